"""Secrets stay in the environment: none is written where others may read it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# Words of a name, which may be numbered or go on: API_KEY, OPENAI_APIKEY_2, TOKEN_FILE_FOR_CI, db-password.
# Long ones also end a word: PGPASSWORD, HFTOKEN, SSHPASS. PWD by itself is the folder of a shell.
SECRET = re.compile(
    r"(?i)((^|[_.-])(api)?(key|pass|pat|auth)|[_.-]pwd|(?<!by)(?<!com)pass|"
    r"token|secret|passw(or)?d|passphrase|credential|(api|access|private)key)s?\d*"
    r"(_?\d+|_(old|new|dev|ci|prod|test|id_rsa|value|base64|b64))?$"
)
SHORTEST = 8  # a shorter value may stand anywhere by chance


def secret_in(values: Any, environment: Mapping[str, str]) -> str | None:
    """Return the name of a variable of the environment that holds a secret, by its name, and whose value
    some text among `values` has: a text, or lists and mappings of them. None if there is none.
    """
    texts = list(_texts(values))
    return next(
        (
            name
            for name, value in sorted(environment.items())
            if SECRET.search(name) and len(value) >= SHORTEST and any(value in text for text in texts)
        ),
        None,
    )


def _texts(values: Any) -> Iterator[str]:
    if isinstance(values, str):
        yield values
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield str(key)
            yield from _texts(value)
    elif isinstance(values, Sequence):
        for value in values:
            yield from _texts(value)
    else:
        yield str(values)

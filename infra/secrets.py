"""Secrets stay in the environment: none is written where others may read it."""

import re
from collections.abc import Mapping

SECRET = re.compile(r"(?i)(^|_)(key|token|secret|password|passwd|credentials?)$")
SHORTEST = 8  # a shorter value may stand anywhere by chance


def secret_in(text: str, environment: Mapping[str, str]) -> str | None:
    """Return the name of a variable of the environment that holds a secret, by its name, and whose value the
    text has; None if there is none.
    """
    return next(
        (
            name
            for name, value in sorted(environment.items())
            if SECRET.search(name) and len(value) >= SHORTEST and value in text
        ),
        None,
    )

"""The tokenizer of a published model: its `tokenizer.json`, and what its other files say."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataloader.format import PLACEHOLDER
from dataloader.tokenizer import Encoding, digest_of

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
MODEL_FILE = "config.json"
_ITEMS = ("image", "audio")  # modalities whose token in chat templates files name
_EDGES = ("start", "end")


class HFTokenizer:
    """Reads the folder `path` (or a `tokenizer.json`) with the `tokenizers` package.

    `bos` is the token that the tokenizer itself puts before a text, none if it puts none there; `eos` the one
    that it puts after it or, if it puts none there, the one that `tokenizer_config.json` names, which then is
    only where generation stops. `bos`, `eos`, `item` and `end_of_item` name others by their text. If `item`
    is left out, an item's rows carry the token that the `config.json` of a whole model beside names
    (`image_token_id`), the eos without one; they are followed by nothing without `end_of_item`. The chat
    template is the file `template`, else `chat_template.jinja`, else that of `tokenizer_config.json`.

    `marks` are the tokens that templates write for items, by modality; `around` what their processor puts
    before and behind the rows, as InternVL's does: <img> and </img>.

    Raises ValueError naming key, value and remedy.
    """

    name = "hf"

    def __init__(
        self,
        path: str,
        template: str | None = None,
        bos: str | None = None,
        eos: str | None = None,
        item: str | None = None,
        end_of_item: str | None = None,
    ) -> None:
        try:
            from tokenizers import AddedToken
            from tokenizers import Tokenizer as Reading
        except ImportError as error:
            raise ValueError(
                f"tokenizer hf needs the package tokenizers ({error}): pip install 'omni-train[open]'"
            ) from error
        given = Path(str(path))
        file = given / TOKENIZER_FILE if given.is_dir() else given
        content = _read(file, f"path={path}")
        try:
            self._reading = Reading.from_str(content)
        except Exception as error:  # the package raises bare Exceptions
            raise ValueError(f"path={path}: {file} is no tokenizer ({error}): save it anew") from error
        self._reading.no_truncation()
        self._reading.no_padding()
        config = _config(file.parent / CONFIG_FILE)
        ids = self._reading.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values()) + 1
        added = self._reading.get_added_tokens_decoder()
        self.special = {token.content: i for i, token in sorted(added.items()) if token.special}
        before, after = _framed(self._reading)
        self.bos = _only("bos", before, self._reading) if bos is None else _id(ids, "bos", bos)
        ends = _only("eos", after, self._reading) if eos is None else _id(ids, "eos", eos)
        self.ends_texts = ends is not None
        self.eos = _id(ids, "eos", _named(config, "eos_token")) if ends is None else ends
        beside = {
            kind: _of_model(file.parent / MODEL_FILE, f"{kind}_token_id", self._reading) for kind in _ITEMS
        }
        rows = item or next(filter(None, beside.values()), None)
        self.item = self.eos if rows is None else _id(ids, "item", rows)
        self.end_of_item = None if end_of_item is None else _id(ids, "end_of_item", end_of_item)
        more = config.get("extra_special_tokens")
        more = more if isinstance(more, dict) else {}
        named = {key: _named(config, key) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
        named |= {"bos_token": bos or named["bos_token"], "eos_token": eos or named["eos_token"]}
        self.names = {key: text for key, text in named.items() if text is not None}
        self.template = _template(file.parent, config, template)
        own = {kind: item or beside[kind] or _named(more | config, f"{kind}_token") for kind in _ITEMS}
        self.marks = {kind: text for kind, text in own.items() if text is not None}
        edges = {kind: [_named(more | config, f"{edge}_{kind}_token") for edge in _EDGES] for kind in _ITEMS}
        self.around = {kind: (of[0], of[1]) for kind, of in edges.items() if of[0] and of[1]}
        chosen = json.dumps([self.bos, self.eos, self.item, self.end_of_item])
        self.digest = digest_of(content + chosen + (json.dumps(self.around) if self.around else ""))
        # Cuts the text where an item stands, as the tokens that models have for items do.
        self._reading.add_special_tokens([AddedToken(PLACEHOLDER, special=True, normalized=False)])
        self._placeholder = self._reading.token_to_id(PLACEHOLDER)

    def encode(self, text: str) -> Encoding:
        """The whole text at once, cut at special tokens alone."""
        encoded = self._reading.encode(text, add_special_tokens=False)
        ids = np.array(encoded.ids, dtype=np.int64)
        ids[ids == self._placeholder] = self.item
        offsets = np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2)
        return Encoding(ids, offsets[:, 0], offsets[:, 1])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        text: str = self._reading.decode([int(i) for i in ids if i < self.vocab_size])
        return text


def _read(file: Path, key: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ValueError(f"{key}: {file}: {why}: give a folder with {TOKENIZER_FILE}") from error


def _config(file: Path) -> dict[str, Any]:
    if not file.exists():
        return {}
    try:
        config = json.loads(_read(file, f"path={file.parent}"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is no JSON ({error}): save the tokenizer anew") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} is no JSON object: save the tokenizer anew")
    return config


def _of_model(file: Path, key: str, reading: Any) -> str | None:
    """The token that the configuration of a model names by its id, None if it names none."""
    found = _config(file).get(key)
    if not isinstance(found, int):
        return None
    token: str | None = reading.id_to_token(found)
    if token is None:
        raise ValueError(
            f"{file} says {key}={found}, and the tokenizer beside it has no such token: take the files of "
            f"one model, or name the token, such as item: '<|image_pad|>'"
        )
    return token


def _named(config: dict[str, Any], key: str) -> str | None:
    value = config.get(key)
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _framed(reading: Any) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before a text and after it. Its own file says them: where there is
    one, transformers does not heed `add_bos_token` and `add_eos_token` of the other either.
    """
    encoded = reading.encode("a")
    own = [place for place, added in enumerate(encoded.special_tokens_mask) if not added]
    first, last = (own[0], own[-1] + 1) if own else (len(encoded), len(encoded))
    return encoded.ids[:first], encoded.ids[last:]


def _only(key: str, found: list[int], reading: Any) -> int | None:
    if len(found) > 1:
        tokens = [reading.id_to_token(i) for i in found]
        raise ValueError(
            f"{key}: the tokenizer puts {tokens} at an edge of a text, where a sample has one token: name "
            f"one, such as {key}: {tokens[-1]!r}"
        )
    return found[0] if found else None


def _id(ids: dict[str, int], key: str, text: str | None) -> int:
    if text is None:
        raise ValueError(f"{key}: {CONFIG_FILE} names no {key}_token: name one, such as {key}: '<|end|>'")
    if text not in ids:
        raise ValueError(f"{key}={text}: the tokenizer has no such token: name one of its tokens")
    return ids[text]


def _template(folder: Path, config: dict[str, Any], given: str | None) -> str:
    if given is not None:
        return _read(Path(given), f"template={given}")
    if (folder / TEMPLATE_FILE).exists():
        return _read(folder / TEMPLATE_FILE, f"path={folder}")
    held = config.get("chat_template")
    if isinstance(held, list):  # several, by name
        held = {one.get("name"): one.get("template") for one in held}.get("default")
    return held if isinstance(held, str) else ""

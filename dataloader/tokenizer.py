"""Tokenizers: text to token ids and back, found by name.

A tokenizer lives wherever its author likes: a class registered under the entry point `omni.tokenizers`. The
`data.tokenizer` of a run is its name, or a mapping of `name` and the keys that the class takes:

    data.tokenizer: bytes
    data.tokenizer: {name: hf, path: models/mine}
"""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dataloader.format import PLACEHOLDER
from dataloader.manifest import Frame, TextForm
from dataloader.registered import make

GROUP = "omni.tokenizers"


class Encoding(NamedTuple):
    """A text in tokens: ids int64 [T], and the characters [start, stop) of the text that each is of, int64
    [T] both. Tokens that are pieces of one character are all of that character.
    """

    ids: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]


class Tokenizer(Protocol):
    """The contract. Encoding must not depend on anything but the text.

    `bos`, `eos`, `item` and `end_of_item` are ids: an item's rows carry `item` and are followed by one
    `end_of_item`. A vocabulary that begins no sample, or ends no item, has None. One with an attribute
    `ends_texts` that is false ends no text: its eos is where generation stops, and carries no loss.
    """

    @property
    def name(self) -> str:
        """The name by which it is registered; recorded in datasets and checkpoints."""

    @property
    def digest(self) -> str:
        """Names all that ids depend on beside `name`, "" if nothing does; recorded as well."""

    @property
    def template(self) -> str:
        """Its chat template, "" if it has none."""

    @property
    def special(self) -> Mapping[str, int]:
        """Ids by text of the tokens that only a template or the platform writes, such as <|im_end|>."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, the special ones included."""

    @property
    def bos(self) -> int | None:
        """Begins every sample."""

    @property
    def eos(self) -> int:
        """Ends every sample."""

    @property
    def item(self) -> int:
        """Stands at every row of an item."""

    @property
    def end_of_item(self) -> int | None:
        """Follows the rows of an item."""

    def encode(self, text: str) -> Encoding:
        """Tokens of a text, in which each `PLACEHOLDER` is one token of its own, without bos and eos."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special ids are left out."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, then four special ids. Needs no training and no download."""

    name = "bytes"
    digest = ""
    template = ""
    special: Mapping[str, int] = {}
    vocab_size = 260
    bos = 256
    eos = 257
    item = 258
    end_of_item = 259

    def encode(self, text: str) -> Encoding:
        """UTF-8 bytes of the text."""
        if text.replace(PLACEHOLDER, "").isascii():  # a character is a byte or an item
            ids = np.frombuffer(text.encode("utf-32-le"), dtype=np.int32).astype(np.int64)
            ids[ids == ord(PLACEHOLDER)] = self.item
            starts = np.arange(len(ids))
            return Encoding(ids, starts, starts + 1)
        ids = np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)
        begins = (ids & 0xC0) != 0x80
        starts = np.cumsum(begins) - 1
        if PLACEHOLDER in text:
            of_items = placeholders_of(text)[starts]
            ids[of_items] = self.item
            kept = begins | ~of_items
            ids, starts = ids[kept], starts[kept]
        return Encoding(ids, starts, starts + 1)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids below 256; bytes that are not UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


def placeholders_of(text: str) -> npt.NDArray[np.bool_]:
    """Which characters of a text are placeholders, and one more that is none, bool [characters + 1]."""
    found = np.zeros(len(text) + 1, dtype=np.bool_)
    at = text.find(PLACEHOLDER)
    while at >= 0:
        found[at] = True
        at = text.find(PLACEHOLDER, at + 1)
    return found


def text_form(tokenizer: Tokenizer) -> TextForm:
    """How a tokenizer has plain text: in a frame of all tokens that it has for one."""
    ends = getattr(tokenizer, "ends_texts", True)
    frame = Frame(tokenizer.bos is not None, tokenizer.end_of_item is not None, ends)
    return TextForm(tokenizer.digest, frame=frame)


def digest_of(text: str) -> str:
    """BLAKE2b of a text, 128 bits, as 32 hexadecimal digits; "" of an empty one."""
    return blake2b(text.encode(), digest_size=16).hexdigest() if text else ""


def get_tokenizer(chosen: str | Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a name, or of a mapping of `name` and its own keys.

    Raises:
        ValueError: if none is registered by the name, it cannot be imported, or does not take the keys.
    """
    tokenizer: Tokenizer = make(GROUP, "tokenizer", chosen)
    return tokenizer

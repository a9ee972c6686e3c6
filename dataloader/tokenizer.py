"""Text to token ids: the protocol, and the byte tokenizer that needs no download."""

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """What the platform asks of a tokenizer; ids are below `vocab_size`.

    `bos`, `eos`, `item` and `end_of_item` are special ids that `encode` never returns: an item's rows carry
    `item` and are followed by one `end_of_item`. Encoding must not depend on anything but the text.
    """

    @property
    def name(self) -> str:
        """Identifies the vocabulary; recorded in datasets and checkpoints."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, the special ones included."""

    @property
    def bos(self) -> int:
        """Begins every sample."""

    @property
    def eos(self) -> int:
        """Ends every sample."""

    @property
    def item(self) -> int:
        """Stands at every row of an item."""

    @property
    def end_of_item(self) -> int:
        """Follows the rows of an item."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without special ids."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; special ids are left out."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, then four special ids. Needs no training and no download."""

    name = "bytes"
    vocab_size = 260
    bos = 256
    eos = 257
    item = 258
    end_of_item = 259

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of the text."""
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids below 256; bytes that are not UTF-8 become U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")


TOKENIZERS = {"bytes": ByteTokenizer}


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of that name; ValueError listing the known ones."""
    if name not in TOKENIZERS:
        raise ValueError(f"unknown tokenizer {name!r}: known are {', '.join(sorted(TOKENIZERS))}")
    return TOKENIZERS[name]()

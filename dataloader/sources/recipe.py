"""What a recipe does: it finds the samples of a kind of files, and makes texts of their bytes.

A recipe is a class registered under the entry point `omni.recipes`, whose arguments are its keys. It is named
like a tokenizer, `{name: webdataset, text: caption}`, and noted in the index. It knows a format and nothing
else: what it finds is counted, sorted, written and read by the rest of this folder.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from dataloader.fetching import Fetcher
from dataloader.format import PLACEHOLDER, DataError
from dataloader.manifest import TextForm
from dataloader.registered import make
from dataloader.storage import Storage
from dataloader.tokenizer import Tokenizer, text_form

GROUP = "omni.recipes"


class Range(NamedTuple):
    """Bytes of a file, whose name is a path below the source's root."""

    file: str
    at: int
    bytes: int


class FoundItem(NamedTuple):
    """An item of a sample, as in `format.Item`, and where its bytes are. `crc` is CRC-32 of the first `HEAD`
    of them, by which another file under the same name is told.
    """

    modality: str
    format: str
    size: tuple[int, ...]
    place: Range
    crc: int


class Found(NamedTuple):
    """A sample: its key within the file that was scanned, where its text is, the bytes that are there, and
    the tags that it carries.
    """

    key: str
    text: Range
    raw: bytes
    items: tuple[FoundItem, ...]
    tags: tuple[str, ...] = ()


class LeftOut(NamedTuple):
    """What is not taken: the key of a sample, "" for a file, the kind of reason, and what was found."""

    key: str
    reason: str
    detail: str


class Text(NamedTuple):
    """A sample's text with a placeholder for each item, its targets and turns as in `format.Sample`."""

    text: str
    targets: tuple[tuple[int, int], ...] | None = None
    turns: tuple[int, ...] | None = None


Write = Callable[[bytes, int], Text]
"""From the bytes of a text's range, and the number of items, to the text. Raises DataError if they are none.
"""


class Recipe(Protocol):
    """The contract. Its functions depend on nothing but what they are given, the files and its keys."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """How the names of files end that are scanned, each by itself."""

    def scan(self, storage: Storage, name: str) -> Iterator[Found | LeftOut]:
        """What a file holds, in an order of its own: keys within it are unique. Raises OSError; what is wrong
        with the file is left out.
        """

    def form(self, tokenizer: Tokenizer) -> TextForm:
        """What the tokens of its texts depend on. Raises DataError for a tokenizer that cannot be used."""

    def write(self, tokenizer: Tokenizer) -> Write:
        """What makes texts, for a tokenizer of which nothing but its chat template may matter."""

    def content(self, fetcher: Fetcher, name: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of ranges (at, bytes) that `scan` found in a file. Raises OSError and ValueError."""


class OfBytes(ABC):
    """What recipes share whose texts know no template, and whose ranges are bytes of their files."""

    def form(self, tokenizer: Tokenizer) -> TextForm:
        """Plain text, as the tokenizer has it."""
        return text_form(tokenizer)

    def write(self, tokenizer: Tokenizer) -> Write:
        """The same text for any tokenizer."""
        return self.text

    @abstractmethod
    def text(self, raw: bytes, num_items: int) -> Text:
        """The text of a sample of so many items. Raises DataError if the bytes are none."""

    def content(self, fetcher: Fetcher, name: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes of ranges."""
        return fetcher.ranges(name, places)


def get_recipe(chosen: str | Mapping[str, Any]) -> Recipe:
    """The recipe of a name, or of a mapping of `name` and its own keys.

    Raises:
        ValueError: if none is registered by the name, it cannot be imported, or does not take the keys.
    """
    recipe: Recipe = make(GROUP, "recipe", chosen)
    return recipe


def placed(text: str, num_items: int) -> str:
    """A text with a placeholder for each item: as it is if it has them, else with all of them before it.

    Raises DataError if it has others.
    """
    count = text.count(PLACEHOLDER)
    if count not in (0, num_items):
        raise DataError(f"its text has {count} placeholders (U+FFFC), and it has {num_items} items")
    return text if count else PLACEHOLDER * num_items + text

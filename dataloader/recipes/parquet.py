"""Parquet files with a sample in each row, as Hugging Face's datasets has them; keys name the columns.

An image or a recording is a struct {bytes, path}, or bytes alone; a list of these holds several. Files may be
compressed, so a value is no range of bytes: its place is its row and its number there.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from dataloader.fetching import Fetcher, is_of_machine, opened
from dataloader.format import DataError, SampleError
from dataloader.recipes.parquet_types import is_item, is_list, is_text
from dataloader.sources.beside import item_beside
from dataloader.sources.heads import found_item
from dataloader.sources.recipe import Found, FoundItem, LeftOut, OfBytes, Range, Text, placed
from dataloader.storage import Storage
from dataloader.tags import tags_of

_SLOTS = 1 << 12  # places in a row of a group: the text, then its items
_ROWS = 1 << 24  # rows of a group
_AT_ONCE = 32  # rows that are decoded at a time while a file is scanned


@dataclass(frozen=True)
class Parquet(OfBytes):
    """The recipe `parquet`. `text` is the column with the text; `image` and `audio` are those with images and
    recordings, "" for none, which stand before the text, images first, unless it has placeholders. `id` is a
    column with the key of each row, "" for its number, and `tags` one with its tags, "" for none.
    """

    text_of: str
    image: str
    audio: str
    id: str
    tags: str
    suffixes: ClassVar = (".parquet",)
    folder = ""  # of paths, which are none here

    def __init__(
        self, text: str = "text", image: str = "", audio: str = "", id: str = "", tags: str = ""
    ) -> None:
        own = {"text_of": text, "image": image, "audio": audio, "id": id, "tags": tags}
        for name, value in own.items():
            object.__setattr__(self, name, value)
        if not text:
            raise ValueError("text must name the column with the text")

    @property
    def _items(self) -> dict[str, str]:
        """Columns of items by modality, in the order in which their items stand."""
        return {name: of for name, of in (("image", self.image), ("audio", self.audio)) if of}

    @property
    def _of_rows(self) -> list[str]:
        """Columns that say what a row is called, and what it carries."""
        return [column for column in (self.id, self.tags) if column]

    @property
    def _columns_of_items(self) -> list[str]:
        """What is read to tell the items of a row."""
        return list(self._items.values())

    def scan(self, storage: Storage, name: str) -> Iterator[Found | LeftOut]:
        """A sample for each row."""
        columns = list(dict.fromkeys([self.text_of, *self._items.values(), *self._of_rows]))
        number = 0
        with opened(storage, name) as file:
            try:
                parquet = pq.ParquetFile(file)
                if wrong := self._wrong(parquet.schema_arrow, columns):
                    yield LeftOut("", "another schema", wrong)
                    return
                for group in range(parquet.num_row_groups):
                    row = 0
                    for batch in parquet.iter_batches(_AT_ONCE, [group], columns, use_threads=False):
                        for values in batch.to_pylist():
                            yield self._found(storage, name, group * _ROWS + row, number, values)
                            row, number = row + 1, number + 1
            except (pa.ArrowException, OSError, ValueError) as error:
                if is_of_machine(error):
                    raise
                yield LeftOut("", "damaged file", f"from row {number} on: {error}")

    def text(self, raw: bytes, num_items: int) -> Text:
        """The text, with its items before it unless it has placeholders for them."""
        try:
            return Text(placed(raw.decode(), num_items))
        except UnicodeDecodeError as error:
            raise DataError(f"its text is not UTF-8 ({error})") from None

    def content(self, fetcher: Fetcher, name: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Values by their places, of row groups that are kept; of other files, ranges of bytes."""
        if not name.lower().endswith(self.suffixes):
            return fetcher.ranges(name, places)
        return [self._value(fetcher, name, *divmod(at, _SLOTS)) for at, _ in places]

    def _value(self, fetcher: Fetcher, name: str, place: int, slot: int) -> bytes:
        group, row = divmod(place, _ROWS)
        columns = self._columns_of_items if slot else [self.text_of]
        table = fetcher.group(name, group, columns)
        if wrong := self._wrong(table.schema, columns):
            raise ValueError(f"{name} is another file: {wrong}")
        if row >= len(table):
            raise ValueError(f"{name}, row group {group}: it has {len(table)} rows")
        values = table.slice(row, 1).to_pylist()[0]
        if not slot:
            return self._raw(values)
        items = [data for _, data in self._all(values)]
        if slot > len(items) or isinstance(items[slot - 1], str):
            raise ValueError(f"{name}, row group {group}, row {row}: it has no item {slot - 1}")
        return _bytes(items[slot - 1])

    def _wrong(self, schema: pa.Schema, columns: Sequence[str]) -> str:
        """What is wrong with those columns of a file, if anything."""
        if missing := [column for column in columns if column not in schema.names]:
            return f"it has no column {missing[0]!r}, there are {', '.join(schema.names)}"
        of_items = ((of, self._takes_items) for of in self._items.values())
        for column, takes in ((self.text_of, self._takes_text), *of_items):
            if column in columns and not takes(kind := schema.field(column).type):
                return f"its column {column!r} is {kind}"
        return ""

    def _takes_text(self, kind: pa.DataType) -> bool:
        return is_text(kind)

    def _takes_items(self, kind: pa.DataType) -> bool:
        return is_item(kind) or is_list(kind, is_item)

    def _found(
        self, storage: Storage, name: str, place: int, number: int, values: dict[str, Any]
    ) -> Found | LeftOut:
        key = str(number if not self.id else values[self.id])
        if values[self.text_of] is None or (self.id and values[self.id] is None):
            return LeftOut(key, "null", f"of row {number} its {self.text_of} or {self.id or 'id'} is null")
        items: list[FoundItem] = []
        try:
            for slot, (modality, data) in enumerate(self._all(values), start=1):
                if isinstance(data, str):
                    item = item_beside(storage, self.folder, modality, data)
                    if isinstance(item, LeftOut):
                        return item._replace(key=key)
                else:
                    at = Range(name, place * _SLOTS + slot, len(data))
                    item = found_item(modality, at, partial(_first, data))
                items.append(item)
        except SampleError as error:
            return LeftOut(key, "bad item", f"item {len(items)}: {error}")
        except DataError as error:
            return LeftOut(key, "null", f"of row {number} {error}")
        if len(items) >= _SLOTS:
            return LeftOut(key, "bad sample", f"it has {len(items)} items")
        try:
            tags = tags_of(values[self.tags]) if self.tags else ()
        except DataError as error:
            return LeftOut(key, "bad sample", str(error))
        raw = self._raw(values)
        return Found(key, Range(name, place * _SLOTS, len(raw)), raw, tuple(items), tags)

    def _raw(self, values: dict[str, Any]) -> bytes:
        """What `text` makes a row's text of."""
        return str(values[self.text_of]).encode()

    def _all(self, values: dict[str, Any]) -> Iterator[tuple[str, bytes | str]]:
        """Modality and bytes, or path, of all items of a row. Raises DataError for one without."""
        for modality, column in self._items.items():
            value = values[column]
            for one in value if isinstance(value, list) else [value]:
                data = one.get("bytes") if isinstance(one, dict) else one
                if data is None:
                    path = one.get("path") if isinstance(one, dict) else None
                    raise DataError(f"an {modality} is null" + (f", by path alone: {path}" if path else ""))
                yield modality, data


def _first(data: bytes, count: int) -> bytes:
    return data[:count]


def _bytes(data: bytes | str) -> bytes:
    assert isinstance(data, bytes)
    return data

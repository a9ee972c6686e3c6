"""Shards of the platform's own datasets, where they lie: a dataset in a store is trained on without a copy.

Of shards that are neither compressed nor coded items are ranges of bytes; of others they are read with their
row group. Texts are so always, for their targets and turns are columns of their own.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from dataloader.fetching import Fetcher, is_of_machine, opened
from dataloader.format import SHARD_SCHEMA, TEXT_COLUMNS, TURNS
from dataloader.manifest import TextForm
from dataloader.ranges import NOWHERE, chunks_of, marks_of, places_of
from dataloader.recipes.from_messages import form_of
from dataloader.sources.heads import crc_of
from dataloader.sources.recipe import Found, FoundItem, LeftOut, OfBytes, Range, Text
from dataloader.storage import Storage
from dataloader.tokenizer import Tokenizer, text_form

_SLOTS = 1 << 12  # places in a row of a group: the text, then its items
_ROWS = 1 << 24  # rows of a group


@dataclass(frozen=True)
class Shards(OfBytes):
    """The recipe `shards`. `chats` says that samples were built of messages: a chat template wrote what
    begins and ends them, and they are cut at turns.
    """

    chats: bool = False
    suffixes: ClassVar = (".parquet",)

    def form(self, tokenizer: Tokenizer) -> TextForm:
        """That of plain text, or of chats."""
        return form_of(tokenizer) if self.chats else text_form(tokenizer)

    def scan(self, storage: Storage, name: str) -> Iterator[Found | LeftOut]:
        """The samples in their order."""
        group = 0
        with opened(storage, name) as file:
            try:
                shard = pq.ParquetFile(file, page_checksum_verification=True)
                held, expected = set(shard.schema_arrow.names), set(SHARD_SCHEMA.names)
                if held != expected | ({TURNS.name} if self.chats else set()):
                    of = "chats" if self.chats else "samples, and chats: true is not set"
                    yield LeftOut("", "another schema", f"its columns {sorted(held)} are not those of {of}")
                    return
                for group in range(shard.num_row_groups):
                    yield from self._of_group(file, shard, name, group)
            except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                if is_of_machine(error):
                    raise
                yield LeftOut("", "damaged file", f"from row group {group} on: {error}")

    def text(self, raw: bytes, num_items: int) -> Text:
        """The text of `content`, with its targets and turns."""
        text, targets, turns = json.loads(raw)
        return Text(text, _spans(targets), None if turns is None else tuple(turns))

    def content(self, fetcher: Fetcher, name: str, places: Sequence[tuple[int, int]]) -> list[bytes]:
        """Ranges of bytes, and values by their places below 0."""
        exact = iter(fetcher.ranges(name, [place for place in places if place[0] >= 0]))
        return [next(exact) if at >= 0 else self._value(fetcher, name, -1 - at) for at, _ in places]

    def _value(self, fetcher: Fetcher, name: str, code: int) -> bytes:
        place, slot = divmod(code, _SLOTS)
        group, row = divmod(place, _ROWS)
        columns = ["items"] if slot else [*TEXT_COLUMNS[1:], *([TURNS.name] if self.chats else [])]
        table = fetcher.group(name, group, columns)
        if row >= len(table):
            raise ValueError(f"{name}, row group {group}: it has {len(table)} rows")
        values = table.slice(row, 1).to_pylist()[0]
        try:  # what is no bytes cannot be joined
            return b"".join([values["items"][slot - 1]["data"]]) if slot else _raw(values)
        except (LookupError, TypeError) as error:
            raise ValueError(
                f"{name}, row group {group}, row {row}: it is another file ({error!r})"
            ) from error

    def _of_group(
        self, file: IO[bytes], shard: pq.ParquetFile, name: str, group: int
    ) -> Iterator[Found | LeftOut]:
        rows = shard.read_row_group(group, use_threads=False).to_pylist()
        start, stop = chunks_of(shard.metadata.row_group(group))["data"]
        file.seek(start)
        every = [item["data"] for row in rows for item in row["items"] or ()]
        at = iter(places_of(file.read(stop - start), 0, stop - start, every))
        for number, row in enumerate(rows):
            place = (group * _ROWS + number) * _SLOTS
            items = []
            for slot, item in enumerate(row["items"] or (), start=1):
                found = next(at)
                exact = Range(
                    name, start + found if found != NOWHERE else -1 - place - slot, len(item["data"])
                )
                size, crc = tuple(item["size"]), crc_of(item["data"])
                items.append(FoundItem(item["modality"], item["format"], size, exact, crc))
            if row["id"] is None or row["text"] is None:
                yield LeftOut(row["id"] or "", "null", f"of row {number} of row group {group}, id or text")
                continue
            raw = _raw(row)
            if len(items) >= _SLOTS:
                yield LeftOut(row["id"], "bad sample", f"it has {len(items)} items")
            else:
                yield Found(row["id"], Range(name, -1 - place, len(row["text"].encode())), raw, tuple(items))


def _raw(row: dict[str, Any]) -> bytes:
    """A text with its targets and turns, from a row of a shard."""
    return json.dumps([row["text"], *marks_of(row)]).encode()


def _spans(targets: Any) -> tuple[tuple[int, int], ...] | None:
    return None if targets is None else tuple((start, stop) for start, stop in targets)

"""Reading samples where they lie: their own bytes, checked against what was indexed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isal.isal_zlib import crc32

from dataloader.fetching import Fetcher
from dataloader.format import DataError, Item, Sample, UnreadableError
from dataloader.manifest import read_manifest
from dataloader.mapped import MappedRows
from dataloader.reader import Reader, chosen
from dataloader.shared_files import SharedFiles
from dataloader.sources.heads import crc_of
from dataloader.sources.recipe import get_recipe
from dataloader.sources.tables import FILES_SCHEMA, SAMPLES_SCHEMA
from dataloader.storage import Storage
from dataloader.tokenizer import Tokenizer, get_tokenizer

_REMEDY = "build it anew with omni data index --overwrite"
_CHANGED = "restore the file, or index anew with omni data index --overwrite"


class PlacedReader:
    """Random access to samples that lie where an index says; safe to share between threads.

    What is asked for of a sample is read, and no more. A file is compared with what was known of it, its size
    and its store's name for its content, before it is first read, and what is read with its CRC.
    """

    def __init__(
        self, path: str | Path, files: SharedFiles | None = None, tokenizer: Tokenizer | None = None
    ) -> None:
        """Open the index at `path`; chats are written by the template of a `tokenizer`, the index's own if it
        can be had by its name. Raises DataError if it is damaged, or its recipe cannot be had."""
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        place = self.manifest.place
        assert place is not None
        self.files = SharedFiles() if files is None else files
        try:
            self._recipe = get_recipe(place.recipe)
            self._write = self._recipe.write(tokenizer or _own(self.manifest.tokenizer))
            self._fetcher = Fetcher(Storage.at(place.root), self.files)
        except ValueError as error:
            raise DataError(f"{self.path}: {error}") from error
        (shard,) = self.manifest.shards
        self._rows = MappedRows(self.path / shard.file, SAMPLES_SCHEMA, shard.rows, _REMEDY)
        self._table = MappedRows(self.path / place.files.file, FILES_SCHEMA, place.files.rows, _REMEDY)
        self._same: dict[int, str] = {}  # names of the files that were compared

    def read(self, i: int, text: bool, items: bool | Sequence[int]) -> Sample:
        """Sample `i` with its text and targets, its items or those of some numbers, or both; what is not
        asked for, or not there, is left out.

        Raises UnreadableError if they are not there any more, or cannot be read.
        """
        if not 0 <= i < self._rows.num_rows:
            raise IndexError(f"{self.path} has {self._rows.num_rows} samples, there is no sample {i}")
        row = self._rows.row(i)
        asked = chosen(row["items"], items)
        try:
            content = self._content([row["text"]] * text + list(asked))
            written = content.pop(0) if text else b""
            if text and crc32(written) != row["text"]["crc"]:
                raise ValueError(f"its text is not the one that was indexed; {_CHANGED}")
            for number, (item, data) in enumerate(zip(asked, content, strict=True)):
                if crc_of(data) != item["crc"]:
                    raise ValueError(f"item {number} of those read is not what was indexed; {_CHANGED}")
            said = self._write(written, len(row["items"])) if text else None
        except (OSError, ValueError) as error:
            raise UnreadableError(row["id"], str(error)) from error
        found = tuple(
            Item(item["modality"], item["format"], tuple(item["size"]), data)
            for item, data in zip(asked, content, strict=True)
        )
        if said is None:
            return Sample(row["id"], "", found)
        return Sample(row["id"], said.text, found, said.targets, said.turns)

    def _content(self, places: Sequence[dict[str, Any]]) -> list[bytes]:
        """The bytes of places, in their order; a file's with one call."""
        if len({place["file"] for place in places}) == 1:
            ranges = [(place["at"], place["bytes"]) for place in places]
            return self._recipe.content(self._fetcher, self._checked(places[0]["file"]), ranges)
        of_file: dict[int, list[int]] = {}
        for number, place in enumerate(places):
            of_file.setdefault(place["file"], []).append(number)
        found: dict[int, bytes] = {}
        for file, numbers in of_file.items():
            ranges = [(places[number]["at"], places[number]["bytes"]) for number in numbers]
            content = self._recipe.content(self._fetcher, self._checked(file), ranges)
            found.update(zip(numbers, content, strict=True))
        return [found[number] for number in range(len(places))]

    def _checked(self, number: int) -> str:
        """The name of a file, once it is known to be the one that was indexed."""
        if number in self._same:
            return self._same[number]
        row = self._table.row(number)
        name: str = row["name"]
        if name.startswith("/") or ".." in name.split("/"):
            raise ValueError(f"{name} lies outside of {self._fetcher.storage}")
        try:
            size, tag = self._fetcher.known(name)
        except FileNotFoundError:
            raise ValueError(f"{name} is not there any more; {_CHANGED}") from None
        if size != row["bytes"]:
            raise ValueError(
                f"{name} has {size} bytes, and had {row['bytes']} when it was indexed; {_CHANGED}"
            )
        if tag != row["tag"]:
            raise ValueError(f"{name} has the tag {tag}, and had {row['tag']} when indexed; {_CHANGED}")
        self._same[number] = name
        return name


def _own(name: str) -> Tokenizer:
    """The tokenizer of an index by its name alone. Raises ValueError if it takes keys."""
    try:
        return get_tokenizer(name)
    except ValueError as error:
        raise ValueError(f"it needs a tokenizer, by --tokenizer: {error}") from error


def open_reader(
    path: str | Path, files: SharedFiles | None = None, tokenizer: Tokenizer | None = None
) -> Reader | PlacedReader:
    """What reads the samples of a dataset, wherever they lie; raises as they do."""
    placed = read_manifest(Path(path)).place is not None
    return PlacedReader(path, files, tokenizer) if placed else Reader(path, files)

"""The sample index: memory-mapped metadata of a dataset, of one sample or of many at once."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dataloader.format import INDEX_SCHEMA, TURNS, DataError, SampleError
from dataloader.item_counts import REFUSED, ItemCounts, RememberedCounts
from dataloader.manifest import MANIFEST, Manifest, check_files, hash_of, read_manifest
from dataloader.mapped import HeldFile
from dataloader.tokenizer import Tokenizer, digest_of
from dataloader.tokens import ItemMeta, SampleMeta, fit_lengths
from ops.ints import Ints

# The index's columns, flattened: those of lists are offsets and values.
_TEXT_TOKENS, _BYTES, _ITEMS, _MODALITY, _AT, _SIZES, _SIZE, _TURNS, _TURN = range(9)
_ITEM_SIZES = (4, 8, 4, 2, 4, 4, 4, 4, 4)  # bytes of a number
_HASHED = 64 << 20  # bytes of an index that are compared with their hash on opening: less than 0.1 s


@dataclass(frozen=True)
class _Places:
    """Where the columns of samples' items are: the batch of each sample begins at `start` [n, columns], its
    items there with number `first` [n], `num_items` [n] of them.
    """

    start: Ints
    first: Ints
    num_items: Ints

    def of(self, column: int) -> Ints:
        """Where the number of each item is in a column, those of all samples one after the other."""
        item = np.arange(self.num_items.sum())
        before = np.cumsum(self.num_items) - self.num_items
        return item + np.repeat(self.start[:, column] + self.first - before, self.num_items)


class Index:
    """Metadata of a dataset's samples, by their position 0 ≤ i < len(index).

    The samples of a step lie in any of a large dataset's record batches, a few in each. So numbers are taken
    straight from the file's memory map, wherever they are: `_starts` [batches, columns] says where a column
    of a record batch begins, counted in its numbers from the start of the file, -1 until it is asked for.
    """

    def __init__(self, path: Path, manifest: Manifest, content: pa.Buffer) -> None:
        """Map `content`, the index's file. Raises pyarrow's errors, or ValueError, if it is no index."""
        self.path = path
        self.manifest = manifest
        self._held = HeldFile(str(path / manifest.index.file), manifest.index.bytes)
        self._file = pa.ipc.open_file(content)
        self._frame = manifest.text.frame
        schema = INDEX_SCHEMA.append(TURNS) if self._frame.turns else INDEX_SCHEMA
        if self._file.schema != schema or self._file.num_record_batches == 0:
            raise ValueError("it lacks the index's columns")
        self._batch_rows = self._file.get_batch(0).num_rows
        self._address = content.address
        self._int16 = np.frombuffer(content, np.int16, content.size // 2)
        self._int32 = np.frombuffer(content, np.int32, content.size // 4)
        self._int64 = np.frombuffer(content, np.int64, content.size // 8)
        self._starts = np.full((self._file.num_record_batches, len(_ITEM_SIZES)), -1, dtype=np.int64)
        self._known: dict[int, list[int]] = {}  # rows of it, for one sample at a time
        if not 0 <= self._start_of(0)[_BYTES] < len(self._int64):
            raise ValueError("its numbers are compressed")

    @staticmethod
    def open(path: str | Path, tokenizer: Tokenizer | None = None, checked: bool = True) -> "Index":
        """Open a dataset's index and check that its files are there, whole, and of that tokenizer; and, if it
        is `checked` and small, that it is the index whose hash the dataset has.

        Raises DataError naming the file, what was found and the remedy.
        """
        path = Path(path)
        asked = None if tokenizer is None else (tokenizer.name, tokenizer.digest)
        manifest = read_manifest(path, asked)
        check_files(path, manifest)
        if tokenizer is not None:
            _check_tokenizer(path, manifest, tokenizer)
        try:
            cheap = manifest.index.hash and manifest.index.bytes <= _HASHED
            if checked and cheap and hash_of(path / manifest.index.file) != manifest.index.hash:
                raise ValueError(f"it was changed: its hash is not that of {MANIFEST}")
            return Index(path, manifest, pa.memory_map(str(path / manifest.index.file)).read_buffer())
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path / manifest.index.file}: {error}; rebuild with omni data build") from error

    def __len__(self) -> int:
        return self.manifest.num_samples

    def meta(self, i: int, source: str, item_counts: ItemCounts) -> SampleMeta:
        """Metadata of sample `i`, under the name of the source it is mixed as."""
        self._check(i)
        self._held.check()
        batch, row = divmod(i, self._batch_rows)
        start = self._known.get(batch) or self._start_of(batch)
        numbers = self._int32.data  # of which one costs a third of an array's
        place, sizes, items = start[_ITEMS] + row, start[_SIZE], []
        for item in range(numbers[place], numbers[place + 1]):
            name = self.manifest.modalities[self._int16.data[start[_MODALITY] + item]]
            at, edge = numbers[start[_AT] + item], start[_SIZES] + item
            size = tuple(numbers[sizes + numbers[edge] : sizes + numbers[edge + 1]])
            try:
                (tokens, rows), refused = item_counts(name, size), ""
            except SampleError as error:
                (tokens, rows), refused = (0, 0), str(error)
            items.append(ItemMeta(name, tokens, rows, at, size, refused))
        text_tokens = numbers[start[_TEXT_TOKENS] + row]
        size_of_all = self._int64.data[start[_BYTES] + row]
        turns: tuple[int, ...] = ()
        if self._frame.turns:
            first, last = numbers[start[_TURNS] + row], numbers[start[_TURNS] + row + 1]
            turns = tuple(numbers[start[_TURN] + first : start[_TURN] + last])
        return SampleMeta(i, source, text_tokens, tuple(items), size_of_all, frame=self._frame, turns=turns)

    def lengths(self, ids: Ints, counts: RememberedCounts, budget: int, policy: str) -> Ints:
        """LLM input tokens of samples [n] as they are trained on, int64 [n]: `length` of what `fit` returns.

        0 for a sample that `fit` drops, or raises for where the policy is `error`.
        """
        start, row, place = self._items_of(ids)
        rows = self._counted(place, counts.rows)
        return fit_lengths(
            self._int32[start[:, _TEXT_TOKENS] + row].astype(np.int64),
            place.num_items,
            self._int32[place.of(_AT)].astype(np.int64),
            np.maximum(rows, 0),
            rows == REFUSED,
            budget,
            policy,
            self._frame,
            *self._turns_of(start, row),
        )

    def item_tokens(self, ids: Ints, counts: RememberedCounts) -> dict[str, tuple[Ints, Ints]]:
        """Encoder tokens of all items of samples [n], by modality: the place in `ids` of the sample that each
        item belongs to, and its tokens, 0 for one that its encoder cannot take; int64 [k] both.
        """
        _, _, place = self._items_of(ids)
        sample = np.repeat(np.arange(len(ids)), place.num_items)
        tokens = np.maximum(self._counted(place, counts.tokens), 0)
        modality = self._int16[place.of(_MODALITY)]
        return {
            name: (sample[modality == number], tokens[modality == number])
            for number, name in enumerate(self.manifest.modalities)
        }

    def _items_of(self, ids: Ints) -> tuple[Ints, Ints, "_Places"]:
        """Where the columns of each sample's batch begin, its row there, and where its items are."""
        if len(ids):
            self._check(int(ids.min()))
            self._check(int(ids.max()))
        self._held.check()
        batch, row = np.divmod(ids, self._batch_rows)
        for number in np.unique(batch[self._starts[batch, 0] < 0]).tolist():
            self._start_of(number)
        start = self._starts[batch]
        first = self._int32[start[:, _ITEMS] + row].astype(np.int64)
        num_items = self._int32[start[:, _ITEMS] + row + 1] - first
        return start, row, _Places(start, first, num_items)

    def _turns_of(self, start: Ints, row: Ints) -> tuple[Ints, Ints] | tuple[()]:
        """How many turns each sample has, and where they end, those of all samples one after the other."""
        if not self._frame.turns:
            return ()
        first = self._int32[start[:, _TURNS] + row].astype(np.int64)
        count = self._int32[start[:, _TURNS] + row + 1] - first
        before = np.cumsum(count) - count
        at = np.arange(count.sum()) + np.repeat(start[:, _TURN] + first - before, count)
        return count, self._int32[at].astype(np.int64)

    def _counted(self, place: "_Places", count_of: Callable[[str, list[Any], int], Ints]) -> Ints:
        """What encoders make of items [k], a number each, `REFUSED` for some."""
        modality, edges = self._int16[place.of(_MODALITY)], place.of(_SIZES)
        begin = self._int32[edges]
        dims = self._int32[edges + 1] - begin
        begin = begin + np.repeat(place.start[:, _SIZE], place.num_items)
        counted = np.empty(len(begin), dtype=np.int64)
        for number, name in enumerate(self.manifest.modalities):
            of_modality = modality == number
            for count in np.flatnonzero(np.bincount(dims[of_modality])).tolist():
                of = np.flatnonzero(of_modality & (dims == count))
                sizes = [self._int32[begin[of] + dim] for dim in range(count)]
                counted[of] = count_of(name, sizes, len(of))
        return counted

    def _check(self, i: int) -> None:
        if not 0 <= i < len(self):
            raise IndexError(f"{self.path} has {len(self)} samples, there is no sample {i}")

    def _start_of(self, batch: int) -> list[int]:
        """Where the columns of a record batch begin."""
        if self._starts[batch, 0] < 0:
            columns = self._file.get_batch(batch)
            items = columns.column("items").buffers()  # of lists of structs, validities and all
            buffers = [columns.column(name).buffers()[1] for name in ("text_tokens", "bytes")]
            buffers += [items[i] for i in (1, 4, 6, 8, 10)]
            turns = columns.column(TURNS.name).buffers() if self._frame.turns else [None] * 4
            buffers += [turns[1], turns[3]]
            self._starts[batch] = [
                (buffer.address - self._address) // size if buffer else 0  # there may be none for no values
                for buffer, size in zip(buffers, _ITEM_SIZES, strict=True)
            ]
        start = self._known[batch] = self._starts[batch].tolist()
        return start


def _check_tokenizer(path: Path, manifest: Manifest, tokenizer: Tokenizer) -> None:
    """Raise DataError if text was counted with another tokenizer, or written by another template."""
    remedy = "rebuild it with omni data build, or change the tokenizer"
    if manifest.place is not None:
        remedy = "add its counts with omni data index --tokenizer, or change the tokenizer"
    if manifest.tokenizer != tokenizer.name:
        raise DataError(
            f"{path} was built with tokenizer {manifest.tokenizer!r}, the model uses {tokenizer.name!r}: "
            f"{remedy}"
        )
    if manifest.text.tokenizer != tokenizer.digest:
        raise DataError(
            f"{path} was built with a tokenizer {tokenizer.name!r} of digest "
            f"{manifest.text.tokenizer or 'unknown'}, the model's has {tokenizer.digest}: {remedy}"
        )
    template = digest_of(tokenizer.template)
    if manifest.text.template and template and manifest.text.template != template:
        raise DataError(
            f"{path} was written by a chat template of digest {manifest.text.template}, the tokenizer's is "
            f"{template}: rebuild it with omni data build, or name the template by data.tokenizer.template"
        )


def same_data(one: Index, other: Index) -> bool:
    """Whether two indexes are of one dataset, or of copies of it as far as their hashes are known."""
    known = one.manifest.hash is not None and one.manifest.hash == other.manifest.hash
    return known or one.path.resolve() == other.path.resolve()

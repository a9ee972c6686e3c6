"""The sample index: memory-mapped metadata of a dataset, read one sample at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dataloader.format import INDEX_SCHEMA, DataError, Manifest, SampleError, check_files, read_manifest
from dataloader.tokens import ItemMeta, SampleMeta

ItemCounts = Callable[[str, tuple[int, ...]], tuple[int, int]]
"""From an item's modality and size to (encoder tokens, LLM rows): the encoder registry's answer. It raises
SampleError, with the remedy, for an item that its encoder cannot take.
"""


class _Batch(NamedTuple):
    """Views into the memory map of one record batch: list columns as offsets and values."""

    text_tokens: npt.NDArray[np.int32]
    bytes: npt.NDArray[np.int64]
    items: npt.NDArray[np.int32]
    modality: npt.NDArray[np.int16]
    at: npt.NDArray[np.int32]
    sizes: npt.NDArray[np.int32]
    size: npt.NDArray[np.int32]


class Index:
    """Metadata of a dataset's samples, by their position 0 ≤ i < len(index)."""

    def __init__(self, path: Path, manifest: Manifest, file: pa.ipc.RecordBatchFileReader) -> None:
        self.path = path
        self.manifest = manifest
        self._file = file
        self._batches: dict[int, _Batch] = {}
        self._batch_rows = file.get_batch(0).num_rows

    @staticmethod
    def open(path: str | Path, expect_tokenizer: str | None = None) -> "Index":
        """Open a dataset's index and check that its files are there, whole, and of that tokenizer.

        Raises DataError naming the file, what was found and the remedy.
        """
        path = Path(path)
        manifest = read_manifest(path)
        check_files(path, manifest)
        if expect_tokenizer is not None and manifest.tokenizer != expect_tokenizer:
            raise DataError(
                f"{path} was built with tokenizer {manifest.tokenizer!r}, the model uses "
                f"{expect_tokenizer!r}: rebuild it with omni data build, or change the tokenizer"
            )
        try:
            file = pa.ipc.open_file(pa.memory_map(str(path / manifest.index.file)))
            usable = file.schema == INDEX_SCHEMA and file.num_record_batches > 0
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path / manifest.index.file}: {error}; rebuild with omni data build") from error
        if not usable:
            raise DataError(
                f"{path / manifest.index.file} lacks the index's columns; rebuild with omni data build"
            )
        return Index(path, manifest, file)

    def __len__(self) -> int:
        return self.manifest.num_samples

    def meta(self, i: int, source: str, item_counts: ItemCounts) -> SampleMeta:
        """Metadata of sample `i`, under the name of the source it is mixed as."""
        if not 0 <= i < len(self):
            raise IndexError(f"{self.path} has {len(self)} samples, there is no sample {i}")
        number, row = divmod(i, self._batch_rows)
        batch = self._batches.get(number)
        if batch is None:
            batch = self._batches[number] = _views(self._file.get_batch(number))
        items = []
        for j in range(batch.items[row], batch.items[row + 1]):
            modality = self.manifest.modalities[batch.modality[j]]
            size = tuple(batch.size[batch.sizes[j] : batch.sizes[j + 1]].tolist())
            try:
                (tokens, rows), refused = item_counts(modality, size), ""
            except SampleError as error:
                (tokens, rows), refused = (0, 0), str(error)
            items.append(ItemMeta(modality, tokens, rows, int(batch.at[j]), size, refused))
        return SampleMeta(i, source, int(batch.text_tokens[row]), tuple(items), int(batch.bytes[row]))


def _views(batch: pa.RecordBatch) -> _Batch:
    items = batch.column("items")
    fields = items.values
    sizes = fields.field("size")
    return _Batch(
        text_tokens=batch.column("text_tokens").to_numpy(),
        bytes=batch.column("bytes").to_numpy(),
        items=items.offsets.to_numpy(),
        modality=fields.field("modality").to_numpy(),
        at=fields.field("at").to_numpy(),
        sizes=sizes.offsets.to_numpy(),
        size=sizes.values.to_numpy(),
    )

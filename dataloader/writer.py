"""Writing a dataset: shards, index and manifest, into a folder that appears only when it is complete."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from dataloader.format import INDEX_SCHEMA, SHARD_SCHEMA, TURNS, DataError, Sample, validate_sample
from dataloader.locks import take
from dataloader.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    DataFile,
    DatasetTotals,
    Manifest,
    TextForm,
    check_files,
    hash_of,
    read_manifest,
    write_manifest,
)
from dataloader.ranges import RANGES, RangesWriter, is_lost, locate
from dataloader.tokenizer import Tokenizer, text_form
from dataloader.tokens import text_tokens

INDEX_FILE = "index.arrow"
INDEX_BATCH_ROWS = 65_536  # rows of the index held in memory while writing


class DatasetWriter:
    """Context manager that writes one dataset; `add` samples inside `with`.

    Everything goes to `<path>.partial` beside the target, which is renamed when the block ends well: a
    build that is cut short leaves the dataset at `path`, if any, as it was. Only one build of a dataset is
    under way at a time. Row groups hold
    `rows_per_group` samples, all but the dataset's last one full: sample `i` lives in group
    `i // rows_per_group`. `recipe` says what the dataset was built from, `text` what its tokens depend on if
    that is not plain text as the tokenizer has it.

    Raises DataError if `path` exists and `overwrite` is false, if another build of it is under way, if a
    sample breaks the format, or if no sample was added.
    """

    def __init__(
        self,
        path: str | Path,
        tokenizer: Tokenizer,
        rows_per_group: int = 32,
        groups_per_shard: int = 64,
        overwrite: bool = False,
        recipe: str = "",
        text: TextForm | None = None,
    ) -> None:
        if rows_per_group < 1 or groups_per_shard < 1:
            raise ValueError(
                f"rows_per_group {rows_per_group} and groups_per_shard {groups_per_shard} must be positive"
            )
        self.path = Path(path).resolve()  # behind a link, so that renames stay on one file system
        self._partial = _partial(self.path)
        self._tokenizer = tokenizer
        self._rows_per_group = rows_per_group
        self._groups_per_shard = groups_per_shard
        self._overwrite = overwrite
        self._recipe = recipe
        self._text = text_form(tokenizer) if text is None else text
        both = (SHARD_SCHEMA, INDEX_SCHEMA)
        self._schema, self._index_schema = (of.append(TURNS) if self._text.frame.turns else of for of in both)
        self._rows: list[dict[str, Any]] = []
        self._index_rows: list[dict[str, Any]] = []
        self._shard: pq.ParquetWriter | None = None
        self._groups_in_shard = 0
        self._rows_in_shard = 0
        self._shards: list[DataFile] = []
        self._modalities: dict[str, int] = {}
        self._item_counts: dict[str, int] = {}
        self._num_samples = 0
        self._text_tokens = 0
        self._bytes = 0

    def __enter__(self) -> "DatasetWriter":
        self._lock = _begin(self._partial)
        try:
            if is_present(self.path, building=True) and not self._overwrite:
                raise DataError(f"{self.path} exists: choose another folder or overwrite it (--overwrite)")
        except BaseException:
            shutil.rmtree(self._partial)
            os.close(self._lock)
            raise
        self._index = pa.ipc.new_file(str(self._partial / INDEX_FILE), self._index_schema)
        self._ranges = RangesWriter(self._partial / RANGES)
        return self

    def add(self, sample: Sample) -> None:
        """Append one sample."""
        validate_sample(sample)
        if self._text.frame.turns != (sample.turns is not None):
            raise DataError(f"sample {sample.id!r}: either all samples of a dataset have turns, or none")
        tokens = text_tokens(sample, self._tokenizer)
        for item in sample.items:
            self._modalities.setdefault(item.modality, len(self._modalities))
            self._item_counts[item.modality] = self._item_counts.get(item.modality, 0) + 1
        size = len(sample.text.encode("utf-8")) + sum(len(item.data) for item in sample.items)
        self._rows.append(_row(sample))
        self._index_rows.append(
            {
                "text_tokens": len(tokens.ids),
                "bytes": size,
                "items": [
                    {"modality": self._modalities[item.modality], "at": at, "size": item.size}
                    for item, at in zip(sample.items, tokens.items, strict=True)
                ],
                "turns": tokens.turns,
            }
        )
        self._num_samples += 1
        self._text_tokens += len(tokens.ids)
        self._bytes += size
        if len(self._rows) == self._rows_per_group:
            self._write_group()
        if len(self._index_rows) == INDEX_BATCH_ROWS:
            self._write_index()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None or self._num_samples == 0:
                self._discard()
            if kind is None and self._num_samples == 0:
                raise DataError(f"{self.path}: no sample was added: a dataset needs at least one")
            if kind is None:
                self._finish()
                publish(self._partial, self.path)
        finally:
            os.close(self._lock)

    def _write_group(self) -> None:
        if self._shard is None:
            # Statistics would store the smallest and largest image; checksums tell damage from a bad image.
            self._shard = pq.ParquetWriter(
                self._partial / f"shard-{len(self._shards):05d}.parquet",
                self._schema,
                compression="none",
                use_dictionary=False,
                write_statistics=False,
                write_page_checksum=True,
            )
        table = pa.Table.from_pylist(self._rows, schema=self._schema)
        self._shard.write_table(table, row_group_size=self._rows_per_group)
        self._rows_in_shard += len(self._rows)
        self._groups_in_shard += 1
        self._rows = []
        if self._groups_in_shard == self._groups_per_shard:
            self._close_shard()

    def _close_shard(self) -> None:
        assert self._shard is not None
        self._shard.close()
        self._shard = None
        name = f"shard-{len(self._shards):05d}.parquet"
        for row in locate(self._partial / name):
            self._ranges.add(row)
        self._shards.append(written(self._partial / name, self._rows_in_shard))
        self._groups_in_shard = self._rows_in_shard = 0

    def _write_index(self) -> None:
        self._index.write_batch(pa.RecordBatch.from_pylist(self._index_rows, schema=self._index_schema))
        self._index_rows = []

    def _finish(self) -> None:
        if self._rows:
            self._write_group()
        if self._shard is not None:
            self._close_shard()
        if self._index_rows:
            self._write_index()
        self._index.close()
        self._ranges.close()
        manifest = Manifest(
            format_version=FORMAT_VERSION,
            recipe=self._recipe,
            tokenizer=self._tokenizer.name,
            num_samples=self._num_samples,
            rows_per_group=self._rows_per_group,
            shards=tuple(self._shards),
            index=written(self._partial / INDEX_FILE, self._num_samples),
            modalities=tuple(self._modalities),
            totals=DatasetTotals(self._text_tokens, self._bytes, self._item_counts),
            text=self._text,
        )
        write_manifest(self._partial, manifest)

    def _discard(self) -> None:
        if self._shard is not None:
            self._shard.close()
        self._index.close()
        self._ranges.close()
        shutil.rmtree(self._partial)


def publish(partial: Path, path: Path) -> None:
    """Give a dataset that is complete its name. One that has it is removed then."""
    # Two renames: no file system swaps folders portably. In between `<path>.old` is the good dataset,
    # and the next build puts it back.
    old = _old(path)
    if path.exists():
        if old.exists():
            shutil.rmtree(old)
        os.rename(path, old)
    os.rename(partial, path)
    if old.exists():
        shutil.rmtree(old)


def _begin(partial: Path) -> int:
    """Make the folder of a build and lock it, where the file system has locks; what a build left that was cut
    short is removed. Returns the descriptor that holds the lock. The folder appears with its lock held, so
    that no other build takes it for one that was left.

    Raises DataError if another build is under way, or the file system does not say whether one is.
    """
    partial.parent.mkdir(parents=True, exist_ok=True)
    new = partial.with_name(f".{partial.name}.{uuid4().hex}")
    new.mkdir()
    lock = os.open(new / INDEX_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _take_if_any(lock, new / INDEX_FILE)
        while not _renamed(new, partial):
            if _under_way(partial, remove=True):
                raise DataError(
                    f"{partial}: another build of this dataset is under way: wait for it, or remove that "
                    "folder if there is none"
                )
    except BaseException:
        os.close(lock)
        shutil.rmtree(new)
        raise
    return lock


def _take_if_any(lock: int, path: Path) -> None:
    """Lock a file that nobody else knows of yet, where the file system has locks."""
    try:
        take(lock, path)
    except TimeoutError as error:
        raise DataError(str(error)) from error
    except OSError:
        pass


def _renamed(new: Path, name: Path) -> bool:
    """Give a folder another name; False if a folder that is not empty has it."""
    try:
        os.rename(new, name)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


def _under_way(partial: Path, remove: bool = False) -> bool:
    """Whether a build writes into `partial`. What is there otherwise was left by one, and may be removed."""
    try:
        descriptor = os.open(partial / INDEX_FILE, os.O_RDWR | os.O_CREAT * remove, 0o666)
    except FileNotFoundError:
        return False
    try:
        if not take(descriptor, partial / INDEX_FILE):
            return True
        # Another build may have taken its place since it was opened.
        if remove and os.path.samestat(os.fstat(descriptor), os.stat(partial / INDEX_FILE)):
            shutil.rmtree(partial)
    except FileNotFoundError:
        return False
    except OSError:  # nobody can say whether it is held
        return True
    finally:
        os.close(descriptor)
    return False


def is_intact(path: str | Path, recipe: str, tokenizer: Tokenizer, text: TextForm | None = None) -> bool:
    """Whether `path` holds a complete dataset of this recipe, tokenizer and frame, so that building it is a
    no-op. `text` is that of `DatasetWriter`.

    Returns False if nothing is there; raises DataError if what is there is damaged or another dataset.
    """
    path = Path(path).resolve()
    if not is_present(path):
        return False
    manifest = read_manifest(path)
    check_files(path, manifest)
    frame = (text_form(tokenizer) if text is None else text).frame
    held = (manifest.recipe, manifest.tokenizer, manifest.text.tokenizer, manifest.text.frame)
    asked = (recipe, tokenizer.name, tokenizer.digest, frame)
    if held != asked:
        raise DataError(
            f"{path} holds another dataset (recipe, tokenizer, its digest and frame are {held}; asked for "
            f"{asked}): choose another folder or overwrite it (--overwrite)"
        )
    return True


def add_hashes(path: str | Path) -> bool:
    """Bring the hashes of its files into the `dataset.json` of a dataset of format 1, which becomes format 2:
    no other file is touched, and runs go on with it. Returns False if it has them already.

    Raises DataError if it is none, or its files are not of their recorded sizes.
    """
    path = Path(path).resolve()
    manifest = read_manifest(path)
    check_files(path, manifest)
    if manifest.hash is not None:
        return False
    *shards, index = [replace(of, hash=hash_of(path / of.file)) for of in manifest.files]
    write_manifest(path, replace(manifest, format_version=FORMAT_VERSION, shards=tuple(shards), index=index))
    return True


def add_ranges(path: str | Path) -> bool:
    """Write `ranges.arrow` into a dataset that has none, so that its samples are read without their row
    groups. Returns False if it has one, or is compressed, so that a sample cannot be read by itself.

    Raises DataError if it is none, or its files are not of their recorded sizes or cannot be read.
    """
    path = Path(path).resolve()
    manifest = read_manifest(path)
    check_files(path, manifest)
    if manifest.place is not None or (path / RANGES).exists():
        return False
    new = path / f"{RANGES}.new"
    writer, found = RangesWriter(new), False
    for shard in manifest.shards:
        try:
            for row in locate(path / shard.file):
                writer.add(row)
                found = found or not is_lost(row)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"{path / shard.file}: cannot be read ({error})") from error
    writer.close()
    if found:
        os.rename(new, path / RANGES)
    else:
        new.unlink()
    return found


def is_present(path: Path, building: bool = False) -> bool:
    """Whether a dataset is at `path`; DataError if it is anything else, which is never replaced. The caller
    is `building` it if it holds its lock.
    """
    cut = not path.exists() and _old(path).exists()
    if cut and (building or not _under_way(_partial(path))):
        os.rename(_old(path), path)  # an earlier replacement was cut between its two renames
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return False
    if not (path / MANIFEST).is_file():
        raise DataError(f"{path} exists and is not a dataset: choose another folder, or remove it yourself")
    return True


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


def _old(path: Path) -> Path:
    return path.with_name(path.name + ".old")


def _row(sample: Sample) -> dict[str, Any]:
    targets = None
    if sample.targets is not None:
        targets = [{"start": start, "stop": stop} for start, stop in sample.targets]
    return {
        "id": sample.id,
        "text": sample.text,
        "targets": targets,
        "items": [vars(item) for item in sample.items],
        "turns": sample.turns,
    }


def written(file: Path, rows: int) -> DataFile:
    """A finished file, once it is on disk: a rename must not publish one that is not."""
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())
    return DataFile(file.name, file.stat().st_size, rows, hash_of(file))

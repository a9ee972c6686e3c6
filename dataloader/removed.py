"""Samples that are trained on no longer: from a list of their ids to rows of a dataset."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dataloader.format import DataError
from dataloader.manifest import Manifest
from ops.ints import Ints

_SHOWN = 3


def read_keys(file: str | Path) -> list[str]:
    """Return the ids that a text file lists, one a line; empty lines are passed over.

    Raises:
        DataError: naming the file, if it cannot be read or lists none.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read ({error}): name a text file with an id a line") from error
    if not (keys := [line for line in lines if line]):
        raise DataError(f"{file} lists no id: give one a line, or leave the file out")
    return keys


def rows_of(path: Path, manifest: Manifest, keys: Sequence[str]) -> Ints:
    """Return the rows, ascending, of a dataset's samples that have these ids: it reads the ids of all.

    Raises:
        DataError: naming ids that no sample has.
    """
    wanted = pa.array(keys, pa.string()).unique()
    found, rows, first = pa.array([], pa.string()), [np.empty(0, np.int64)], 0
    for ids in _ids(path, manifest):
        hit = pc.is_in(ids, value_set=wanted)
        rows.append(first + np.flatnonzero(hit.to_numpy(zero_copy_only=False)))
        found = pa.concat_arrays([found, ids.filter(hit)])
        first += len(ids)
    unknown = wanted.filter(pc.invert(pc.is_in(wanted, value_set=found)))
    if len(unknown):
        shown = ", ".join(map(repr, unknown.slice(0, _SHOWN).to_pylist()))
        raise DataError(
            f"{len(unknown):,} of {len(wanted):,} ids are those of no sample of {path}, such as {shown}: "
            "take them out of the list (omni data inspect shows ids as they are)"
        )
    return np.concatenate(rows)


def among(ids: Ints, rows: Ints) -> np.ndarray:
    """Whether each of `ids` [n] is one of `rows`, which ascend: bool [n]."""
    if not len(rows):
        return np.zeros(len(ids), np.bool_)
    place = np.minimum(np.searchsorted(rows, ids), len(rows) - 1)
    return np.asarray(rows[place] == ids)


def _ids(path: Path, manifest: Manifest) -> Iterator[pa.Array]:
    """The ids of a dataset's samples in their order, in parts."""
    for shard in manifest.shards:
        file = path / shard.file
        try:
            if manifest.place is not None:
                opened = pa.ipc.open_file(pa.memory_map(str(file)))
                yield from (opened.get_batch(n).column("id") for n in range(opened.num_record_batches))
            else:
                yield from (batch.column("id") for batch in pq.ParquetFile(file).iter_batches(columns=["id"]))
        except (pa.ArrowException, OSError, KeyError) as error:
            raise DataError(
                f"{file}: its ids cannot be read ({error}): check with omni data verify"
            ) from error

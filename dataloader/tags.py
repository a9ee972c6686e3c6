"""Tags of samples that lie elsewhere: for each the rows that carry it, so that a phase takes them by name.

`tags.arrow` beside an index has a row for each tag, sorted. A list of a phase names one as `tag:NAME`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataloader.format import DataError
from dataloader.manifest import Manifest
from ops.ints import Ints

TAGS = "tags.arrow"
PREFIX = "tag:"
SCHEMA = pa.schema(
    [
        pa.field("tag", pa.string(), nullable=False),
        pa.field("rows", pa.large_list(pa.int64()), nullable=False),  # ascending
    ]
)
_SHOWN = 5


def tags_of(value: Any) -> tuple[str, ...]:
    """Return the tags that a value of a sample's own says: a text, a list of texts, none for null.

    Raises:
        DataError: for anything else.
    """
    listed = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(tag, str) and tag for tag in listed):
        raise DataError(f"its tags are {str(value)[:60]!r}: they must be a text, or a list of texts")
    return tuple(dict.fromkeys(listed))


class TagRows:
    """The rows of each tag, put together file by file."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Ints]] = defaultdict(list)

    def add(self, tags: Mapping[str, Sequence[int]], first: int) -> None:
        """Note the rows of a file's tags, which count from row `first` on."""
        for tag, rows in tags.items():
            self._rows[tag].append(first + np.array(rows, np.int64))

    def write(self, file: Path) -> int:
        """Write `file` if there is any tag, and return how many."""
        names = sorted(self._rows)
        if names:
            rows = [np.concatenate(self._rows[tag]) for tag in names]
            edges = np.cumsum([0, *map(len, rows)])
            listed = pa.LargeListArray.from_arrays(pa.array(edges, pa.int64()), np.concatenate(rows))
            with pa.ipc.new_file(str(file), SCHEMA) as writer:
                writer.write_batch(pa.RecordBatch.from_arrays([pa.array(names), listed], schema=SCHEMA))
        return len(names)


def rows_with(path: Path, manifest: Manifest, tag: str) -> Ints:
    """Return the rows, ascending, of the samples of the dataset `path` that carry a tag.

    Raises:
        DataError: if its samples have no tags, or none of them this one.
    """
    held = None if manifest.place is None else manifest.place.tags
    if held is None:
        raise DataError(
            f"{PREFIX}{tag}: samples of {path} have no tags: index them with the recipe's key tags, such as "
            f"--recipe '{{name: webdataset, tags: tags}}', or list ids in a file"
        )
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path / held.file))).read_all()
        at = pc.index(table["tag"], tag).as_py()
        if at >= 0:
            rows = np.asarray(table["rows"][at].values.to_numpy(), np.int64)
            if len(rows) == 0 or rows.min() < 0 or rows.max() >= manifest.num_samples:
                raise ValueError(f"rows of {tag} are not those of {manifest.num_samples:,} samples")
            return np.unique(rows)
        names = table["tag"].to_pylist()
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise DataError(
            f"{path / held.file}: {error}; index anew with omni data index --overwrite"
        ) from error
    more = f" and {len(names) - _SHOWN:,} others" if len(names) > _SHOWN else ""
    raise DataError(
        f"{PREFIX}{tag}: no sample of {path} carries it; there are {', '.join(names[:_SHOWN])}{more}"
    )

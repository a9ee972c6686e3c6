"""The parts of all files of a source, put together in the order of the files' names."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dataloader.format import DataError
from dataloader.manifest import (
    MANIFEST,
    PLACED_VERSION,
    DatasetTotals,
    Manifest,
    Place,
    TextForm,
    write_manifest,
)
from dataloader.sources.recipe import LeftOut
from dataloader.sources.scan import File, Work, modalities_of, read_part
from dataloader.sources.tables import (
    BATCH_ROWS,
    FILES,
    FILES_SCHEMA,
    LEFT_OUT,
    SAMPLES,
    SAMPLES_SCHEMA,
    BatchWriter,
    index_rows,
    index_schema,
    renumbered,
)
from dataloader.tags import TAGS, TagRows
from dataloader.tokenizer import Tokenizer
from dataloader.writer import written

ROWS_PER_GROUP = 32


def put_together(
    folder: Path,
    work: Work,
    files: Sequence[File],
    listing: str,
    tokenizer: Tokenizer,
    form: TextForm,
    tell: Callable[[str], None],
    batch_rows: int,
) -> None:
    """Write the index's files and its manifest into `folder` from the parts of all files, of which `listing`
    is a name; `tell` hears what was left out. Raises DataError if there is no sample.
    """
    (folder / MANIFEST).unlink(missing_ok=True)  # of a build that was killed
    modalities = sorted(set().union(*(modalities_of(work, file) for file in files)))
    index_file = f"index-{work.vocabulary}.arrow"
    samples = BatchWriter(folder / SAMPLES, SAMPLES_SCHEMA, batch_rows)
    index = BatchWriter(folder / index_file, index_schema(form.frame.turns), batch_rows)
    table, refuse, tags, items = _FileTable(), _Refuse(), TagRows(), Counter[str]()
    tokens = size = 0
    with open(folder / LEFT_OUT, "w", encoding="utf-8") as left_out:
        for file in files:
            part = read_part(work, file)
            tags.add(part.tags, samples.num_rows)
            rows = renumbered(part.rows, table.add(part.files, samples.num_rows, len(part.rows)))
            samples.add(rows)
            index.add(index_rows(rows, part.counts, modalities, form.frame.turns))
            tokens += pc.sum(part.counts["text_tokens"]).as_py() or 0
            size += pc.sum(rows["bytes"]).as_py() or 0
            items.update(part.items)
            left_out.writelines(refuse.add(file.name, one) for one in part.left_out)
    samples.close()
    index.close()
    if not samples.num_rows:
        raise DataError(
            f"{work.root}: no sample was found: {'; '.join(refuse.told()) or 'its files are empty'}"
        )
    table.write(folder / FILES)
    num_tags = tags.write(folder / TAGS)
    of_tags = written(folder / TAGS, num_tags) if num_tags else None
    manifest = Manifest(
        format_version=PLACED_VERSION,
        recipe=work.recipe["name"],
        tokenizer=tokenizer.name,
        num_samples=samples.num_rows,
        rows_per_group=ROWS_PER_GROUP,
        shards=(written(folder / SAMPLES, samples.num_rows),),
        index=written(folder / index_file, samples.num_rows),
        modalities=tuple(modalities),
        totals=DatasetTotals(tokens, size, {name: items[name] for name in modalities}),
        text=form,
        place=Place(work.root, dict(work.recipe), written(folder / FILES, len(table.rows)), listing, of_tags),
    )
    write_manifest(folder, manifest)
    for told in refuse.told():
        tell(f"left out {told}; {LEFT_OUT} has all")


class _FileTable:
    """The rows of `files.arrow`, each file once."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._numbers: dict[str, int] = {}

    def add(self, files: Sequence[File], first: int, rows: int) -> npt.NDArray[np.int32]:
        """Note the files of a part, whose first was scanned and gave `rows` samples from row `first` on, and
        return their numbers.
        """
        for file in files:
            if file.name not in self._numbers:
                self._numbers[file.name] = len(self.rows)
                self.rows.append({**vars(file), "first": 0, "rows": 0})
        numbers = [self._numbers[file.name] for file in files]
        self.rows[numbers[0]] |= {"first": first, "rows": rows}
        return np.array(numbers, np.int32)

    def write(self, file: Path) -> None:
        """Write them."""
        with pa.ipc.new_file(str(file), FILES_SCHEMA) as writer:
            for at in range(0, len(self.rows), BATCH_ROWS):
                rows = self.rows[at : at + BATCH_ROWS]
                writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=FILES_SCHEMA))


class _Refuse:
    """What is left out, by reason."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._such: dict[str, str] = {}

    def add(self, file: str, one: LeftOut) -> str:
        """Count it, and return its line."""
        self._counts[one.reason] += 1
        self._such.setdefault(one.reason, f"{file}/{one.key}".rstrip("/") + f" ({one.detail})")
        return json.dumps({"file": file, **one._asdict()}) + "\n"

    def told(self) -> list[str]:
        """What to tell of it: a text for each reason."""
        return [
            f"{count} for {reason!r}, such as {self._such[reason]}"
            for reason, count in sorted(self._counts.items())
        ]

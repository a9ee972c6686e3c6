"""What another tokenizer makes of the texts of an index: its counts alone are added, all else stays."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dataloader.manifest import DatasetTotals, read_manifest, write_manifest
from dataloader.sources.jobs import Each
from dataloader.sources.reader import PlacedReader
from dataloader.sources.recipe import get_recipe
from dataloader.sources.scan import write_part
from dataloader.sources.tables import (
    COUNTS_SCHEMA,
    SAMPLES,
    BatchWriter,
    index_rows,
    index_schema,
    read_table,
)
from dataloader.tokenizer import get_tokenizer
from dataloader.tokens import text_tokens
from dataloader.writer import written

_ROWS = 16_384  # samples that a job counts at a time


@dataclass(frozen=True)
class Counting:
    """What jobs share: the index, the tokenizer as it was named, and the folder of parts."""

    index: Path
    tokenizer: Any
    vocabulary: str
    parts: Path
    hash: str | None  # of the index

    def part(self, first: int) -> Path:
        """Where the counts of the samples from `first` on go."""
        return self.parts / f"{self.hash}.{first}.{self.vocabulary}"


def add_counts(work: Counting, each: Each, jobs: int, tell: Callable[[str], None], batch_rows: int) -> None:
    """Count the texts of an index by one more tokenizer, and note it in its manifest.

    Raises UnreadableError for a text that cannot be read.
    """
    manifest = read_manifest(work.index)
    assert manifest.place is not None
    tell(f"counting the tokens of {manifest.num_samples} texts of {work.index} ...")
    firsts = range(0, manifest.num_samples, _ROWS)
    for _ in each(partial(count, work), firsts, jobs):
        pass
    tokenizer = get_tokenizer(work.tokenizer)
    file = work.index / f"index-{work.vocabulary}.arrow"
    form = get_recipe(manifest.place.recipe).form(tokenizer)
    turns = form.frame.turns
    new = work.parts / file.name
    index = BatchWriter(new, index_schema(turns), batch_rows)
    tokens = 0
    with pa.memory_map(str(work.index / SAMPLES)) as mapped:
        samples = pa.ipc.open_file(mapped).read_all()
        for first in firsts:
            counts, _ = read_table(work.part(first))
            tokens += pc.sum(counts["text_tokens"]).as_py()
            index.add(index_rows(samples.slice(first, _ROWS), counts, manifest.modalities, turns))
        index.close()
    new.replace(file)
    own = replace(
        manifest,
        tokenizer=tokenizer.name,
        index=written(file, manifest.num_samples),
        totals=DatasetTotals(tokens, manifest.totals.bytes, manifest.totals.items),
        text=form,
    )
    write_manifest(work.index, own)


def count(work: Counting, first: int) -> None:
    """Write the counts of the samples from `first` on, unless they are there."""
    if work.part(first).exists():
        return
    tokenizer = get_tokenizer(work.tokenizer)
    reader = PlacedReader(work.index, tokenizer=tokenizer)
    rows = []
    for i in range(first, min(first + _ROWS, reader.manifest.num_samples)):
        found = text_tokens(reader.read(i, text=True, items=False), tokenizer)
        rows.append({"text_tokens": len(found.ids), "at": found.items, "turns": found.turns})
    write_part(work.part(first), rows, COUNTS_SCHEMA, {})

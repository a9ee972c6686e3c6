"""Data of which only the metadata matters: enough to plan steps and to rehearse them.

A trace (`omni/planning/traces.py`) becomes a dataset of an index alone, whose items have the sizes that the
trace says or implies. What a rank would load for a step is made from metadata, whatever the dataset.
"""

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa

from dataloader.format import INDEX_SCHEMA, PLACEHOLDER, Sample
from dataloader.loader import Fetch, Fetched
from dataloader.manifest import FORMAT_VERSION, DataFile, DatasetTotals, Manifest, hash_of, write_manifest
from dataloader.tokenizer import ByteTokenizer, Tokenizer, text_form
from dataloader.tokens import SampleMeta, tokenize
from omni.config import Config
from omni.data_config import SourceConfig
from omni.models.registry import ItemArrays
from omni.planning.prepare import make_encoders
from omni.planning.run_data import tokenizer_of
from omni.planning.traces import for_encoders, open_trace, with_sizes

NUM_SAMPLES = 1024
_ROWS_PER_GROUP = 32
_BATCH_ROWS = 65_536


def say(note: str) -> None:
    """Print what a user must know of a trace."""
    print(f"note: {note}", file=sys.stderr)


def use_trace(
    config: Config,
    name: str,
    path: Path,
    num_samples: int = NUM_SAMPLES,
    tell: Callable[[str], None] = say,
) -> None:
    """Make a trace the only source of a configuration, written to the new folder `path`: a synthetic one of
    `num_samples`, a Parquet file, or the folder of a dataset. `tell` hears of items that are left out.

    Raises:
        DataError: for a trace that is not there or cannot be used.
    """
    encoders = make_encoders(config.model.encoders)
    trace, left_out = for_encoders(open_trace(name, num_samples, config.train.seed), encoders)
    trace, recounted = with_sizes(trace, encoders)
    for note in (*left_out, *recounted):
        tell(f"trace {name}: {note}")
    write_index(path, trace, tokenizer_of(config.data), f"trace {name}")
    config.data.sources = {Path(name).resolve().stem: SourceConfig(path=str(path))}
    config.data.heldout, config.data.mixture = {}, {}


def write_index(path: Path, trace: Sequence[SampleMeta], tokenizer: Tokenizer, recipe: str) -> None:
    """Write a dataset of a trace whose items have sizes: an index, and one shard without content."""
    path.mkdir(parents=True)
    modalities = tuple(dict.fromkeys(item.modality for meta in trace for item in meta.items))
    number = {modality: n for n, modality in enumerate(modalities)}
    rows = [
        {
            "text_tokens": meta.text_tokens,
            "bytes": meta.bytes,
            "items": [{"modality": number[i.modality], "at": i.at, "size": i.size} for i in meta.items],
        }
        for meta in trace
    ]
    with pa.ipc.new_file(str(path / "index.arrow"), INDEX_SCHEMA) as index:
        for at in range(0, len(rows), _BATCH_ROWS):
            index.write_batch(pa.RecordBatch.from_pylist(rows[at : at + _BATCH_ROWS], schema=INDEX_SCHEMA))
    (path / "none.parquet").touch()
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        recipe=recipe,
        tokenizer=tokenizer.name,
        num_samples=len(trace),
        rows_per_group=_ROWS_PER_GROUP,
        shards=(_file(path / "none.parquet", len(trace)),),
        index=_file(path / "index.arrow", len(trace)),
        modalities=modalities,
        totals=DatasetTotals(
            sum(meta.text_tokens for meta in trace),
            sum(meta.bytes for meta in trace),
            dict(Counter(item.modality for meta in trace for item in meta.items)),
        ),
        text=text_form(tokenizer),
    )
    write_manifest(path, manifest)


def _file(path: Path, rows: int) -> DataFile:
    return DataFile(path.name, path.stat().st_size, rows, hash_of(path))


def stand_in(fetch: Fetch) -> Fetched[ItemArrays]:
    """What loading would bring, without loading: text of the planned length, all of it target text, and
    items that could not be decoded, which keep their planned shape.
    """
    texts = [tokenize(Sample("", _text(meta), ()), meta, ByteTokenizer()) for _, meta in fetch.texts]
    return Fetched(texts, [None] * len(fetch.items), ())


def _text(meta: SampleMeta) -> str:
    """One letter for each token of text, and a placeholder where each item stands."""
    starts = [0, *(item.at for item in meta.items)]
    stops = [*(item.at for item in meta.items), meta.text_tokens]
    return PLACEHOLDER.join("a" * (stop - start) for start, stop in zip(starts, stops, strict=True))

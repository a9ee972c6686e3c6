"""Data of which only the metadata matters: enough to plan steps and to rehearse them.

A trace (`dataloader/trace.py`) becomes a dataset whose texts repeat one letter and whose items have the sizes
that the trace implies and no content. What a rank would load for a step is made from metadata, whatever the
dataset.
"""

from collections.abc import Collection
from math import isqrt
from pathlib import Path

from dataloader.format import PLACEHOLDER, DataError, Item, Sample
from dataloader.loader import Fetch, Fetched
from dataloader.tokenizer import ByteTokenizer
from dataloader.tokens import ItemMeta, SampleMeta, tokenize
from dataloader.trace import generate
from dataloader.writer import DatasetWriter
from omni.config import Config, SourceConfig
from omni.models.registry import ItemArrays, make_encoder
from omni.planning.prepare import check_seed

NUM_SAMPLES = 1024
_WINDOW = 28  # pixels of a row's side in the traces
_AUDIO_RATE, _AUDIO_ROW = 16_000, 1_280  # samples of a second, and of a row at 12.5 rows a second


def use_trace(config: Config, name: str, path: Path, num_samples: int = NUM_SAMPLES) -> None:
    """Make a trace the only source of a configuration, written to the new folder `path`."""
    check_seed(config)
    encoders = [make_encoder(key, options) for key, options in config.model.encoders.items()]
    modalities = {encoder.modality for encoder in encoders}
    write_trace_dataset(path, name, config.train.seed, modalities, num_samples)
    config.data.sources = {name: SourceConfig(path=str(path))}
    config.data.heldout = {}


def write_trace_dataset(
    path: Path, name: str, seed: int, modalities: Collection[str], num_samples: int = NUM_SAMPLES
) -> None:
    """Write those of `num_samples` samples of trace `name` whose items are all of `modalities`.

    Items keep their size on screen or in seconds; each encoder makes of it the tokens that it makes.

    Raises:
        DataError: if no sample is left.
        ValueError: for an unknown trace.
    """
    trace = generate(name, num_samples, seed)
    usable = [meta for meta in trace if {item.modality for item in meta.items} <= set(modalities)]
    if not usable:
        raise DataError(
            f"trace {name}: every sample has items that no encoder takes (there are encoders for: "
            f"{', '.join(sorted(modalities)) or 'nothing'}): choose another trace, or add encoders"
        )
    with DatasetWriter(path, ByteTokenizer(), recipe=f"trace {name}") as writer:
        for number, meta in enumerate(usable):
            writer.add(Sample(str(number), _text(meta), tuple(map(_item, meta.items))))


def _item(meta: ItemMeta) -> Item:
    """An item that fills about as many rows as the trace says."""
    if meta.modality == "audio":
        return Item("audio", "wav", (meta.rows * _AUDIO_ROW, _AUDIO_RATE), b"-")
    high = isqrt(meta.rows)
    return Item(meta.modality, "png", (high * _WINDOW, -(-meta.rows // high) * _WINDOW), b"-")


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

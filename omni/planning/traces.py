"""Traces as commands name them: a synthetic one, a file or a dataset; and what encoders take of one."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path

from dataloader.format import DataError, SampleError
from dataloader.index import Index
from dataloader.tokens import ItemMeta, SampleMeta
from dataloader.trace import TRACES, generate
from dataloader.trace_file import read_trace
from omni.models.registry import Encoder
from omni.planning.run_spec import item_count

MAX_TOKENS = 131_072
_WINDOW = 28  # pixels of a row's side in the traces
_AUDIO_RATE, _AUDIO_ROW = 16_000, 1_280  # samples of a second, and of a row at 12.5 rows a second
_NEAR = 0.01


def open_trace(name: str, num_samples: int, seed: int, max_tokens: int = MAX_TOKENS) -> list[SampleMeta]:
    """The samples of a trace: `num_samples` of a synthetic one, or texts of as many tokens as a number says;
    those of a Parquet file, or those that the index of a dataset's folder lists, whose items have sizes and
    no tokens yet.

    Raises:
        DataError: if there is no such trace, file or dataset, or it cannot be used.
    """
    path = Path(name)
    if name in TRACES:
        return generate(name, num_samples, seed, max_tokens)
    if name.isdecimal() and int(name) > 0:
        texts = int(name) - 1  # the first token is bos
        return [SampleMeta(i, name, texts, (), 0) for i in range(num_samples)]
    if path.is_dir():
        index = Index.open(path)
        return [index.meta(i, path.name, lambda modality, size: (0, 0)) for i in range(len(index))]
    if path.exists():
        return read_trace(path)
    raise DataError(
        f"trace {name}: there is no such file or folder: give a Parquet file of lengths (its columns: "
        f"docs/data.md), a dataset's folder, a number of tokens, or a synthetic trace: {', '.join(TRACES)}"
    )


@dataclass(frozen=True)
class Others:
    """Items of a trace that no encoder of a model takes, of `modalities`: so many of so many `items`, in so
    many of so many `samples`; `tokens` is their share of all encoder tokens, None where sizes do not tell.
    """

    modalities: tuple[str, ...]
    items: tuple[int, int]
    samples: tuple[int, int]
    tokens: float | None

    def __str__(self) -> str:
        share = "tokens unknown" if self.tokens is None else f"{self.tokens:.1%} of encoder tokens"
        return (
            f"{', '.join(self.modalities)}: {self.items[0]:,} of {self.items[1]:,} items, {share}, in "
            f"{self.samples[0]:,} of {self.samples[1]:,} samples"
        )


def others(trace: Sequence[SampleMeta], taken: Collection[str]) -> Others | None:
    """What a trace has of modalities that are not among those `taken`, None if nothing."""
    items = [item for meta in trace for item in meta.items]
    left = [item for item in items if item.modality not in taken]
    if not left:
        return None
    samples = sum(any(item.modality not in taken for item in meta.items) for meta in trace)
    known = all(item.tokens for item in left)
    return Others(
        modalities=tuple(sorted({item.modality for item in left})),
        items=(len(left), len(items)),
        samples=(samples, len(trace)),
        tokens=sum(item.tokens for item in left) / sum(item.tokens for item in items) if known else None,
    )


def for_encoders(
    trace: Sequence[SampleMeta], encoders: Mapping[str, Encoder]
) -> tuple[list[SampleMeta], list[str]]:
    """A trace as a model with these encoders can plan it, and what a user must know of that.

    Items that no encoder takes leave their sample, which stays. Those given by size are counted by their
    encoder; one that it cannot take says so, as in a dataset.
    """
    taken = {encoder.modality for encoder in encoders.values()}
    counted = [replace(meta, items=tuple(_counted(item, encoders) for item in meta.items)) for meta in trace]
    left = others(counted, taken)
    if left is None:
        return counted, []
    note = (
        f"items that no encoder of the model takes are left out of their samples, which stay: {left} (there "
        f"are encoders for: {', '.join(sorted(taken)) or 'nothing'})"
    )
    kept = (tuple(item for item in meta.items if item.modality in taken) for meta in counted)
    return [replace(meta, items=items) for meta, items in zip(counted, kept, strict=True)], [note]


def _counted(item: ItemMeta, encoders: Mapping[str, Encoder]) -> ItemMeta:
    if not item.size or all(encoder.modality != item.modality for encoder in encoders.values()):
        return item
    try:
        tokens, rows = item_count(encoders, item.modality, item.size)
    except SampleError as error:
        return replace(item, refused=str(error))
    return replace(item, tokens=tokens, rows=rows)


def with_sizes(
    trace: Sequence[SampleMeta], encoders: Mapping[str, Encoder]
) -> tuple[list[SampleMeta], list[str]]:
    """A trace whose items all have sizes, on screen or in seconds, of which each encoder makes the tokens
    that it makes; and where these are not those that the trace has, how many there are of both.
    """
    sized = [replace(meta, items=tuple(map(_sized, meta.items))) for meta in trace]
    given, made = dict[str, int](), dict[str, int]()
    for before, after in zip(trace, sized, strict=True):
        for item, new in zip(before.items, after.items, strict=True):
            given[item.modality] = given.get(item.modality, 0) + item.tokens
            made[item.modality] = made.get(item.modality, 0) + _counted(new, encoders).tokens
    notes = [
        f"{modality} items have {tokens:,} encoder tokens in the trace; of items of that size the model's "
        f"encoder makes {made[modality]:,}, which count"
        for modality, tokens in given.items()
        if abs(made[modality] - tokens) > _NEAR * tokens
    ]
    return sized, notes


def _sized(item: ItemMeta) -> ItemMeta:
    """An item with a size that fills about as many rows as the trace says."""
    if item.size:
        return item
    if item.modality == "audio":
        return replace(item, size=(item.rows * _AUDIO_ROW, _AUDIO_RATE))
    high = isqrt(item.rows)
    return replace(item, size=(high * _WINDOW, -(-item.rows // high) * _WINDOW))

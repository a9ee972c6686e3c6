"""How a sample becomes LLM tokens, from metadata (planning) and from the payload (loading), consistently.

The token sequence of a sample is

    bos  text…  [item]*rows end_of_item  text…  …  eos

The model's inputs are all but the last of them and the labels all but the first, so the eos is only ever a
label. `length` and `item_row_offsets` say the same from metadata alone as `tokenize` does from the payload.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dataloader.format import PLACEHOLDER, DataError, Sample
from dataloader.tokenizer import Tokenizer

LONG_SAMPLE_POLICIES = ("error", "drop", "truncate")


@dataclass(frozen=True)
class ItemMeta:
    """An item without its payload.

    `tokens` go into the encoder and `rows` come out as LLM embeddings; `at` is the number of text tokens of
    the sample before the item; `size` is as in `Item`, () if unknown. `refused` says why the encoder cannot
    take the item, "" if it can: such an item has no tokens and no rows, and no sample is trained on with it.
    """

    modality: str
    tokens: int
    rows: int
    at: int
    size: tuple[int, ...]
    refused: str = ""


@dataclass(frozen=True)
class SampleMeta:
    """A sample without its payload: all that planning needs.

    `id` is the sample's index within its source, `text_tokens` and `items` are what is kept of it, `bytes`
    its stored payload. A `truncated` sample keeps a prefix: its eos stays a label but carries no loss.
    """

    id: int
    source: str
    text_tokens: int
    items: tuple[ItemMeta, ...]
    bytes: int
    phase: int = 0
    truncated: bool = False


def length(meta: SampleMeta) -> int:
    """LLM input tokens of a sample: bos, text, rows and end_of_item of each item; the eos is only a label."""
    return 1 + meta.text_tokens + sum(item.rows + 1 for item in meta.items)


def item_row_offsets(meta: SampleMeta) -> tuple[int, ...]:
    """Position of the first row of each kept item in the sample's LLM input tokens (bos is position 0)."""
    offsets = []
    rows_before = 1
    for item in meta.items:
        offsets.append(rows_before + item.at)
        rows_before += item.rows + 1
    return tuple(offsets)


def fit(meta: SampleMeta, budget: int, policy: str) -> SampleMeta | None:
    """The sample as it is trained on when a sequence may have at most `budget` input tokens.

    A sample that fits comes back unchanged. Of a longer one, or one with an item that its encoder cannot
    take, `error` raises DataError, `drop` returns None, and `truncate` keeps the longest prefix of at most
    `budget` input tokens that does not cut into an item: text is cut at any token; an item that cannot be
    taken, or whose rows and end_of_item do not all fit, goes, with everything after it. The last kept token's
    label is then the eos, without loss. Returns None if only the bos would stay.
    """
    _check_fit(budget, policy)
    refused = next((number for number, item in enumerate(meta.items) if item.refused), None)
    if refused is None and length(meta) <= budget:
        return meta
    if policy == "drop":
        return None
    if policy == "error" and refused is not None:
        raise DataError(
            f"sample {meta.id} of source {meta.source!r}, item {refused}: {meta.items[refused].refused}. "
            "Or mend the data, or set data.on_long to drop or truncate"
        )
    if policy == "error":
        raise DataError(
            f"sample {meta.id} of source {meta.source!r} has {length(meta)} tokens, the budget is {budget}: "
            "raise data.microbatch_tokens or, if it is set, data.sample_tokens; or set data.on_long to drop "
            "or truncate"
        )
    return _truncate(meta, budget)


def fit_lengths(
    text_tokens: npt.NDArray[np.int64],
    num_items: npt.NDArray[np.int64],
    at: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    refused: npt.NDArray[np.bool_],
    budget: int,
    policy: str,
) -> npt.NDArray[np.int64]:
    """`length` of what `fit` returns for n samples with k items in all, int64 [n], without their metadata.

    `text_tokens` and `num_items` are [n]; `at`, `rows` and `refused` are [k], the items of one sample after
    those of the one before, as in `ItemMeta`. A sample that `fit` drops, or raises for, has length 0.
    """
    _check_fit(budget, policy)
    after = np.concatenate([[0], np.cumsum(rows + 1)])  # tokens of all items up to one, and it
    last = np.cumsum(num_items)
    first = last - num_items
    lengths = 1 + text_tokens + after[last] - after[first]
    fits = lengths <= budget
    sample = np.repeat(np.arange(len(lengths)), num_items)
    fits[sample[refused]] = False
    if policy != "truncate" or fits.all():
        return np.where(fits, lengths, 0)
    # A prefix ends at the budget, or before the first item that is refused or reaches beyond the budget.
    start = 1 + at + after[:-1] - after[first][sample]
    gone = refused | (start + rows + 1 > budget)
    cut = np.full_like(lengths, budget)
    np.minimum.at(cut, sample[gone], start[gone])
    return np.where(fits, lengths, np.where(cut > 1, cut, 0))


def _check_fit(budget: int, policy: str) -> None:
    if policy not in LONG_SAMPLE_POLICIES:
        raise ValueError(f"unknown policy {policy!r} for long samples: known are {LONG_SAMPLE_POLICIES}")
    if budget < 1:
        raise ValueError(f"the token budget is {budget}: it must be at least 1")


def _truncate(meta: SampleMeta, budget: int) -> SampleMeta | None:
    free = budget - 1  # the bos
    text = 0
    kept = []
    for item in meta.items:
        before = item.at - text
        if item.refused or before + item.rows + 1 > free:
            # Either the text before the item is cut, or that text fits whole and the item is the first to go.
            text += min(before, free)
            break
        free -= before + item.rows + 1
        text = item.at
        kept.append(item)
    else:
        text += min(meta.text_tokens - text, free)
    if text == 0 and not kept:
        return None
    return replace(meta, text_tokens=text, items=tuple(kept), truncated=True)


def count_text(sample: Sample, tokenizer: Tokenizer) -> tuple[int, tuple[int, ...]]:
    """Text tokens of a sample, and for each item the number of text tokens before it."""
    total = 0
    ats = []
    for piece, _ in _pieces(sample):
        if piece == PLACEHOLDER:
            ats.append(total)
        else:
            total += len(tokenizer.encode(piece))
    return total, tuple(ats)


def tokenize(
    sample: Sample, meta: SampleMeta, tokenizer: Tokenizer
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Inputs int64 [T], labels int64 [T] and loss mask bool [T] of a sample, T = length(meta).

    `labels[t]` is the token after `input_ids[t]`; the mask is true where that token is target text, or the
    eos of a sample that is whole and whose targets reach the end of its text. The items' payload is not
    needed. Raises DataError naming the sample if the payload does not hold what `meta` says.
    """
    ids = [tokenizer.bos]
    target = [False]
    seen, kept_items = 0, 0
    num_placeholders = 0
    for piece, is_target in _pieces(sample):
        if piece == PLACEHOLDER:
            num_placeholders += 1
            if kept_items == len(meta.items):
                continue
            item = meta.items[kept_items]
            if item.at != seen:
                raise _mismatch(
                    sample, meta, f"item {kept_items} stands after {seen} text tokens, not {item.at}"
                )
            kept_items += 1
            ids += [tokenizer.item] * item.rows + [tokenizer.end_of_item]
            target += [False] * (item.rows + 1)
        else:
            tokens = tokenizer.encode(piece)
            kept = tokens[: max(0, meta.text_tokens - seen)]
            seen += len(tokens)
            ids += kept
            target += [is_target] * len(kept)
    if seen < meta.text_tokens or (seen > meta.text_tokens and not meta.truncated):
        raise _mismatch(sample, meta, f"the text has {seen} tokens, not {meta.text_tokens}")
    if kept_items < len(meta.items) or (num_placeholders > kept_items and not meta.truncated):
        raise _mismatch(sample, meta, f"the text has {num_placeholders} placeholders, not {len(meta.items)}")
    to_the_end = sample.targets is None or (
        len(sample.targets) > 0 and sample.targets[-1][1] == len(sample.text)
    )
    ids.append(tokenizer.eos)
    target.append(to_the_end and not meta.truncated)
    assert len(ids) == length(meta) + 1
    sequence = np.array(ids, dtype=np.int64)
    return sequence[:-1], sequence[1:].copy(), np.array(target[1:], dtype=np.bool_)


def _mismatch(sample: Sample, meta: SampleMeta, what: str) -> DataError:
    return DataError(
        f"sample {sample.id!r} ({meta.id} of source {meta.source!r}): {what} as the index says; "
        "index and shards disagree: check with omni data verify, rebuild with omni data build"
    )


def _pieces(sample: Sample) -> list[tuple[str, bool]]:
    """The text cut at placeholders and at the edges of target spans: (piece, carries loss), in order.

    Each piece is tokenised by itself, so that counts from the index are exact for any tokenizer.
    """
    text = sample.text
    spans: Sequence[tuple[int, int]] = [(0, len(text))] if sample.targets is None else sample.targets
    starts = {start for start, _ in spans}
    stops = {stop for _, stop in spans}
    edges = {0, len(text)} | starts | stops
    position = text.find(PLACEHOLDER)
    while position >= 0:
        edges |= {position, position + 1}
        position = text.find(PLACEHOLDER, position + 1)
    ordered = sorted(edges)
    pieces = []
    inside = False
    for start, stop in pairwise(ordered):
        inside = start in starts or (inside and start not in stops)
        pieces.append((text[start:stop], inside))
    return pieces

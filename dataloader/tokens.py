"""How a sample becomes LLM tokens, from metadata (planning) and from the payload (loading), consistently.

The token sequence of a sample is

    bos  text…  [item]*rows end_of_item  text…  …  eos

in the dataset's frame: a vocabulary may have no bos, or nothing that follows an item. The model's inputs are
all but the last of them and the labels all but the first, so the eos is only ever a label. `text_tokens` is
the one place where text becomes tokens; `length` and `item_row_offsets` say the same from metadata alone as
`tokenize` does from the payload.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dataloader.format import PLACEHOLDER, DataError, Sample
from dataloader.manifest import PLAIN, Frame
from dataloader.tokenizer import Tokenizer, placeholders_of

TextArrays = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]

LONG_SAMPLE_POLICIES = ("error", "drop", "truncate")


@dataclass(frozen=True)
class ItemMeta:
    """An item without its payload.

    `tokens` go into the encoder, and `rows` are the LLM's tokens that it takes: embeddings that come out of
    the encoder, and literal tokens that this puts among them. `at` is the number of text tokens of the sample
    before the item; `size` is as in `Item`, () if unknown. `refused` says why the encoder cannot
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
    its stored payload. `turns` are numbers of text tokens at which turns end, where the frame has turns. A
    `truncated` sample keeps a prefix: its eos stays a label but carries no loss.
    """

    id: int
    source: str
    text_tokens: int
    items: tuple[ItemMeta, ...]
    bytes: int
    phase: int = 0
    truncated: bool = False
    frame: Frame = PLAIN
    turns: tuple[int, ...] = ()


def length(meta: SampleMeta) -> int:
    """LLM input tokens of a sample: bos, text, rows and end_of_item of each item; the eos is only a label."""
    after = meta.frame.end_of_item
    return meta.frame.bos + meta.text_tokens + sum(item.rows + after for item in meta.items)


def item_row_offsets(meta: SampleMeta) -> tuple[int, ...]:
    """Position of the first row of each kept item in the sample's LLM input tokens (a bos is position 0)."""
    offsets = []
    rows_before = int(meta.frame.bos)
    for item in meta.items:
        offsets.append(rows_before + item.at)
        rows_before += item.rows + meta.frame.end_of_item
    return tuple(offsets)


def target_runs(meta: SampleMeta) -> tuple[tuple[int, int], ...]:
    """Runs [start, stop) of a sample's LLM input tokens whose next token carries loss, where all its text is
    target text: as the mask of `tokenize` then says.
    """
    runs = []
    at, seen = meta.frame.bos - 1, 0  # the token before a stretch of text, and text tokens before it
    for item in meta.items:
        last = at + item.at - seen
        runs.append((at, last))
        at, seen = last + item.rows + meta.frame.end_of_item, item.at
    ends = meta.frame.eos and not meta.truncated
    runs.append((at, at + meta.text_tokens - seen + ends))
    return tuple((max(0, start), stop) for start, stop in runs if max(0, start) < stop)


def fit(meta: SampleMeta, budget: int, policy: str) -> SampleMeta | None:
    """The sample as it is trained on when a sequence may have at most `budget` input tokens.

    A sample that fits comes back unchanged. Of a longer one, or one with an item that its encoder cannot
    take, `error` raises DataError, `drop` returns None, and `truncate` keeps the longest prefix of at most
    `budget` input tokens that does not cut into an item: text is cut at any token; an item that cannot be
    taken, or whose rows and end_of_item do not all fit, goes, with everything after it. The last kept token's
    label is then the eos, without loss. Where the frame has turns, the longest such prefix that ends with a
    turn is kept. Returns None if only the bos would stay, or no whole turn.
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
    frame: Frame = PLAIN,
    num_turns: npt.NDArray[np.int64] | None = None,
    turns: npt.NDArray[np.int64] | None = None,
) -> npt.NDArray[np.int64]:
    """`length` of what `fit` returns for n samples with k items in all, int64 [n], without their metadata.

    `text_tokens` and `num_items` are [n]; `at`, `rows` and `refused` are [k], the items of one sample after
    those of the one before, as in `ItemMeta`. Where the frame has turns, `num_turns` [n] and `turns` [m] are
    those of `SampleMeta`. A sample that `fit` drops, or raises for, has length 0.
    """
    _check_fit(budget, policy)
    whole = rows + frame.end_of_item
    after = np.concatenate([[0], np.cumsum(whole)])  # tokens of all items up to one, and it
    last = np.cumsum(num_items)
    first = last - num_items
    lengths = frame.bos + text_tokens + after[last] - after[first]
    fits = lengths <= budget
    sample = np.repeat(np.arange(len(lengths)), num_items)
    fits[sample[refused]] = False
    if policy != "truncate" or fits.all():
        return np.where(fits, lengths, 0)
    # A prefix ends at the budget, or before the first item that is refused or reaches beyond the budget.
    start = frame.bos + at + after[:-1] - after[first][sample]
    gone = refused | (start + whole > budget)
    cut = np.full_like(lengths, budget)
    np.minimum.at(cut, sample[gone], start[gone])
    if frame.turns:
        assert num_turns is not None
        assert turns is not None
        # One order of the items and turns of all samples; an item at a turn's end comes after it.
        of_turn = np.repeat(np.arange(len(lengths)), num_turns)
        wide = 1 + max(at.max(initial=0), turns.max(initial=0))
        items = np.searchsorted(sample * wide + at, of_turn * wide + turns)
        ends = frame.bos + turns + after[items] - after[first][of_turn]
        whole_turns = ends <= cut[of_turn]
        cut = np.zeros_like(cut)
        np.maximum.at(cut, of_turn[whole_turns], ends[whole_turns])
    return np.where(fits, lengths, np.where(cut > frame.bos, cut, 0))


def _check_fit(budget: int, policy: str) -> None:
    if policy not in LONG_SAMPLE_POLICIES:
        raise ValueError(f"unknown policy {policy!r} for long samples: known are {LONG_SAMPLE_POLICIES}")
    if budget < 1:
        raise ValueError(f"the token budget is {budget}: it must be at least 1")


def _truncate(meta: SampleMeta, budget: int) -> SampleMeta | None:
    free = budget - meta.frame.bos
    text = 0
    kept = []
    for item in meta.items:
        before = item.at - text
        whole = item.rows + meta.frame.end_of_item
        if item.refused or before + whole > free:
            # Either the text before the item is cut, or that text fits whole and the item is the first to go.
            text += min(before, free)
            break
        free -= before + whole
        text = item.at
        kept.append(item)
    else:
        text += min(meta.text_tokens - text, free)
    if meta.frame.turns:
        text = max((turn for turn in meta.turns if turn <= text), default=0)
        kept = [item for item in kept if item.at < text]
    if text == 0 and not kept:
        return None
    return replace(meta, text_tokens=text, items=tuple(kept), truncated=True)


@dataclass(frozen=True)
class TextTokens:
    """The text of a sample in tokens: `ids` int64 [T] without those of items, item i after `items[i]` of
    them, and which of them are targets, bool [T]; turn i ends after `turns[i]` of them.
    """

    ids: npt.NDArray[np.int64]
    items: tuple[int, ...]
    targets: npt.NDArray[np.bool_]
    turns: tuple[int, ...] = ()


def text_tokens(sample: Sample, tokenizer: Tokenizer) -> TextTokens:
    """What a tokenizer makes of a sample's text. A token is a target if it holds a character of one."""
    ids, starts, stops = tokenizer.encode(sample.text)
    items: tuple[int, ...] = ()
    if count := sample.text.count(PLACEHOLDER):
        of_item = placeholders_of(sample.text)[starts]
        places = np.flatnonzero(of_item).tolist()
        if len(places) != count:
            raise DataError(
                f"sample {sample.id!r}: tokenizer {tokenizer.name} makes {len(places)} tokens of its "
                f"{count} placeholders (U+FFFC): it must give each one token of its own"
            )
        items = tuple(place - number for number, place in enumerate(places))
        ids, starts, stops = (array[~of_item] for array in (ids, starts, stops))
    if sample.targets is None:
        targets = np.ones(len(ids), dtype=np.bool_)
    else:
        spans = np.array(sample.targets, dtype=np.int64).reshape(-1, 2)
        first = np.searchsorted(spans[:, 1], starts, side="right")  # the first span that ends after its start
        begins = np.append(spans[:, 0], np.iinfo(np.int64).max)[first]
        targets = begins < np.maximum(stops, starts + 1)
    turns = np.searchsorted(starts, sample.turns).tolist() if sample.turns else ()
    return TextTokens(ids, items, targets, tuple(turns))


def tokenize(sample: Sample, meta: SampleMeta, tokenizer: Tokenizer) -> TextArrays:
    """Inputs int64 [T], labels int64 [T] and loss mask bool [T] of a sample, T = length(meta).

    `labels[t]` is the token after `input_ids[t]`; the mask is true where that token is target text, or the
    eos of a sample that is whole and whose targets reach the end of its text. The items' payload is not
    needed. Raises DataError naming the sample if the payload does not hold what `meta` says.
    """
    text = text_tokens(sample, tokenizer)
    seen, kept = len(text.ids), meta.items
    if seen < meta.text_tokens or (seen > meta.text_tokens and not meta.truncated):
        raise _mismatch(sample, meta, f"the text has {seen} tokens, not {meta.text_tokens}")
    if len(text.items) < len(kept) or (len(text.items) > len(kept) and not meta.truncated):
        raise _mismatch(sample, meta, f"the text has {len(text.items)} placeholders, not {len(kept)}")
    for number, (item, at) in enumerate(zip(kept, text.items, strict=False)):
        if item.at != at:
            raise _mismatch(sample, meta, f"item {number} stands after {at} text tokens, not {item.at}")
    frame = meta.frame
    sequence = np.empty(length(meta) + 1, np.int64)
    target = np.zeros(len(sequence), np.bool_)
    if frame.bos:
        assert tokenizer.bos is not None
        sequence[0] = tokenizer.bos
    at, seen = int(frame.bos), 0  # tokens written, and those of the text among them
    for item in kept:
        stop = at + item.at - seen
        sequence[at:stop] = text.ids[seen : item.at]
        target[at:stop] = text.targets[seen : item.at]
        at, seen = stop + item.rows, item.at
        sequence[stop:at] = tokenizer.item
        if frame.end_of_item:
            assert tokenizer.end_of_item is not None
            sequence[at] = tokenizer.end_of_item
            at += 1
    sequence[at:-1] = text.ids[seen : meta.text_tokens]
    target[at:-1] = text.targets[seen : meta.text_tokens]
    sequence[-1] = tokenizer.eos
    to_the_end = sample.targets is None or (
        len(sample.targets) > 0 and sample.targets[-1][1] == len(sample.text)
    )
    target[-1] = frame.eos and to_the_end and not meta.truncated
    return sequence[:-1], sequence[1:].copy(), target[1:]


def blank(meta: SampleMeta) -> TextArrays:
    """What stands in for `tokenize` where the text cannot be read: of the planned length, without targets."""
    size = length(meta)
    return np.zeros(size, np.int64), np.zeros(size, np.int64), np.zeros(size, np.bool_)


def _mismatch(sample: Sample, meta: SampleMeta, what: str) -> DataError:
    return DataError(
        f"sample {sample.id!r} ({meta.id} of source {meta.source!r}): {what} as the index says; "
        "index and shards disagree: check with omni data verify, rebuild with omni data build"
    )

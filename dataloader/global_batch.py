"""Which samples a step trains on: the global batch, a prefix of what is left of the stream.

Every rank computes it for the whole world, so it is columns of numbers and no object per sample.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dataloader.format import DataError
from dataloader.stream import Order
from dataloader.tokens import SampleMeta, fit
from ops.ints import Ints

Lengths = Callable[[str, Ints, int, str], Ints]
"""From a source's name, ids [n] within it, the most tokens of a sample and the policy for longer ones to the
samples' lengths [n] as they are trained on, 0 for those that are not: `Index.lengths` of the source. Those
that are `REMOVED` were taken out of the run, however long they are.
"""

REMOVED = -1

_FIRST_READ = 256  # samples read at first, to learn their mean length
_MOST_READ = 1 << 16  # samples read together


@dataclass(frozen=True)
class Budget:
    """Tokens of a microbatch, and what a step takes: LLM tokens or samples (one of them).

    A sample has at most `sample_tokens`, None for those of a microbatch; `on_long` says what is done with
    longer ones. Which samples a step takes follows from these alone, whatever the layout.
    """

    microbatch_tokens: int
    step_tokens: int | None
    step_samples: int | None
    on_long: str
    sample_tokens: int | None = None

    @property
    def longest(self) -> int:
        """The most tokens of a sample."""
        return self.microbatch_tokens if self.sample_tokens is None else self.sample_tokens


@dataclass(frozen=True)
class GlobalBatch:
    """The samples of a step, in the stream's order: columns [n] of int64.

    `sources` are numbers of sources in the stream's order of names, `ids` count within a source, `lengths`
    are LLM tokens as trained on. `skipped` names the dropped samples among them, (source, id) in order, and
    none that is removed. The next step begins at position `next_cursor` of the stream.
    """

    sources: Ints
    ids: Ints
    lengths: Ints
    skipped: tuple[tuple[str, int], ...]
    next_cursor: int


def take_global_batch(
    stream: Order, lengths: Lengths, metas: Callable[[str, int], SampleMeta], cursor: int, budget: Budget
) -> GlobalBatch:
    """The samples within the budget from position `cursor` on: at least one, whatever its length.

    Samples that are dropped are passed over, up to the first sample that the budget has no room for: there
    the next step begins. `metas` reads a sample's metadata, for the error of one that is refused.

    Raises:
        DataError: if the stream holds no sample that is not dropped, or for the first sample that is too long
            or that its encoder cannot take, where `budget.on_long` is `error`.
    """
    begin, taken, tokens = cursor, 0, 0
    read = []
    full = False
    while not full:
        count = _samples_to_read(budget, cursor - begin, taken, tokens)
        if not taken:
            count = min(count, begin + stream.cycle - cursor)
        sources, ids = stream.take(cursor, count)
        found = _lengths_of(stream, lengths, sources, ids, budget)
        tokens_of = np.maximum(found, 0)
        end = _end(tokens_of, taken, tokens, budget)
        full = end < count
        sources, ids, found, tokens_of = sources[:end], ids[:end], found[:end], tokens_of[:end]
        if budget.on_long == "error" and not found.all():
            refused = int(np.argmax(found == 0))
            meta = metas(stream.names[sources[refused]], int(ids[refused]))
            fit(meta, budget.longest, budget.on_long)  # says why
        read.append((sources, ids, found))
        cursor += end
        taken += int(np.count_nonzero(tokens_of))
        tokens += int(tokens_of.sum())
        if not taken and cursor == begin + stream.cycle:
            # Where both are one number, a sample may be as long as a microbatch.
            own = budget.sample_tokens not in (None, budget.microbatch_tokens)
            key = "sample_tokens" if own else "microbatch_tokens"
            more = "" if budget.on_long == "truncate" else ", or set data.on_long=truncate"
            raise DataError(
                f"data.{key}={budget.longest} fits no sample: "
                f"{cursor - begin} in a row were dropped, as too long or for an item that its encoder cannot "
                f"take; raise it{more} (data.on_long=error names the first and why)"
            )
    sources, ids, found = (np.concatenate(column) for column in zip(*read, strict=True))
    kept, dropped = found > 0, found == 0
    names = (stream.names[source] for source in sources[dropped].tolist())
    skipped = tuple(zip(names, ids[dropped].tolist(), strict=True))
    return GlobalBatch(sources[kept], ids[kept], found[kept], skipped, cursor)


def _samples_to_read(budget: Budget, passed: int, taken: int, tokens: int) -> int:
    """How many samples to read next, so that they likely fill the step.

    `passed` samples were read so far, of which `taken` are in the step with all their `tokens`.
    """
    if budget.step_samples is not None:
        done, all_of_it, at_least = taken, budget.step_samples, budget.step_samples
    else:
        assert budget.step_tokens is not None
        done, all_of_it = tokens, budget.step_tokens
        at_least = max(_FIRST_READ, budget.step_tokens // budget.microbatch_tokens)
    # Go on as so far; if nothing was of use yet, double what was read.
    count = max(0, all_of_it - done) * passed // done if done else max(at_least, passed)
    return min(_MOST_READ, count + count // 16 + 16)


def _end(tokens_of: Ints, taken: int, tokens: int, budget: Budget) -> int:
    """The first of the samples [n] that a step of `taken` samples and `tokens` has no room for; n if none."""
    usable = tokens_of > 0
    taken_before = taken + np.cumsum(usable) - usable
    if budget.step_samples is not None:
        over = taken_before >= budget.step_samples
    else:
        assert budget.step_tokens is not None
        over = tokens + np.cumsum(tokens_of) > budget.step_tokens
    ends = usable & over & (taken_before > 0)
    return int(np.argmax(ends)) if ends.any() else len(ends)


def _lengths_of(stream: Order, lengths: Lengths, sources: Ints, ids: Ints, budget: Budget) -> Ints:
    """Lengths [n] as trained on of samples of any sources, as `Lengths` gives them."""
    out = np.empty(len(ids), dtype=np.int64)
    for number in np.flatnonzero(np.bincount(sources)).tolist():
        of = sources == number
        out[of] = lengths(stream.names[number], ids[of], budget.longest, budget.on_long)
    return out

"""What a step lost of its samples because they were too long, beside how many it has."""

from dataclasses import dataclass

from dataloader.tokens import length
from omni.planning.planner import Planner
from pipeline.plan import Taken


@dataclass(frozen=True)
class Cut:
    """Of the samples up to where the next step begins, `samples` are trained on as a prefix and `dropped` not
    at all; `tokens` and `squares` are the shares of all their LLM tokens, and of their squared lengths, that
    the step lacks. Rows of an item that its encoder cannot take are not known and count as none.
    """

    samples: int
    dropped: int
    tokens: float
    squares: float

    def __str__(self) -> str:
        if not (self.samples or self.dropped):
            return "cut: none"
        dropped = f", dropped: {self.dropped:,}" if self.dropped else ""
        shares = f"{self.tokens:.1%} of tokens, {self.squares:.1%} of squared lengths"
        return f"cut: {self.samples:,} samples{dropped}; lost: {shares}"


def cut_of(planner: Planner, taken: Taken) -> Cut:
    """Compare the samples of a step with what they are in its data."""
    pairs = zip(taken.source, taken.ids, strict=True)
    whole = [length(planner.world.samples.metas(taken.sources[source], sample)) for source, sample in pairs]
    dropped = [length(planner.world.samples.metas(source, sample)) for source, sample in taken.skipped]
    tokens, squares = sum(whole) + sum(dropped), sum(n * n for n in (*whole, *dropped))
    return Cut(
        samples=sum(kept < all_of_it for kept, all_of_it in zip(taken.lengths, whole, strict=True)),
        dropped=len(dropped),
        tokens=1 - taken.tokens / tokens,
        squares=1 - sum(n * n for n in taken.lengths) / squares,
    )


def told(planner: Planner, taken: Taken) -> str:
    """Say how many samples and tokens a step has, also of a rank, and what was cut of them."""
    world, count = planner.domain.arrangement, len(taken)
    each = f"{count / world.world:.4g} a rank, {count / world.llm.dp:.4g} a replica"
    return f"{count:,} samples ({each}), {taken.tokens:,} tokens; {cut_of(planner, taken)}"

"""Steps with too few samples for their ranks: found before a run starts, from budget and layout."""

from collections.abc import Iterator

from omni.planning.planner import Planner
from pipeline.plan import Taken


def few(planner: Planner, taken: Taken) -> Iterator[str]:
    """Say in a line each why ranks idle in a step of these samples, whatever its plan, and what to set.

    A sample stays with the ranks that may share it, so with fewer samples than such places some have none; a
    pipeline with fewer microbatches than stages fills and empties for longer than it is full.
    """
    world, budget, count = planner.domain.arrangement, planner.world.budget_at(taken.cursor), len(taken)
    key, value = (
        ("step_samples", budget.step_samples)
        if budget.step_tokens is None
        else ("step_tokens", budget.step_tokens)
    )
    assert value is not None
    own = planner.domain.sharing[planner.domain.llm].policy
    shared = own.cuts and not own.within_replica
    places, name = (world.num_domains, "domains") if shared else (world.llm.dp, "replicas")
    if 0 < count < places:
        least = -(-value * places // count)
        yield (
            f"a step has {count:,} samples for {places:,} {name}: {places - count:,} of these train on "
            f"none. Set data.{key}={least} or more, which is a sample each, or use fewer ranks"
        )
    full = planner.domain.pack_tokens * world.llm.dp  # tokens of a microbatch of every replica
    passes = -(-taken.tokens // full)
    if count and passes < world.llm.pp:
        least = -(-value * world.llm.pp * full // taken.tokens)
        yield (
            f"a step of {taken.tokens:,} tokens fills {passes} of the microbatches of "
            f"{planner.domain.pack_tokens} tokens (data.microbatch_tokens={budget.microbatch_tokens}, "
            f"packing.divisor={planner.domain.pack_divisor}) on each of {world.llm.dp:,} replicas, fewer "
            f"than the {world.llm.pp} stages of layout.llm.pp: ranks idle as it fills and empties. "
            f"Set data.{key}={least} or more, or a larger packing.divisor"
        )

"""How a step that no device can hold is divided: what ranks share of it at once into portions, or all of it
into rounds, each of which is encoded, passed and gone back through before the next.

A layer of an encoder that is computed anew works with all tokens of an encoder batch. For example, with
41 GiB if a million tokens a rank are shared at once, and with 23 if half of them are, which takes 1 % longer.
Encoders also keep most of what a step of many samples holds. In as few rounds as leave room for that, a step
takes 5 to 10 % more; a schedule that encodes just in time instead keeps less than any, and waits for the
slowest rank in each microbatch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from parallel.costs import CostTable
from pipeline.costs import plan_memory
from pipeline.domain_plan import DomainPlan, EncoderBatch
from pipeline.ops import Kind

TRIES = 4  # numbers of rounds that are tried for a step that fits in fewer of none
PORTIONS = 8  # encoder batches at most that all that is shared of a step comes in, where it may be one

Hope = tuple[int, int]
"""Bytes that a plan is beyond what ranks can hold, and those that dividing it further may free."""


def starts_of(domain: DomainPlan, rounds: int, table: CostTable) -> list[int]:
    """Return the first microbatches of at most so many rounds, whose items keep about the same bytes; of
    about as many microbatches, if items keep nothing. Each microbatch goes where its middle lies.

    Rounds are cut from the order of the step, in which microbatches of about the same work are neighbours:
    those of a round wait little for each other.
    """
    kept = [0] * len(domain.microbatches)
    for item in domain.items:
        kept[item.microbatch] += table.parts[item.component].kept_bytes(item.tokens)
    kept = kept if any(kept) else [1] * len(kept)
    total = max(1, 2 * sum(kept))
    middles = (2 * before + own for before, own in zip(accumulate(kept, initial=0), kept, strict=False))
    of = [min(rounds - 1, middle * rounds // total) for middle in middles]
    return [0, *(m for m in range(1, len(of)) if of[m] > of[m - 1])]


def batches_of_rounds(
    domain: DomainPlan,
    waves: Sequence[int],
    starts: Sequence[int],
    batches_of: Callable[[DomainPlan, Sequence[int]], Sequence[EncoderBatch]],
) -> tuple[EncoderBatch, ...]:
    """Have encoder batches made of the items of each round by themselves, from a domain of these items and
    the `waves` with which they are encoded.
    """
    if len(starts) == 1:
        return tuple(batches_of(domain, waves))
    found: list[EncoderBatch] = []
    for first, stop in pairwise([*starts, len(domain.microbatches)]):
        numbers = [n for n, item in enumerate(domain.items) if first <= item.microbatch < stop]
        own = replace(domain, items=tuple(domain.items[n] for n in numbers))
        found += (
            replace(
                batch,
                items=tuple(numbers[i] for i in batch.items),
                outputs=tuple(
                    tuple(replace(rows, item=numbers[rows.item]) for rows in of) for of in batch.outputs
                ),
            )
            for batch in batches_of(own, [waves[n] for n in numbers])
        )
    return tuple(found)


def workspace_at_once(plan: DomainPlan, table: CostTable) -> int:
    """Bytes that layers work with in the largest encoder batch that several ranks share at once: portions and
    rounds leave less of it.
    """
    return max(
        (
            table.parts[batch.component].working_token * batch.layout.local_tokens(cp_rank)
            for batch in plan.encoder_batches
            if len(batch.microbatches) > 1 and batch.layout.num_cp_ranks > 1
            for cp_rank in range(batch.layout.num_cp_ranks)
        ),
        default=0,
    )


def rounds_to_try(refused: Sequence[tuple[DomainPlan, int]], table: CostTable) -> Iterator[tuple[int, int]]:
    """Yield which of the plans of one round that do not fit to make again, by number, in how many rounds;
    each is given with the bytes that it is beyond what a device holds.

    Fewer rounds come first, for each number of them the plans in the order given, and none whose other
    activations do not fit by themselves.
    """
    fewest = [_fewest(plan, beyond, table) for plan, beyond in refused]
    most = max((len(plan.microbatches) for plan, _ in refused), default=0)
    rounds = min((own for own in fewest if own is not None), default=most + 1)
    for _ in range(TRIES):
        if rounds > most:
            return
        yield from ((number, rounds) for number, own in enumerate(fewest) if own and own <= rounds)
        rounds += -(-rounds // 3)


def of_encoders(plan: DomainPlan, table: CostTable) -> int:
    """Bytes that encoders keep and work with in a round, about, here or on the host: the most that more
    rounds may leave free.
    """
    kept = plan_memory(plan, table)
    encoded = max(
        sum(kept(team * plan.team, op) for op in ops if op.kind is Kind.ENCODE)
        for team, ops in enumerate(plan.ops)
    )
    here = encoded // plan.rounds + workspace_at_once(plan, table)
    return max(here, _most_away(plan, table) // plan.rounds)


def helps(before: Hope | None, now: Hope) -> bool:
    """Whether dividing a step further, from what was `before` to what is `now`, has brought a fourth of what
    it freed, or has not been tried: else something else is in the way.
    """
    return before is None or 4 * (before[0] - now[0]) >= max(1, before[1] - now[1])


def _fewest(plan: DomainPlan, beyond: int, table: CostTable) -> int | None:
    """Return the fewest rounds in which what encoders keep and work with may fit, None if nothing of it does;
    of a plan in one round.
    """
    encoded = of_encoders(plan, table)
    room = encoded - beyond
    return None if room <= 0 else max(2, -(-encoded // room))


def _most_away(plan: DomainPlan, table: CostTable) -> int:
    """Bytes that encoders of a rank send to its host in a step, at most."""
    away = [0] * plan.num_ranks
    for batch in plan.encoder_batches:
        of_token = table.parts[batch.component].away_token
        for rank in batch.ranks if of_token else ():
            away[rank] += of_token * batch.share(rank).tokens
    return max(away)

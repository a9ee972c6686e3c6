"""Random domains: the verifier accepts what every registered schedule makes of them."""

from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random

import pytest
from domain_plans import BUILDERS, one
from random_domains import MOST_STAGES, for_one_queue, random_domain
from random_ranks import RandomRanks

from pipeline.ops import ISSUED
from pipeline.plan import StepPlan
from pipeline.verifier import violations

EACH = 200


@pytest.mark.parametrize("schedule", BUILDERS)
def test_what_a_schedule_makes_of_random_domains_is_accepted(schedule):
    """With a queue for each communicator; every second one also reordered for one queue a rank."""
    for number in range(EACH):
        plan, costs = random_domain(Random(f"{schedule}/{number}"), BUILDERS[schedule])
        assert list(violations(plan, one)) == [], number
        if number % 2:
            continue
        ordered = for_one_queue(plan, costs)
        assert list(violations(ordered, one, single_fifo=True)) == [], number
        for before, after in zip(plan.domain.ops, ordered.domain.ops, strict=True):
            assert Counter(before) == Counter(replace(op, within=0) for op in after), number
            assert [op for op in before if op.kind not in ISSUED] == [
                op for op in after if op.kind not in ISSUED
            ], number
        if number % 10 == 0:
            RandomRanks(plan, number).run()
            RandomRanks(ordered, number, single_queue=True).run()


def facts(plan: StepPlan) -> set[tuple[object, ...]]:
    """What a domain is an example of."""
    domain = plan.domain
    components = {encoder_batch.component for encoder_batch in domain.encoder_batches}
    seen = {
        ("stages", domain.num_stages),
        ("virtual stages of a rank", domain.num_virtual_stages // domain.num_stages),
        ("pool", domain.pool),
        ("tp", domain.tp),
        ("collective group", domain.collective_group),
        ("team", domain.team),
        ("encoders beside", domain.llm_size < domain.num_ranks),
        ("encoders", len(components)),
        ("points of rows", len(domain.all_points)),
        ("microbatches", len(domain.microbatches)),
        ("without items", None in domain.routes and domain.encoder_batches != ()),
        ("no encoder batch", domain.encoder_batches == ()),
        ("frozen", *plan.frozen),
    }
    for encoder_batch in domain.encoder_batches:
        seen |= {
            ("tp groups of an encoder batch", encoder_batch.layout.num_cp_ranks),
            ("ranks of a tp group", encoder_batch.tp),
        }
        seen |= {("microbatches of an encoder batch", len(encoder_batch.microbatches))}
        seen |= {("stages of an encoder batch", len({domain.stage(rank) for rank in encoder_batch.ranks}))}
        seen |= {("shards of an item", len(shards)) for shards in encoder_batch.layout.shards}
    pieces = {len(shards) for batch in domain.microbatches for shards in batch.layout.shards}
    return seen | {("shards of a sequence", count) for count in pieces}


@cache
def counted(schedule: str) -> Counter[tuple[object, ...]]:
    plans = (random_domain(Random(f"{schedule}/{n}"), BUILDERS[schedule])[0] for n in range(EACH))
    return Counter(fact for plan in plans for fact in facts(plan))


@pytest.mark.parametrize("schedule", BUILDERS)
def test_random_domains_are_of_every_kind(schedule):
    wanted = {("stages", n) for n in range(1, MOST_STAGES + 1)} | {("microbatches", n) for n in range(7)}
    wanted |= {("pool", n) for n in (1, 2, 3)} | {("collective group", n) for n in (1, 2, 3, 4)}
    wanted |= {(name, n) for name in ("tp", "team", "ranks of a tp group") for n in (1, 2)}
    wanted |= {("encoders beside", flag) for flag in (False, True)} | {("encoders", n) for n in (0, 1, 2)}
    wanted |= {("points of rows", n) for n in (1, 2, 3)} | {
        ("without items", True),
        ("no encoder batch", True),
    }
    wanted |= {("tp groups of an encoder batch", n) for n in (1, 2, 3, 4)} | {
        ("stages of an encoder batch", n) for n in (1, 2, 3)
    }
    wanted |= {("microbatches of an encoder batch", n) for n in (1, 2)} | {
        ("shards of an item", n) for n in (1, 2)
    }
    wanted |= {("shards of a sequence", n) for n in (1, 2, 3)}
    wanted |= {("frozen", *names) for names in ((), ("image",), ("audio", "image"), ("llm",))}
    if BUILDERS[schedule].vpp is None:
        wanted |= {("virtual stages of a rank", n) for n in (1, 2, 3)}
    few = {fact: counted(schedule)[fact] for fact in wanted if counted(schedule)[fact] < 3}
    assert not few

"""Which microbatches of a step share their items: sharing must pay for the barrier that it is."""

from dataclasses import replace
from random import Random

import pytest
from own_policies import own
from planners import planner, policies_of
from small import overrides, write_mixed
from work_costs import work_cost

from dataloader.balance.simple import LPT
from dataloader.global_batch import Budget
from dataloader.tokens import ItemMeta, SampleMeta
from omni.compose import compose_config
from omni.planning.planner import Planner
from omni.planning.pools import without_effect
from omni.planning.prepare import prepare_run
from omni.planning.sharing import Sharing, make_chunks, worth_sharing
from parallel.cluster import Link, Links
from parallel.costs import CostTable
from parallel.layout import Layout, arrange
from parallel.placements import COLOCATED
from parallel.policies import SharingPolicy, make_pool
from parallel.schemes import sequence_cost
from parallel.tiles import AttentionShape
from pipeline.builders import SchedulePolicy
from pipeline.domain_plan import Chunk, PlannedItem
from pipeline.plan import StepPlan

RANKS, UNIT = 8, 4
LINK = Link(2_000, 10**11)
TABLE = CostTable(0, {"eye": work_cost(10**9, 10**6, 0, exchanges=4)}, Links(LINK, LINK), row_bytes=64)
COST = sequence_cost(TABLE, "eye", AttentionShape(8, 8), 128, LINK)
SLOTS = {"eye": [(rank,) for rank in range(RANKS)]}


def sharing_by(policy: str) -> Sharing:
    chosen = own(SharingPolicy)[policy]
    return Sharing(chosen, make_pool(COST, RANKS, UNIT), RANKS, whole=not chosen.cuts)


def planned(policy: str, batches: list[list[int]], at_once: bool = False) -> tuple[Chunk, ...]:
    """The chunks of a step whose microbatches have items of so many tokens."""
    items = [
        PlannedItem("eye", 0, 0, number, tokens, tokens // UNIT, 0)
        for number, lengths in enumerate(batches)
        for tokens in lengths
    ]
    return make_chunks(
        items,
        SLOTS,
        {"eye": sharing_by(policy)},
        lambda name, n: TABLE.parts[name].marginal_ns(n, n * n),
        [item.microbatch for item in items],
        at_once,
    )


def encode_ns(chunks: tuple[Chunk, ...]) -> int:
    """Time until all ranks have encoded all chunks: ranks that share one begin and end it together."""
    clock = [0] * RANKS
    for chunk in chunks:
        start = max(clock[rank] for rank in chunk.ranks)
        took = max(TABLE.parts["eye"].forward_ns(*chunk.share(rank)) for rank in chunk.ranks)
        for rank in chunk.ranks:
            clock[rank] = start + took
    return max(clock)


def heavy_tailed(num_batches: int, items: int, seed: int, spread: float = 1.5) -> list[list[int]]:
    random = Random(seed)
    return [
        [UNIT * round(min(16_000, random.lognormvariate(5, spread)) + 1) for _ in range(items)]
        for _ in range(num_batches)
    ]


def shared(chunks: tuple[Chunk, ...]) -> set[int]:
    return {m for chunk in chunks if len(chunk.ranks) > 1 for m in chunk.microbatches}


@pytest.mark.parametrize("policy", ["dhp", "dynamic", "long_short", "hybrid_pow2"])
@pytest.mark.parametrize("num_batches", [1, 3, 8])
def test_a_step_takes_no_longer_than_with_whole_items(policy, num_batches):
    gains = []
    for seed in range(12):
        batches = heavy_tailed(num_batches, 40, seed)
        whole, chosen = encode_ns(planned("none", batches)), encode_ns(planned(policy, batches))
        assert chosen <= whole, seed
        gains.append(whole / chosen)
    assert sum(gains) / 12 > 1.02, gains


@pytest.mark.parametrize("policy", ["dynamic", "long_short"])
def test_items_of_all_microbatches_at_once_take_no_longer(policy):
    gains, merged = [], 0
    for seed in range(12):
        batches = heavy_tailed(8, 6, seed, 2.0)
        apart, chunks = planned(policy, batches), planned(policy, batches, at_once=True)
        assert sorted(i for chunk in chunks for i in chunk.items) == list(range(8 * 6))
        merged += len(chunks) == 1
        assert encode_ns(chunks) <= encode_ns(apart), seed
        gains.append(encode_ns(apart) / encode_ns(chunks))
    assert merged > 6
    assert sum(gains) / 12 > 1.004, gains
    even = [[400] * 16] * 6
    assert planned(policy, even, at_once=True) == planned(policy, even), "which balance whole"


def heavy_step(schedule: str, **of_domain: object) -> Planner:
    """A step of two stages and two replicas that share items of very different sizes in four microbatches."""

    def meta(source: str, sample: int) -> SampleMeta:
        return SampleMeta(sample, source, 20, (ItemMeta("image", 400 * 3 ** (sample % 5), 1, 0, ()),), 0)

    world = arrange(Layout(dp=2, pp=2), {"eye": 1, "ear": 1}, COLOCATED, 0, 2)
    policies = policies_of(LPT, own(SchedulePolicy)[schedule])
    budget = Budget(40, None, 8, "error")
    return planner(
        world=world, metas=meta, budget=budget, encoder_sp="dynamic", policies=policies, **of_domain
    )


def waves_of(made: Planner) -> set[int]:
    """Of how many microbatches chunks have items that ranks share."""
    chunks = made.next_step(1, 0, 0).domain.chunks
    return {len(chunk.microbatches) for chunk in chunks if chunk.layout.num_members > 1}


def test_schedules_that_encode_all_items_first_share_those_of_all_microbatches_at_once():
    assert waves_of(heavy_step("encode_first")) == waves_of(heavy_step("zero_bubble_h1")) == {4}
    assert waves_of(heavy_step("one_f_one_b")) == waves_of(heavy_step("joint")) == {1}
    assert waves_of(heavy_step("encode_first", encoder_bytes=1)) == {1}, "a bound takes small chunks"


@pytest.mark.parametrize("schedule", ["encode_first", "auto"])
def test_microbatches_are_shared_one_by_one_where_devices_do_not_hold_them_at_once(schedule):
    def fits(plan: StepPlan) -> bool:
        return plan.domain.schedule == "encode_first" and all(
            len(chunk.microbatches) == 1 for chunk in plan.domain.chunks
        )

    made = heavy_step(schedule)
    assert waves_of(replace(made, fits=fits)) == {1}
    assert waves_of(replace(heavy_step("encode_first", guarded=False), fits=fits)) == {4}


def test_items_that_balance_over_the_step_stay_whole():
    """In one microbatch alone sharing would pay: three items for eight ranks."""
    batch = [4000, 3000, 2000]
    assert shared(planned("dynamic", [batch])) == {0}
    assert not shared(planned("dynamic", [batch] * 8))


def test_the_microbatch_of_a_giant_is_shared_and_the_others_are_not():
    small = [[400] * 16 for _ in range(6)]
    chunks = planned("dynamic", [*small[:2], [64_000, *small[2]], *small[3:]])
    assert shared(chunks) == {2}
    assert {i for chunk in chunks for i in chunk.items} == set(range(6 * 16 + 1))


def test_all_shares_whatever_it_costs():
    assert shared(planned("all", [[4000, 3000, 2000]] * 8)) == set(range(8))


def step_ns(several, lengths, layouts, sharing):
    """Time of a step that shares `several` microbatches, by hand: whole items to the least loaded rank."""
    total, whole = 0, []
    for m in sorted(lengths):
        if m not in several:
            whole += [sharing.whole_ns(n) for n in lengths[m]]
        if m in several or m == max(lengths):
            loads = [0] * RANKS
            for ns in sorted(whole, reverse=True):
                loads[loads.index(min(loads))] += ns
            total, whole = total + max(loads), []
        if m in several:
            total += sharing.slowest_ns(layouts[m])
    return total


def test_the_choice_is_the_best_number_of_microbatches_from_the_longest_item_on():
    sharing = sharing_by("dynamic")
    numbers = set()
    for seed in range(30):
        lengths = dict(enumerate(heavy_tailed(5, 10 + seed, seed, 1.0)))
        layouts = {m: sharing.layout([of]) for m, of in lengths.items()}
        chosen = worth_sharing(lengths, layouts, sharing)
        numbers.add(len(chosen))
        able = [m for m in lengths if any(len(shards) > 1 for shards in layouts[m].shards)]
        able.sort(key=lambda m: -max(lengths[m]))
        times = [step_ns(able[:count], lengths, layouts, sharing) for count in range(len(able) + 1)]
        assert chosen == able[: len(chosen)]
        assert times[len(chosen)] == min(times)
    assert len(numbers) > 2


def test_a_policy_without_anybody_to_share_with_is_said(tmp_path):
    write_mixed(tmp_path / "mixed")

    def notes(world, *more):
        config = compose_config(overrides(tmp_path / "mixed", tmp_path / "run", *more))
        return without_effect(prepare_run(config, world).planner.domain.sharing)

    shared = ("layout.domain=2", "llm_sp=dynamic", "encoder_sp=all")
    assert notes(2, *shared) == notes(2) == notes(2, "layout.llm.cp=2", "llm_sp=all") == []
    llm, image = notes(2, *shared[1:])
    assert llm.startswith("llm_sp=dynamic has no effect: nobody to share with")
    assert image.startswith("encoder_sp=all has no effect on image: a domain has one slot")

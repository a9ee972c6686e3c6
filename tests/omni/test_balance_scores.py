"""Scores of balance: what they say is what plans and costs of single ranks say."""

from dataclasses import replace

import numpy as np
import pytest

from dataloader.tokens import ItemMeta, SampleMeta
from dataloader.trace import all_as, generate
from omni.compose import compose_config
from omni.config import Config
from omni.planning.balance_score import (
    EVEN,
    Factors,
    as_planned,
    divide_group,
    groups_of,
    perturbed,
    score_step,
    step_of,
    time_layout,
)
from omni.planning.balance_table import Choice, Row, best, choices, planner_of, row_of, scored
from omni.planning.planner import Planner
from omni.planning.prepare import prepare_run
from parallel.schemes import rank_times
from parallel.sequence import SequenceLayout, Shard


def configure(ranks: int, *more: str) -> Config:
    return compose_config(
        [
            "~experiment", "system=multiplexed", "model=llama3_1b_so400m", "cluster=h100",
            "data.microbatch_tokens=131072",
            "train.steps=1", "data.step_tokens=null", f"data.step_samples={8 * ranks}",
            "train.precision=bf16", "+data.sources.none.path=none", *more,
        ]
    )  # fmt: skip


def planner(ranks: int, domain: int, sharing: str = "none") -> Planner:
    trace = all_as("image", generate("longtail", 8 * ranks, 1))
    return planner_of(configure(ranks), ranks, trace, Choice("lpt", sharing, domain, 1))


def test_a_layout_takes_each_rank_what_its_shards_say():
    cost = planner(16, 16, "dynamic").domain.sharing["llm"].cost
    shards = (
        (Shard(0, 0, 700), Shard(9, 700, 900), Shard(3, 1600, 400)),
        (Shard(3, 0, 512),),
        (Shard(9, 0, 3000), Shard(0, 3000, 100)),
        (Shard(5, 0, 0),),
        (Shard(3, 0, 77),),
    )
    layout = SequenceLayout(16, shards)
    found = time_layout(layout, cost, [0] * 16, np.full(5, EVEN))
    by_rank = rank_times(layout, cost)
    assert found.exchange.tolist() == [of.exchange_ns for of in by_rank]
    np.testing.assert_allclose(found.in_turn, [of.total_ns for of in by_rank], atol=3)
    np.testing.assert_allclose(found.overlapped, [of.overlapped_ns for of in by_rank], atol=3)
    assert found.exchange[9] > 0
    assert found.across_bytes == 0, "all on one node"


def test_two_ranks_on_two_nodes_send_each_other_all_that_they_exchange():
    cost = planner(16, 16, "dynamic").domain.sharing["llm"].cost.far
    layout = SequenceLayout(2, ((Shard(0, 0, 600), Shard(1, 600, 600)), (Shard(1, 0, 50),)))
    apart = time_layout(layout, cost, [0, 1], np.full(2, EVEN))
    # A transfer is timed by the busier direction of a rank, which here sends as much as the other receives.
    assert apart.across_bytes > 0
    moved = cost.link.bytes_per_s * (apart.exchange - cost.sharing_ns).sum() / 1e9
    assert moved / 2 <= apart.across_bytes <= moved


def test_ranks_share_over_the_links_of_the_nodes_that_they_are_on():
    for domain, nodes in ((8, ()), (16, (0,) * 8 + (1,) * 8), (12, (0,) * 4 + (1,) * 4 + (2,) * 4)):
        own = planner(2 * domain, domain, "dynamic")
        links = own.domain.transport.links
        for name in ("llm", "image"):
            cost = own.domain.sharing[name].cost
            # Of domains of 12, the second begins in the middle of a node: four and four stay together in all.
            assert cost.nodes == nodes
            assert cost.link == (links.across if nodes else links.inside)
            assert cost.inside == (links.inside if nodes else None)


def test_costs_that_all_double_change_no_ratio_but_that_of_exchanges():
    own = planner(8, 8)
    step = step_of(own)
    plain = as_planned(step.metas)
    double = Factors(plain.llm * 2, [[2 * EVEN] * len(of) for of in plain.items])
    once, twice = score_step(own, step, [plain, double])
    assert twice.encoder == pytest.approx(once.encoder, rel=1e-6)
    assert twice.llm == pytest.approx(once.llm, rel=1e-6)
    assert once.overlapped == once.in_turn > 1, "nothing is shared"


def test_perturbed_costs_are_off_by_at_most_their_share_and_the_same_each_time():
    metas = generate("longtail", 400, 3)
    found, again = perturbed(metas, 0.2, 7), perturbed(metas, 0.2, 7)
    assert found.llm.tolist() == again.llm.tolist()
    assert found.items == again.items
    assert found.llm.tolist() != perturbed(metas, 0.2, 8).llm.tolist()
    drawn = [*found.llm.tolist(), *(factor for of in found.items for factor in of)]
    assert (min(drawn), max(drawn)) == (800, 1200)
    assert list(map(len, found.items)) == [len(meta.items) for meta in metas]


def test_equal_samples_are_even_and_one_long_video_is_as_uneven_as_the_bound_says():
    image = ItemMeta("image", 576, 144, 0, ())
    alike = [SampleMeta(n, "s", 300, (image,), 0) for n in range(64)]
    own = planner_of(configure(8), 8, alike, Choice("lpt", "none", 1, 1))
    step = step_of(own)
    (found,) = score_step(own, step, [as_planned(step.metas)])
    assert found.overlapped == found.encoder == found.llm == found.bound == 1
    video = replace(alike[0], items=(ItemMeta("image", 400_000, 100_000, 0, ()),))
    own = planner_of(configure(8), 8, [video, *alike[1:]], Choice("lpt", "none", 1, 1))
    step = step_of(own)
    (found,) = score_step(own, step, [as_planned(step.metas)])
    assert found.bound == pytest.approx(found.overlapped, rel=1e-3)
    assert found.overlapped > 7, "a rank of eight does nearly everything"


@pytest.mark.parametrize(("domain", "group"), [(1, 4), (2, 2), (4, 1), (4, 4)])
def test_samples_are_scored_where_plans_have_them(domain: int, group: int):
    config = configure(16, f"layout.domain={domain}", f"balance.group={group}")
    own = prepare_run(config, 16, all_as("image", generate("longtail", 128, 0))).planner
    step, scored = step_of(own), []
    for number, samples in enumerate(groups_of(own, step.taken)):
        scored += divide_group(own, number, samples, step.costs.take(samples))
    for number in range(0, own.domain.arrangement.num_domains, 3):
        plan = own.next_step(1, 0, number)
        planned = plan.group.replicas[number - plan.group.first]
        assert [tuple(of) for of in scored[number]] == list(planned)


def test_no_step_is_below_its_bound_and_exchanges_in_turn_take_no_less():
    config, trace = configure(16), all_as("image", generate("longtail", 128, 5))
    rows = 0
    for _, own, step in choices(config, 16, trace, ["none", "lpt"], ["none", "dynamic"], [2, 16], [4, 99]):
        (found,) = score_step(own, step, [as_planned(step.metas)])
        assert found.bound <= found.overlapped + 1e-9
        assert found.overlapped <= found.in_turn
        assert min(found.encoder, found.llm) >= 1
        rows += 1
    assert rows == 12, "in domains of 16 there is one group"


def test_choices_scored_once_leave_the_same_step():
    config, trace = configure(8), all_as("image", generate("longtail", 64, 5))
    every = list(choices(config, 8, trace, ["none", "lpt"], ["none", "dynamic"], [1, 4], [1, 8]))
    rows = [row for row, _, _ in scored(iter(every))]
    assert [row.choice for row in rows] == [choice for choice, _, _ in every]
    assert [(row.planned, row.off) for row in rows] == [
        (row.planned, row.off) for row in (row_of(*each) for each in every)
    ]
    # Alone, one rank has nobody to share with, and four that share all leave no policy anything to decide.
    assert len({id(row.planned) for row in rows}) == 10 < len(rows) == 16


def test_the_smallest_domain_near_the_best_is_chosen():
    base = score_step(own := planner(8, 1), step := step_of(own), [as_planned(step.metas)])[0]

    def row(policy: str, sharing: str, domain: int, value: float) -> Row:
        return Row(Choice(policy, sharing, domain, 1), base, replace(base, overlapped=value))

    rows = [row("a", "dynamic", 64, 1.04), row("b", "dynamic", 16, 1.044), row("c", "none", 16, 1.045)]
    assert best([*rows, row("d", "dynamic", 8, 1.06)]).choice.policy == "c"
    assert best([*rows[:2], row("d", "dynamic", 8, 1.0401)]).choice.policy == "d"


def test_items_that_no_encoder_takes_are_refused_where_nobody_left_them_out():
    trace = generate("longtail", 64, 0)
    with pytest.raises(
        ValueError, match=r"the trace holds (audio|video) items, and no encoder of model\.enc"
    ):
        prepare_run(configure(8), 8, trace)
    assert prepare_run(configure(8), 8, all_as("image", trace)).planner.domain.encoders == {"image": "image"}


def test_a_trace_is_taken_in_its_order_over_and_over():
    trace = generate("balanced", 20, 0)
    spec = prepare_run(configure(1), 1, trace)
    first = spec.planner.world.take(0)
    assert first.ids == tuple(range(8))
    assert spec.planner.world.take(16).ids == (16, 17, 18, 19, 0, 1, 2, 3)
    assert spec.planner.world.meta_of(first, 3) == trace[3]

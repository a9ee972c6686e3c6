"""The bound of a step: no plan is below it, whatever its policies, and the best of all plans is close."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from random import Random

from best_plans import Case, Times, best_step
from hypothesis import given, settings
from hypothesis import strategies as st
from planners import BUDGET, COMPONENTS, planner, plans_of_all_domains, settings_of_planners

from dataloader.manifest import Frame
from dataloader.tokens import ItemMeta, SampleMeta, length
from omni.planning.bound import Bound, step_bound
from omni.planning.few_samples import few
from omni.planning.planner import Planner
from parallel.cluster import Link, Links
from parallel.costs import CostTable, WorkCost
from parallel.laws import Law, Laws
from parallel.layout import Layout, arrange
from parallel.placements import COLOCATED
from pipeline.costs import simulate

BARE = Frame(bos=False, end_of_item=False)


@given(settings_of_planners(), st.sampled_from([(), ("eye",), ("ear", "eye"), ("llm",)]))
@settings(max_examples=60, deadline=None)
def test_no_plan_is_below_the_bound(made: dict, frozen: tuple[str, ...]) -> None:
    own = planner(**made, frozen=lambda step: frozen)
    plans = plans_of_all_domains(own, 1, 0)
    metas = [meta for plan in plans for meta in own.metas_of(plan.domain)]
    simulated = max(simulate(plan.domain, own.domain.table).makespan_ns for plan in plans)
    bound = step_bound(metas, own.domain, frozen)
    assert bound.ns <= simulated, bound
    assert step_bound(metas, own.domain, frozen, any_domain=True).ns <= bound.ns


def cases(seed: int = 0) -> Iterator[Case]:
    """Steps of up to six samples on one to four ranks, with and without items, long ones among short ones."""
    random = Random(seed)
    while True:
        replicas, stages = random.choice([(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 3), (1, 4)])
        encoders = random.random() < 0.5
        most = {1: 5, 2: 4, 3: 3, 4: 3}[stages] - (stages > 1 and encoders)
        samples = []
        for _ in range(random.randint(2, most)):
            tokens = random.choice([random.randint(1, 12), random.randint(1, 12), random.randint(20, 60)])
            item = random.randint(1, tokens) if encoders and random.random() < 0.6 else 0
            samples.append((tokens, item))
        ns = random.choice([10, 30])
        split = random.choice([(10, 10), (14, 6)])
        times = Times(
            forward=(ns, random.choice([0, 1]), random.choice([0, 20])),
            input=(ns * split[0] // 10, 1, 0),
            weight=(ns * split[1] // 10, 0, 0),
            encode=(random.choice([10, 40]), 0, 0),
            encode_back=(random.choice([20, 80]), 0, 0),
            message_token=random.choice([0, 1]),
        )
        yield Case(tuple(samples), replicas, stages, random.choice([16, 64]), times)


def bound_of(case: Case) -> Bound:
    """The bound of a made-up step, by a planner of its layout whose parts take what the case says."""
    own = case.times

    def part(*of: tuple[int, int, int]) -> WorkCost:
        return WorkCost(Laws(*(Law(token * 10**6, square * 10**6, fixed) for token, square, fixed in of)))

    none = (0, 0, 0)
    llm = part(own.forward, own.input, own.weight)
    parts = {f"llm/{stage}": llm for stage in range(case.stages)}
    parts |= {"eye": part(own.encode, own.encode_back, none), "ear": part(none, none, none)}
    link = Link(0, 10**9 // own.message_token if own.message_token else 10**18)
    made = planner(dp=case.replicas, pp=case.stages)
    domain = replace(
        made.domain,
        table=CostTable(0, parts, Links(link, link), 1, COMPONENTS),
        microbatch_tokens=case.room,
    )
    metas = [
        SampleMeta(
            number, "made", tokens - (item > 0), (ItemMeta("image", item, 1, 0, ()),) if item else (), 0
        )
        for number, (tokens, item) in enumerate(case.samples)
    ]
    bare = [replace(meta, frame=BARE) for meta in metas]
    assert [length(meta) for meta in bare] == [tokens for tokens, _ in case.samples]
    return step_bound(bare, domain)


def test_the_best_of_all_plans_is_close_to_the_bound() -> None:
    ratios = []
    for case in islice(cases(), 200):
        best, bound = best_step(case), bound_of(case)
        assert bound.ns <= best, (case, bound)
        ratios.append(best / bound.ns)
    assert sum(ratios) / len(ratios) <= 1.05


def test_too_few_samples_for_the_ranks_are_told() -> None:
    def told(made: Planner) -> list[str]:
        return list(few(made, made.world.take(0)))

    full = replace(BUDGET, step_tokens=400)
    assert told(planner(dp=2, budget=full)) == []
    lonely = planner(dp=8, budget=replace(BUDGET, step_tokens=None, step_samples=3))
    (line,) = told(lonely)
    assert line.startswith("a step has 3 samples for 8 replicas: 5 of these train on none")
    assert "data.step_samples=8 or more" in line
    shared = planner(world=arrange(Layout(dp=8), {"eye": 1, "ear": 1}, COLOCATED, 0, 8), llm_sp="dynamic")
    assert told(replace(shared, world=replace(shared.world, budget=lonely.world.budget))) == []
    (line,) = told(planner(pp=4, budget=replace(BUDGET, step_tokens=60)))
    least = re.search(r"fewer than the 4 stages of layout.llm.pp.* Set data.step_tokens=(\d+) or more", line)
    assert least
    assert told(planner(pp=4, budget=replace(BUDGET, step_tokens=int(least[1]) + 40))) == []

"""What takes a simulated step: each cause where it is the only one, and that all together are the step."""

from dataclasses import replace

import pytest
from domain_plans import COMPONENTS, LLM, Shape, Work, make_plan
from work_costs import work_cost

from parallel.cluster import Link, Links
from parallel.costs import CostTable
from pipeline.builders import ENCODE_FIRST, Facts
from pipeline.builders.one_queue.serial import serialise
from pipeline.causes import causes_of, unreduced_ns, work_of
from pipeline.costs import begun_before, plan_costs, plan_memory, simulate
from pipeline.expand import expand
from pipeline.reductions import with_reductions

FREE = Link(0, 1)


def table(
    stages: int, forward_ns: int = 10, encode_ns: int = 0, message_ns: int = 0, **more: int
) -> CostTable:
    parts = {f"llm/{stage}": work_cost(0, 0, forward_ns, **more) for stage in range(stages)}
    parts |= {name: work_cost(0, 0, encode_ns) for name in ("audio", "image")}
    return CostTable(0, parts, Links(FREE, Link(message_ns, 1)), 0, COMPONENTS)


def divided(domain, costs):
    work = work_of(domain, costs)
    return vars(causes_of(domain, costs, sum(work) / len(work), single_queue=False))


@pytest.mark.parametrize("stages, microbatches", [(1, 3), (4, 4), (3, 8)])
def test_even_passes_wait_for_the_pipeline_alone(stages, microbatches):
    found = divided(make_plan(stages, microbatches, [], "one_f_one_b").domain, table(stages))
    assert found.pop("even") == microbatches * 30
    assert found.pop("bubble") == (stages - 1) * 30
    assert set(found.values()) == {0}


def test_what_one_rank_encodes_is_uneven_work():
    work = [Work("image", m, (0,), (2,)) for m in range(4)]
    found = divided(make_plan(2, 4, work, "encode_first").domain, table(2, encode_ns=100))
    assert found["even"] == 4 * 30 + 4 * 300 / 2
    assert found["work"] == 4 * 300 / 2


def test_a_message_and_a_reduction_count_where_nothing_hides_them():
    domain = make_plan(2, 1, [], "one_f_one_b").domain
    found = divided(domain, table(2, message_ns=5, reduce_ns=7))
    assert (found["messages"], found["reducing"]) == (2 * 5, 7)
    # The first stage waits for its weights; those of the second are there when its output is.
    found = divided(domain, table(2, message_ns=5, reduce_ns=7, gather_ns=12))
    assert found["reducing"] == 7 + 12


@pytest.mark.parametrize("schedule", ["one_f_one_b", "encode_first", "joint"])
def test_causes_add_up_to_the_step(schedule):
    work = [Work("image", m, (m % 4,), (2,)) for m in range(6)]
    domain = make_plan(Shape(stages=2, pool=2), 6, work, schedule).domain
    costs = table(2, encode_ns=40, message_ns=5, reduce_ns=50)
    assert sum(divided(domain, costs).values()) == pytest.approx(simulate(domain, costs).makespan_ns)


def test_in_one_queue_free_reductions_hold_up_nobody():
    # The last stage's gradients are reduced first, behind its long backward of an encoder; the first stage
    # has issued its own by then, and would stand in the queue until that backward ends.
    shape = Shape(stages=2, tp=2, collective_group=2, team=2)
    work = [Work("image", 0, (0, 1), (2, 2)), Work("image", 0, (2, 3), (2, 2, 2, 2))]
    domain = make_plan(shape, 2, work, "encode_first").domain
    domain = replace(domain, reductions=((LLM, 1), (LLM, 0), (1, 0)))
    behind = {"reduce_ns": 10, "pieces": 9, "followed": 8}
    parts = {f"llm/{stage}": work_cost(0, 0, 100, **behind) for stage in range(2)}
    parts |= {name: work_cost(10**8, 0, 100, **behind) for name in ("audio", "image")}
    costs = CostTable(0, parts, Links(FREE, FREE), 0, COMPONENTS)
    compute_ns, message_ns = plan_costs(domain, costs)
    order = ENCODE_FIRST(domain, Facts((compute_ns, message_ns), plan_memory(domain, costs)))
    lists = expand(with_reductions(order, domain, COMPONENTS), domain)
    domain = replace(domain, ops=tuple(map(tuple, lists)))
    lists = serialise(domain, compute_ns, message_ns, begun_before(domain, costs, compute_ns))
    domain = replace(domain, ops=tuple(map(tuple, lists)))
    whole = simulate(domain, costs, single_fifo=True).makespan_ns
    assert 0 <= whole - unreduced_ns(domain, costs, single_queue=True) <= 3 * 10

"""Random domains under any schedule, ordered as the planner orders them: what the verifier must accept, and
what faults are planted into.
"""

from dataclasses import replace
from random import Random

from domain_plans import make_plan, random_work
from wide_plans import random_wide_shape, whole_teams

from pipeline.builders import SchedulePolicy
from pipeline.builders.one_queue.serial import serialise
from pipeline.costs import Costs
from pipeline.ops import Op
from pipeline.plan import StepPlan

MOST_STAGES = 8
FROZEN = ((), (), (), ("image",), ("audio", "image"), ("llm",), ("audio", "llm"))


def random_domain(random: Random, policy: SchedulePolicy, most: int = 6) -> tuple[StepPlan, Costs]:
    """A step of training of up to `most` microbatches in any domain that a schedule can order, and what its
    ops cost: up to eight stages, several virtual stages a rank where the schedule takes them.
    """
    vpp = (1, 2, 2, 3) if policy.vpp is None else range(1, policy.vpp + 1)
    shape = random_wide_shape(random, MOST_STAGES, max_wide=4, vpp=vpp, folds=False)
    microbatches = random.randint(0, most)
    work = whole_teams(random_work(random, shape, microbatches), shape)
    costs = random_costs(random)
    frozen = random.choice(FROZEN)
    return make_plan(shape, microbatches, work, policy, frozen, cuts=random, costs=costs), costs


def random_costs(random: Random) -> Costs:
    """Any times, some of them none."""
    times: dict[object, int] = {}
    most, most_message = random.choice(((0, 0), (1, 1), (50, 20), (50, 200)))

    def compute_ns(rank: int, op: Op) -> int:
        return times.setdefault((rank, op), random.randint(0, most))

    def message_ns(op: Op) -> int:
        return times.setdefault(replace(op, within=0), random.randint(0, most_message))

    return compute_ns, message_ns


def for_one_queue(plan: StepPlan, costs: Costs) -> StepPlan:
    """The same plan with lists for one queue a rank."""
    lists = serialise(plan.domain, *costs)
    return replace(plan, domain=replace(plan.domain, ops=tuple(map(tuple, lists))))

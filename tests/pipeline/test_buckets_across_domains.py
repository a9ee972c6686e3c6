"""Domains reduce together bucket by bucket while each goes its own way: in one queue a rank, no order hangs.

The verifier runs the lists of one domain, with a REDUCE as one transfer. Ranks start its buckets one by one,
among the layers of backwards, and meet ranks of other domains in them, whose lists have other orders. Here
all of that runs in queues, for two domains: every transfer and every bucket stands in the queue of all that
take part, in the order in which the engine starts it, and goes when it is first in all of them.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from random import Random

import pytest
from domain_plans import BUILDERS, COMPONENTS
from random_domains import random_domain

from pipeline.behind import Behind, Within
from pipeline.builders.one_queue.moves import moves_of, reduced_amid, reduced_early
from pipeline.builders.one_queue.rendezvous import meet
from pipeline.builders.one_queue.serial import in_orders, run_freely
from pipeline.domain_plan import DomainPlan
from pipeline.ops import COLLECTIVE, COMPUTE, Kind, Op, issued_within
from pipeline.reductions import Pair, closing, in_front, made_by, runs_alone
from pipeline.simulator import ComputeCost, StuckError, run

ORDERS = {
    "late": lambda moves, order: order,
    "amid": reduced_amid,
    "early": reduced_early,
}
Step = tuple[object, ...]
"""A transfer by name: equal for all that take part in it."""


class Buckets:
    """The reduction of a virtual stage on one rank: each bucket is noted in the rank's `queue` as it starts.
    A bucket has one element; of so many layers, number `at` is complete behind the layer of the same share.
    """

    def __init__(self, pair: Pair, elements: int, layers: int, queue: list[Step]) -> None:
        self.pair, self.elements, self.layers, self.queue = pair, elements, layers, queue
        self.begun = 0

    def begin_first(self, elements: int) -> None:
        while self.begun < min(elements, self.elements):
            self.queue.append(("bucket", *self.pair, self.begun))
            self.begun += 1

    def begin_behind(self, layer: int) -> None:
        self.begin_first(self.elements * (self.layers - 1 - layer) // self.layers)

    def begin(self) -> None:
        self.begin_first(self.elements)


def queue_of(
    domain: DomainPlan, number: int, team: int, buckets: Mapping[Pair, int], layers: int
) -> list[Step]:
    """What a team of a domain starts on a device with one queue, in order: messages between the ops of its
    list, layer by layer what the layers of passes tell each other, and the buckets of reductions.
    """
    queue: list[Step] = []
    reductions = {pair: Buckets(pair, count, layers, queue) for pair, count in buckets.items()}
    fronts = partial(in_front, domain, COMPONENTS)
    begins = closing(domain, team, fronts)

    def issue(op: Op) -> None:
        if op.kind in COLLECTIVE:
            route = domain.routes[op.index]
            if route is not None and not route.is_local:
                queue.append((number, op.kind, op.index))
            return
        source, destination = domain.sender(op, team * domain.team)
        virtual_stage = op.virtual_stage + {Kind.RECV_FORWARD: -1, Kind.RECV_BACKWARD: 1}.get(op.kind, 0)
        forward = op.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
        teams = source // domain.team, destination // domain.team
        queue.append((number, forward, op.index, virtual_stage, teams))

    for at, op in enumerate(domain.ops[team]):
        if op.within:
            continue
        if op.kind is Kind.REDUCE:
            reductions[op.index, op.virtual_stage].begin()
        elif op.kind in COMPUTE:
            of = begins.get(op, ())
            own = bool(of) and of[-1] == made_by(domain, COMPONENTS, op)
            behind = Behind([reductions[pair] for pair in of], last_grows=own)
            within = Within(op, issued_within(domain.ops[team], at), issue)
            collective_group = domain.collective_group_of(op, team * domain.team)
            for layer in range(layers) if within.forward else reversed(range(layers)):
                within.came(layer, layers)
                if len(collective_group) > 1:
                    queue.append(
                        (number, collective_group, op.kind, op.index, op.virtual_stage, op.grad, layer)
                    )
                behind.left(layer, layers)
                if not within.forward:
                    within.left(layer, layers)
            within.passed()
        elif op.kind is not Kind.WAIT:
            issue(op)
    return queue


def stuck(queues: list[list[Step]]) -> list[Step]:
    """Run all queues; return what is first in those that never end."""
    members: defaultdict[Step, int] = defaultdict(int)
    for queue in queues:
        for step in queue:
            members[step] += 1
    heads, arrived = [0] * len(queues), defaultdict[Step, list[int]](list)
    coming = list(range(len(queues)))
    while coming:
        at = coming.pop()
        if heads[at] == len(queues[at]):
            continue
        step = queues[at][heads[at]]
        arrived[step].append(at)
        if len(arrived[step]) == members[step]:
            for each in arrived[step]:
                heads[each] += 1
            coming += arrived[step]
    return [queue[head] for queue, head in zip(queues, heads, strict=True) if head < len(queue)]


def ordered(random: Random, schedule: str) -> Iterator[DomainPlan]:
    """A domain's lists in every order of its reductions that runs to the end."""
    plan, (compute_ns, message_ns) = random_domain(random, BUILDERS[schedule])

    def carried(rank: int, op: Op) -> int:
        return 1 + compute_ns(rank, op)

    timeline = run_freely(plan.domain, carried, message_ns)
    moves = moves_of(timeline, carrying(plan.domain), in_parts=True)
    met = meet(moves, random.choice((0, 1)))
    for of in ORDERS.values():
        orders = of(moves, met)
        if orders is None:
            continue
        lists = in_orders(plan.domain, moves, orders)
        domain = replace(plan.domain, ops=tuple(map(tuple, lists)))
        try:
            run(domain, lambda rank, op: 1, lambda op: 1, single_fifo=True)
        except StuckError:
            continue
        yield domain


def carrying(domain: DomainPlan) -> ComputeCost:
    """Every backward that may carries reductions."""
    return lambda rank, op: 5 * (op.kind is Kind.REDUCE or runs_alone(domain, op, rank // domain.team))


def carries(domain: DomainPlan, team: int) -> bool:
    """Whether anything but its own begins behind a backward of a team."""
    begins = in_front(domain, COMPONENTS, team)
    return any(of[0] != made_by(domain, COMPONENTS, op) for op, of in begins.items())


@pytest.mark.parametrize("schedule", BUILDERS)
def test_no_order_of_buckets_hangs(schedule: str) -> None:
    carried = 0
    for number in range(25):
        random = Random(f"{schedule}/{number}")
        domains = list(ordered(random, schedule))
        assert domains
        buckets = {pair: random.randint(1, 6) for pair in domains[0].reductions}
        layers = [random.randint(1, 6) for _ in domains]
        teams = domains[0].teams
        for first, second in ((a, b) for a in range(len(domains)) for b in range(len(domains))):
            queues = [
                queue_of(domains[of], copy, team, buckets, layers[of])
                for copy, of in enumerate((first, second))
                for team in teams
            ]
            assert stuck(queues) == [], f"{number}: {first}, {second}"
        carried += sum(carries(domain, team) for domain in domains for team in teams)
    assert carried

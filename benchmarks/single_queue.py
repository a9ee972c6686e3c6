"""What it costs, simulated, to order all communication of a rank for a single queue.

    python benchmarks/single_queue.py [--plans 500]

Random domains of 2 to 8 stages, of one rank or of two that compute together, with random encoder work and
random op times are scheduled by any of the builders. Each is simulated with a queue for each communicator,
and, after `pipeline.serial.serialise`, with one queue a rank. Prints how many lists would hang on one queue
as they are, and the ratio of the simulated step times, apart for domains whose ranks compute alone and
together: there a layer's collectives stand in the queue as well.
"""

import argparse
import statistics
from dataclasses import replace
from random import Random

from parallel.policy import find, registered
from parallel.sequence import SequenceLayout
from pipeline.builders import Facts, SchedulePolicy
from pipeline.domain_plan import Chunk, DomainPlan, Microbatch, PlannedItem, PlannedSample
from pipeline.expand import expand
from pipeline.ops import Op
from pipeline.routes import outputs_of, plan_routes
from pipeline.serial import serialise
from pipeline.simulator import StuckError, run

LENGTH = 100  # LLM tokens of a microbatch
EVERY = [find(SchedulePolicy, name, "schedule") for name in registered(SchedulePolicy.group)]
SCHEDULES = [policy for policy in EVERY if not (policy.candidates or policy.quanta)]


def random_domain(random: Random, tp: int) -> DomainPlan:
    """A domain of one replica with random work, by a random schedule of those for one part on a rank."""
    stages, num_microbatches = random.randint(2, 8), random.randint(1, 32)
    size = stages * tp
    items = [
        PlannedItem("image", m, index, m, 4, 1, 5 * index)
        for m in range(num_microbatches)
        for index in range(random.randint(0, stages))
    ]
    domain = DomainPlan(
        team=1,
        holds=tuple((stage,) for stage in range(stages) for _ in range(tp)),
        pool=1,
        tp=tp,
        party=tp,
        llm=1,
        homes=((0, size), (0, size)),
        samples=tuple(PlannedSample("made up", m, LENGTH) for m in range(num_microbatches)),
        microbatches=tuple(
            Microbatch((m,), SequenceLayout.whole([LENGTH], [0], 1), ((),)) for m in range(num_microbatches)
        ),
        items=tuple(items),
        chunks=tuple(_chunk(items, number, random.randrange(size)) for number in range(len(items))),
        routes=(),
        ops=(),
        reductions=(),
        bounds=(),
        feeds=(),
    )
    domain = replace(domain, routes=plan_routes(domain))
    order = random.choice(SCHEDULES)(domain, Facts((lambda rank, op: 1, lambda op: 1), lambda rank, op: 1))
    return replace(domain, ops=tuple(map(tuple, expand(order, domain))))


def _chunk(items: list[PlannedItem], number: int, rank: int) -> Chunk:
    layout = SequenceLayout.whole([items[number].tokens], [0], 1)
    outputs = outputs_of([number], items, layout, 1, 1)
    return Chunk("image", (items[number].microbatch,), (rank,), (number,), layout, ((),), outputs)


def hangs(domain: DomainPlan) -> bool:
    """Whether the lists get stuck with one queue a rank."""
    try:
        run(domain, lambda rank, op: 1, lambda op: 1, single_fifo=True)
    except StuckError:
        return True
    return False


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=500)
    plans = parser.parse_args().plans
    for tp in (1, 2):
        measured = [simulated_ratio(seed, tp) for seed in range(plans)]
        ratios, hanging = [ratio for ratio, _ in measured], sum(hung for _, hung in measured)
        print(
            f"tp {tp}: {plans} random domains; {hanging} would hang on a single queue as they are, none once "
            f"ordered; simulated step time, ordered over free: mean {statistics.mean(ratios):.4f}, "
            f"most {max(ratios):.4f}"
        )


def simulated_ratio(seed: int, tp: int) -> tuple[float, bool]:
    """Return the simulated time of a domain, ordered over free, and whether it would hang as it is."""
    random = Random(seed)
    domain = random_domain(random, tp)
    times = {op: random.randint(10, 100) for ops in domain.ops for op in ops}

    def compute(rank: int, op: Op) -> int:
        return times[op]

    relaxed = run(domain, compute, lambda op: 5)
    ordered = replace(domain, ops=tuple(map(tuple, serialise(domain, compute, lambda op: 5))))
    single = run(ordered, compute, lambda op: 5, single_fifo=True)
    return single.makespan_ns / relaxed.makespan_ns, hangs(domain)


if __name__ == "__main__":
    main()

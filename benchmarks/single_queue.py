"""What it costs, simulated, to order all communication of a rank for a single queue.

    python benchmarks/single_queue.py [--plans 500]

Random domains of 2 to 8 stages, of one rank or of two that compute together, with random encoder work and
random op times are scheduled by any of the builders. Each is simulated with a queue for each communicator,
and, after `serialise`, with one queue a rank. Prints how many lists would hang on one queue
as they are, and the ratio of the simulated step times, apart for domains whose ranks compute alone and
together: there a layer's collectives stand in the queue as well.

Leaves with 1 where lists that were ordered get stuck on one queue, or take on average more than 1.01 of the
time with free queues where ranks compute alone, 1.15 where two compute together. The last line is JSON.
"""

import argparse
import json
import statistics
import sys
from dataclasses import replace
from random import Random

from parallel.policy import find, registered
from parallel.sequence import SequenceLayout
from pipeline.builders import Facts, SchedulePolicy
from pipeline.builders.one_queue.serial import serialise
from pipeline.domain_plan import DomainPlan, EncoderBatch, Microbatch, PlannedItem, PlannedSample
from pipeline.expand import expand
from pipeline.ops import Op
from pipeline.routes import outputs_of, plan_routes
from pipeline.simulator import StuckError, run

LENGTH = 100  # LLM tokens of a microbatch
MOST = {1: 1.01, 2: 1.15}  # ordered over free on average, by ranks that compute together
EVERY = [find(SchedulePolicy, name, "schedule") for name in registered(SchedulePolicy.group)]
SCHEDULES = [policy for policy in EVERY if not (policy.candidates or policy.encoder_batches)]


def random_domain(random: Random, tp: int) -> DomainPlan:
    """A domain of one replica with random work, by a random schedule for one virtual stage a rank."""
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
        collective_group=tp,
        llm=1,
        homes=((0, size), (0, size)),
        samples=tuple(PlannedSample("made up", m, LENGTH, ((0, LENGTH),)) for m in range(num_microbatches)),
        microbatches=tuple(
            Microbatch((m,), SequenceLayout.whole([LENGTH], [0], 1), ((),)) for m in range(num_microbatches)
        ),
        items=tuple(items),
        encoder_batches=tuple(
            _encoder_batch(items, number, random.randrange(size)) for number in range(len(items))
        ),
        routes=(),
        ops=(),
        reductions=(),
        bounds=(),
        feeds=(),
    )
    domain = replace(domain, routes=plan_routes(domain))
    order = random.choice(SCHEDULES)(domain, Facts((lambda rank, op: 1, lambda op: 1), lambda rank, op: 1))
    return replace(domain, ops=tuple(map(tuple, expand(order, domain))))


def _encoder_batch(items: list[PlannedItem], number: int, rank: int) -> EncoderBatch:
    layout = SequenceLayout.whole([items[number].tokens], [0], 1)
    outputs = outputs_of([number], items, layout, 1, 1)
    return EncoderBatch("image", (items[number].microbatch,), (rank,), (number,), layout, ((),), outputs)


def hangs(domain: DomainPlan) -> bool:
    """Whether the lists get stuck with one queue a rank."""
    try:
        run(domain, lambda rank, op: 1, lambda op: 1, single_fifo=True)
    except StuckError:
        return True
    return False


def main() -> int:
    """Simulate, print, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", type=int, default=500)
    plans = parser.parse_args().plans
    result, missed = {}, []
    for tp, most in MOST.items():
        measured = [simulated(seed, tp) for seed in range(plans)]
        hung, stuck = sum(hung for _, hung in measured), sum(ratio is None for ratio, _ in measured)
        ratios = [ratio for ratio, _ in measured if ratio is not None] or [0.0]
        mean, worst = round(statistics.mean(ratios), 4), round(max(ratios), 4)
        print(
            f"tp {tp}: {plans} random domains; {hung} would hang on a single queue as they are, {stuck} once "
            f"ordered; simulated step time, ordered over free: mean {mean:.4f}, most {worst:.4f}"
        )
        result[f"tp {tp}"] = {"mean": mean, "most": worst, "hang": hung, "hang_ordered": stuck}
        missed += [f"tp {tp}: {stuck} ordered lists get stuck"] if stuck else []
        missed += [f"tp {tp}: ordered lists take {mean}, at most {most}"] if mean > most else []
    for problem in missed:
        print(f"missed: {problem}")
    print(json.dumps({"benchmark": "single_queue", "plans": plans, "simulated": result, "missed": missed}))
    return int(bool(missed))


def simulated(seed: int, tp: int) -> tuple[float | None, bool]:
    """Return the time of a random domain, ordered over free, or None where its ordered lists get stuck; and
    whether it would hang on one queue as it is.
    """
    random = Random(seed)
    domain = random_domain(random, tp)
    times = {op: random.randint(10, 100) for ops in domain.ops for op in ops}

    def compute(rank: int, op: Op) -> int:
        return times[op]

    free = run(domain, compute, lambda op: 5)
    ordered = replace(domain, ops=tuple(map(tuple, serialise(domain, compute, lambda op: 5))))
    if hangs(ordered):
        return None, hangs(domain)
    single = run(ordered, compute, lambda op: 5, single_fifo=True)
    return single.makespan_ns / free.makespan_ns, hangs(domain)


if __name__ == "__main__":
    sys.exit(main())

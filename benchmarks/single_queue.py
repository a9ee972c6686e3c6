"""What it costs, simulated, to order all communication of a rank for a single queue.

    python benchmarks/single_queue.py [--plans 500]

Random replicas of 2 to 8 stages with random encoder work and random op times are scheduled by both builders.
Each is simulated with a queue for each communicator, and, after `pipeline.serial.serialise`, with one queue a
rank. Prints how many lists would hang on one queue as they are, and the ratio of the simulated step times.
"""

import argparse
import statistics
from random import Random

from parallel.sequence import SequenceLayout
from pipeline.builders import BUILDERS, expand
from pipeline.plan import Chunk, Op, PlannedItem
from pipeline.routes import plan_route
from pipeline.serial import serialise
from pipeline.simulator import StuckError, run

LENGTH = 100  # LLM tokens of a microbatch


def random_replica(random: Random) -> tuple[list[list[Op]], list]:
    """Op lists and routes of a replica with random work."""
    stages, microbatches = random.randint(2, 8), random.randint(1, 32)
    items, chunks = [], []
    for m in range(microbatches):
        for rank in random.sample(range(stages), random.randint(0, stages)):
            start = 10 * rank
            items.append(PlannedItem("image", m, rank, m, 4, 1, start))
            chunks.append(Chunk("image", m, rank, (len(items) - 1,), 4, 16, 1))
    layout = SequenceLayout.whole([LENGTH], [0], stages)
    routes = [plan_route(m, layout, items, chunks) for m in range(microbatches)]
    order = BUILDERS[random.choice(sorted(BUILDERS))](stages, microbatches, chunks)
    return expand(order, chunks, routes), routes


def hangs(ops: list[list[Op]], routes: list) -> bool:
    """Whether the lists get stuck with one queue a rank."""
    try:
        run(ops, routes, lambda rank, op: 1, lambda op: 1, single_fifo=True)
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
    ratios, hanging = [], 0
    for seed in range(plans):
        random = Random(seed)
        ops, routes = random_replica(random)
        times = {op: random.randint(10, 100) for of_rank in ops for op in of_rank}

        def compute(rank: int, op: Op, times: dict[Op, int] = times) -> int:
            return times[op]

        relaxed = run(ops, routes, compute, lambda op: 5)
        ordered = serialise(ops, routes, compute, lambda op: 5)
        single = run(ordered, routes, compute, lambda op: 5, single_fifo=True)
        hanging += hangs(ops, routes)
        ratios.append(single.makespan_ns / relaxed.makespan_ns)
    print(f"{plans} random replicas; {hanging} would hang on a single queue as they are, none once ordered")
    print(
        f"simulated step time, ordered over free: mean {statistics.mean(ratios):.4f}, most {max(ratios):.4f}"
    )


if __name__ == "__main__":
    main()

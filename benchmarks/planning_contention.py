"""How much planning slows the thread that launches kernels: planned on a thread, and in a process apart.

    python benchmarks/planning_contention.py [--rounds 15] [overrides ...]

Beside a loop of small torch operators, which is what an engine does between long ones, a step of Llama 3 70B
on a trace with long tails is planned (overrides choose another run). Each round runs the loop until a plan
made in the process is there, then as long alone, then until one made on a thread is there.

What is measured is how long the loop's thread takes for a second of its own work, waits for a core left out
(Linux tells both): what remains are waits for the interpreter. Other jobs on the machine, and cores that
share units, hardly matter then. The figures are medians of the rounds' ratios to the loop alone.

The last line is JSON. The exit code is 1 if planning in the process slows the loop by more than 10 %.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

import torch

from omni.compose import compose_config
from omni.planning.layouts import planned_ranks
from omni.planning.plan_process import Planned, PlannerProcess, PlanStep, plan_step
from omni.planning.prepare import prepare_run
from omni.rehearsal.stand_in_data import use_trace

OPERATORS = 200  # of a batch, of some microseconds each
LIMIT = 1.10
DEFAULT = ["experiment=llama3_70b", "system=multiplexed", "layout.domain=2", "data.step_tokens=262144"]


@dataclass(frozen=True)
class Loop:
    """Seconds that a second of work took, batches of operators, and seconds of the longest one."""

    stretch: float
    batches: int
    worst: float


def ran_or_waited() -> float:
    """Seconds of a clock that stands still while this thread waits for a core."""
    _, waited_ns, _ = map(int, Path("/proc/thread-self/schedstat").read_text().split())
    return time.perf_counter() - waited_ns / 1e9


def run_loop(more: Callable[[int], bool]) -> Loop:
    """Run batches of operators as long as `more(batches so far)`."""
    x, y = torch.randn(32, 32), torch.randn(32, 32)
    times: list[float] = []
    work = time.thread_time()
    while more(len(times)):
        start = ran_or_waited()
        for _ in range(OPERATORS):
            torch.add(x, y)
        times.append(ran_or_waited() - start)
    return Loop(sum(times) / (time.thread_time() - work), len(times), max(times))


def beside(plan: PlanStep, steps: "count[int]") -> tuple[Loop, Planned]:
    """Run the loop until a plan, asked for by a thread as in training, is there."""
    made: list[Planned] = []
    # The step's number changes nothing: the stream position, 0, decides what there is to plan.
    thread = threading.Thread(target=lambda: made.append(plan(next(steps), 0, 0)))
    thread.start()
    loop = run_loop(lambda _: thread.is_alive())
    thread.join()
    return loop, made[0]


def private_bytes(pid: int) -> int:
    """Memory that a process shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("overrides", nargs="*", help=f"of omni train; without any: {' '.join(DEFAULT)}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with tempfile.TemporaryDirectory() as folder:
        config = compose_config(arguments.overrides or DEFAULT)
        use_trace(config, "longtail", Path(folder) / "trace")
        spec = prepare_run(config, planned_ranks(config.launch))
        process = PlannerProcess(spec.planner, timeout_s=600)
        before = private_bytes(process.pid)
        figures = measure(partial(plan_step, spec.planner), process, arguments.rounds)
        figures["process_private_mb"] = round(private_bytes(process.pid) / 1e6, 1)
        figures["process_private_at_fork_mb"] = round(before / 1e6, 1)
        process.close()
    figures["layout"] = spec.arrangement.describe()
    figures["domain_ranks"] = spec.arrangement.domain_size
    passed = float(figures["slowdown_process"]) <= LIMIT  # type: ignore[arg-type]
    print(f"the loop beside the process takes at most {LIMIT}: {'yes' if passed else 'NO'}")
    print(json.dumps({"benchmark": "planning_contention", "passed": passed, **figures}))
    return 0 if passed else 1


def measure(on_thread: PlanStep, in_process: PlanStep, rounds: int) -> dict[str, object]:
    """Alternate, and return medians over rounds."""
    steps = count(1)
    beside(on_thread, steps), beside(in_process, steps)  # what is remembered between steps, on both sides
    found: list[tuple[float, ...]] = []
    for number in range(1, rounds + 1):
        apart, at = beside(in_process, steps)
        alone = run_loop(lambda batches, enough=apart.batches: batches < enough)  # type: ignore[misc]
        threaded, on = beside(on_thread, steps)
        assert on.plan.digests[1:] == at.plan.digests[1:], "both plan the same"
        found.append(
            (
                threaded.stretch / alone.stretch,
                apart.stretch / alone.stretch,
                alone.worst * 1e3,
                threaded.worst * 1e3,
                apart.worst * 1e3,
                on.cpu_s * 1e3,
                at.cpu_s * 1e3,
            )
        )
        print(
            f"round {number:2}: loop x{found[-1][0]:.2f} beside a thread, x{found[-1][1]:.2f} beside the "
            f"process; longest batch {alone.worst * 1e3:.1f}, {threaded.worst * 1e3:.1f}, "
            f"{apart.worst * 1e3:.1f} ms",
            flush=True,
        )
    names = (
        "slowdown_thread", "slowdown_process", "longest_alone_ms", "longest_thread_ms", "longest_process_ms",
        "plan_cpu_thread_ms", "plan_cpu_process_ms",
    )  # fmt: skip
    medians = map(statistics.median, zip(*found, strict=True))
    return {name: round(value, 3) for name, value in zip(names, medians, strict=True)}


if __name__ == "__main__":
    sys.exit(main())

"""What planning a step costs one rank, at any world size: CPU time and bytes.

    python benchmarks/planning.py [--sizes 128,512,2048,4096,16384] [--domains 1,8,32] [--samples 16,128,512]
        [--steps 3] [--schedule auto] [--microbatch 8192] [--quick]

Llama 3 70B with a ViT of 2.4 B, tp 8 and pp 4 (experiment=llama3_70b layout=tp8_pp4, the encoder over tp 8),
trace `longtail`, 16 samples a replica, sequences shared by `dynamic`, op lists for GPUs (safe with one queue
a rank) by the experiment's schedule or another. A rank takes the step's samples and deals them to groups
(world), composes its group's and its domain's plan, of `auto` one that fits, verifies it, models what it
would hold itself and hashes all levels: process CPU time of this, the median of so many steps, in
milliseconds, by what it is spent on; "no" says that the last step does not fit its device. One rank of a node
does so, the others read the plan and model what they would hold: `read`, and `a rank` is the mean of eight.
Of more than 16 samples a replica, domains of 32 are left out. `--quick`: 512 GPUs, domains of 1 and 8, one
step.

Leaves with 1 where a step lacks samples; where with 16 samples a replica planning takes more than 100, 250
and 600 ms for domains of 1, 8 and 32 replicas at any size, or grows more than 1.5 times from 512 GPUs to
16,384; and where with more of them planning takes the mean rank more than 2 % of the step's time, `auto`
4 %, or the world's level more than 1.5 µs a sample of the step. Simulated: the time of the domain's step on
the cluster file's GPUs, of which the mean rank's share is printed. The last line is JSON.
"""

import argparse
import gc
import json
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from omni.compose import compose_config
from omni.config import ConfigError
from omni.planning.fullest import check_rank
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.rehearsal.stand_in_data import use_trace
from pipeline.costs import simulate
from pipeline.plan import StepPlan

FEW = 16  # samples a replica, for which the limits in milliseconds are
SHARE, SHARE_OF_AUTO = 0.02, 0.04
WORLD_US = 1.5  # a sample of the step
REPLICA = 32  # GPUs: tp 8, pp 4
LIMITS_MS = {1: 100, 8: 250, 32: 600}
GROWTH = 1.5
NODE = 8  # ranks, which are of one domain
SAMPLES = 16_384  # of the trace, before those that no encoder takes are left out


def prepare(
    folder: Path, gpus: int, replicas: int, each: int, schedule: str | None, microbatch: int
) -> RunSpec:
    """The run of so many GPUs in domains of so many replicas, with so many samples each."""
    config = compose_config(
        [
            "experiment=llama3_70b",
            "system=multiplexed",
            "layout=tp8_pp4",
            "encoder_sp=dynamic",
            "llm_sp=dynamic",
            f"launch.ranks={gpus}",
            f"layout.domain={replicas}",
            "data.step_tokens=null",
            f"data.step_samples={each * gpus // REPLICA}",
            f"data.microbatch_tokens={microbatch}",
            f"run.dir={folder / 'run'}",
            *([f"pipeline={schedule}"] if schedule else []),
        ]
    )
    path = folder / "longtail"
    if path.exists():
        from omni.data_config import SourceConfig

        config.data.sources = {"longtail": SourceConfig(path=str(path))}
        config.data.heldout = {}
    else:
        use_trace(config, "longtail", path, SAMPLES)
    return prepare_run(config, gpus)


def measure(spec: RunSpec, steps: int) -> dict[str, Any]:
    """Plan `steps` steps, after one to warm up, for a domain in the middle."""
    number, cursor, found = spec.arrangement.num_domains // 2, 0, []
    plan, fits = None, True
    # As the planner process does: what was there before the first plan is no garbage to look through, nor is
    # any looked for during a plan.
    gc.collect()
    gc.freeze()
    gc.disable()
    for step in range(1, steps + 2):
        plan = None
        gc.collect()
        spent: dict[str, float] = {}

        @contextmanager
        def timed(name: str, spent: dict[str, float] = spent):
            start = time.process_time()
            yield
            spent[name] = (time.process_time() - start) * 1e3

        with timed("world"):
            world = spec.planner.world
            world.groups_of(world.take(cursor), spec.planner.domain.costing)
        with timed("compose"):
            plan = spec.planner.next_step(step, cursor, number)
        spent["compose"] -= spent["world"]  # which it takes and deals again
        with timed("verify"):
            spec.planner.verify(plan)
        with timed("memory"):
            fits = holds(spec, plan)
        with timed("hash"):
            _ = plan.digests
        spent["all"] = sum(spent.values())
        with timed("store"):
            stored = pickle.dumps(plan, protocol=5)
        with timed("read"):
            holds(spec, pickle.loads(stored))
        wanted = spec.config.data.step_samples
        assert len(plan.taken) == wanted, f"the step has {len(plan.taken)} of {wanted} samples"
        cursor = plan.taken.next_cursor
        found.append(spent)
    assert plan is not None
    median = {name: statistics.median(of[name] for of in found[1:]) for name in found[0]}
    simulated = simulate(plan.domain, spec.table, single_fifo=True).makespan_ns / 1e6
    rank_ms = (median["all"] + median["store"] + (NODE - 1) * median["read"]) / NODE
    return {
        **{f"{name}_ms": round(value, 1) for name, value in median.items()},
        "rank_ms": round(rank_ms, 1),
        "bytes": len(stored),
        "microbatches": len(plan.domain.microbatches),
        "simulated_step_ms": round(simulated, 1),
        "share": round(rank_ms / simulated, 5),
        "world_us_a_sample": round(median["world"] * 1e3 / len(plan.taken), 2),
        "schedule": plan.domain.schedule,
        "fits": fits,
    }


def holds(spec: RunSpec, plan: StepPlan) -> bool:
    """Whether the first rank of a plan's domain can hold it."""
    try:
        check_rank(spec, spec.arrangement.global_ranks(plan.number)[0], plan)
    except ConfigError:
        return False  # planned for nothing, for as long
    return True


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> int:
    """Measure, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=_numbers, default=[128, 512, 2048, 4096, 16384])
    parser.add_argument("--domains", type=_numbers, default=[1, 8, 32])
    parser.add_argument("--samples", type=_numbers, default=[FEW])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--schedule")
    parser.add_argument("--microbatch", type=int, default=16384, help="tokens of a microbatch")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.sizes, arguments.domains, arguments.steps = [512], [1, 8], 1
    results: dict[str, dict[str, Any]] = {}
    print(
        f"{'GPUs':>6} {'domain':>6} {'samples':>7} {'world':>8} {'us each':>8} {'compose':>8} {'verify':>8} "
        f"{'memory':>8} {'hash':>8} {'all ms':>8} {'read':>8} {'a rank':>8} {'bytes':>9} {'share':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        cases = product(arguments.samples, arguments.domains, arguments.sizes)
        for each, replicas, gpus in cases:
            if gpus < REPLICA * replicas or (each > FEW and replicas > 8):
                continue
            spec = prepare(Path(folder), gpus, replicas, each, arguments.schedule, arguments.microbatch)
            result = results[f"{gpus}x{replicas}x{each}"] = measure(spec, arguments.steps)
            print(
                f"{gpus:6} {replicas:6} {each:7} {result['world_ms']:8.1f} "
                f"{result['world_us_a_sample']:8.2f} {result['compose_ms']:8.1f} {result['verify_ms']:8.1f} "
                f"{result['memory_ms']:8.1f} {result['hash_ms']:8.1f} "
                f"{result['all_ms']:8.1f} {result['read_ms']:8.1f} {result['rank_ms']:8.1f} "
                f"{result['bytes']:9} {result['share']:8.5f}  "
                f"{result['schedule']}{'' if result['fits'] else ', no'}",
                flush=True,
            )
    missed = list(_missed(results, arguments.domains, arguments.schedule == "auto"))
    for line in missed:
        print(f"missed: {line}")
    print(json.dumps({"benchmark": "planning", "results": results, "missed": missed}))
    return 1 if missed else 0


def _missed(results: dict[str, dict[str, Any]], domains: list[int], is_auto: bool) -> Iterator[str]:
    most = SHARE_OF_AUTO if is_auto else SHARE
    for key, result in results.items():
        _, replicas, each = map(int, key.split("x"))
        limit = LIMITS_MS.get(replicas)
        if each > FEW:
            if result["share"] > most:
                yield f"{key}: {result['share']:.1%} of the simulated step, at most {most:.0%}"
            if result["world_us_a_sample"] > WORLD_US:
                yield f"{key}: {result['world_us_a_sample']} us a sample of the world, at most {WORLD_US}"
        elif limit is not None and result["all_ms"] > limit:
            yield f"{key}: {result['all_ms']} ms of CPU, at most {limit}"
    for replicas in domains:
        small, large = results.get(f"512x{replicas}x{FEW}"), results.get(f"16384x{replicas}x{FEW}")
        if small and large and large["all_ms"] > GROWTH * small["all_ms"]:
            growth = large["all_ms"] / small["all_ms"]
            yield f"{replicas} replicas a domain: {growth:.2f} times from 512 to 16,384, at most {GROWTH}"


if __name__ == "__main__":
    sys.exit(main())

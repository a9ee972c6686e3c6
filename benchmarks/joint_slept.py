"""Joint schedules on 4 and 8 real ranks whose compute is slept, beside the simulator. SLEPT, not computed.

    python benchmarks/joint_slept.py [--seconds 25] [--quick]

With more ranks than cores a rank computes while another idles, so bubbles vanish. Here a tiny model trains on
gloo ranks, pp=4 and pp=8, through trainer, plan, verifier and engine; before each pass a rank sleeps for the
time that the cost table gives it: 12.5 ms times the number of ranks for a forward of the LLM, and encoders in
the named ratio to it. Ranks that share cores hold each other up, and the more they are the longer; longer
passes keep that small. What remains real are op lists, messages, shipments and whoever waits for whom.
The same ranks train the same samples with encode-first, joint, and joint over ZB-H1 in turn. The time of a
step is that from a barrier to the totals of all ranks. Each schedule steps for so many seconds in a setting,
three steps at least. Steps differ, and sleep does not vary: a schedule's figure is the mean of its simulated
steps and the median of what steps took beyond, `low` and `high` are the least and the most of a step's ratio.

Leaves with 1 where a joint schedule takes longer than `encode_first` in all turns, where one gains less than
80 % of the milliseconds that the simulator predicts, if these are 2 % or more, or where the simulator is off
by more than 5 % in the median of the settings or 10 % in one. The last line is JSON.
"""

import argparse
import concurrent.futures
import contextlib
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import torch
import torch.distributed as dist
from joint_runs import SCHEDULES, cores_awake, far_off, misses, over_first, spawn, write_data

from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.data_config import SourceConfig
from omni.models.llm import NAME as LLM
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.training.ahead import Ahead
from omni.training.trainer import Trainer
from parallel.laws import Law, Laws
from pipeline.costs import part_of, plan_costs, simulate
from pipeline.ops import COMPUTE, Kind, Op

RATIOS = ("0.15", "0.5", "1")
RANKS, MICROBATCHES = (4, 8), (4, 16)
FORWARD_NS_PER_RANK = 12_500_000
WARMUP = 2
LEAST_STEPS = 3


def slept_run(folder: Path, schedule: str, ratio: str, ranks: int, microbatches: int, steps: int) -> RunSpec:
    """A run whose cost table says what is slept: the LLM's forward as above, the encoder in `ratio` to it."""
    image = "model.encoders.image"
    config = compose_config(
        [
            "system=multiplexed", "tracking=jsonl", "cluster=cpu", f"pipeline={schedule}",
            f"launch.ranks={ranks}",
            f"layout.llm.pp={ranks}", f"model.llm.layers={ranks}", "model.llm.hidden=32", "model.llm.heads=2",
            "model.llm.kv_heads=2", "model.llm.ffn=64", f"{image}.layers=1", f"{image}.hidden=32",
            f"{image}.ffn=64", f"{image}.max_side=128", "data.microbatch_tokens=512", "data.step_tokens=null",
            f"data.step_samples={4 * microbatches}", f"train.steps={steps}", "train.precision=fp32",
            f"run.dir={folder / f'{schedule}-{ratio}-{ranks}-{microbatches}'}",
        ]
    )  # fmt: skip
    config.data.sources = {"images": SourceConfig(path=str(folder / "images"))}
    config.data.heldout = {}
    spec = prepare_run(config, ranks)
    bare = with_factors(spec, dict.fromkeys(spec.table.parts, Fraction(1)))
    domain, spent = bare.planner.next_step(1, 0, 0).domain, dict.fromkeys(spec.table.parts, 0)
    cost, _ = plan_costs(domain, bare.table)
    for rank, ops in enumerate(domain.ops):
        for op in ops:
            if op.kind in COMPUTE:
                name, _ = part_of(domain, bare.table, rank, op)
                spent[name] += cost(rank, op)
    # Stages alike: a backward counts as two forwards, and each has one of both for every microbatch.
    whole = Fraction(3 * microbatches * FORWARD_NS_PER_RANK * ranks)
    wanted = {
        name: whole if name.startswith(f"{LLM}/") else whole * ranks * Fraction(ratio) for name in spent
    }
    return with_factors(spec, {name: wanted[name] / spent[name] for name in spent})


def steps_in(seconds: float, folder: Path, ratio: str, ranks: int, microbatches: int) -> int:
    """How many steps of encode-first, as simulated, a setting has in so many seconds."""
    spec = slept_run(folder, SCHEDULES[0], ratio, ranks, microbatches, 1)
    step = simulate(spec.planner.next_step(1, 0, 0).domain, spec.table).makespan_ns / 1e9
    return max(LEAST_STEPS, math.ceil(seconds / step))


def with_factors(spec: RunSpec, factors: Mapping[str, Fraction]) -> RunSpec:
    """The run with a cost table in which tokens and attention of each part take so many times as long, and a
    pass nothing beside them: what any pass takes is that of a tiny model.
    """
    laws = {
        name: Laws(
            *(
                Law(int(law.token_fs * factor), int(law.square_fs * factor), 0)
                for law in (stated.forward, stated.input, stated.weight)
            )
        )
        for name, factor in factors.items()
        for stated in (spec.table.parts[name].stated,)
    }
    table = spec.table.with_laws(1, laws)
    return replace(spec, table=table, planner=spec.planner.with_table(table))


def timed_step(trainer: Trainer, ahead: Ahead, step: int, computed: dict[Kind, float]) -> tuple[float, float]:
    """Measured and simulated seconds of a step whose passes are slept, less what the tiny model computes for
    each kind of op, as `computed` in the step before.
    """
    prepared = trainer.begin(ahead, step)
    concurrent.futures.wait(ahead.ready.values())  # until the next step is loaded
    domain, table = prepared.plan.domain, trainer.tables.at(step)
    cost, _ = plan_costs(domain, table)

    def sleep(op: Op) -> None:
        trainer.note(op)
        if op.kind in COMPUTE:
            time.sleep(max(0.0, cost(trainer.rank.domain_rank, op) / 1e9 - computed.get(op.kind, 0.0)))

    trainer.rank.engine.on_op = sleep
    dist.barrier()
    start = time.perf_counter()
    done = trainer.run_step(prepared)
    taken = time.perf_counter() - start
    trainer.update(done)
    for kind in COMPUTE:
        own = [timing.busy_ns / 1e9 for timing in done.result.timings if timing.op.kind is kind]
        computed[kind] = statistics.median(own) if own else 0.0
    return taken, simulate(domain, table).makespan_ns / 1e9


def work(rank: int, folder: Path, ratio: str, ranks: int, microbatches: int, steps: int) -> None:
    """One rank: all schedules in turn, step by step; the first leaves what it measured."""
    os.environ["WANDB_MODE"] = "offline"
    torch.set_num_threads(1)
    store = folder / f"store-{ratio}-{ranks}-{microbatches}"
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    total = WARMUP + steps
    trainers = []
    for name in SCHEDULES:
        spec = slept_run(folder, name, ratio, ranks, microbatches, total)
        trainers.append(Trainer(spec, RunFolder(Path(spec.config.run.dir)), rank, torch.device("cpu")))
    found: list[list[tuple[float, float]]] = [[] for _ in trainers]
    computed: list[dict[Kind, float]] = [{} for _ in trainers]
    with contextlib.ExitStack() as stack:
        aheads = [stack.enter_context(trainer.ahead()) for trainer in trainers]
        for step in range(1, total + 1):
            for at, trainer in enumerate(trainers):
                found[at].append(timed_step(trainer, aheads[at], step, computed[at]))
    if rank == 0:
        (folder / "found.json").write_text(json.dumps([of[WARMUP:] for of in found]))
    dist.barrier()
    dist.destroy_process_group()


def summarise(found: list[list[list[float]]]) -> dict[str, dict[str, float]]:
    """By schedule: slept and simulated over encode-first, and how far the simulator is off."""
    slept, simulated = ([[one[n] for one in of] for of in found] for n in (0, 1))
    said = [statistics.mean(of) for of in simulated]
    took = [
        mean + statistics.median(a - b for a, b in zip(*of, strict=True))
        for mean, of in zip(said, zip(slept, simulated, strict=True), strict=True)
    ]
    rows = {}
    for at, (name, (_, low, high)) in enumerate(zip(SCHEDULES, over_first(slept), strict=True)):
        gain_ms = (took[0] - took[at]) * 1e3
        row = {
            "ms": took[at] * 1e3,
            "measured": took[at] / took[0],
            "low": low,
            "high": high,
            "predicted": said[at] / said[0],
            "gain_ms": gain_ms,
            "gain_high_ms": gain_ms,  # what is slept does not vary
            "predicted_gain_ms": (said[0] - said[at]) * 1e3,
            "off": said[at] / took[at] - 1,
        }
        rows[name] = {key: round(value, 4) for key, value in row.items()}
    return rows


def main() -> int:
    """Sleep through every setting, print, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=25, help="that a schedule steps in a setting")
    parser.add_argument("--quick", action="store_true", help="4 ranks, 4 microbatches, the middle encoder")
    arguments = parser.parse_args()
    settings = [(ranks, ratio, m) for ranks in RANKS for ratio in RATIOS for m in MICROBATCHES]
    table, missed, off = {}, list[str](), list[float]()
    with tempfile.TemporaryDirectory() as made, cores_awake():
        folder = Path(made)
        write_data(folder / "images", 512)
        for ranks, ratio, m in [(4, "0.5", 4)] if arguments.quick else settings:
            steps = steps_in(arguments.seconds, folder, ratio, ranks, m)
            spawn(work, (folder, ratio, ranks, m, steps), ranks)
            rows = summarise(json.loads((folder / "found.json").read_text()))
            setting = f"{ranks} ranks, ratio {ratio}, {m} microbatches"
            table[setting] = rows
            missed += misses(setting, rows)
            off += [abs(row["off"]) for row in rows.values()]
            for name, row in rows.items():
                print(
                    f"slept: {setting:38} {steps:2} steps {name:22}",
                    "  ".join(f"{key} {of}" for key, of in row.items()),
                )
    missed += far_off("the simulator", off)
    for text in missed:
        print(f"missed: {text}")
    print(json.dumps({"benchmark": "joint_slept", "slept": table, "missed": missed}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

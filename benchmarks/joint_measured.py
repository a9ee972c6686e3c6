"""Joint schedules measured on two real ranks, beside what the simulator with learnt costs says.

    python benchmarks/joint_measured.py [--turns 120] [--quick]

Two ranks of one thread, pp=2, gloo: a decoder of hidden 256 and encoders that take about 0.15, 0.5 and 1
times what it takes, in steps of 4 and of 16 microbatches. For each, the same ranks train the same model on
the same samples three times over, with encode-first, joint, and joint over ZB-H1, in turn, step by step.
Costs learn from measured ops. After 12 turns to warm up, the time of a step is that from a barrier to the
totals of all ranks; nothing is planned or loaded meanwhile, and no core halts. `measured` is the median of
each turn's ratio to encode-first, with the order statistics between which it lies with 95 %.

What is predicted is the simulated time of the same lists. The table says what ops take of a core; by the
clock they take longer, since a machine, or the host of a virtual one, lets them stand still. By how many
times, what issuing a message or a shipment and taking it in costs the ranks, after how long it is there, and
what is around the lists (comparing plans, putting gradients in order, totals, barriers) is charged as it was
in the median of turns before: nothing of a turn enters its own prediction.

How far the simulator is off is told in three ways. `wall`: the predicted step over the measured one. And two
of its halves: `costs`, what the table says that the compute ops of a step take, over the CPU time that they
took; `lists`, the simulated time of the lists over that from the first op to the last that reduces nothing,
each compute op charged the time that it took in that very turn, so that what remains is who waits for whom.
`still` says for which share of their time compute ops stood still, `around_ms` what is around the lists.

Leaves with 1 where the whole interval of a joint schedule is above 1 and it is not predicted to be; where the
whole interval of what it gains is below 80 % of the milliseconds that are predicted for these lists, if these
are 2 % of a step or more, or what it gains over all settings is; or where `costs`, `lists` or `wall` is off
by more than 5 % in the median of the settings or 10 % in one. The last line is JSON.
"""

import argparse
import concurrent.futures
import contextlib
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from joint_learnt import Learnt, Turn, delays_of
from joint_runs import (
    LENGTH,
    SCHEDULES,
    cores_awake,
    far_off,
    gained_in_all,
    gains_ms,
    misses,
    over_first,
    spawn,
    too_little,
    write_data,
)

from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.data_config import SourceConfig
from omni.planning.plan_process import reduces
from omni.planning.prepare import prepare_run
from omni.training.ahead import Ahead
from omni.training.figures import StepRun
from omni.training.trainer import Trainer
from pipeline.costs import plan_costs
from pipeline.domain_plan import DomainPlan
from pipeline.ops import COLLECTIVE, COMPUTE, Kind, Op
from pipeline.simulator import Timeline, run
from pipeline.stopwatch import Timing

ENCODERS = {"0.15": (1, 96), "0.5": (2, 160), "1": (3, 192)}  # layers and width
MICROBATCHES = (4, 16)
TOKENS, WARMUP = 256, 12


def make_trainer(
    folder: Path, rank: int, schedule: str, encoder: tuple[int, int], steps: int, microbatches: int
) -> Trainer:
    """A rank that trains with a schedule."""
    layers, width = encoder
    run, image = folder / f"{schedule}-{width}-{microbatches}", "model.encoders.image"
    config = compose_config(
        [
            "system=multiplexed", "tracking=jsonl", "cluster=cpu", f"pipeline={schedule}", "launch.ranks=2",
            "layout.llm.pp=2",
            "model.llm.layers=4", "model.llm.hidden=256", "model.llm.heads=8", "model.llm.kv_heads=8",
            "model.llm.ffn=704", f"{image}.layers={layers}", f"{image}.hidden={width}",
            f"{image}.ffn={3 * width}", f"{image}.max_side=128", f"data.microbatch_tokens={TOKENS}",
            "data.step_tokens=null", f"data.step_samples={microbatches * TOKENS // LENGTH}",
            f"train.steps={steps}", "train.precision=fp32", "costs.learn=true", f"run.dir={run}",
        ]
    )  # fmt: skip
    config.data.sources = {"images": SourceConfig(path=str(folder / "images"))}
    config.data.heldout = {}
    return Trainer(prepare_run(config, 2), RunFolder(run), rank, torch.device("cpu"))


class Measured(NamedTuple):
    """A step: its seconds, and those from its first op to the last that reduces nothing; those predicted of
    it, of which `around` are around the lists; those of its lists, given what its ops took; the sum of
    compute by the table over the CPU time of it; the encoder's work over the LLM's; for which share of their
    time ops stood still.
    """

    step: float
    lists: float
    predicted: float
    around: float
    by_wall: float
    costs: float
    encoder: float
    still: float


def timed_step(trainer: Trainer, ahead: Ahead, step: int, learnt: Learnt) -> Measured:
    """Run a step on both ranks and measure it, beside what is predicted of it."""
    prepared = trainer.begin(ahead, step)
    concurrent.futures.wait(ahead.ready.values())  # until the next step is loaded
    dist.barrier()
    start = time.perf_counter()
    done = trainer.run_step(prepared)
    dist.barrier()
    taken = time.perf_counter() - start
    trainer.update(done)
    return compare(taken, prepared.plan.domain, done, learnt)


def compare(taken: float, domain: DomainPlan, done: StepRun, learnt: Learnt) -> Measured:
    """Hold what both ranks measured of a step against its cost table and the simulator."""
    found: list[tuple[int, list[Timing]]] = [(0, [])] * dist.get_world_size()
    dist.all_gather_object(found, (done.result.watch.made_ns, done.result.timings))
    table_ns, stated_ns = plan_costs(domain, done.table)
    wall, cpu, spent = Counter[tuple[int, Op]](), Counter[tuple[int, Op]](), Counter[Kind]()
    issues: list[int] = []
    for rank, (_, timings) in enumerate(found):
        for op, begun, ended, busy_ns in timings:
            if op.kind in COMPUTE:
                wall[rank, op], cpu[rank, op] = round((ended - begun) * 1e9), max(1, busy_ns)
                spent[op.kind] += table_ns(rank, op)
            elif not reduces(op):
                issues.append(busy_ns if op.kind is Kind.WAIT else round((ended - begun) * 1e9))
    issue_ns, delays, stretch = learnt.issue_ns(done.table), learnt.delays_ns(), learnt.stretch

    def message_ns(op: Op) -> int:
        delay = delays.get(op.kind in COLLECTIVE)  # from the end of issuing to the end of taking in
        return stated_ns(op) if delay is None else delay + issue_ns

    def simulated(compute_ns: Callable[[int, Op], float]) -> Timeline:
        def cost(rank: int, op: Op) -> int:
            return round(compute_ns(rank, op)) if op.kind in COMPUTE else table_ns(rank, op)

        return run(domain, cost, message_ns, issue_ns=issue_ns)

    predicted = simulated(lambda rank, op: table_ns(rank, op) * stretch)
    ended = max(made / 1e9 + one.end_s for made, of in found for one in of if not reduces(one.op))
    lists, around = ended - min(made / 1e9 + of[0].start_s for made, of in found), learnt.around_s
    encoder = spent[Kind.ENCODE] + spent[Kind.ENCODE_BACKWARD]
    learnt.turns.append(
        Turn(
            wall.total() / cpu.total(),
            statistics.mean(issues),
            list(delays_of(predicted, found)),
            taken - lists,
        )
    )
    return Measured(
        step=taken,
        lists=lists,
        predicted=ops_s(predicted) + around,
        around=around,
        by_wall=ops_s(simulated(lambda rank, op: wall[rank, op])),
        costs=spent.total() / cpu.total(),
        encoder=encoder / max(1, spent[Kind.FORWARD] + spent[Kind.BACKWARD]),
        still=1 - cpu.total() / wall.total(),
    )


def ops_s(timeline: Timeline) -> float:
    """Simulated seconds until the last op ends that reduces nothing."""
    return max(event.end_ns for of in timeline.events for event in of if not reduces(event.op)) / 1e9


def work(rank: int, folder: Path, encoder: tuple[int, int], m: int, steps: int) -> None:
    """One rank: all schedules in turn, step by step; the first leaves what was measured."""
    os.environ["WANDB_MODE"] = "offline"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder / f'store-{encoder}-{m}'}", rank=rank, world_size=2)
    trainers = [make_trainer(folder, rank, name, encoder, WARMUP + steps, m) for name in SCHEDULES]
    learnt = [Learnt() for _ in trainers]
    found: list[list[Measured]] = [[] for _ in trainers]
    with contextlib.ExitStack() as stack:
        aheads = [stack.enter_context(trainer.ahead()) for trainer in trainers]
        for step in range(1, WARMUP + steps + 1):
            turns = list(range(len(trainers)))
            if step == WARMUP:
                gc.collect()
                gc.freeze()  # as where a planner process is forked: else steps look through three trainers
            for at in turns[step % len(turns) :] + turns[: step % len(turns)]:
                found[at].append(timed_step(trainers[at], aheads[at], step, learnt[at]))
    if rank == 0:
        (folder / "found.json").write_text(json.dumps([of[WARMUP:] for of in found]))
    dist.barrier()
    dist.destroy_process_group()


def summarise(found: Sequence[Sequence[Measured]]) -> dict[str, dict[str, float]]:
    """By schedule: measured and predicted over encode-first, and how far the simulator is off."""
    steps, predicted = ([[getattr(one, key) for one in of] for of in found] for key in ("step", "predicted"))
    ratios, gains, promised = over_first(steps), gains_ms(steps), gains_ms(predicted)
    rows: dict[str, dict[str, float]] = {}
    for number, (name, of) in enumerate(zip(SCHEDULES, found, strict=True)):
        row = {
            "ms": statistics.median(a.step for a in of) * 1e3,
            **dict(zip(("measured", "low", "high"), ratios[number], strict=True)),
            "predicted": over_first(predicted)[number][0],
            **dict(zip(("gain_ms", "gain_low_ms", "gain_high_ms"), gains[number], strict=True)),
            "predicted_gain_ms": promised[number][0],
            "costs": statistics.median(a.costs for a in of) - 1,
            "lists": statistics.median(a.by_wall / a.lists for a in of) - 1,
            "wall": statistics.median(a.predicted / a.step for a in of) - 1,
            "around_ms": statistics.median(a.around for a in of) * 1e3,
            "encoder": statistics.median(a.encoder for a in of),
            "still": statistics.median(a.still for a in of),
            "turns": len(of),
        }
        rows[name] = {key: round(value, 4) for key, value in row.items()}
    return rows


def main() -> int:
    """Measure every setting, print, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, help="of each setting: 120, or 25 if quick")
    parser.add_argument("--quick", action="store_true", help="the middle encoder alone, and few turns")
    arguments = parser.parse_args()
    turns = arguments.turns or (25 if arguments.quick else 120)
    table, missed = {}, list[str]()
    off: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as made, cores_awake():
        folder = Path(made)
        result = folder / "found.json"
        write_data(folder / "images", 512)
        for ratio, encoder in ENCODERS.items():
            for m in MICROBATCHES if not arguments.quick or ratio == "0.5" else ():
                spawn(work, (folder, encoder, m, turns), 2)
                found = [[Measured(*one) for one in of] for of in json.loads(result.read_text())]
                setting, rows = f"ratio {ratio}, {m} microbatches", summarise(found)
                table[setting] = rows
                missed += misses(setting, rows)
                for way in ("costs", "lists", "wall"):
                    off[way] += [abs(row[way]) for row in rows.values()]
                for name, row in rows.items():
                    print(
                        f"{setting:26} {name:22}", "  ".join(f"{key} {value}" for key, value in row.items())
                    )
    for way, by in off.items():
        missed += far_off(way, by)
    gained = gained_in_all(table)
    missed += too_little(gained)
    for text in missed:
        print(f"missed: {text}")
    in_all = {name: of._asdict() for name, of in gained.items()}
    print(json.dumps({"benchmark": "joint_measured", "measured": table, "gained": in_all, "missed": missed}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

"""Joint schedules measured on two real ranks, beside what the simulator with learnt costs says.

    python benchmarks/joint_measured.py [--turns 120] [--quick]

Two ranks of one thread, pp=2, gloo: a decoder of hidden 256 and encoders that take about 0.15, 0.5 and 1
times what it takes, in steps of 4 and of 16 microbatches. For each, the same ranks train the same model on
the same samples three times over, with encode-first, joint, and joint over ZB-H1, in turn, step by step.
Costs learn from measured ops. After 12 turns to warm up, the time of a step is that from a barrier to the
totals of all ranks; nothing is planned or loaded meanwhile, and no core halts. `measured` is the median of
each turn's ratio to encode-first, with the order statistics between which it lies with 95 %.

What is predicted is the simulated time of the same lists. Equal ops do not take equal times: on a virtual
machine a whole rank takes 4 to 8 % more or less from step to step, whatever the other does, and single ops
as much again. Whoever waits for two waits for the later, so a tight schedule loses by that what a loose one
has to spare. The simulator is therefore given for each op what the table says, times the factor by which the
same op differed from that in a turn before, the same drawn turn for all ops of a step, of mean 1 over turns
for each kind of op on a rank; a prediction is the median of several draws in every turn. What issuing a
message or a shipment and taking one in costs the ranks themselves is charged as it was in turns before.
`steady` is what that and the table say, without factors.

How far the simulator is off is told in three ways. `costs`: what the table says that the compute ops of a
step take, over the CPU time that they took. `lists`: the simulated time of the step's lists over the time
from its first op to its last, each compute op charged the time that it took, since no table knows for how
long a busy machine, or the host of a virtual one, lets an op stand still; what remains is who waits for whom,
and messages. `wall`: the simulated time with the table's costs, over the whole step. `still` says for which
share of their time compute ops stood still.

Leaves with 1 where the whole interval of a joint schedule is above 1; where the whole interval of what it
gains is below 80 % of the milliseconds that are predicted for these lists, if these are 2 % of a step or
more, or what it gains over all settings is; or where `costs` or `lists` is off by more than 5 % in the median
of the settings or 10 % in one. The last line is JSON.
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
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
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
from joint_spread import Spread

from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.data_config import SourceConfig
from omni.planning.prepare import prepare_run
from omni.training.ahead import Ahead
from omni.training.figures import StepRun
from omni.training.trainer import Trainer
from pipeline.costs import plan_costs, simulate
from pipeline.domain_plan import DomainPlan
from pipeline.ops import COMPUTE, Kind, Op
from pipeline.simulator import run
from pipeline.stopwatch import Timing

ENCODERS = {"0.15": (1, 96), "0.5": (2, 160), "1": (3, 192)}  # layers and width
MICROBATCHES = {4: 2, 16: 1}  # and by how many times the turns: short steps vary by more
TOKENS, WARMUP = 256, 12
DRAWS = 16  # of a prediction


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
    """A step: seconds of the whole and from the first op to the last; those that the simulator says, by the
    table, by the table with factors drawn, and by the time that ops took; the sum of compute by the table
    over the CPU time of it; the encoder's work over the LLM's; for which share of their time ops stood still.
    """

    step: float
    lists: float
    by_table: float
    by_draws: tuple[float, ...]
    by_wall: float
    costs: float
    encoder: float
    still: float


def timed_step(trainer: Trainer, ahead: Ahead, step: int, spread: Spread) -> Measured:
    """Run a step on both ranks and measure it, beside what is predicted of it."""
    prepared = trainer.begin(ahead, step)
    concurrent.futures.wait(ahead.ready.values())  # until the next step is loaded
    dist.barrier()
    start = time.perf_counter()
    done = trainer.run_step(prepared)
    dist.barrier()
    taken = time.perf_counter() - start
    trainer.update(done)
    return compare(taken, prepared.plan.domain, done, spread)


def compare(taken: float, domain: DomainPlan, done: StepRun, spread: Spread) -> Measured:
    """Hold what both ranks measured of a step against its cost table and the simulator."""
    found: list[tuple[int, list[Timing]]] = [(0, [])] * dist.get_world_size()
    dist.all_gather_object(found, (done.result.watch.made_ns, done.result.timings))
    table = replace(done.table, issue_ns=spread.issue_ns)
    table_ns, message_ns = plan_costs(domain, table)
    wall, cpu, spent = Counter[tuple[int, Op]](), Counter[tuple[int, Op]](), Counter[Kind]()
    issues: list[int] = []
    for rank, (_, timings) in enumerate(found):
        for op, begun, ended, busy_ns in timings:
            if op.kind in COMPUTE:
                wall[rank, op], cpu[rank, op] = round((ended - begun) * 1e9), max(1, busy_ns)
                spent[op.kind] += table_ns(rank, op)
            elif Kind.REDUCE not in (op.kind, op.on):
                issues.append(busy_ns)

    def simulated_s(compute_ns: Callable[[int, Op], int]) -> float:
        def cost(rank: int, op: Op) -> int:
            return compute_ns(rank, op) if op.kind in COMPUTE else table_ns(rank, op)

        return run(domain, cost, message_ns, issue_ns=table.issue_ns).makespan_ns / 1e9

    def drawn_s(draw: Callable[[int, Op], float]) -> float:
        return simulated_s(lambda rank, op: round(table_ns(rank, op) * draw(rank, op)))

    draw_turn = spread.drawing()
    drawn = [drawn_s(draw_turn()) for _ in range(DRAWS)]
    spread.note(
        {(rank, op): ns / table_ns(rank, op) for (rank, op), ns in cpu.items()}, statistics.mean(issues)
    )
    encoder = spent[Kind.ENCODE] + spent[Kind.ENCODE_BACKWARD]
    return Measured(
        step=taken,
        lists=max(made / 1e9 + of[-1].end_s for made, of in found)
        - min(made / 1e9 + of[0].start_s for made, of in found),
        by_table=simulate(domain, table).makespan_ns / 1e9,
        by_draws=tuple(drawn),
        by_wall=simulated_s(lambda rank, op: wall[rank, op]),
        costs=spent.total() / cpu.total(),
        encoder=encoder / max(1, spent[Kind.FORWARD] + spent[Kind.BACKWARD]),
        still=1 - cpu.total() / wall.total(),
    )


def work(rank: int, folder: Path, encoder: tuple[int, int], m: int, steps: int) -> None:
    """One rank: all schedules in turn, step by step; the first leaves what was measured."""
    os.environ["WANDB_MODE"] = "offline"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder / f'store-{encoder}-{m}'}", rank=rank, world_size=2)
    trainers = [make_trainer(folder, rank, name, encoder, WARMUP + steps, m) for name in SCHEDULES]
    spreads = [Spread(number) for number in range(len(trainers))]
    found: list[list[Measured]] = [[] for _ in trainers]
    with contextlib.ExitStack() as stack:
        aheads = [stack.enter_context(trainer.ahead()) for trainer in trainers]
        for step in range(1, WARMUP + steps + 1):
            turns = list(range(len(trainers)))
            if step == WARMUP:
                gc.collect()
                gc.freeze()  # as where a planner process is forked: else steps look through three trainers
            for at in turns[step % len(turns) :] + turns[: step % len(turns)]:
                found[at].append(timed_step(trainers[at], aheads[at], step, spreads[at]))
    if rank == 0:
        (folder / "found.json").write_text(json.dumps([of[WARMUP:] for of in found]))
    dist.barrier()
    dist.destroy_process_group()


def summarise(found: Sequence[Sequence[Measured]]) -> dict[str, dict[str, float]]:
    """By schedule: measured and predicted over encode-first, and how far the simulator is off."""
    steps, steady = ([[getattr(one, key) for one in of] for of in found] for key in ("step", "by_table"))
    predicted = [[drawn for one in of for drawn in one.by_draws] for of in found]
    ratios, gains, promised = over_first(steps), gains_ms(steps), gains_ms(predicted)
    rows: dict[str, dict[str, float]] = {}
    for number, (name, of) in enumerate(zip(SCHEDULES, found, strict=True)):
        row = {
            "ms": statistics.median(a.step for a in of) * 1e3,
            **dict(zip(("measured", "low", "high"), ratios[number], strict=True)),
            "predicted": over_first(predicted)[number][0],
            **dict(zip(("gain_ms", "gain_low_ms", "gain_high_ms"), gains[number], strict=True)),
            "predicted_gain_ms": promised[number][0],
            "steady_gain_ms": gains_ms(steady)[number][0],
            "costs": statistics.median(a.costs for a in of) - 1,
            "lists": statistics.median(a.by_wall / a.lists for a in of) - 1,
            "wall": statistics.median(a.by_table / a.step for a in of) - 1,
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
    parser.add_argument("--turns", type=int, default=120, help="with 16 microbatches, twice with 4")
    parser.add_argument("--quick", action="store_true", help="the middle encoder alone")
    arguments = parser.parse_args()
    table, missed = {}, list[str]()
    off: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as made, cores_awake():
        folder = Path(made)
        result = folder / "found.json"
        write_data(folder / "images", 512)
        for ratio, encoder in ENCODERS.items():
            for m in MICROBATCHES if not arguments.quick or ratio == "0.5" else ():
                spawn(work, (folder, encoder, m, MICROBATCHES[m] * arguments.turns), 2)
                found = [[Measured(*one) for one in of] for of in json.loads(result.read_text())]
                setting, rows = f"ratio {ratio}, {m} microbatches", summarise(found)
                table[setting] = rows
                missed += misses(setting, rows)
                for way in ("costs", "lists"):
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
    print(json.dumps({"benchmark": "joint_measured", "measured": table, "gained": gained, "missed": missed}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

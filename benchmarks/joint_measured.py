"""Joint schedules measured on two real ranks, beside what the simulator with learnt costs says.

    python benchmarks/joint_measured.py [--steps 30] [--quick]

Two ranks of one thread, pp=2, gloo: a decoder of hidden 256 and encoders that take about 0.15, 0.5 and 1
times what it takes, in steps of 4 and of 16 microbatches. For each, the same ranks train the same model on
the same samples three times over, with encode-first, joint, and joint over ZB-H1, in turn, step by step.
Costs learn from measured ops. After 12 steps to warm up, the time of a step is that from a barrier to the
totals of all ranks; nothing is planned or loaded meanwhile. Only the half of the turns counts in which
compute stood still least: where something else ran on the machine, a step says nothing of its schedule. A
ratio is the median of those of the turns, its interval that between the order statistics that hold the median
with 95 %. The cost table knows CPU time, so `off`, how far the simulator is off, leaves out of a measured step
the share for which compute stood still in it (on a virtual machine whose host is busy, a fifth or more);
`off_wall` does not.

Leaves with 1 where the whole interval of `joint` over `encode_first` is above 1, where `joint` has less than
80 % of a gain of at least 2 % that the simulator predicts for these lists, or where `off` is more than 5 % in
the median of the settings or 10 % in one. The last line is JSON.
"""

import argparse
import concurrent.futures
import contextlib
import io
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from PIL import Image

from dataloader.format import PLACEHOLDER, Item, Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.config import SourceConfig
from omni.planning.prepare import prepare_run
from omni.training.ahead import PLANS_AHEAD, Ahead
from omni.training.trainer import Trainer
from pipeline.costs import simulate
from pipeline.ops import COMPUTE, Kind

SCHEDULES = ("encode_first", "joint", "joint_zero_bubble_h1")
ENCODERS = {"0.15": (1, 96), "0.5": (2, 160), "1": (3, 192)}  # layers and width
MICROBATCHES = (4, 16)
TOKENS, LENGTH, HEIGHT, WARMUP = 256, 128, 16, 12
GAIN, WORTH, MEDIAN_OFF, MOST_OFF = 0.8, 0.02, 0.05, 0.10


def write_data(path: Path, count: int) -> None:
    """Write samples of one length, each with an image of 16 pixels by 16 to 96 and a text."""
    rng, draw = np.random.default_rng(0), random.Random(0)
    with DatasetWriter(path, ByteTokenizer()) as writer:
        for number in range(count):
            width = draw.choice((16, 16, 24, 32, 48, 96))
            out = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (HEIGHT, width), dtype=np.uint8)).save(out, "PNG")
            image = Item("image", "png", (HEIGHT, width), out.getvalue())
            text = "a" * (LENGTH - HEIGHT * width // 16 - 2)  # a row for 4 x 4 pixels
            writer.add(Sample(str(number), PLACEHOLDER + text, (image,)))


def make_trainer(
    folder: Path, rank: int, schedule: str, encoder: tuple[int, int], steps: int, microbatches: int
) -> Trainer:
    """A rank that trains with a schedule."""
    layers, width = encoder
    run, image = folder / f"{schedule}-{width}-{microbatches}", "model.encoders.image"
    config = compose_config(
        [
            "tracking=jsonl", "cluster=cpu", f"pipeline={schedule}", "launch.ranks=2", "layout.llm.pp=2",
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


def timed_step(trainer: Trainer, ahead: Ahead, step: int) -> tuple[float, float, float, float]:
    """Measured and predicted seconds of a step, the encoder's work over the LLM's by the learnt table, and
    for which share of the time of this rank's compute ops it stood still.
    """
    prepared = ahead.take(step)
    trainer.offer(ahead, step + PLANS_AHEAD)  # waits until that is planned
    concurrent.futures.wait(ahead.ready.values())  # until the next step is loaded
    dist.barrier()
    start = time.perf_counter()
    done = trainer.run_step(prepared)
    dist.barrier()
    taken = time.perf_counter() - start
    trainer.update(done)
    trainer.learn_costs(done)
    timeline = simulate(prepared.plan.domain, done.table)
    spent = dict.fromkeys(COMPUTE, 0)
    for events in timeline.events:
        for event in events:
            if event.op.kind in COMPUTE:
                spent[event.op.kind] += event.end_ns - event.start_ns
    encoder = spent[Kind.ENCODE] + spent[Kind.ENCODE_BACKWARD]
    ratio = encoder / max(1, spent[Kind.FORWARD] + spent[Kind.BACKWARD])
    computed = [timing for timing in done.result.timings if timing.op.kind in COMPUTE]
    busy_s = sum(timing.busy_ns for timing in computed) / 1e9
    still = 1 - busy_s / sum(timing.end_s - timing.start_s for timing in computed)
    return taken, timeline.makespan_ns / 1e9, ratio, still


def work(rank: int, folder: Path, encoder: tuple[int, int], m: int, steps: int) -> None:
    """One rank: all schedules in turn, step by step; each leaves what it measured."""
    os.environ["WANDB_MODE"] = "offline"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder / f'store-{encoder}-{m}'}", rank=rank, world_size=2)
    total = WARMUP + steps
    trainers = [make_trainer(folder, rank, name, encoder, total, m) for name in SCHEDULES]
    found: list[list[tuple[float, float, float, float]]] = [[] for _ in trainers]
    with contextlib.ExitStack() as stack:
        aheads = [stack.enter_context(trainer.ahead()) for trainer in trainers]
        for step in range(1, total + 1):
            turns = list(range(len(trainers)))
            for at in turns[step % len(turns) :] + turns[: step % len(turns)]:
                found[at].append(timed_step(trainers[at], aheads[at], step))
    (folder / f"found-{rank}.json").write_text(json.dumps([of[WARMUP:] for of in found]))
    dist.barrier()
    dist.destroy_process_group()


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the order statistics that hold it with 95 % (the binomial's normal approximation)."""
    ordered, n = sorted(values), len(values)
    half = 0.98 * math.sqrt(n)
    low, high = max(0, math.floor(n / 2 - half)), min(n - 1, math.ceil(n / 2 + half) - 1)
    return statistics.median(ordered), ordered[low], ordered[high]


def undisturbed(folder: Path) -> list[list[tuple[float, float, float, float]]]:
    """What the first rank measured, by schedule, in the half of the turns that was disturbed least; for which
    share of a step compute stood still is the mean of both ranks.
    """
    first, second = (json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(2))
    found = [
        [(*own[:3], (own[3] + other[3]) / 2) for own, other in zip(of, others, strict=True)]
        for of, others in zip(first, second, strict=True)
    ]
    turns = range(len(found[0]))
    still = [max(of[turn][3] for of in found) for turn in turns]
    kept = sorted(sorted(turns, key=lambda turn: still[turn])[: (len(turns) + 1) // 2])
    print(f"compute stood still for {max(still[turn] for turn in kept):.1%} of its time at most")
    return [[of[turn] for turn in kept] for of in found]


def summarise(found: Sequence[Sequence[tuple[float, float, float, float]]]) -> dict[str, dict[str, object]]:
    """By schedule: measured and predicted over encode-first, and how far the simulator is off."""
    first = found[0]
    rows: dict[str, dict[str, object]] = {}
    for name, of in zip(SCHEDULES, found, strict=True):
        middle, low, high = interval([a[0] / b[0] for a, b in zip(of, first, strict=True)])
        rows[name] = {
            "ms": round(statistics.median(a[0] for a in of) * 1e3, 1),
            "measured": round(middle, 4),
            "low": round(low, 4),
            "high": round(high, 4),
            "predicted": round(statistics.median(a[1] / b[1] for a, b in zip(of, first, strict=True)), 4),
            "off": round(statistics.median(a[1] / a[0] / (1 - a[3]) for a in of) - 1, 4),
            "off_wall": round(statistics.median(a[1] / a[0] for a in of) - 1, 4),
            "encoder": round(statistics.median(a[2] for a in of), 3),
            "turns": len(of),
        }
    return rows


def misses(setting: str, rows: dict[str, dict[str, object]]) -> list[str]:
    """What a setting misses."""
    out = []
    for name in SCHEDULES[1:]:
        row = {key: float(str(value)) for key, value in rows[name].items()}
        if row["low"] > 1:
            out.append(f"{setting}: {name} is slower than encode_first: {row['measured']:.3f}")
        gain, promised = 1 - row["measured"], 1 - row["predicted"]
        if promised >= WORTH and gain < GAIN * promised:
            out.append(f"{setting}: {name} gains {gain:.3f}, of {promised:.3f} that are predicted")
    return out


def main() -> int:
    """Measure every setting, print, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="the middle encoder alone")
    arguments = parser.parse_args()
    table, missed, off = {}, [], []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_data(folder / "images", 512)
        for ratio, encoder in ENCODERS.items():
            for m in MICROBATCHES if not arguments.quick or ratio == "0.5" else ():
                mp.spawn(work, (folder, encoder, m, arguments.steps), nprocs=2)
                setting, found = f"ratio {ratio}, {m} microbatches", undisturbed(folder)
                rows = summarise(found)
                table[setting] = rows
                missed += misses(setting, rows)
                off += [abs(float(str(row["off"]))) for row in rows.values()]
                for name, row in rows.items():
                    print(
                        f"{setting:26} {name:22}", "  ".join(f"{key} {value}" for key, value in row.items())
                    )
    if statistics.median(off) > MEDIAN_OFF or max(off) > MOST_OFF:
        missed.append(f"the simulator is off by {statistics.median(off):.3f}, at most {max(off):.3f}")
    for text in missed:
        print(f"missed: {text}")
    print(json.dumps({"benchmark": "joint_measured", "measured": table, "missed": missed}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

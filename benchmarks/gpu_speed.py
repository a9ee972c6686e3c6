"""Speed of training on the GPUs of this machine: MFU with a profile, and simulated against measured steps.

    python benchmarks/gpu_speed.py --cases mfu|steps --gpus N --out FOLDER [--calibrated FILE] [--quick]

`mfu` trains a model of 1 B with so400m as its encoder, and one of 8 B: whole where there are four GPUs or
more, on fewer with 8 of its 32 layers and 32,768 ids; passes, domains and the rest are what `system=omni`
chooses. `steps` trains layouts of the 1 B, with passes of 8,192 tokens at most. All in bf16, on texts and
noise drawn here: documents of 1,000 to 8,000 bytes with up to four pictures of 224 to 448 pixels. 10 steps,
of which the last 6 count: the median of step time, MFU, idle share and peak memory. Beside them stands the
step that `omni plan` simulates for the same samples, with the cluster's shipped file and, where
`omni calibrate` wrote one, with that. Goals, of `mfu` alone: 40 % for the 1 B, 45 % for the 8 B.
--quick: the tiny model, on CPUs too, no goals. figures.json of FOLDER has each row as soon as it is known;
`omni timeline` of a step is beside it, and of `mfu` a trace of kernels. The last line is JSON; the exit code
is 1 where a run fails or a goal is missed.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from gpu_links import cluster_of
from PIL import Image

from dataloader.format import PLACEHOLDER, Item, Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from infra.run_folder import RunFolder, read_metrics, write_json
from ops.device import device_name

STEPS, COUNTED = 10, 6
SAMPLES = 96
TRAINED = (
    "~experiment", "tracking=jsonl", "optim.lr=1e-5", "optim.warmup_steps=0", "data.on_long=truncate",
    "train.steps=1000", "train.eval_every=0", "train.checkpoint_every=0",
    f"train.timeline_every={STEPS - 1}",
)  # fmt: skip
LARGE = ("train.precision=bf16", "data.tokenizer=bytes", "model.llm.vocab=128256")
CHOSEN = ("data.microbatch_tokens=null",)  # and all else that the default, system=omni, chooses
GIVEN = ("system=multiplexed", "data.microbatch_tokens=8192")
SMALL = ("model=tiny", "train.precision=fp32", "data.microbatch_tokens=1024", "data.step_samples=8")
B1 = ("model=llama3_1b_so400m", *LARGE)
B8 = ("model=llama3_1b_so400m", "model/llm=llama3_8b", *LARGE)


@dataclass(frozen=True)
class Case:
    """A run: what is set beside TRAINED, how many GPUs it takes, and the least MFU of its goal."""

    name: str
    gpus: int
    keys: tuple[str, ...]
    goal: float | None = None


def mfu_cases(gpus: int) -> tuple[Case, ...]:
    """The 1 B, and the 8 B as far as it fits."""
    if gpus < 4:
        cut = ("model.llm.layers=8", "model.llm.vocab=32768")
        eight = Case("8 B, 8 of 32 layers", gpus, (*B8, *CHOSEN, *cut, f"data.step_samples={8 * gpus}"), 0.45)
    else:
        used = gpus // 4 * 4
        tp4 = ("layout.llm.tp=4", "+layout.encoders.image.tp=4", f"data.step_samples={8 * used}")
        eight = Case("8 B", used, (*B8, *CHOSEN, *tp4), 0.45)
    return Case("1 B", gpus, (*B1, *CHOSEN, f"data.step_samples={16 * gpus}"), 0.40), eight


def step_cases() -> tuple[Case, ...]:
    """Layouts of the 1 B whose steps are made of different things."""

    def case(name: str, gpus: int, *keys: str) -> Case:
        return Case(name, gpus, (*B1, *GIVEN, f"data.step_samples={8 * gpus}", *keys))

    again = ("model.llm.recompute=full", "model.encoders.image.recompute=full")
    kept = (*again, "model.llm.keep_attention=true", "+model.encoders.image.keep_attention=true")
    tp2, both = "layout.llm.tp=2", ("layout.llm.tp=2", "+layout.encoders.image.tp=2")
    return (
        case("one GPU", 1),
        case("one GPU, recomputed", 1, *again),
        case("one GPU, recomputed but for attention", 1, *kept),
        case("dp 2", 2),
        case("tp 2", 2, *both),
        case("pp 2, joint", 2, "layout.llm.pp=2", "pipeline.policy=joint"),
        case("cp 2", 2, "layout.llm.cp=2"),
        case("dp 8", 8),
        case("tp 2, pp 2, dp 2", 8, tp2, "+layout.encoders.image.tp=2", "layout.llm.pp=2"),
    )


def quick_cases() -> tuple[Case, ...]:
    return Case("tiny, dp 2", 2, SMALL), Case("tiny, dp 8", 8, SMALL)


def write_data(path: Path, small: bool) -> None:
    """Documents of random words, with pictures of noise between them."""
    rng = np.random.default_rng(0)
    letters = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz      ", dtype=np.uint8)
    sides, lengths, mode = ((8, 33), (40, 400), "L") if small else ((224, 449), (1000, 8000), "RGB")
    with DatasetWriter(path, ByteTokenizer(), rows_per_group=8) as writer:
        for number in range(SAMPLES):
            items, parts = [], []
            for _ in range(int(rng.integers(0, 5))):
                height, width = (int(side) for side in rng.integers(*sides, size=2))
                shape = (height, width) if mode == "L" else (height, width, 3)
                out = io.BytesIO()
                Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(out, "JPEG")
                items.append(Item("image", "jpeg", (height, width), out.getvalue()))
            for _ in range(len(items) + 1):
                length = int(rng.integers(*lengths)) // (len(items) + 1)
                parts.append(bytes(rng.choice(letters, length)).decode())
            writer.add(Sample(f"{number}", PLACEHOLDER.join(parts), tuple(items)))


def trained(case: Case, cluster: str, calibrated: Path | None, data: Path, out: Path) -> dict[str, Any]:
    """Train a case and return its figures, or how it failed."""
    run = out / case.name.replace(" ", "_").replace(",", "")
    keys = [*TRAINED, f"cluster={cluster}", *case.keys, f"launch.ranks={case.gpus}"]
    keys += [f"+data.sources.drawn.path={data}"]
    if case.goal is not None:
        keys.append(f"profile.steps=[{STEPS - COUNTED},{STEPS - COUNTED}]")  # before those that count
    code = first_steps([sys.executable, "-m", "omni", "train", *keys, f"run.dir={run}"], run)
    steps = read_metrics(RunFolder(run).metrics)[STEPS - COUNTED : STEPS]
    if len(steps) < COUNTED:
        return {"run": case.name, "GPUs": case.gpus, "failed": f"exit code {code} before step {STEPS}"}
    middle = {key: median(step[key] for step in steps if key in step) for key in steps[-2]}
    row = {
        "run": case.name,
        "GPUs": case.gpus,
        "step s": middle["perf/step_s"],
        "MFU": middle.get("perf/mfu"),
    }
    row |= {"idle": middle.get("perf/idle_frac"), "GB": middle.get("mem/peak_gb")}
    row["ops, simulated / measured - 1"] = middle.get("plan/pred_error")
    for name, more in {"shipped": [], "calibrated": _chosen(calibrated)}.items():
        if name == "shipped" or more:
            row[f"simulated s, {name}"] = simulated(keys, more, out / "plan")
    row["goal"] = case.goal
    timeline = subprocess.run(
        [sys.executable, "-m", "omni", "timeline", f"{run}"], capture_output=True, text=True
    )
    (run / "timeline.txt").write_text(timeline.stdout)
    return row


def first_steps(command: list[str], run: Path) -> int:
    """Train until STEPS are recorded, and end the run there: a checkpoint, which the end of a run writes,
    would take longer than all of them. Returns the exit code, which a run that was ended has, too.
    """
    process = subprocess.Popen(command)
    try:
        while process.poll() is None and len(read_metrics(RunFolder(run).metrics)) < STEPS:
            time.sleep(0.5)
        while process.poll() is None:  # the first signal asks to save, the second one ends at once
            process.terminate()
            time.sleep(0.2)
    finally:
        process.kill()
    return process.wait()


def _chosen(calibrated: Path | None) -> list[str]:
    """The arguments that have a plan use a cluster file of one's own."""
    if calibrated is None or not calibrated.exists():
        return []
    return ["--config-dir", f"{calibrated.parents[1]}", f"cluster={calibrated.stem}"]


def simulated(keys: list[str], more: list[str], run: Path) -> float | None:
    """Median seconds of the steps that count, as they are simulated; None where they are refused."""
    seconds = []
    for step in range(STEPS - COUNTED + 1, STEPS + 1, 2):
        command = [sys.executable, "-m", "omni", "plan", "--json", "--step", f"{step}", *more[:2], *keys]
        done = subprocess.run([*command, *more[2:], f"run.dir={run}"], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            return None
        seconds.append(json.loads(done.stdout)["simulated_step_ns"] / 1e9)
    return median(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", choices=("mfu", "steps"), required=True)
    parser.add_argument("--gpus", type=int, required=True, help="how many may be used")
    parser.add_argument("--out", type=Path, required=True, help="a folder for runs and figures.json")
    parser.add_argument("--calibrated", type=Path, help="a cluster file that omni calibrate wrote here")
    parser.add_argument("--quick", action="store_true", help="the tiny model")
    arguments = parser.parse_args()
    os.environ.setdefault("WANDB_MODE", "offline")
    cluster = cluster_of(device_name()) or "cpu"
    cases = mfu_cases(arguments.gpus) if arguments.cases == "mfu" else step_cases()
    cases = quick_cases() if arguments.quick else cases
    data, out = arguments.out / "data", arguments.out
    if not (data / "dataset.json").exists():
        write_data(data, arguments.quick)
    rows: list[dict[str, Any]] = []
    for case in cases:
        if case.gpus > arguments.gpus:
            why = f"needs {case.gpus} GPUs, and there are {arguments.gpus}"
            rows.append({"run": case.name, "GPUs": case.gpus, "not possible": why})
        else:
            rows.append(trained(case, cluster, arguments.calibrated, data, out))
        print(json.dumps(rows[-1]), flush=True)
        write_json(out / "figures.json", {"cluster": cluster, "runs": rows})
    missed = [row["run"] for row in rows if "failed" in row or (row.get("goal") or 0) > (row.get("MFU") or 1)]
    print(json.dumps({"runs": len(rows), "missed": missed}))
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())

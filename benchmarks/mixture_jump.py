"""A mixture that jumps in the middle of a run: step time over all work / all ranks. Simulated.

    python benchmarks/mixture_jump.py [jump.svg]

A model of 1 B with an encoder of 0.4 B, four stages of one GPU, 32 microbatches of 4,096 tokens. Every sample
is as long: an image of 1,024 rows with a caption, or plain text. First one sample in ten has an image, then
nine in ten. `disaggregated` has as many ranks beside the LLM as the first mixture keeps busy, at least one;
all others encode on the ranks of the LLM. Lists are as GPUs run them, with one queue a rank.

Leaves with 1 where `joint` with split backwards takes more than 1.08 of its bound before or after, or where
the two differ by more than 0.04. The last line is JSON.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dataloader.format import PLACEHOLDER, Item, Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from infra.run_folder import write_text
from omni.compose import compose_config
from omni.data_config import SourceConfig
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from pipeline.costs import plan_costs, simulate
from pipeline.drawing import Track, rows_of, svg
from pipeline.ops import COMPUTE
from pipeline.simulator import Timeline

STAGES, LENGTH, MICROBATCH, MICROBATCHES = 4, 2048, 4096, 32
SIDE = 32 * 28  # pixels: 32 x 32 rows of 28 x 28 pixels
PHASES = {"1:9": (1, 9), "9:1": (9, 1)}
MOST, CHANGE = 1.08, 0.04
SYSTEMS = {
    "stage0": ("system=megatron",),
    "disaggregated": ("placement=disaggregated", "pipeline=disaggregated"),
    "encode_first": ("pipeline=encode_first",),
    "joint": ("pipeline=joint",),
    "joint, split": ("pipeline=joint_zero_bubble_h2",),
}
DRAWN = ("stage0", "joint, split")
OVERRIDES = (
    "system=multiplexed",
    "model=llama3_1b_so400m",
    "cluster=h100",
    "train.precision=bf16",
    f"layout.llm.pp={STAGES}",
    f"data.microbatch_tokens={MICROBATCH}",
    f"data.step_tokens={MICROBATCH * MICROBATCHES}",
)


def write_data(folder: Path) -> None:
    """Write a dataset of images with captions and one of plain text, all samples of one length."""
    caption = LENGTH - SIDE * SIDE // 28**2 - 2  # a token before the text, one after the item
    image = Item("image", "png", (SIDE, SIDE), b"-")
    samples = {
        "images": Sample("0", PLACEHOLDER + "a" * caption, (image,)),
        "text": Sample("0", "a" * (LENGTH - 2), ()),
    }
    for name, sample in samples.items():
        with DatasetWriter(folder / name, ByteTokenizer(), recipe="mixture jump") as writer:
            for number in range(64):
                writer.add(Sample(str(number), sample.text, sample.items))


def prepare(folder: Path, weights: Sequence[int], overrides: Sequence[str], beside: int = 0) -> RunSpec:
    """The run as GPUs would have it, with so many ranks beside the LLM."""
    ranks = (f"launch.ranks={STAGES + beside}", f"placement.ranks={beside}")
    config = compose_config([*OVERRIDES, *overrides, *ranks, f"run.dir={folder / 'run'}"])
    config.data.sources = {
        name: SourceConfig(path=str(folder / name), weight=weight)
        for name, weight in zip(("images", "text"), weights, strict=True)
    }
    config.data.heldout = {}
    return prepare_run(config, STAGES + beside)


def measure(spec: RunSpec) -> tuple[Timeline, float, float]:
    """The first step: its timeline, its time over all work / all ranks, the encoder's share of the work."""
    plan = spec.planner.next_step(1, 0, 0)
    spec.planner.verify(plan)
    timeline = simulate(plan.domain, spec.table, single_fifo=True)
    compute_ns, _ = plan_costs(plan.domain, spec.table)
    work = [
        (op.kind in ("encode", "encode_backward"), compute_ns(rank, op))
        for rank in range(plan.domain.num_ranks)
        for op in plan.domain.ops_of(rank)
        if op.kind in COMPUTE
    ]
    total, encoder = sum(ns for _, ns in work), sum(ns for encodes, ns in work if encodes)
    return timeline, timeline.makespan_ns * plan.domain.num_ranks / total, encoder / total


def main() -> int:
    """Plan both mixtures under every system, simulate, compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path, nargs="?", help="where to draw, such as jump.svg")
    picture = parser.parse_args().picture
    table: dict[str, dict[str, float]] = {name: {} for name in SYSTEMS}
    pictures: list[tuple[str, list[Track]]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_data(folder)
        *_, share = measure(prepare(folder, PHASES["1:9"], SYSTEMS["encode_first"]))
        beside = max(1, round(STAGES * share / (1 - share)))
        for name, overrides in SYSTEMS.items():
            for phase, weights in PHASES.items():
                ranks = beside if name == "disaggregated" else 0
                timeline, ratio, _ = measure(prepare(folder, weights, overrides, ranks))
                table[name][phase] = round(ratio, 4)
                taken = f"{timeline.makespan_ns / 1e6:.0f} ms, {ratio:.2f} of the bound (simulated)"
                title = f"{name}, {phase}: {taken}"
                if name in DRAWN:
                    pictures.append((title, rows_of(timeline, [f"rank {t}" for t in timeline.domain.teams])))
                print(title)
    if picture:
        write_text(picture, svg(pictures))
    before, after = table["joint, split"].values()
    missed = [f"joint, split: {value}" for value in (before, after) if value > MOST]
    missed += [f"joint, split changes by {abs(after - before):.3f}"] * (abs(after - before) > CHANGE)
    for text in missed:
        print(f"missed: {text}")
    result = {"over_bound": table, "beside": beside, "encoder_share_before": round(share, 4)}
    print(json.dumps({"benchmark": "mixture_jump", "simulated": result, "missed": missed}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

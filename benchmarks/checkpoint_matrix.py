"""Checkpoints of one layout under every other: the same state to the bit, the same losses after it.

    python benchmarks/checkpoint_matrix.py [--quick]

Four ranks train two steps and save, under seven layouts of a dense model with an encoder and three of one
with experts, and go on for three steps. Each checkpoint is loaded under every other layout of its model, into
ranks that hold what these steps left: all weights, both moments and the biases of experts must be
`torch.equal` after gathering, and the losses of the next three steps within 10⁻⁵ of those of the run that
went on (sums are in another order). The last line is JSON, and the exit code 1 where a pair differs.
"""

import argparse
import io
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from small_runs import make_trainer, on_ranks

from dataloader.format import PLACEHOLDER, Item, Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from omni.rank.state import MOMENTS, Owned
from omni.training.checkpoints import Checkpoints
from omni.training.parity import collect, collect_buffers
from omni.training.trainer import Trainer

WORLD, STEPS, NEXT = 4, 2, 3
TOLERANCE = 1e-5
MOE = "model.llm.moe={experts: 4, topk: 2, ffn: 48, shared_ffn: 32, dense_layers: 1}"
DENSE = {
    "tp2 dp2": ["layout.llm.tp=2", "+layout.encoders.image.tp=2"],
    "pp2 tp2": ["layout.llm.pp=2", "layout.llm.tp=2", "+layout.encoders.image.tp=2"],
    "interleaved pp2·vpp2": ["layout.llm.pp=2", "layout.llm.vpp=2", "pipeline.policy=interleaved"],
    "disaggregated 2+2": ["placement=disaggregated", "placement.ranks=2", "layout.llm.pp=2"],
    "dynamic pools dp4": ["layout.domain=4", "llm_sp=dynamic", "encoder_sp=dynamic"],
    "cp2 dp2": ["layout.llm.cp=2"],
    "pp4 stage0": ["layout.llm.pp=4", "system=megatron"],
}
EXPERTS = {
    "ep4": [MOE, "layout.llm.ep=4"],
    "tp2 ep4": [MOE, "layout.llm.tp=2", "layout.llm.ep=4", "+layout.encoders.image.tp=2"],
    "pp2 ep2": [MOE, "layout.llm.pp=2", "layout.llm.ep=2", "layout.domain=2"],
}
QUICK = ("tp2 dp2", "interleaved pp2·vpp2")


def write_images(path: Path) -> None:
    """Texts, and images of several sizes."""
    rng = np.random.default_rng(0)
    with DatasetWriter(path, ByteTokenizer(), rows_per_group=4) as writer:
        for i in range(12):
            pixels = rng.integers(0, 256, (8, 8 * (1 + i % 4)), dtype=np.uint8)
            out = io.BytesIO()
            Image.fromarray(pixels).save(out, "PNG")
            items = (Item("image", "png", pixels.shape, out.getvalue()),) if i % 3 else ()
            writer.add(Sample(str(i), PLACEHOLDER * len(items) + f"sample {i} of a few words", items))


def state(trainer: Trainer) -> list[dict[str, torch.Tensor] | None]:
    """Weights, both moments and the biases of experts of all ranks, put together on the first one."""

    def held(own: Owned, key: str) -> torch.Tensor:
        return own.main if key == "main" else own.adam[key]

    found = [collect(trainer, partial(held, key=key)) for key in ("main", *MOMENTS)]
    return [*found, collect_buffers(trainer)]


def train(trainer: Trainer, steps: int) -> list[float]:
    """Losses of the next steps."""
    losses = []
    with trainer.ahead() as ahead:
        for step in range(trainer.step + 1, trainer.step + steps + 1):
            done = trainer.run_step(trainer.begin(ahead, step))
            trainer.update(done)
            losses.append(done.totals.loss)
    return losses


def differs(one: list[Any], two: list[Any]) -> list[str]:
    """Names of tensors that are not the same to the bit; each copy must be as what it is a copy of."""
    wrong = []
    for expected, found in zip(one, two, strict=True):
        by_name = {name.partition("@")[0]: tensor for name, tensor in expected.items()}
        wrong += sorted(by_name.keys() ^ {name.partition("@")[0] for name in found})
        wrong += [n for n, t in found.items() if not torch.equal(t, by_name[n.partition("@")[0]])]
    return wrong


def matrix(rank: int, world: int, folder: Path, keys: list[str], layouts: dict[str, list[str]]) -> Any:
    """Write under all layouts, then load each checkpoint under every other, by the ranks that wrote that."""
    trainers: dict[str, Trainer] = {}
    written: dict[str, tuple[list[Any], list[float]]] = {}
    for number, (name, layout) in enumerate(layouts.items()):
        trainer = make_trainer(rank, world, [*keys, *layout, f"run.dir={folder / str(number)}"])
        train(trainer, STEPS)
        trainer.saving.save(trainer.reporter)
        trainer.saving.finish(trainer.reporter)
        written[name] = state(trainer), train(trainer, NEXT)
        trainers[name] = trainer
    worst, wrong, pairs = 0.0, [], 0
    stores = {name: trainer.saving.checkpoints for name, trainer in trainers.items()}
    for target, trainer in trainers.items():
        for source, (expected, losses) in written.items():
            if source == target:
                continue
            of = stores[source]
            trainer.saving.checkpoints = Checkpoints(
                of.storage, of.folder, trainer.rank, trainer.control, of.keep
            )
            assert trainer.saving.restore() == STEPS
            found = state(trainer)
            if rank == 0:
                wrong += [f"{source} → {target}: {name}" for name in differs(expected, found)]
            after = train(trainer, NEXT)
            # Summed, so that one that is not a number counts; `max` would pass over it.
            apart = sum(abs(a - b) / abs(b) for a, b in zip(after, losses, strict=True))
            worst, pairs = worst if worst >= apart else apart, pairs + 1
            if not apart <= TOLERANCE:
                wrong.append(f"{source} → {target}: losses {after}, expected {losses}")
    return pairs, worst, wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two layouts of the dense model")
    options = parser.parse_args()
    models = [DENSE, EXPERTS]
    if options.quick:
        models = [{name: DENSE[name] for name in QUICK}]
    pairs, worst, wrong = 0, 0.0, []
    for number, layouts in enumerate(models):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            write_images(folder / "images")
            keys = [
                "~experiment",
                "system=multiplexed",
                "model=tiny",
                "model.llm.layers=4",
                "model.llm.hidden=64",
                "model.llm.ffn=96",
                "model.llm.kv_heads=4",
                "model.encoders.image.hidden=32",
                "model.encoders.image.heads=2",
                "model.encoders.image.ffn=64",
                f"+data.sources.images.path={folder / 'images'}",
                "data.microbatch_tokens=160",
                "data.step_samples=8",
                f"train.steps={STEPS + NEXT}",
                "train.precision=fp32",
                "train.eval_every=0",
                "optim.lr=1e-3",
                "optim.eps=1e-4",
                "tracking=jsonl",
            ]
            found = on_ranks(WORLD, matrix, folder, keys, layouts)[0]
            print(f"model {number}: {found[0]} pairs, losses within {found[1]:.1e}", flush=True)
        pairs, worst, wrong = pairs + found[0], max(worst, found[1]), wrong + found[2]
    for line in wrong[:20]:
        print(f"wrong: {line}")
    print(
        json.dumps(
            {"benchmark": "checkpoint_matrix", "pairs": pairs, "wrong": len(wrong), "losses_within": worst}
        )
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

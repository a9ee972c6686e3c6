"""Families of published models against transformers: the worst errors of each, in fp32 on this machine's CPU.

    PYTHONPATH=tests:tests/omni python benchmarks/open_models.py
    PYTHONPATH=tests:tests/omni python benchmarks/open_models.py --quick    # a layout each, within 3 minutes

Of each family a tiny random model is drawn, with everything on that the family has, and saved. A line says:

    logits      of a pack of four sequences, against each sequence alone: the largest difference, relative
                to the largest logit
    keys        how many keys of the family were taken away, one by one, and the least that logits are then
                off, in tolerances; below 10 a key could be forgotten unseen
    loss        of a step under the layouts named, relative to that of the model on one sequence at a time
    gradients   the worst of any tensor, relative to its norm
    back        whether the files that are exported are the folder's, byte by byte

Losses and gradients are held against transformers in fp64, so that all rounding is ours: in fp32 its own
gradients of the decays of delta nets, small sums of large terms, are up to 9e-6 off. The last line is JSON;
the exit code is 1 if any error is above 1e-5, or files differ.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from open_model_folders import DELTAS, FAMILIES, make
from ranks import RankPool
from small import with_values
from test_open_model_keys import FORGOTTEN, LENGTHS, TOLERANCE, logits
from test_open_models import LAYOUTS, TEXTS, as_theirs, configured, expected_in_double, files, trained
from test_qwen3_5 import FORGOTTEN as OF_DELTAS

from dataloader.format import Sample
from dataloader.storage import Storage
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from infra.checkpoint import complete, read_manifest
from omni.open_models.folder import open_folder
from omni.training.export_folder import export_folder

SEEN = 10  # tolerances by which a key that is taken away must show


@dataclass
class Found:
    """The worst errors of a family."""

    logits: float
    keys: int
    least_seen: float
    layouts: list[str] = field(default_factory=list)
    loss: float = 0.0
    gradients: float = 0.0
    worst: str = ""
    back: bool = True

    @property
    def holds(self) -> bool:
        """Whether all are within their bounds."""
        worst = max(self.logits, self.loss, self.gradients)
        return worst < TOLERANCE and self.back and (not self.keys or self.least_seen > SEEN)

    def line(self, family: str) -> str:
        """A row of the table."""
        seen = f"{self.keys:3} {self.least_seen:8.0f}" if self.keys else f"{'-':>3} {'-':>8}"
        return (
            f"{family:18} {self.logits:8.1e} {seen}  {self.loss:8.1e} {self.gradients:9.1e}"
            f"  {'yes' if self.back else 'NO':4}  {', '.join(self.layouts)}{'' if self.holds else '  MISSED'}"
        )


def in_packs(ranks: RankPool, family: str, folder: Path, model: torch.nn.Module) -> Found:
    """Compare logits of a pack, as they are and with each key taken away."""
    ids = torch.randint(0, 272, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = torch.cat([model(part[None]).logits[0] for part in ids.split(LENGTHS)])

    def away(forgotten: dict[str, object]) -> float:
        found = ranks.run(1, logits, str(folder), forgotten, ids)[0]
        return float((found - plain).abs().max() / plain.abs().max())

    keys = (FORGOTTEN | OF_DELTAS).get(family, {})
    seen = [away({key: value}) / TOLERANCE for key, value in keys.items()]
    return Found(away({}), len(keys), min(seen, default=0.0))


def in_layout(
    ranks: RankPool, layout: str, folder: Path, model: torch.nn.Module, work: Path, found: Found
) -> None:
    """Train a step, compare loss and gradients, and write the folder again."""
    run, out = work / "run", work / "out"
    config = with_values(configured(work.parent / "texts", folder, run), LAYOUTS[layout])
    world = {"one": 1, "tp2 dp2": 4}.get(layout, 2)
    loss, gradients, _ = ranks.run(world, trained, config, world)[0]
    plain_loss, plain = expected_in_double(model)
    ours = as_theirs(folder, gradients, sum(len(text) + 1 for text in TEXTS))
    norm = float(torch.stack([own.norm() for own in plain.values()]).norm())
    off = {
        name: float((own - plain[name]).norm()) / max(float(plain[name].norm()), 1e-6 * norm)
        for name, own in ours.items()
    }
    worst = max(off, key=lambda name: off[name])
    storage = Storage.at(run / "checkpoints")
    export_folder(storage, read_manifest(storage, complete(storage)[-1]), open_folder(str(folder)), out)
    found.layouts.append(layout)
    found.loss = max(found.loss, abs(loss / plain_loss - 1))
    if off[worst] > found.gradients:
        found.gradients, found.worst = off[worst], f"{worst}, {layout}"
    found.back &= ours.keys() == plain.keys() and files(out) == files(folder)


def layouts_of(family: str, number: int, quick: bool) -> list[str]:
    """All layouts that a family has, or one of them in turn."""
    sparse = "moe" in family or family in ("mixtral", "gpt_oss", "qwen3_next")
    every = [layout for layout in LAYOUTS if sparse or layout != "ep2"]
    return [every[number % len(every)]] if quick else every


def main() -> int:
    """Compare every family, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one layout of each family")
    parser.add_argument("--only", default="", help="families whose name begins like this")
    given, start = parser.parse_args(), time.perf_counter()
    result, ranks = {}, RankPool()
    print(f"{'family':18} {'logits':>8} {'keys: least seen':>12} {'loss':>5} {'gradients':>9}  back  layouts")
    with tempfile.TemporaryDirectory() as name:
        with DatasetWriter(Path(name) / "texts", ByteTokenizer(), rows_per_group=4) as writer:
            for text in TEXTS:
                writer.add(Sample(text[:5], text))
        try:
            every = [family for family in (*FAMILIES, *DELTAS) if family.startswith(given.only)]
            for number, family in enumerate(every):
                folder = Path(name) / f"model{number}"
                model = make(family, folder)
                found = in_packs(ranks, family, folder, model)
                for at, layout in enumerate(layouts_of(family, number, given.quick)):
                    work = Path(name) / f"{number}_{at}"
                    in_layout(ranks, layout, folder, model, work, found)
                print(found.line(family), flush=True)
                result[family] = {**vars(found), "holds": found.holds}
        finally:
            ranks.close()
    missed = [family for family, found in result.items() if not found["holds"]]
    told = {"benchmark": "open_models", "families": result, "missed": missed}
    print(json.dumps({**told, "seconds": round(time.perf_counter() - start)}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

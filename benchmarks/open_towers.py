"""Published towers against transformers: the worst errors of each, in fp32 on this machine's CPU.

    PYTHONPATH=tests:tests/omni python benchmarks/open_towers.py
    PYTHONPATH=tests:tests/omni python benchmarks/open_towers.py --quick    # fewer sizes, within 3 minutes

Of each tower a tiny random one is drawn, norms and biases too, and saved with its processor. A line says:

    rows        of a pack of items of several sizes, against transformers' own forward of each item alone: the
                largest difference, relative to the largest number
    alone       the same pack against our rows of each item alone
    gradients   the worst of any weight, relative to its norm; of biases that shift all keys, which never
                learn here, that of transformers relative to the norm of all
    pp 2        a first step on two ranks, as stages, against one rank: the worst gradient
    tp 2        the same where the two share layers, of LLM and tower, and
    shared      where they share items; towers in our own layers ("ours") alone do, shared items those
                without windows
    sizes       how many sizes were counted, and of how many the processor makes another number of patches

The last line is JSON; the exit code is 1 if rows are off by more than 1e-6, gradients by more than 1e-5, any
count is, or the statement of work has other weights than the module.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ranks import RankPool
from tower_folders import ALL, OURS, Errors, compared, compared_ours, make_tower
from tower_runs import SHARED, TP, line, measure, write_data

from omni.models.registry import make_encoder
from omni.training.parity import TOLERANCE, Measurement, compare

ROWS = 1e-6
WINDOWS = "Qwen2.5-VL ours"
LAYOUTS = {
    "pp 2": ("layout=pp2",),
    "tp 2": TP,
    "shared": SHARED,
}
QUICK = 13  # of so many sizes, one


@dataclass
class Found:
    """The errors of a tower."""

    errors: Errors
    layouts: dict[str, float]
    sizes: int
    miscounted: int

    @property
    def holds(self) -> bool:
        """Whether all are within their bounds."""
        own = self.errors
        gradients = max(own.gradients, *self.layouts.values())
        wrong = own.counts or own.weights or self.miscounted
        return max(own.rows, own.alone) <= ROWS and gradients <= TOLERANCE and not wrong

    def line(self, name: str) -> str:
        """A row of the table."""
        own = self.errors
        layouts = "".join(
            f" {self.layouts[layout]:8.1e}" if layout in self.layouts else f" {'':8}" for layout in LAYOUTS
        )
        return (
            f"{name:15} {own.rows:8.1e} {own.alone:8.1e} {own.gradients:10.1e}{layouts} "
            f"{self.sizes:6} {self.miscounted:4}{'' if self.holds else '  MISSED'}"
        )


def sizes(audio: bool) -> Iterator[tuple[np.ndarray, tuple[int, int]]]:
    """3,484 pictures of many sizes, or recordings of many lengths, with their sizes."""
    for row in range(52):
        for column in range(67):
            if audio:
                samples = 4 * (67 * row + column) + 1
                yield np.zeros(samples, np.float32), (samples, 16000)
            else:
                size = 20 + 27 * row, 13 + 22 * column
                yield np.zeros((*size, 3), np.uint8), size


def miscounted(encoder: Any, every: int) -> tuple[int, int]:
    """Count and process one of `every` items. Return how many, and of how many the two differ."""
    chosen = [own for number, own in enumerate(sizes(encoder.modality == "audio")) if number % every == 0]
    wrong = [size for item, size in chosen if encoder.count(size)[0] != len(encoder.preprocess(item).values)]
    return len(chosen), len(wrong)


def layouts(ranks: RankPool, name: str, folder: Path, work: Path) -> dict[str, float]:
    """The worst gradient of a first step on two ranks against one, by how these share a step."""

    def step(world: int, *more: str) -> Measurement:
        run = work / f"run{len(list(work.iterdir()))}"
        keys = line(work / "data", name, folder, run, "weights: true", "train.steps=1", *more)
        return ranks.run(world, measure, keys, world)[0]

    write_data(name, work / "data")
    own = [layout for layout in LAYOUTS if layout == "pp 2" or name in OURS]
    if name == WINDOWS:
        own.remove("shared")
    one = step(1)
    return {layout: compare(one, step(2, *LAYOUTS[layout]))[0].relative for layout in own}


def main() -> int:
    """Compare every tower, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"one of {QUICK} sizes")
    parser.add_argument("--only", default="", help="towers whose name begins like this")
    given, start = parser.parse_args(), time.perf_counter()
    result, ranks = {}, RankPool()
    heads = "".join(f" {layout:>8}" for layout in LAYOUTS)
    print(f"{'tower':15} {'rows':>8} {'alone':>8} {'gradients':>10}{heads} {'sizes':>6} {'off':>4}")
    try:
        for name in (name for name in ALL if name.startswith(given.only)):
            with tempfile.TemporaryDirectory() as work:
                folder = Path(work) / "tower"
                make_tower(name, folder)
                shared = layouts(ranks, name, folder, Path(work))
                if name in OURS:
                    keys = line(Path(work) / "data", name, folder, Path(work) / "one", "weights: true")
                    errors = ranks.run(1, compared_ours, name, folder, keys)[0]
                else:
                    errors = compared(name, folder)
                encoder = make_encoder("own", {"name": ALL[name][1], "folder": str(folder)})
                found = Found(errors, shared, *miscounted(encoder, QUICK if given.quick else 1))
            print(found.line(name), flush=True)
            rest = {"layouts": shared, "sizes": found.sizes, "miscounted": found.miscounted}
            result[name] = {**vars(errors), **rest, "holds": found.holds}
    finally:
        ranks.close()
    missed = [name for name, found in result.items() if not found["holds"]]
    told = {"benchmark": "open_towers", "quick": given.quick, "towers": result, "missed": missed}
    print(json.dumps({**told, "seconds": round(time.perf_counter() - start)}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

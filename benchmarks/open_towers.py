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
from test_towers import line, measure, write_data
from tower_folders import TOWERS, Errors, compared

from omni.models.registry import make_encoder
from omni.training.parity import TOLERANCE, compare

ROWS = 1e-6
QUICK = 13  # of so many sizes, one


@dataclass
class Found:
    """The errors of a tower."""

    errors: Errors
    stages: float
    sizes: int
    miscounted: int

    @property
    def holds(self) -> bool:
        """Whether all are within their bounds."""
        own = self.errors
        gradients = max(own.gradients, self.stages)
        wrong = own.counts or own.weights or self.miscounted
        return max(own.rows, own.alone) <= ROWS and gradients <= TOLERANCE and not wrong

    def line(self, name: str) -> str:
        """A row of the table."""
        own = self.errors
        return (
            f"{name:11} {own.rows:8.1e} {own.alone:8.1e} {own.gradients:10.1e} {self.stages:8.1e} "
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


def stages(ranks: RankPool, name: str, folder: Path, work: Path) -> float:
    """The worst gradient of a first step of two stages, against one rank."""
    write_data(name, work / "data")
    given = work / "data", name, folder
    one = ranks.run(1, measure, line(*given, work / "one", "merge: 1", "train.steps=1"), 1)[0]
    two = ranks.run(2, measure, line(*given, work / "two", "merge: 1", "train.steps=1", "layout=pp2"), 2)[0]
    return compare(one, two)[0].relative


def main() -> int:
    """Compare every tower, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"one of {QUICK} sizes")
    parser.add_argument("--only", default="", help="towers whose name begins like this")
    given, start = parser.parse_args(), time.perf_counter()
    result, ranks = {}, RankPool()
    print(f"{'tower':11} {'rows':>8} {'alone':>8} {'gradients':>10} {'pp 2':>8} {'sizes':>6} {'off':>4}")
    try:
        for name in (name for name in TOWERS if name.startswith(given.only)):
            with tempfile.TemporaryDirectory() as work:
                folder = Path(work) / "tower"
                errors = compared(name, folder)
                worst = stages(ranks, name, folder, Path(work))
                encoder = make_encoder("own", {"name": TOWERS[name][1], "folder": str(folder)})
                found = Found(errors, worst, *miscounted(encoder, QUICK if given.quick else 1))
            print(found.line(name), flush=True)
            rest = {"stages": worst, "sizes": found.sizes, "miscounted": found.miscounted}
            result[name] = {**vars(errors), **rest, "holds": found.holds}
    finally:
        ranks.close()
    missed = [name for name, found in result.items() if not found["holds"]]
    told = {"benchmark": "open_towers", "quick": given.quick, "towers": result, "missed": missed}
    print(json.dumps({**told, "seconds": round(time.perf_counter() - start)}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

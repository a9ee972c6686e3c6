"""A long run of the quickstart that saves often: does the memory of its ranks grow, or what they hold open?

    python benchmarks/soak.py [--steps 1000] [--every 25]

Trains the quickstart (make data) on two ranks with a checkpoint every 25 steps. Ten times a second it looks
at each rank from outside: RSS (all memory that the rank has mapped and used, also what it shares with the
process it was forked from), file descriptors and threads. After seven tenths of the steps memory must be
flat: no tenth may be more than 2 % above the highest before, and the medians of descriptors and threads not
above those of the four tenths before. A tenth is judged by what it held after saves, each of which has malloc
give back what is free: the median of the least RSS from one save to the next, which differs by 3 % with the
lengths that a tenth has. A leak of 60 kB a step is found. The highest RSS is told and not judged: single
moments differ by more.

Prints a line for each tenth of the steps, and at last a line of JSON. Leaves with 1 where something grows.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

MOST = 1.02  # times what was held before
EVERY_S = 0.1
LIMIT_S = 3600.0
RANK = "omni-rank-"
RANKS = 2
KEYS = ("experiment=quickstart", f"launch.ranks={RANKS}", "tracking=jsonl")
TENTHS = 10


class Look(NamedTuple):
    """What a rank held after a step: MB of memory, open files and threads."""

    step: int
    rss_mb: float
    files: int
    threads: int


def ranks_of(launcher: "subprocess.Popen[bytes]") -> dict[str, psutil.Process]:
    """The processes of the ranks below a launcher, by name."""
    found = {}
    with suppress(psutil.Error):
        for process in psutil.Process(launcher.pid).children(recursive=True):
            with suppress(psutil.Error):
                if process.name().startswith(RANK):
                    found[process.name()] = process
    return found


def look_at(process: psutil.Process, step: int) -> Look:
    return Look(step, process.memory_info().rss / 1e6, process.num_fds(), process.num_threads())


def steps_done(metrics: Path) -> int:
    with suppress(FileNotFoundError):
        return metrics.read_bytes().count(b"\n")
    return 0


def soak(steps: int, every: int, folder: Path) -> tuple[int, dict[str, list[Look]]]:
    """Train; return the exit code and what each rank held, from the first step on, before the last one."""
    run = folder / "run"
    line = [sys.executable, "-m", "omni", "train", *KEYS, f"train.steps={steps}", f"run.dir={run}"]
    looks: dict[str, list[Look]] = {}
    ranks: dict[str, psutil.Process] = {}
    with (folder / "log").open("wb") as log:
        launcher = subprocess.Popen(
            [*line, f"train.checkpoint_every={every}"],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        until = time.monotonic() + LIMIT_S
        while launcher.poll() is None and time.monotonic() < until:
            step = steps_done(run / "metrics.jsonl")
            if 0 < step < steps:
                if len(ranks) < RANKS or not all(process.is_running() for process in ranks.values()):
                    ranks = ranks_of(launcher)
                for name, process in ranks.items():
                    with suppress(psutil.Error):
                        looks.setdefault(name, []).append(look_at(process, step))
            time.sleep(EVERY_S)
    if launcher.poll() is None:
        launcher.terminate()
    return launcher.wait(), looks


def between(looks: Iterable[Look], steps: int, first: int, last: int) -> list[Look]:
    """The looks in some tenths of the steps."""
    return [look for look in looks if first * steps < TENTHS * look.step <= last * steps]


def least_between_saves(looks: Iterable[Look], every: int) -> list[float]:
    """The least RSS from each save to the next."""
    least: dict[int, float] = {}
    for look in looks:
        saves = look.step // every
        least[saves] = min(look.rss_mb, least.get(saves, look.rss_mb))
    return list(least.values())


class Tenth(NamedTuple):
    """A tenth of the steps: MB of RSS after saves, in the median, and at most."""

    held_mb: float
    most_mb: float


def tenth_of(looks: list[Look], every: int) -> Tenth:
    return Tenth(median(least_between_saves(looks, every)), max(look.rss_mb for look in looks))


def growth(looks: list[Look], steps: int, every: int) -> dict[str, float]:
    """By how many times each figure is larger after seven tenths than before."""
    tenths = [tenth_of(between(looks, steps, at, at + 1), every) for at in range(TENTHS)]
    found = {}
    for key in Tenth._fields:
        megabytes = [getattr(of, key) for of in tenths]
        found[key] = round(max(megabytes[7:]) / max(megabytes[:7]), 4)
    before, after = between(looks, steps, 3, 7), between(looks, steps, 7, 10)
    for key in ("files", "threads"):
        old, new = [getattr(of, key) for of in before], [getattr(of, key) for of in after]
        found[key] = round(median(new) / median(old), 4)
    return found


def tell(looks: dict[str, list[Look]], steps: int, every: int) -> None:
    """Print what each rank held in each tenth of the steps."""
    for name, of in sorted(looks.items()):
        for at in range(TENTHS):
            if some := between(of, steps, at, at + 1):
                held, most = tenth_of(some, every)
                files, threads = max(look.files for look in some), max(look.threads for look in some)
                print(
                    f"{name}: to step {some[-1].step}: RSS {held:.0f} MB after saves, at most {most:.0f}, "
                    f"{files} files, {threads} threads"
                )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=25, help="steps between two checkpoints (25)")
    options = parser.parse_args()
    if not Path("data/quickstart").is_dir():
        sys.exit("data/quickstart is not there: run `make data` first, and this in the folder that holds it")
    with tempfile.TemporaryDirectory(prefix="soak_") as name:
        code, looks = soak(options.steps, options.every, Path(name))
        if code:
            print((Path(name) / "log").read_text(errors="replace")[-3000:], file=sys.stderr)
    tell(looks, options.steps, options.every)
    found = {name: growth(of, options.steps, options.every) for name, of in sorted(looks.items()) if not code}
    limits = {"held_mb": MOST, "files": 1.0, "threads": 1.0}
    flat = bool(found) and all(of[key] <= most for of in found.values() for key, most in limits.items())
    figures = {"exit_code": code, "growth": found, "flat": flat}
    print(json.dumps({"benchmark": "soak", "steps": options.steps, **figures}))
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())

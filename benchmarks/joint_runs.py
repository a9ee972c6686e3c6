"""What joint_measured.py and joint_slept.py share: samples, schedules, ratios with intervals, and targets."""

import contextlib
import io
import math
import multiprocessing
import os
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch.multiprocessing as mp
from PIL import Image

from dataloader.format import PLACEHOLDER, Item, Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from omni.training.side_by_side import interval, over
from parallel.handshake import SECRET, new_secret

SCHEDULES = ("encode_first", "joint", "joint_zero_bubble_h1")
GAIN, WORTH, MEDIAN_OFF, MOST_OFF = 0.8, 0.02, 0.05, 0.10
LENGTH, HEIGHT = 128, 16


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


def spawn(work: Callable[..., None], arguments: tuple[Any, ...], ranks: int) -> None:
    """Run `work(rank, *arguments)` on ranks that share a secret, as the launcher of a run gives them one."""
    os.environ.setdefault(SECRET, new_secret())
    mp.spawn(work, arguments, nprocs=ranks)


@contextlib.contextmanager
def cores_awake() -> Iterator[None]:
    """Keep every core busy with what gives way to anything else (SCHED_IDLE, on Linux alone).

    Ranks sleep at each message; a core of a virtual machine that has nothing to do is given to others, and
    comes back late.
    """
    context = multiprocessing.get_context("spawn")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "SCHED_IDLE") else 0
    spinning = [context.Process(target=_spin, args=(os.getpid(),), daemon=True) for _ in range(cores)]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.terminate()
            process.join()


def _spin(parent: int) -> None:
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while os.getppid() == parent:
        for _ in range(1_000_000):
            pass


def over_first(by_schedule: Sequence[Sequence[float]]) -> list[tuple[float, float, float]]:
    """For each schedule, from its seconds in every turn: the ratio to those of the first, as `interval`."""
    return [over(of, by_schedule[0]) for of in by_schedule]


def gains_ms(by_schedule: Sequence[Sequence[float]]) -> list[tuple[float, float, float]]:
    """For each schedule, from its seconds in every turn: the milliseconds that it gains, as `interval`."""
    first = by_schedule[0]
    return [interval([(a - b) * 1e3 for a, b in zip(first, of, strict=True)]) for of in by_schedule]


def misses(setting: str, rows: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Say what a setting misses, from rows of the ratio to encode-first, `measured`, which is at least `low`,
    and `predicted`, and `gain_ms`, which is at most `gain_high_ms`, of `predicted_gain_ms`.
    """
    for name in SCHEDULES[1:]:
        row = rows[name]
        if row["low"] > 1 >= row["predicted"]:
            takes = f"{row['measured']:.3f}, {row['predicted']:.3f} predicted"
            yield f"{setting}: {name} is slower than encode_first: {takes}"
        if row["predicted"] <= 1 - WORTH and row["gain_high_ms"] < GAIN * row["predicted_gain_ms"]:
            gains = f"{row['gain_ms']:.1f} ms, at most {row['gain_high_ms']:.1f}"
            yield f"{setting}: {name} gains {gains}, of {row['predicted_gain_ms']:.1f} ms predicted"


class Gained(NamedTuple):
    """Milliseconds over all settings: gained, at most gained, and predicted."""

    ms: float
    most_ms: float
    predicted_ms: float


def gained_in_all(table: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, Gained]:
    """Add up for each joint schedule what it gains over all settings. The halves of intervals add up as
    errors that are independent do: by their squares.
    """
    found = {}
    for name in SCHEDULES[1:]:
        rows = [of[name] for of in table.values()]
        ms = sum(row["gain_ms"] for row in rows)
        beyond = math.hypot(*(row["gain_high_ms"] - row["gain_ms"] for row in rows))
        sums = ms, ms + beyond, sum(row["predicted_gain_ms"] for row in rows)
        found[name] = Gained(*(round(of, 3) for of in sums))
    return found


def too_little(gained: Mapping[str, Gained]) -> Iterator[str]:
    """Say which schedule gains less than it should over all settings, all of its interval."""
    for name, (ms, most_ms, predicted_ms) in gained.items():
        if most_ms < GAIN * predicted_ms:
            yield f"{name} gains {ms:.1f} ms in all, at most {most_ms:.1f}, of {predicted_ms:.1f} predicted"


def far_off(name: str, by: Sequence[float]) -> Iterator[str]:
    """Say where what the simulator is off by is too much, of all settings."""
    if statistics.median(by) > MEDIAN_OFF or max(by) > MOST_OFF:
        yield f"{name}: off by {statistics.median(by):.3f} in the median, {max(by):.3f} at most"

"""Tiny datasets, and real runs of the command line on them."""

import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from forks import Launched
from PIL import Image
from processes import heed_signals
from ranks import leave_imports, server

from dataloader.format import PLACEHOLDER, Item, Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from omni.__main__ import main

TIMEOUT_S = 240  # of a run: some ten seconds on a machine of its own
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Ten pictures of 8x8 pixels that stand for the digits.
DIGITS = np.random.default_rng(7).integers(0, 256, (10, 8, 8), dtype=np.uint8)

# The smallest model that has every part, and policies by name. `data_keys` adds the data.
TINY = (
    "system=multiplexed",
    "tracking=jsonl",
    "model.llm.layers=2",
    "model.llm.hidden=32",
    "model.llm.heads=2",
    "model.llm.kv_heads=1",
    "model.llm.ffn=64",
    "model.encoders.image.layers=1",
    "model.encoders.image.hidden=16",
    "model.encoders.image.heads=2",
    "model.encoders.image.ffn=32",
    "data.microbatch_tokens=64",
    "data.step_tokens=128",
    "data.record_samples=true",
    "optim.warmup_steps=0",
    "train.eval_every=0",
    "train.checkpoint_every=0",
    "train.timeout_s=60",
)


def picture(digits: Sequence[int], kind: str = "PNG") -> Item:
    """An image of digits side by side."""
    pixels = np.concatenate([DIGITS[d] for d in digits], axis=1)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return Item("image", kind.lower(), pixels.shape, buffer.getvalue())


def strip(i: int, kind: str = "PNG") -> Sample:
    """Sample `i`: two or three digits and their names."""
    digits = np.random.default_rng(i).integers(0, 10, 2 + i % 2)
    text = PLACEHOLDER + " ".join(WORDS[d] for d in digits)
    return Sample(f"strip-{i}", text, (picture(digits, kind),))


def document(i: int) -> Sample:
    return Sample(f"document-{i}", f"document {i} of few words")


def write(path: Path, samples: Sequence[Sample], tokenizer: Any = None) -> Path:
    with DatasetWriter(path, tokenizer or ByteTokenizer(), rows_per_group=8) as writer:
        for sample in samples:
            writer.add(sample)
    return path


def data_keys(strips: Path, docs: Path | None = None) -> list[str]:
    """Overrides that train on `strips` and `docs` alone, without held-out data."""
    keys = [f"data.sources.strips.path={strips}", "~data.heldout.strips", "~data.heldout.docs"]
    return [*keys, "~data.sources.docs" if docs is None else f"data.sources.docs.path={docs}"]


@dataclass
class Finished:
    """A command that ended: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    def lines_with(self, *words: str) -> list[str]:
        """Lines of stderr that hold all `words`."""
        return [line for line in self.err.splitlines() if all(word in line for word in words)]


class Running:
    """A command under way. Its output goes to files, so that nobody waits for a reader.

    `omni` and what it starts are forks of a process that has imported everything (`forks.py`), unless it is
    to be `fresh`, or its environment is other than in PYTHONPATH.
    """

    def __init__(
        self, arguments: Sequence[str], cwd: Path, env: dict[str, str] | None = None, fresh: bool = False
    ) -> None:
        number = len(list(cwd.glob("out*.txt")))
        self.files = cwd / f"out{number}.txt", cwd / f"err{number}.txt"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", **(env or {})}
        self.process: Launched | subprocess.Popen[bytes]
        forked = list(arguments[:2]) == ["-m", "omni"] and not fresh and {*(env or {})} <= {"PYTHONPATH"}
        if forked and sys.platform == "linux" and not torch.cuda.is_available():
            self.process = Launched(arguments, cwd, environment, self.files)
            return
        with self.files[0].open("ab") as out, self.files[1].open("ab") as err:
            self.process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=cwd,
                env=environment,
                stdout=out,
                stderr=err,
                preexec_fn=heed_signals,
            )

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
        """Poll a condition; fails if the command ends before it holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"ended before {what}:\n{self.texts()[1]}"
            assert time.monotonic() < deadline, f"no {what} in {timeout_s} s:\n{self.texts()[1]}"
            time.sleep(0.02)

    def descendants(self) -> list[psutil.Process]:
        """Every process below this one, parents first."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def finish(self, timeout_s: float = TIMEOUT_S) -> Finished:
        """Wait for the end. A command that hangs is killed with all its processes, and fails the test."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            out, err = self.texts()
            raise AssertionError(f"running after {timeout_s} s:\n{out[-2000:]}\n{err[-4000:]}") from None
        return Finished(self.process.returncode, *self.texts())

    def end(self) -> None:
        """Kill what is left of the command."""
        if self.process.poll() is not None:
            return
        for process in [*self.descendants(), psutil.Process(self.process.pid)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()

    def texts(self) -> tuple[str, str]:
        out, err = (file.read_text(errors="replace") for file in self.files)
        return out, err


def omni(arguments: Sequence[str], cwd: Path, timeout_s: float = TIMEOUT_S) -> Finished:
    """Run a command that starts no ranks to its end, in a fork of a process that has imported everything."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = (Path(folder) / name for name in ("out", "err"))
        process = server().Process(target=_command, args=(list(arguments), cwd, out, err))
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise AssertionError(f"running after {timeout_s} s:\n{err.read_text(errors='replace')[-4000:]}")
        return Finished(process.exitcode, *(file.read_text(errors="replace") for file in (out, err)))


def _command(arguments: list[str], cwd: Path, out: Path, err: Path) -> None:
    for number, file in ((1, out), (2, err)):
        with file.open("wb") as stream:
            os.dup2(stream.fileno(), number)
    leave_imports()
    os.chdir(cwd)
    sys.exit(main(arguments))


def train(keys: Sequence[str], cwd: Path, timeout_s: float = TIMEOUT_S) -> Finished:
    """Run `omni train` to its end in `cwd`, in the run folder `run` unless a key says otherwise."""
    return start_training(keys, cwd).finish(timeout_s)


def start_training(keys: Sequence[str], cwd: Path) -> Running:
    """Start `omni train` with TINY and `keys`, which may replace some of TINY's."""
    return Running(["-m", "omni", *training(keys)], cwd)


def training(keys: Sequence[str]) -> list[str]:
    """The arguments of `omni` that train with TINY and `keys`."""
    given = {key.partition("=")[0] for key in keys}
    defaults = [key for key in (*TINY, "run.dir=run") if key.partition("=")[0] not in given]
    return ["train", *defaults, *keys]


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file. Every line must be whole."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def steps(run: Path) -> list[int]:
    """Steps in metrics.jsonl so far, a line that is being written left out."""
    file = run / "metrics.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line)["progress/step"] for line in text.splitlines(True) if line.endswith("\n")]


def learnt(run: Path) -> list[dict[str, float]]:
    """What must not depend on when a run was interrupted, step by step: losses, norms, counters."""
    kept = ("loss/", "optim/", "progress/", "data/skipped/")
    return [
        {key: value for key, value in record.items() if key.startswith(kept)}
        for record in read_lines(run / "metrics.jsonl")
    ]


def checkpoints(run: Path) -> list[str]:
    """Names of the checkpoints that were committed."""
    return sorted(path.parent.name for path in (run / "checkpoints").glob("step_*/checkpoint.json"))

"""Faults done to a run's data.

Each function does one to a trial. Its docstring says what, and after "Must:" what must come of it.
"""

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

from fault_processes import two_that_differ
from fault_reference import check
from fault_runs import SAVE_EVERY, STEPS, Trial
from PIL import Image

from dataloader.format import Item, Sample
from dataloader.index import Index
from dataloader.reader import Reader
from dataloader.tokenizer import ByteTokenizer
from dataloader.verify import verify_dataset
from dataloader.writer import DatasetWriter

MISTAKE = 2
DOCS = Path("data/quickstart/docs_train")
SOURCE = "data.sources.docs.path"
OTHER_LETTERS = str.maketrans("ae", "ea")  # of the same number of bytes


def flipped_data(trial: Trial) -> None:
    """Bits of a shard flip. Must: named with the shard and exit code 2 when they are read; with the shard
    mended it goes on, exact.
    """
    own = _own_docs(trial)
    shard = next(own.glob("*.parquet"))
    good = shard.read_bytes()
    bad = bytearray(good)
    for at in range(64, len(bad) - 4096, 997):
        bad[at] ^= 1 << trial.rng.randrange(8)
    shard.write_bytes(bad)
    trial.train(f"{SOURCE}={own}")
    trial.ends_with(MISTAKE)
    trial.says("error", shard.name)
    trial.moment = f"named after step {trial.rows()}"
    shard.write_bytes(good)
    trial.train(f"{SOURCE}={own}")
    trial.ends_with(0)
    trial.is_exact()


def changed_labels(trial: Trial) -> None:
    """Before a resume the data has other texts of the same sizes. Must: refused by name, exit code 2; with
    its own data it goes on, exact.
    """
    trial.copy_reference()
    shutil.rmtree(trial.run.checkpoints / f"step_{STEPS:08d}")
    other = trial.folder / "other"
    _rewrite(DOCS, other, lambda sample: replace(sample, text=sample.text.translate(OTHER_LETTERS)))
    trial.train(f"{SOURCE}={other}")
    trial.ends_with(MISTAKE)
    trial.says("data.sources.docs", "checkpoint")
    trial.train()
    trial.ends_with(0)
    trial.is_exact()


def cut_index(trial: Trial) -> None:
    """The index of a dataset is cut short before the start. Must: refused by name, exit code 2."""
    own = _own_docs(trial)
    index = own / Index.open(own).manifest.index.file
    content = index.read_bytes()
    index.write_bytes(content[: trial.rng.randrange(len(content))])
    trial.train(f"{SOURCE}={own}")
    trial.ends_with(MISTAKE)
    trial.says("error", index.name)


def cut_index_under_a_run(trial: Trial) -> None:
    """The index of a dataset is cut to nothing under the run. Must: exact, since what was read is kept, or
    named with a non-zero exit code; with the index mended it goes on, exact.
    """
    own = _own_docs(trial)
    index = own / Index.open(own).manifest.index.file
    content = index.read_bytes()
    trial.train(f"{SOURCE}={own}")
    trial.wait_until(lambda: trial.rows() > SAVE_EVERY, "a checkpoint")
    index.write_bytes(b"")
    codes = trial.end()
    trial.moment = f"exit code {codes[0]}"
    if codes != [0]:
        trial.says(index.name)
        index.write_bytes(content)
        trial.train(f"{SOURCE}={own}")
        trial.ends_with(0)
    trial.is_exact()


def other_data(trial: Trial) -> None:
    """A node has other texts of the same sizes. Must: named with exit code 2 before a step."""
    one, two = trial.folder / "one", trial.folder / "two"
    for node in (one, two):
        (node / "data").mkdir(parents=True)
        shutil.copytree(DOCS.parent, node / "data" / "quickstart", dirs_exist_ok=True)
    shutil.rmtree(two / DOCS)
    _rewrite(DOCS, two / DOCS, lambda sample: replace(sample, text=sample.text.translate(OTHER_LETTERS)))
    two_that_differ(trial, ({}, one), ({}, two), "the data of data.sources.docs")


def damaged_image(trial: Trial) -> None:
    """A JPEG lacks the end of its scan, which libjpeg would fill with grey. Must: named with its sample, exit
    code 2; left out and counted with data.on_error=skip.
    """
    own = trial.folder / "docs"
    numbers, number = count(), trial.rng.randrange(40)
    bad = Item("image", "jpeg", (64, 64), _jpeg(trial)[:-400] + b"\xff\xd9")

    def spoil(sample: Sample) -> Sample:
        return replace(sample, items=(bad, *sample.items[1:])) if next(numbers) == number else sample

    _rewrite(Path("data/quickstart/strips_train"), own, spoil)
    keys = (f"data.sources.strips.path={own}", "data.sources.docs.weight=1")
    trial.train(*keys)
    trial.ends_with(MISTAKE)
    trial.says("failed", "item 0")
    shutil.rmtree(trial.run.path)
    trial.train(*keys, "data.on_error=skip", "data.max_error_share=0.5")
    trial.ends_with(0)
    trial.says("left out so far", "with a bad item")


def concurrent_builds(trial: Trial) -> None:
    """Two builds of one dataset run at once. Must: what is there at the end is whole; none reports a dataset
    that it has not made.
    """
    lines = [json.dumps({"id": str(n), "text": f"text {n} " * 40}) for n in range(20_000)]
    source, out = trial.folder / "texts.jsonl", trial.folder / "built"
    source.write_text("\n".join(lines) + "\n")
    line = [sys.executable, "-m", "omni", "data", "build", "--from-jsonl", str(source), "--out", str(out)]
    builds = [subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for _ in range(2)]
    said = [build.communicate(timeout=120)[0].decode() for build in builds]
    codes = [build.returncode for build in builds]
    (trial.folder / "log").write_text("\n".join(said))
    check(0 in codes and set(codes) <= {0, 1, MISTAKE}, f"exit codes {codes}")
    check(len(Index.open(out)) == len(lines), f"{len(Index.open(out))} samples")
    problems = verify_dataset(out, ByteTokenizer(), {}).problems
    check(not problems, f"{problems}")
    trial.moment = f"exit codes {codes}"


def _own_docs(trial: Trial) -> Path:
    """A copy of a dataset, to be damaged."""
    return Path(shutil.copytree(DOCS, trial.folder / "docs"))


def _rewrite(source: Path, out: Path, change: Callable[[Sample], Sample]) -> None:
    reader = Reader(source)
    with DatasetWriter(out, ByteTokenizer()) as writer:
        for number in range(len(Index.open(source))):
            writer.add(change(reader.read(number, text=True, items=True)))


def _jpeg(trial: Trial) -> bytes:
    out = io.BytesIO()
    Image.frombytes("RGB", (64, 64), trial.rng.randbytes(64 * 64 * 3)).save(out, "JPEG", quality=90)
    return out.getvalue()


KINDS = (
    flipped_data,
    changed_labels,
    cut_index,
    cut_index_under_a_run,
    other_data,
    damaged_image,
    concurrent_builds,
)

"""Items that fail on their way to the encoder, which is the loader's threads' way."""

import contextlib
import io
import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import RankPool
from small import overrides, write_mixed

from dataloader.format import SampleError
from dataloader.reader import Reader
from dataloader.tokens import tokenize
from infra.run_folder import RunFolder, read_metrics
from omni.compose import compose_config
from omni.config import Config
from omni.models.registry import Encoder, ItemArrays
from omni.planning.prepare import prepare_run
from omni.training.trainer import Trainer

SKIP = ("data.on_error=skip", "data.max_error_share=1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bad_items") / "mixed"
    write_mixed(path)
    return path


def fail_on_sample_1(encoder: Encoder, how: str) -> set[str]:
    """Let preprocessing fail on the one item of sample 1. Returns the threads that it will have run on."""
    preprocess = encoder.preprocess
    threads = set()

    def fail(array: np.ndarray) -> ItemArrays:
        arrays = preprocess(array)
        if array.shape != encoder.blank().shape:
            threads.add(threading.current_thread().name.rpartition("-")[0])
        if array.shape[1] != 48 or how == "good":
            return arrays
        if how == "bad":
            raise SampleError("nothing to be seen")
        if how == "bug":
            raise ZeroDivisionError("a mistake of its author")
        if how == "infinite":
            return ItemArrays(np.full(arrays.values.shape, np.inf, np.float32), arrays.positions)
        return arrays.part(0, len(arrays.values) - 1)

    encoder.preprocess = fail  # type: ignore[method-assign]
    return threads


def train(rank: int, config: Config, world: int, how: str) -> tuple[str, str, set[str], str]:
    """Train with an encoder that fails on one item. Returns the error's type, what it says
    with its notes, the threads that items were preprocessed on, and what is on the screen.
    """
    spec = prepare_run(config, world)
    threads = fail_on_sample_1(spec.encoders["image"], how)
    kind, message, screen = "", "", io.StringIO()
    try:
        with contextlib.redirect_stdout(screen):
            Trainer(spec, RunFolder.create(Path(spec.config.run.dir)), rank, torch.device("cpu")).run()
    except Exception as error:
        kind, message = type(error).__name__, " ".join([str(error), *getattr(error, "__notes__", ())])
    return kind, message, threads, screen.getvalue()


def test_an_item_that_fails_in_preprocessing_makes_a_bad_sample(
    ranks: RankPool, data: Path, tmp_path: Path
) -> None:
    line = overrides(data, tmp_path, "layout=pp2", *SKIP)
    found = ranks.run(2, train, compose_config(line), 2, "bad")
    assert [(error, threads) for error, _, threads, _ in found] == [("", {"loader"})] * 2
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert [m["data/skipped/bad_item"] for m in metrics] == [1, 2, 3]


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        (
            "bad",
            "BadDataError",
            "source mixed, sample 1 ('strip1'), item 0: nothing to be seen. Mend",
        ),
        (
            "infinite",
            "BadDataError",
            "source mixed, sample 1 ('strip1'), item 0: what its encoder makes of it holds numbers that",
        ),
        ("bug", "ZeroDivisionError", "a mistake of its author The item is that of source 'mixed', sample 1"),
        ("count", "DataError", "mixed, sample 1, item 0: image made "),
    ],
)
def test_what_else_goes_wrong_in_preprocessing_ends_the_run_and_names_the_item(
    ranks: RankPool, data: Path, tmp_path: Path, how: str, error: str, says: str
) -> None:
    ((found, message, threads, _),) = ranks.run(1, train, compose_config(overrides(data, tmp_path)), 1, how)
    assert (found, threads) == (error, {"loader"})
    assert message.startswith(says)
    assert how != "count" or message.endswith("make count() and preprocess() agree")


def test_samples_left_out_are_on_the_screen_and_in_the_summary(
    ranks: RankPool, data: Path, tmp_path: Path
) -> None:
    short = ("data.microbatch_tokens=120", "data.on_long=drop")  # one text is longer
    ((error, _, _, screen),) = ranks.run(
        1, train, compose_config(overrides(data, tmp_path, *short, *SKIP)), 1, "bad"
    )
    assert not error
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    summary = json.loads((tmp_path / "summary.json").read_text())
    dropped, bad = (last[f"data/skipped/{why}"] for why in ("too_long", "bad_item"))
    assert dropped > 0
    assert bad > 0
    assert [summary[f"data/skipped/{why}"] for why in ("too_long", "bad_item")] == [dropped, bad]
    line = screen.splitlines()[-1]
    assert line.startswith(f"left out so far: {dropped} samples that are too long")
    assert f", {bad} with a bad item" in line


def targets(rank: int, config: Config, how: str) -> float:
    """Run a step of two ranks and return the number of its targets."""
    spec = prepare_run(config, 2)
    fail_on_sample_1(spec.encoders["image"], how)
    trainer = Trainer(spec, RunFolder.create(Path(spec.config.run.dir)), rank, torch.device("cpu"))
    with trainer.ahead() as ahead:
        return trainer.run_step(trainer.begin(ahead, 1)).totals.num_targets


@pytest.mark.parametrize("more", [("layout=pp2", "system=megatron"), ("layout=pp2",), ("layout.domain=2",)])
def test_targets_of_a_bad_sample_do_not_count_wherever_the_loss_is_computed(
    ranks: RankPool, data: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    line = overrides(data, tmp_path, *more, *SKIP)  # a step takes every sample once
    good, masked = (ranks.run(2, targets, compose_config(line), how) for how in ("good", "bad"))
    spec = prepare_run(compose_config(line), 2)
    sample = Reader(data).read(1, text=True, items=False)
    (meta,) = (m for m in spec.planner.metas_of(spec.planner.next_step(1, 0, 0).domain) if m.id == 1)
    lost = tokenize(sample, meta, spec.tokenizer)[2].sum()
    assert lost > 20
    assert masked == [number - lost for number in good]

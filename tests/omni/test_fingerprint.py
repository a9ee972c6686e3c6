"""What a checkpoint may be continued with, and what it may not."""

from pathlib import Path
from typing import Any

import pytest
from small import overrides, write_mixed

from infra.checkpoint import CheckpointError
from infra.storage import Storage
from omni.compose import compose_config
from omni.planning.prepare import prepare_run
from omni.training.fingerprint import check_fingerprint, fingerprint


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fingerprint") / "mixed"
    write_mixed(path)
    return path


def of(data: Path, *more: str) -> dict[str, Any]:
    return fingerprint(prepare_run(compose_config(overrides(data, data / "run", *more)), 2))


@pytest.mark.parametrize(
    "key",
    [
        "model.llm.recompute=full",
        "model.llm.loss_chunk=16",
        "model.encoders.image.recompute=selective",
        "optim.max_skipped=3",
        "layout=pp2",
        "train.steps=9",
        "data.loader_threads=2",
    ],
)
def test_what_changes_neither_samples_nor_losses_may_change(data: Path, key: str) -> None:
    saved, current = of(data), of(data, key)
    assert saved == current
    check_fingerprint({"step": 1, "fingerprint": saved}, current, Storage.at(data))


@pytest.mark.parametrize(
    "key",
    [
        "model.llm.norm_eps=1e-6",
        "model.llm.layers=2",
        "model.encoders.image.std=0.5",
        "optim.clip=2.0",
        "data.step_samples=4",
        "train.seed=1",
    ],
)
def test_what_decides_samples_or_losses_must_not_change(data: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=key.partition("=")[0]):
        check_fingerprint({"step": 1, "fingerprint": of(data)}, of(data, key), Storage.at(data))

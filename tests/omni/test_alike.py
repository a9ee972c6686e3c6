"""Ranks that are not of one kind are named before anything is built."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import RankPool
from small import overrides

from dataloader.manifest import DataFile, DatasetTotals, Manifest
from omni.compose import compose_config
from omni.config import ConfigError
from omni.training import alike
from omni.training.alike import check_alike, description, differences


def _compare(rank: int, line: list[str], odd: int | None, what: str) -> str:
    manifest = Manifest(2, "", "bytes", 1, 1, (), DataFile("i", 1, 1, "e" * 32), (), DatasetTotals(1, 1, {}))
    if rank == odd and what == "configuration":
        line = [*line, "optim.lr=0.5"]
    elif rank == odd and what == "environment":
        os.environ["NVIDIA_TF32_OVERRIDE"] = "1"
    elif rank == odd and what == "data":
        manifest = replace(manifest, index=replace(manifest.index, hash="f" * 32))
    elif rank == odd:
        alike.PACKAGES = ("torch", "psutil")  # as if one were not there
    try:
        check_alike(compose_config(line), torch.device("cpu"), {"data.sources.mixed": manifest})
    except ConfigError as error:
        return str(error)
    finally:
        os.environ.pop("NVIDIA_TF32_OVERRIDE", None)
        alike.PACKAGES = ("torch", "megatron-core", "numpy")
    return "all alike"


def test_ranks_that_are_alike_pass(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(3, _compare, overrides(tmp_path, tmp_path), None, "") == ["all alike"] * 3


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("configuration", "optim.lr is 0.5, on rank 0 0."),
        ("environment", "NVIDIA_TF32_OVERRIDE is 1, on rank 0 not set"),
        ("data", "the data of data.sources.mixed is "),
        ("packages", "numpy is None, on rank 0 "),
    ],
)
def test_a_rank_of_another_kind_is_named_on_every_rank(
    ranks: RankPool, tmp_path: Path, what: str, said: str
) -> None:
    first, odd, last = ranks.run(3, _compare, overrides(tmp_path, tmp_path), 1, what)
    assert odd.startswith("rank 1 on ")
    assert said in odd
    assert first == last == "rank 1 is not what rank 0 is: it says in what"


def test_a_changed_file_is_another_program(monkeypatch, tmp_path: Path) -> None:
    config = compose_config(overrides(tmp_path, tmp_path))
    before = description(config, {})
    for package in ("omni", "infra"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "one.py").write_text("a = 1\n")
    monkeypatch.setattr(alike, "ROOT", tmp_path)
    one = description(config, {})
    (tmp_path / "omni" / "one.py").write_text("a = 2\n")
    two = description(config, {})
    assert differences(one, one) == []
    assert [text.split(" is ")[0] for text in differences(two, one)] == ["omni-train's files"]
    assert differences(one, before)

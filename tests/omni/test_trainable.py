"""What plans take and no module computes is refused by all commands that make modules, before ranks start."""

import re
from pathlib import Path
from typing import Any

import pytest
from small import with_values

from omni.__main__ import main
from omni.compose import compose_config
from omni.config import Config, ConfigError
from omni.planning.trainable import OF_ENCODER, OF_RUN, check_trainable
from omni.training.seats import Seat
from omni.training.worker import joined

ASKED: dict[str, Any] = {
    "train.precision": "mxfp8",
    "model.llm.mla.kv_rank": 16,
    "model.llm.mtp": 1,
    "model.encoders.image.window": 16,
}
SMALL = ("tracking=jsonl", "launch.ranks=2", "train.steps=1", "train.precision=auto")


@pytest.fixture(scope="module")
def small() -> Config:
    return compose_config(SMALL)


def test_every_key_that_is_refused_is_asked_for(small: Config) -> None:
    check_trainable(small)
    refused = {of.key for of in OF_RUN} | {f"model.encoders.image.{of.key}" for of in OF_ENCODER}
    assert refused == set(ASKED)


@pytest.mark.parametrize("key", ASKED)
def test_what_no_module_computes_is_refused_by_key(small: Config, key: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_trainable(with_values(small, {key: ASKED[key]}))
    said = (
        f"{key}={str(ASKED[key]).lower()}: the engine has no .* yet; omni plan takes it. To train, set {key}="
    )
    assert re.match(said, str(error.value))


@pytest.mark.parametrize(
    "command",
    [["train"], ["parity", "--", "layout=pp2"], ["rehearse", "--dry", "--trace", "longtail"], ["doctor"]],
    ids=lambda command: command[0],
)
def test_every_command_that_makes_modules_refuses(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *rest = command
    folder = tmp_path / "run"
    assert main([first, *SMALL, f"run.dir={folder}", "model.llm.mtp=1", *rest]) == 2
    assert (
        "error: model.llm.mtp=1: the engine has no prediction of further tokens yet"
        in capsys.readouterr().err
    )
    assert not folder.exists()


def test_ranks_that_are_started_by_hand_refuse_before_they_meet(small: Config, tmp_path: Path) -> None:
    config = with_values(small, {"model.llm.mtp": 1})
    with pytest.raises(ConfigError, match=r"model.llm.mtp=1"), joined(tmp_path / "c", Seat(config, 0, 1)):
        pass

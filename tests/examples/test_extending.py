"""docs/extending.md, walked: its files are written outside the repository, its commands run in order."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packages import pip_install
from runs import TIMEOUT_S, Finished, Running
from tower_folders import built, expected, items, off, ours, transformers
from walk import PAGE, read_walk, write_files

from dataloader.tokens import ItemMeta
from omni.encoders import Encoder, Item, SampleError
from omni.models.registry import make_encoder, published
from omni.planning.run_spec import item_layout

WALK = read_walk(PAGE.read_text())
INSTALL, *REST = WALK.commands
MADE = [command for command in REST if command[0] == "python"]
COMMANDS = [command for command in REST if command[0] == "omni"]
# One of each, and those with every policy.
QUICK = [COMMANDS[0], *(command for command in COMMANDS if "pipeline=there_and_back" in command)]
SAID = {"plan": "rules R1 to R7", "parity": "parity holds", "train": "held-out loss after step 3"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stranger's folder, its package installed, its data written."""
    folder = tmp_path_factory.mktemp("stranger")
    write_files(WALK, folder / "package")
    pip_install(folder / "package", folder)
    for command in MADE:
        done = walked(folder, command[1:])
        assert done.code == 0, done.err
    return folder


def walked(folder: Path, arguments: list[str]) -> Finished:
    """A command of the page, run where the page runs it, with the package installed."""
    paths = [str(folder / "packages"), *filter(None, [os.environ.get("PYTHONPATH")])]
    running = Running(arguments, folder / "package", {"PYTHONPATH": os.pathsep.join(paths)})
    return running.finish(2 * TIMEOUT_S)  # parity is two runs


def test_the_page_installs_a_package_and_then_writes_its_data() -> None:
    assert INSTALL[:2] == ["pip", "install"]
    assert REST[0] == MADE[0]
    assert len(MADE) + len(COMMANDS) == len(REST)
    assert {command[1] for command in QUICK} == set(SAID)


def words_of(command: list[str]) -> str:
    return " ".join(word for word in command[1:] if "conf" not in word and word != "experiment=video")


@pytest.mark.parametrize(
    "command",
    [pytest.param(command, marks=() if command in QUICK else pytest.mark.slow) for command in COMMANDS],
    ids=words_of,
)
def test_a_command_of_the_page_does_what_the_page_says(folder: Path, command: list[str]) -> None:
    done = walked(folder, ["-m", *command])
    assert done.code == 0, done.err
    assert SAID[command[1]] in done.out + done.err
    if command[1] == "plan":
        policies = ("balance=", "llm_sp=", "encoder_sp=", "pipeline=")
        assert [word for word in command if word.startswith(policies) and word not in done.out] == []


@pytest.fixture
def encoder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Encoder:
    monkeypatch.syspath_prepend(str(folder / "packages"))
    return make_encoder("video", {"name": "video"})


def test_rows_of_a_video_stand_in_time_height_and_width(encoder: Encoder) -> None:
    size = (5, 9, 20)
    tokens, rows = encoder.count(size)
    assert item_layout({"video": encoder}, ItemMeta("video", tokens, rows, 0, size), 272).grid == (3, 2, 3)


def test_every_pixel_of_a_video_stands_in_the_tubelet_at_its_place(encoder: Encoder) -> None:
    video = np.random.default_rng(0).integers(0, 256, (5, 9, 20), dtype=np.uint8)
    ready = encoder.preprocess(video)
    assert len(ready.values) == encoder.count(video.shape)[0]
    pairs = zip(ready.positions, ready.values.reshape(-1, 2, 4, 4), strict=True)
    tubelets = {tuple(map(int, where)): values for where, values in pairs}
    for frame, row, column in np.ndindex(video.shape):
        value = tubelets[frame // 2, row // 4, column // 4][frame % 2, row % 4, column % 4]
        assert value == pytest.approx(video[frame, row, column] / 255 - 0.5)


def test_a_damaged_video_is_a_sample_error(encoder: Encoder) -> None:
    for data in (b"no array", b""):
        with pytest.raises(SampleError, match=r"not a \.npy array"):
            encoder.decode(Item("video", "npy", (3, 4, 4), data))
    with pytest.raises(SampleError, match=r"state \(frames, height, width\)"):
        encoder.count((4, 4))


def test_rows_of_the_tower_are_those_of_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the weights of its folder, which has other names for them."""
    monkeypatch.syspath_prepend(str(folder / "packages"))
    model = transformers.AutoModel.from_pretrained(folder / "package/models/dinov2")
    own: Any = make_encoder("image", {"name": "dinov2", "folder": str(folder / "package/models/dinov2")})
    found, pack = published("image", own), items(own)
    assert found is not None
    assert sorted(len(rule.theirs) for rule in found.rules.values()) == [1] * len(found.tensors)
    assert off(ours(own, built(own, model), pack), expected(own, model, pack)) <= 1e-6

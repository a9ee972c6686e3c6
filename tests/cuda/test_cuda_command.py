"""`omni rehearse --device cuda`, and where it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_gpu import FakeGPU
from small import overrides, write_mixed

from omni.__main__ import main
from omni.config import ConfigError
from omni.rehearsal import noop_guard

COMMAND = ("rehearse", "--dry", "--device", "cuda", "--json", "--rank", "1")
STRICT = """\
import sys
from omni.rehearsal import findings, noop_guard
from omni.__main__ import main
findings.ALLOWED = findings.ALLOWED[1:]
install = noop_guard.install
def with_a_race():
    install()
    from infra.shard_file import Shard
    Shard.read = lambda shard: shard.data.numpy()  # whether it is whole or not
noop_guard.install = with_a_race
sys.exit(main(sys.argv[1:]))
"""


def rehearse(start: list[str], line: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *start, *COMMAND, *line],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("command")
    write_mixed(path / "mixed")
    few = ["train.precision=auto", "model.llm.layers=2", "layout.llm.pp=2", "data.step_samples=2"]
    return overrides(path / "mixed", path, *few)


def test_the_command_says_what_a_rank_launches_and_where_its_host_waits(
    gpu: FakeGPU, line: list[str]
) -> None:
    done = rehearse(["-m", "omni"], line)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    forward = figures["launches"]["forward"]
    # One layer on each of two stages: the kernel and the zeros beside it.
    assert forward["launches"]["attention"] == 2 * forward["ops"]
    assert figures["unknown"] == {}
    assert forward["product_flops"] > 0
    assert forward["host_ms"] == pytest.approx(sum(forward["launches"].values()) * 6e-3, abs=1e-3)
    assert forward["bound_by"] == "launches", "products of 64 columns"
    assert {f["phase"] for f in figures["findings"]} >= {"build", "totals", "restore"}


def test_a_wait_that_is_not_on_the_list_and_a_race_fail_the_command(gpu: FakeGPU, line: list[str]) -> None:
    done = rehearse(["-c", STRICT], line)
    assert done.returncode == 1
    assert "not allowed: build (engine): the host waits" in done.stderr
    assert "not allowed: checkpoint (checkpoint): nothing orders, numpy on the host reads" in done.stderr


def test_without_a_compiler_the_command_says_what_to_install(line: list[str], tmp_path: Path) -> None:
    done = rehearse(["-m", "omni"], line, CXX="no-such-compiler", XDG_CACHE_HOME=str(tmp_path))
    assert done.returncode == 2
    assert "no C++ compiler 'no-such-compiler'" in done.stderr
    assert "install g++" in done.stderr


def test_a_compiler_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o700)
    monkeypatch.setenv("CXX", str(slow))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(noop_guard, "COMPILE_S", 0.3)
    with pytest.raises(ConfigError, match=rf"{slow} has not built .*noop_cuda.cpp in 0.3 s, .*CXX"):
        noop_guard.built()


def test_a_guard_is_not_loaded_from_where_others_may_put_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    planted = noop_guard.kept(Path(torch.__file__).parent)
    planted.parent.mkdir()
    planted.write_bytes(b"of a stranger")
    planted.parent.chmod(0o777)
    with pytest.raises(ConfigError, match=r"others may write to it.*XDG_CACHE_HOME"):
        noop_guard.built()


def test_each_environment_has_a_guard_with_its_own_torch(gpu: FakeGPU) -> None:
    """A guard of an environment that is gone finds no torch; one of another loads a second torch."""
    own = Path(torch.__file__).parent
    assert bytes(own / "lib") in noop_guard.built().read_bytes(), "where it looks for libraries"
    assert noop_guard.kept(own) == noop_guard.built() != noop_guard.kept(own.parent / "other" / "torch")


def test_a_process_that_has_torch_is_refused(
    line: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main([*COMMAND, *line]) == 2
    assert "a process of its own" in capsys.readouterr().err

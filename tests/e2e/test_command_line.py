"""Every command explains itself, quickly, and only what is chosen is imported."""

import ast
import dataclasses
import io
import signal
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from runs import Running, omni

from omni.__main__ import main
from omni.config import Config

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("omni", "infra", "dataloader", "pipeline", "parallel", "ops")
COMMANDS = sorted(file.stem for file in (ROOT / "omni" / "commands").glob("[a-z]*.py"))


def test_omni_help_names_every_command(tmp_path):
    result = omni(["--help"], tmp_path, timeout_s=60)
    assert result.code == 0, result.err
    assert result.err == ""
    for command in COMMANDS:
        assert f"\n    {command} " in result.out


def test_omni_says_its_version(tmp_path):
    result = omni(["--version"], tmp_path, timeout_s=60)
    assert (result.code, result.err) == (0, "")
    assert result.out == f"{version('omni-train')}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(tmp_path, command):
    result = omni([command, "--help"], tmp_path, timeout_s=60)
    assert result.code == 0, result.err
    assert "Traceback" not in result.err
    assert len(result.out.splitlines()) >= 5
    assert list(tmp_path.iterdir()) == []


def test_omni_train_help_lists_groups_and_every_key_with_its_value(tmp_path):
    result = omni(["train", "--help"], tmp_path, timeout_s=60)
    for group in ("model", "layout", "system", "data", "optim", "cluster", "tracking", "experiment"):
        assert f"\n{group}: " in result.out
    for name, inner in ((field.name, field.default_factory()) for field in dataclasses.fields(Config)):
        if inner == {}:
            assert f"\n{name}: {{}}\n" in result.out
            continue
        assert f"\n{name}:\n" in result.out
        for key in dataclasses.fields(inner):
            assert f"\n  {key.name}:" in result.out
    assert "steps: 2000" in result.out


@pytest.mark.parametrize(
    "arguments", [[], ["tarin"], ["data"], ["data", "biuld"], ["parity", "train.steps=1"]]
)
def test_a_command_that_does_not_exist_is_refused_with_the_usage(tmp_path, arguments):
    result = omni(arguments, tmp_path, timeout_s=60)
    assert result.code == 2
    assert "Traceback" not in result.err
    assert "usage: omni" in result.err or "error:" in result.err


@pytest.mark.parametrize("key", ["launch.ranks=0", "cluster.ranks_per_node=0"])
@pytest.mark.parametrize("command", [["plan"], ["layout", "show"], ["rehearse", "--dry"]])
def test_numbers_below_their_least_are_refused_by_every_command(tmp_path, command, key):
    result = omni([*command, key], tmp_path, timeout_s=60)
    assert result.code == 2
    assert key in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    "command",
    [["train"], ["plan"], ["layout", "show"], ["rehearse", "--dry"], ["parity"]],
    ids=lambda command: command[0],
)
def test_every_command_composes_files_of_a_users_own_folder(tmp_path, command):
    (tmp_path / "own" / "layout").mkdir(parents=True)
    (tmp_path / "own" / "layout" / "mine.yaml").write_text("llm: {pp: 3}\n")
    after = ["--", "train.steps=1"] if command == ["parity"] else []
    result = omni([*command, "--config-dir", "own", "layout=mine", *after], tmp_path)
    assert result.code == 2
    assert "layout.llm.pp=3" in result.err, "of two ranks"
    assert "Traceback" not in result.err


def test_overrides_may_stand_on_both_sides_of_an_option(tmp_path):
    keys = ["layout", "show", "layout.llm.pp=2", "--rank", "1", "model.llm.layers=1"]
    result = omni(keys, tmp_path, timeout_s=60)
    assert result.code == 2
    assert "layout.llm.pp=2" in result.err
    assert "model.llm.layers=1" in result.err
    assert omni([*keys, "--rnk"], tmp_path, timeout_s=60).code == 2


@pytest.mark.parametrize("command", [["layout", "show", "launch.ranks=4096"], ["train", "--help"]])
def test_a_reader_that_has_seen_enough_is_no_error_and_no_success(tmp_path, command):
    code = (
        "import os, subprocess, sys\n"
        f"show = subprocess.Popen([sys.executable, '-m', 'omni', *{command}],\n"
        "    stdout=subprocess.PIPE, stderr=subprocess.PIPE)\n"
        "show.stdout.close()\n"
        "sys.stderr.write(show.stderr.read().decode())\n"
        "sys.exit(show.wait())"
    )
    result = Running(["-c", code], tmp_path).finish(60)
    assert (result.code, result.err) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("command", ["plan", "train"])
def test_ctrl_c_ends_a_command_without_a_traceback(monkeypatch, capsys, command):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr("omni.__main__.import_module", interrupted)
    assert main([command]) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "interrupted\n"


def test_a_name_that_the_locale_cannot_show_ends_no_command(tmp_path, monkeypatch):
    (tmp_path / "größe").mkdir()
    (tmp_path / "größe" / "config.yaml").write_text("")
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    assert main(["status", *[str(tmp_path / "größe")] * 2]) == 0
    assert out.buffer.getvalue().count(b"/gr\\xf6\\xdfe  0 of ?") == 2


def test_help_and_mistakes_do_not_wait_for_heavy_imports(tmp_path):
    """In one process: each of these may import no more than those behind it."""
    may_not = (
        (["--help"], {"torch", "hydra", "wandb", "megatron", "pyarrow"}),
        (["data", "--help"], {"torch", "hydra", "wandb", "megatron"}),
        (["parity", "--help"], {"torch", "wandb", "megatron"}),
        (["plan", "layout.llm.pp=3"], {"megatron", "wandb"}),
        (["layout", "show"], {"megatron", "wandb"}),
        (["rehearse", "--dry", "layout.llm.pp=3"], {"megatron", "wandb"}),
        (["train", "layout.llm.pp=3"], {"megatron", "wandb"}),
    )
    code = (
        "import sys; from omni.__main__ import main\n"
        f"for arguments in {[arguments for arguments, _ in may_not]!r}:\n"
        "    try: main(arguments)\n"
        "    except SystemExit: pass\n"
        "    print('imported:', *sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    result = Running(["-c", code], tmp_path).finish(60)
    assert result.code == 0, result.err
    found = [set(line.split()) for line in result.out.splitlines() if line.startswith("imported:")]
    assert all("omni" in imported for imported in found)
    for (arguments, unwanted), imported in zip(may_not, found, strict=True):
        assert not unwanted & imported, arguments


def test_a_rank_imports_neither_a_compiler_nor_a_tracker_before_it_needs_one(tmp_path):
    code = "import sys, omni.training.worker; print(*sys.modules)"
    result = Running(["-c", code], tmp_path).finish(60)
    assert result.code == 0, result.err
    unwanted = {"wandb"} if torch.cuda.is_available() else {"wandb", "torch._inductor.compile_fx"}
    assert not unwanted & set(result.out.split())


def sources() -> list[Path]:
    return [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]


def test_what_is_run_as_a_module_is_guarded():
    """No module does work when it is imported: spawned processes and tests import them all."""
    unguarded = []
    for file in sources():
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                call = ast.unparse(node.value.func)
                if call.rpartition(".")[2] in ("main", "run", "exit", "exit_with", "launch_local", "train"):
                    unguarded.append(f"{file.relative_to(ROOT)}:{node.lineno}: {call}")
    assert unguarded == []


ENTRY_POINTS = (
    "infra/agent.py",
    "infra/forkserver.py",
    "infra/launchers/local.py",
    "infra/launchers/node.py",
    "omni/__main__.py",
    "omni/calibration/worker.py",
    "omni/doctor/worker.py",
    "omni/training/against.py",
    "omni/training/of_checkpoint.py",
    "omni/training/side_by_side.py",
    "omni/training/worker.py",
    "omni/training/parity.py",
)


@pytest.mark.parametrize("module", ENTRY_POINTS)
def test_entry_points_run_under_a_guard(module):
    tree = ast.parse((ROOT / module).read_text())
    guards = [node for node in tree.body if isinstance(node, ast.If) and "__main__" in ast.unparse(node.test)]
    *first, entry = guards
    assert entry is tree.body[-1]
    assert {ast.unparse(guard.test) for guard in guards} == {"__name__ == '__main__'"}
    # A process of a launch may ask to end with its parent before it imports what takes long.
    assert [ast.unparse(guard.body) for guard in first] in ([], ["end_with_parent()"])


def test_entry_points_are_all_in_the_list_above():
    guarded = {file.relative_to(ROOT).as_posix() for file in sources() if "__name__ ==" in file.read_text()}
    assert guarded == {*ENTRY_POINTS}

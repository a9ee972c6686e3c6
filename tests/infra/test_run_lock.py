"""A run folder has one holder; one that is gone is told from one that is not, or may not be."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from infra.run_folder import RunFolder
from infra.run_lock import (
    FILE,
    Holder,
    LockedError,
    holding,
    is_alive,
    launch_of_rank,
    read_holder,
    this_process,
)

HERE = Holder("here", "boot", "space", 1, 1.0, "mine", "today", "machine")
THERE = replace(HERE, pid=7, started=70.0, launch="other")


@pytest.mark.parametrize(
    "holder, start, alive",
    [
        (THERE, 70.0, True),
        (THERE, None, False),  # no process has its number
        (THERE, 71.0, False),  # another has it now
        (replace(THERE, boot="earlier"), 70.0, False),  # the machine was restarted
        (replace(THERE, host="elsewhere"), 70.0, None),
        (replace(THERE, host="elsewhere", boot="earlier"), 70.0, None),
        (replace(THERE, space="a container"), 70.0, None),
        (replace(THERE, boot="another", machine="another of this name"), 70.0, None),
        (replace(THERE, machine=""), 70.0, None),
    ],
)
def test_a_holder_is_alive_if_its_process_is_the_one_that_took_the_lock(holder, start, alive):
    assert is_alive(holder, HERE, lambda pid: start if pid == 7 else None) is alive


@pytest.mark.parametrize(
    ("boot", "start", "alive"), [("boot", 70.0, True), ("boot", None, False), ("another", 70.0, None)]
)
def test_in_containers_without_a_machine_id_another_boot_may_be_another_machine(boot, start, alive):
    holder, here = replace(THERE, boot=boot, machine=""), replace(HERE, machine="")
    assert is_alive(holder, here, lambda pid: start if pid == 7 else None) is alive


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "run")


def held_by(folder, **changes):
    """Write a lock of another launch, of this process but for the changes."""
    RunFolder.create(folder.path)
    holder = replace(this_process("other"), **changes)
    (folder.path / FILE).write_text(json.dumps(vars(holder)))
    return holder


def test_a_lock_is_held_inside_the_block_and_leaves_nothing(folder):
    with holding(folder, "mine"):
        assert holds(folder, "mine")
        folder.config.write_text("a: 1")
    assert read_holder(folder) is None
    assert sorted(path.name for path in folder.path.iterdir()) == ["checkpoints", "config.yaml"]


def test_a_folder_that_became_read_only_is_told_and_fails_nothing(folder, monkeypatch, capsys):
    def unlink(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with holding(folder, "mine"):
        monkeypatch.setattr(Path, "unlink", unlink)
    assert f"the lock of {folder.path} cannot be removed: [Errno 30] Read-only" in capsys.readouterr().err


def test_a_folder_that_is_gone_holds_no_lock(folder):
    with holding(folder, "mine"):
        shutil.rmtree(folder.path)


def test_a_folder_in_which_nothing_was_written_is_removed(folder):
    with pytest.raises(KeyError), holding(folder, "mine"):
        raise KeyError
    assert not folder.path.exists()


def test_a_live_holder_is_named_and_left_alone(folder):
    holder = held_by(folder)
    with pytest.raises(LockedError, match=f"process {holder.pid}.*stop it, or choose another run.dir"):
        holding(folder, "mine").__enter__()
    assert read_holder(folder) == holder


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"space": "a container"}])
def test_where_a_holder_cannot_be_seen_the_message_says_which_file_to_remove(folder, change):
    held_by(folder, **change)
    with pytest.raises(LockedError, match=f"cannot be seen from here.*remove {folder.path / FILE}"):
        holding(folder, "mine").__enter__()


def holds(folder, launch):
    """Whether this process holds the lock, whenever it took it."""
    return replace(read_holder(folder), since="") == replace(this_process(launch), since="")


@pytest.mark.parametrize("change", [{"boot": "earlier"}, {"started": 1.0}, {"pid": 2**22 + 1}])
def test_a_stale_lock_is_taken_over(folder, change, tmp_path, monkeypatch):
    (tmp_path / "machine-id").write_text("machine")
    monkeypatch.setattr("infra.run_lock._MACHINE", tmp_path / "machine-id")
    held_by(folder, **change)
    with holding(folder, "mine"):
        assert holds(folder, "mine")


def test_a_lock_of_the_same_launch_is_shared_and_stays_with_its_holder(folder):
    holder = held_by(folder, launch="mine")
    with holding(folder, "mine"):
        assert read_holder(folder) == holder
    assert read_holder(folder) == holder


def test_a_launch_goes_on_elsewhere_after_the_holder_of_its_lock_went_away(folder):
    held_by(folder, launch="mine", host="elsewhere")
    with holding(folder, "mine"):
        assert holds(folder, "mine")


@pytest.fixture
def stopped(folder, monkeypatch):
    """Another process that looks at the lock and is stopped there; little patience with it."""
    monkeypatch.setattr("infra.run_lock.ALONE_S", 0.1)
    RunFolder.create(folder.path)
    handle = os.open(folder.path, os.O_RDONLY)
    yield lambda: fcntl.flock(handle, fcntl.LOCK_EX)
    os.close(handle)


def test_who_cannot_look_at_a_lock_says_so_in_time(folder, stopped):
    stopped()
    folder.config.write_text("a: 1")  # the folder stays
    with pytest.raises(
        LockedError, match=rf"{folder.path}: this process waited 0.1 s for a lock .* folder\."
    ):
        holding(folder, "mine").__enter__()
    holder = held_by(folder)
    with pytest.raises(LockedError, match=f"launch other .*process {holder.pid},.*trains or did.*end it"):
        holding(folder, "mine").__enter__()


def test_a_lock_that_cannot_be_looked_at_in_the_end_fails_nothing(folder, stopped, capsys):
    with holding(folder, "mine"):
        stopped()
    assert f"the lock of {folder.path} cannot be removed" in capsys.readouterr().err


def test_a_damaged_lock_is_named(folder):
    RunFolder.create(folder.path)
    (folder.path / FILE).write_text("{")
    with pytest.raises(LockedError, match="damaged"):
        holding(folder, "mine").__enter__()


def test_ranks_know_their_launch(monkeypatch):
    monkeypatch.delenv("OMNI_LAUNCH_ID", raising=False)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert launch_of_rank() is None, "torchrun without --rdzv-id"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    assert launch_of_rank() == "job-7"
    monkeypatch.setenv("OMNI_LAUNCH_ID", "mine")
    assert launch_of_rank() == "mine"


TAKE = """
import sys, time
from pathlib import Path
from infra.run_folder import RunFolder
from infra.run_lock import LockedError, holding
while not Path(sys.argv[2]).exists():
    time.sleep(0.001)
try:
    with holding(RunFolder(Path(sys.argv[1])), sys.argv[3]):
        time.sleep(1)
except LockedError:
    sys.exit(2)
"""


def test_of_launches_that_find_a_stale_lock_at_once_one_takes_it(folder, tmp_path):
    held_by(folder, started=1.0)
    go = tmp_path / "go"
    takers = [
        subprocess.Popen([sys.executable, "-c", TAKE, str(folder.path), str(go), f"launch {i}"])
        for i in range(3)
    ]
    go.touch()
    assert sorted(taker.wait(60) for taker in takers) == [0, 2, 2]

"""What is refused of jobs that are sound by themselves."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dataloader.storage import Storage
from infra.checkpoint import claim, commit
from infra.last_checkpoint import note_last
from infra.launchers.job import Job
from infra.machine import Machine
from infra.run_folder import RunFolder
from omni.commands import _jobs
from omni.commands._jobs import Prepared
from omni.commands._launchers import LauncherConfig
from omni.config import Config, ConfigError, LaunchConfig, TrainConfig


def job(number, ranks, oversubscribe=False):
    config = Config(launch=LaunchConfig(oversubscribe=oversubscribe))
    return Prepared(Job(number, "job", Path("folder"), 1, ranks), config, "")


def test_jobs_that_run_together_fit_the_machine_together(monkeypatch):
    monkeypatch.setattr(_jobs, "this_machine", lambda: Machine(1, 2**40))
    ranks = 4, 1, 5, 2, 1  # 8 a core
    jobs = [job(number, each) for number, each in enumerate(ranks)]
    _jobs._check_crowd(jobs[:2] + jobs[3:], 3)
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.parallel=3: 11 ranks at a time: .* 1 cores"):
        _jobs._check_crowd(jobs, 3)
    _jobs._check_crowd([replace(each, config=job(0, 1, True).config) for each in jobs], 3)


def test_jobs_of_a_sweep_keep_their_checkpoints_apart():
    def saving(number, where):
        return replace(job(number, 1), config=Config(train=TrainConfig(checkpoint_dir=where)))

    _jobs._check_checkpoints([job(0, 1), job(1, 1), saving(2, "a"), saving(3, "b")])
    with pytest.raises(ConfigError, match=r"train\.checkpoint_dir=a .* jobs 1 and 2: give each"):
        _jobs._check_checkpoints([saving(0, "b"), saving(1, "a"), saving(2, "a")])


def test_a_new_run_does_not_take_the_checkpoints_of_another_for_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("omni.training.fingerprint.fingerprint", lambda spec: {})
    storage = Storage.at(tmp_path / "kept")
    commit(storage, claim(storage, None, adopt=True), 7, [], {"cursor": 56, "fingerprint": {}})
    spec = SimpleNamespace(config=Config(train=TrainConfig(steps=7, checkpoint_dir=str(tmp_path / "kept"))))
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"checkpoint_dir=.* of another run, and run\.dir=.*/run is new"):
        _jobs._continued(folder, spec)
    assert not folder.path.exists()
    folder.path.mkdir()
    folder.config.write_text("of an older version: true\n")
    assert _jobs._continued(folder, spec) == (7, 56, None)
    spec.config.train.steps = 6
    with pytest.raises(ConfigError, match=r"train\.steps=6: the run has done 7 steps: .* --fork FOLDER"):
        _jobs._continued(folder, spec)


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew(tmp_path, capsys):
    store, folder = tmp_path / "kept", RunFolder(tmp_path / "run")
    spec = SimpleNamespace(config=Config(train=TrainConfig(checkpoint_dir=str(store))))
    folder.path.mkdir()
    assert _jobs._continued(folder, spec) == (0, 0, None), "it has saved nothing yet"
    note_last(folder, Storage.at(store), 4)
    with pytest.raises(ConfigError) as refused:
        _jobs._continued(folder, spec)
    for word in ("train.checkpoint_dir", f"saved {store}/step_00000004", "mounted?", "from the start"):
        assert word in str(refused.value)
    assert not store.exists()
    (folder.path / "last_checkpoint").unlink()
    (folder.path / "last_checkpoint").mkdir()
    note_last(folder, Storage.at(store), 4)
    assert "last_checkpoint cannot be written" in capsys.readouterr().err
    (folder.path / "last_checkpoint").rmdir()
    assert _jobs._continued(folder, spec) == (0, 0, None)


@pytest.mark.parametrize("launcher", [{"setup": ["export A=ABCDEFGH"]}, {"env": {"A": "ABCDEFGH"}}])
def test_scripts_hold_no_secret_of_the_environment(monkeypatch, launcher):
    monkeypatch.setenv("MY_TOKEN", "ABCDEFGH")
    assert "dir:" in _jobs._written(Config(), LauncherConfig(setup=["export A=ABCDEFG"]))
    with pytest.raises(ConfigError, match="holds the value of MY_TOKEN"):
        _jobs._written(Config(), LauncherConfig(**launcher))


@pytest.mark.parametrize(("ranks", "every", "refused"), [(8, 0, False), (9, 0, True), (9, 50, False)])
def test_many_ranks_that_save_nothing_before_the_end_are_refused_unless_they_say_so(ranks, every, refused):
    config = Config(train=TrainConfig(steps=50, checkpoint_every=every))
    if not refused:
        _jobs._check_saves(config, ranks)
        return
    with pytest.raises(ConfigError, match=r"checkpoint_every=0 with launch\.ranks=9.*checkpoint_every=100"):
        _jobs._check_saves(config, ranks)

"""Real Slurm, two virtual nodes: a sweep of four jobs of two nodes; one that is queued again, then cancelled;
agents, srun and scripts that are killed.

Where Slurm cannot be started these are skipped, with the reason.
"""

import re
import subprocess
from functools import partial
from pathlib import Path

import psutil
import pytest
import slurm_cluster
from processes import MARK, marked
from runs import TINY, Running, data_keys, omni, steps, strip, write

from dataloader.storage import Storage
from infra.checkpoint import complete, verify
from infra.launchers.job import Job
from infra.launchers.script import Batch, render

pytestmark = pytest.mark.slow

LAUNCHER = slurm_cluster.launcher("127.0.0.1")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    with slurm_cluster.slurm(tmp_path_factory.mktemp("slurm"), 2, 2, "CPUs=1 RealMemory=4000") as env:
        yield env


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return data_keys(write(tmp_path_factory.mktemp("data") / "strips", [strip(i) for i in range(32)]))


def ask(cluster, *command):
    return subprocess.run(command, env=cluster, capture_output=True, text=True, timeout=60, check=True).stdout


def test_a_sweep_of_jobs_of_two_nodes_completes(cluster, data, tmp_path):
    keys = ["layout=data_parallel,pp2", "optim.lr=1e-3,2e-3", "train.steps=2", "hydra.sweep.dir=sweep"]
    waited = ["-m", "omni", "train", "-m", *TINY, *data, *LAUNCHER, *keys, "hydra.launcher.wait=true"]
    done = Running(waited, tmp_path, cluster).finish(480)  # four jobs, one after the other
    assert done.code == 0, done.err
    assert len(re.findall(r"^\d +\d+ +quickstart-\d +2 +2 ", done.err, re.M)) == 4, "two nodes, two ranks"
    assert len(re.findall(r"^\d +completed +layout=", done.err, re.M)) == 4
    for folder in (tmp_path / "sweep" / str(number) for number in range(4)):
        assert (steps(folder), (folder / "exit_code").read_text()) == ([1, 2], "0\n")
    assert omni(["sweep", "show", "sweep"], tmp_path).out.count(" done ") == 4


def test_a_job_of_two_nodes_resumes_when_queued_again_and_saves_when_cancelled(cluster, data, tmp_path):
    keys = ["train.steps=100000", "train.checkpoint_every=5", "run.dir=run"]
    done = Running(["-m", "omni", "train", *TINY, *data, *LAUNCHER, *keys], tmp_path, cluster).finish()
    assert done.code == 0, done.err
    long = tmp_path / "run"
    (number,) = re.findall(r"^\d +(\d+) +quickstart ", done.err, re.M)

    def has_steps(least):
        return lambda: len(steps(long)) >= least and complete(Storage.at(long / "checkpoints")) != []

    slurm_cluster.wait(has_steps(6), "checkpoint", 240)
    ask(cluster, "scontrol", "requeue", number)
    shown = partial(ask, cluster, "scontrol", "show", "job", number)
    started = {"Restarts=1", "JobState=RUNNING"}  # the count alone rises while the first start still saves
    slurm_cluster.wait(lambda: started <= set(shown().split()), "restart", 120)
    before = complete(Storage.at(long / "checkpoints"))[-1]
    slurm_cluster.wait(has_steps(before + 6), "step after the restart", 240)
    ask(cluster, "scancel", number)
    slurm_cluster.wait((long / "exit_code").exists, "end", 120)
    assert (long / "exit_code").read_text() == "143\n"
    last = complete(Storage.at(long / "checkpoints"))[-1]
    assert last == len(steps(long)) > before, "saved after the step under way"
    assert steps(long) == list(range(1, last + 1)), "no step is lost or repeated"
    assert verify(Storage.at(long / "checkpoints"), last)["step"] == last, "it can be loaded"


@pytest.mark.parametrize(
    ("victim", "words"),
    [
        ("agent", ["-m", "infra.launchers.node"]),
        ("srun", ["srun", "--kill-on-bad-exit=0"]),
        ("script", ["slurm_script"]),
    ],
)
def test_nothing_of_a_job_outlives_what_is_killed(cluster, data, tmp_path, victim, words):
    environment = {**cluster, MARK: str(tmp_path)}
    keys = ["train.steps=100000", "run.dir=run", "hydra.launcher.requeue=false"]
    done = Running(["-m", "omni", "train", *TINY, *data, *LAUNCHER, *keys], tmp_path, environment).finish()
    assert done.code == 0, done.err
    slurm_cluster.wait(lambda: steps(tmp_path / "run"), "step", 240)
    whole = marked(tmp_path)
    assert sum(process.name().startswith("omni-rank-") for process in whole) == 2
    next(process for process in whole if set(words) <= words_of(process)).kill()
    slurm_cluster.wait(lambda: not marked(tmp_path), f"end of all with its {victim}", 30)


def words_of(process: psutil.Process) -> set[str]:
    """The words of a command line, with the names of files for their paths."""
    return {Path(word).name for word in process.cmdline()}


def test_a_script_for_128_nodes_is_accepted(tmp_path):
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    what = "CPUs=64 RealMemory=100000 Gres=gpu:8"
    with slurm_cluster.slurm(tmp_path / "slurm", 0, 128, what, "GresTypes=gpu") as cluster:
        folder = tmp_path / "my runs"
        folder.mkdir()
        job = Job(0, "big", folder, 128, 8, 1, env={"NCCL_DEBUG": "INFO"})
        job.script.write_text(render(job, Batch("python", time="2:00:00", partition="main"), tmp_path))
        number = ask(cluster, "sbatch", "--parsable", "--hold", str(job.script)).strip()
        shown = ask(cluster, "scontrol", "--oneliner", "show", "job", number)
        ask(cluster, "scancel", number)
    assert {"NumNodes=128-128", "Requeue=1", "TimeLimit=02:00:00"} <= set(shown.split())
    assert f"StdOut={folder}/output.log" in shown
    assert "gpu:8" in shown

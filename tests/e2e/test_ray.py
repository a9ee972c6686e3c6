"""Real Ray, a cluster of simulated nodes on this machine: a sweep of jobs of two nodes; a job that loses a
node, goes on and is interrupted; one that finds no room; an index that tasks build; an agent and a launcher
that are killed.
"""

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runs import TINY, Running, data_keys, omni, steps, strip, write

from dataloader.storage import Storage
from infra.checkpoint import complete, verify

pytest.importorskip("ray", reason="Ray is not installed: pip install 'omni-train[ray]'")
pytestmark = pytest.mark.slow

NODE = {"node_ip_address": "127.0.0.2", "object_store_memory": 10**8, "include_dashboard": False}


@pytest.fixture(scope="module")
def cluster():
    """A head without CPUs, which launchers connect to, and two nodes of one CPU."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        up = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **NODE})
        try:
            for _ in range(2):
                up.add_node(num_cpus=1, **NODE)
            yield up
        finally:
            up.shutdown()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return data_keys(write(tmp_path_factory.mktemp("data") / "strips", [strip(i) for i in range(32)]))


def launcher(cluster, *more):
    own = ["hydra/launcher=ray", f"hydra.launcher.address={cluster.address}", "hydra.launcher.gpus=false"]
    return [*own, "hydra.launcher.ranks_per_node=1", *more]


def test_jobs_of_two_nodes_complete(cluster, data, tmp_path):
    keys = ["launch.ranks=2", "layout=data_parallel,pp2", "train.steps=2"]
    own = launcher(cluster, "hydra.sweep.dir=sweep")
    done = Running(["-m", "omni", "train", "-m", *TINY, *data, *own, *keys], tmp_path, fresh=True).finish(480)
    assert done.code == 0, done.err
    assert len(re.findall(r"^\d +quickstart-\d +2 +2 ", done.err, re.M)) == 2, "two nodes, two ranks"
    assert len(re.findall(r"^\d +completed +layout=", done.err, re.M)) == 2
    for folder in (tmp_path / "sweep" / str(number) for number in range(2)):
        assert (steps(folder), (folder / "exit_code").read_text()) == ([1, 2], "0\n")
        assert (folder / "output.1.log").exists()
    assert omni(["sweep", "show", "sweep"], tmp_path).out.count(" done ") == 2


def test_a_job_that_loses_a_node_goes_on_and_saves_when_it_is_interrupted(cluster, data, tmp_path):
    keys = ["launch.ranks=2", "train.steps=100000", "train.checkpoint_every=5", "run.dir=run"]
    running = Running(["-m", "omni", "train", *TINY, *data, *launcher(cluster), *keys], tmp_path, fresh=True)
    run = tmp_path / "run"
    storage = Storage.at(run / "checkpoints")
    try:
        running.wait_until(lambda: complete(storage) and len(steps(run)) > 5, "checkpoint")
        lost = cluster.worker_nodes.copy().pop()
        below = [process for process in trained_in(run) if under(process, lost)]
        assert len(below) >= 2, "an agent and a rank"
        cluster.remove_node(lost, allow_graceful=False)
        wait_for_ends(below)
        running.wait_until((run / "exit_code").exists, "loss", 30)
        assert (run / "exit_code").read_text() == "again\n", "it waits to be started again"
        before = complete(storage)[-1]
        cluster.add_node(num_cpus=1, **NODE)
        running.wait_until(lambda: len(steps(run)) > before + 5, "step after the loss")
        os.kill(running.process.pid, signal.SIGINT)
        done = running.finish()
    finally:
        running.end()
    assert (done.code, (run / "exit_code").read_text()) == (128 + signal.SIGINT, "130\n"), done.err
    assert "job 0 is queued again" in done.err
    assert re.search(r"^0 +stopped \(exit code 130\)", done.err, re.M)
    last = complete(storage)[-1]
    assert last == len(steps(run)) > before, "saved after the step under way"
    assert steps(run) == list(range(1, last + 1)), "no step is lost or repeated"
    assert verify(storage, last)["step"] == last, "it can be loaded"
    assert trained_in(run) == []


def test_a_job_that_finds_no_room_is_told_what_there_is(cluster, data, tmp_path):
    cluster.wait_for_nodes(timeout=60)  # a node that was lost may be listed for some time
    keys = ["launch.ranks=3", "train.steps=2", "run.dir=run"]
    done = omni(["train", *TINY, *data, *launcher(cluster, "hydra.launcher.room_s=2"), *keys], tmp_path)
    assert done.code == 2
    assert (
        "it asks for 3 × CPU 1, each on a node of its own; nodes there are: 1 × CPU 0; 2 × CPU 1" in done.err
    )
    assert "Traceback" not in done.err


def test_tasks_build_the_index_that_this_process_builds(cluster, tmp_path):
    (tmp_path / "source").mkdir()
    for number in range(4):
        texts = [f"text {i} of {number}" for i in range(20)]
        pq.write_table(pa.table({"text": texts}), tmp_path / f"source/{number}.parquet")
    line = ["data", "index", "source", "--recipe", "parquet", "--out"]
    assert omni([*line, "here"], tmp_path).code == 0
    # A process of its own: Ray's client keeps what it was told of one cluster for the next.
    on_ray = ["-m", "omni", *line, "there", "--on", "ray"]
    done = Running(on_ray, tmp_path, {"RAY_ADDRESS": cluster.address}, fresh=True).finish()
    assert done.code == 0, done.err
    here, there = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("here", "there")
    )
    assert here == there


# Jobs as they really are, but for their ranks' work.

DRIVER = """
import os, sys
from pathlib import Path
from infra.launchers.job import Job
from infra.launchers.ray_cluster import on_cluster
from infra.launchers.ray_jobs import run_on_ray
from infra.launchers.ray_nodes import RayNeeds

jobs = [Job(number, f"job-{number}", Path(str(number)).absolute(), 1, 1) for number in range(3)]
with on_cluster(sys.argv[1]) as ray:
    run_on_ray(ray, jobs, RayNeeds(sys.executable, False, 1, 60, True), os.getppid(), print)
"""

WORKER = """
import os, sys, time
from pathlib import Path
from infra.lineage import end_with_parent
from infra.run_folder import write_text

if __name__ == "__main__":
    end_with_parent()
    config = Path(sys.argv[1])
    write_text(config.with_name("rank"), f"{os.getpid()} {os.getppid()}")
    if config.read_text():
        sys.exit(int(config.read_text()))
    time.sleep(300)
"""


def test_what_is_killed_is_named_and_leaves_nobody_behind(cluster, tmp_path):
    package = tmp_path / "omni" / "training"
    package.mkdir(parents=True)
    for path, text in ((package, WORKER), (package.parent, "")):
        (path / "worker.py").write_text(text)
        (path / "__init__.py").touch()
    for number, text in enumerate(["3", "", ""]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.yaml").write_text(text)
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    running = Running(["-Pc", DRIVER, cluster.address], tmp_path, {"PYTHONPATH": path})
    try:
        running.wait_until((tmp_path / "1" / "rank").exists, "rank of job 1")
        rank, agent = (psutil.Process(int(pid)) for pid in (tmp_path / "1" / "rank").read_text().split())
        agent.kill()
        running.wait_until((tmp_path / "1" / "exit_code").exists, "end of job 1", 30)
        assert not runs(rank)
        running.wait_until((tmp_path / "2" / "rank").exists, "rank of job 2")
        codes = [(tmp_path / str(number) / "exit_code").read_text() for number in range(2)]
        assert codes == ["3\n", "137\n"], "neither touches the others"
        for victim in ("actor", "launcher"):
            running.wait_until((tmp_path / "2" / "rank").exists, "rank of job 2")
            below = trained_in(tmp_path / "2")
            assert len(below) == 3, "an agent, its fork server and its rank"
            (tmp_path / "2" / "rank").unlink()  # which the next start writes again
            (agent,) = (process for process in below if "infra.launchers.node" in process.cmdline())
            agent.parent().kill() if victim == "actor" else running.process.kill()
            wait_for_ends(below)
    finally:
        running.end()


def trained_in(run: Path) -> list[psutil.Process]:
    """Processes that were given the configuration of a run folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if str(run / "config.yaml") in process.cmdline() and runs(process):
                found.append(process)
    return found


def under(process, node) -> bool:
    """Whether a process descends from the raylet of a simulated node."""
    raylet = node.all_processes["raylet"][0].process.pid
    return raylet in [parent.pid for parent in process.parents()]


def runs(process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def wait_for_ends(processes) -> None:
    """Wait until processes have ended, as they must within ten seconds."""
    deadline = time.monotonic() + 10
    while any(map(runs, processes)):
        assert time.monotonic() < deadline, processes
        time.sleep(0.05)

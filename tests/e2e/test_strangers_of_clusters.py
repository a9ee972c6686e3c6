"""As tests/infra/test_strangers.py, of whole jobs that train: two nodes of a real Slurm, and a Ray of one
machine that `omni train` starts.

Where Slurm cannot be started, or Ray is not installed, its test is skipped, with the reason.
"""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest
import slurm_cluster
from processes import MARK, end_all, marked
from runs import TINY, Running, data_keys, steps, strip, write
from strangers import LIMIT_S, Harm, heeded, listeners, needs_another_user, network, outward

from parallel.handshake import new_secret

pytestmark = [pytest.mark.slow, needs_another_user]

STEPS = 400
# Until it is told to go, a run takes about 200 seconds for its steps, so that it trains while strangers come.
HELD = """
import time
from pathlib import Path
from omni.models.encoders.vit import ViTEncoder

class Held(ViTEncoder):
    def decode(self, item):
        if not Path(__file__).with_name("go").exists():
            time.sleep(0.2)
        return super().decode(item)
"""
# Calls all of Ray's servers as one who has no token, prints those that answer, and then runs a task.
INTRUDER = """
import json
import os
import sys

import grpc
import ray

cluster, command, *addresses = sys.argv[1:]
METHODS = (
    "ray.rpc.CoreWorkerService/NumPendingTasks",
    "ray.rpc.NodeManagerService/GetNodeStats",
    "ray.rpc.ObjectManagerService/Push",
    "ray.rpc.InternalKVGcsService/InternalKVKeys",
    "ray.rpc.JobInfoGcsService/GetAllJobInfo",
    "ray.rpc.RayletDriver/ClusterInfo",
)
answered, refused = [], 0
for address in addresses:
    with grpc.insecure_channel(address) as channel:
        for method in METHODS:
            try:
                channel.unary_unary("/" + method)(b"", timeout=2)
                answered.append((address, method))
            except grpc.RpcError as error:
                refused += error.code() == grpc.StatusCode.UNAUTHENTICATED
print(json.dumps((answered, refused)), flush=True)


@ray.remote(num_cpus=0)
def run():
    return os.system(command)


ray.init(address=cluster, log_to_driver=False)
ray.get(run.remote(), timeout=30)
"""


def prepare(folder):
    """The keys of a run that is held until a file in `folder` tells it to go, and its environment."""
    (folder / "held.py").write_text(HELD)
    data = data_keys(write(folder / "strips", [strip(i) for i in range(32)]))
    held = ["~model.encoders.image.name", "+model.encoders.image._target_=held.Held"]
    keys = [*TINY, *data, *held, "launch.ranks=2", f"train.steps={STEPS}", "run.dir=run"]
    return keys, {"PYTHONPATH": str(folder), MARK: str(folder)}


def check_end(folder, before, canary):
    """A run that was held goes on where strangers met it, to its end."""
    assert not canary.exists()
    assert before < STEPS, "they came while it trained"
    assert steps(folder / "run") == list(range(1, STEPS + 1))
    assert (folder / "run" / "exit_code").read_text() == "0\n"


def test_a_job_of_two_nodes_on_slurm_obeys_no_stranger(tmp_path):
    if reason := slurm_cluster.why_not():
        pytest.skip(reason)
    keys, env = prepare(tmp_path)
    launcher = [*slurm_cluster.launcher(outward()), f"+hydra.launcher.env.GLOO_SOCKET_IFNAME={network()}"]
    run, canary = tmp_path / "run", tmp_path / "harm"
    with slurm_cluster.slurm(tmp_path / "slurm", 2, 2, "CPUs=1 RealMemory=4000") as cluster:
        submit = Running(["-m", "omni", "train", *keys, *launcher], tmp_path, {**cluster, **env})
        try:
            done = submit.finish()
            assert done.code == 0, done.err
            slurm_cluster.wait(lambda: steps(run), "step", 240)
            job = marked(tmp_path)
            daemons = {parent for each in job for parent in each.parents() if parent.name() == "slurmstepd"}
            assert len(daemons) == 3, "of the script, and of each node"
            found = listeners([*job, *daemons])
            agents = [each for each in job if each.cmdline()[1:3] == ["-m", "infra.launchers.node"]]
            assert len(beyond_loopback(agents)) == len(agents) == 2, "a gate each, and stores behind it"
            ranks = [each for each in job if each.name().startswith("omni-rank-")]
            assert {address for address, _ in listeners(ranks)} == {outward()}, "gloo"
            agent = agents[0].cmdline()
            launch = agent[agent.index("--launch") + 1]
            obeyed = heeded((port for _, port in found), canary, launch)
            time.sleep(6)  # agents read of each other every five seconds
            before = len(steps(run))
            (tmp_path / "go").touch()
            slurm_cluster.wait((run / "exit_code").exists, "end", 240)
        finally:
            end_all(marked(tmp_path))
    assert obeyed == []
    check_end(tmp_path, before, canary)


def beyond_loopback(processes):
    return [port for address, port in listeners(processes) if not address.startswith("127.")]


def test_a_ray_that_omni_train_starts_obeys_nobody_without_its_token(tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'omni-train[ray]'")
    keys, env = prepare(tmp_path)
    launcher = ["hydra/launcher=ray", "hydra.launcher.gpus=false", "hydra.launcher.ranks_per_node=2"]
    run, canary = tmp_path / "run", tmp_path / "harm"
    running = Running(["-m", "omni", "train", *keys, *launcher], tmp_path, env)
    try:
        running.wait_until(lambda: len(steps(run)) > 0, "step")
        driver = psutil.Process(running.process.pid)
        whole = {driver, *running.descendants(), *marked(tmp_path)}
        of_ray = [driver, *(each for each in whole if each.name().startswith(("gcs_server", "ray")))]
        found, cluster = listeners(whole), listeners(of_ray)
        assert {address for address, _ in found} == {"127.0.0.1"}
        assert len(cluster) >= 6, "driver, GCS, raylet (two ports), runtime environments, actor"
        obeyed = heeded((port for _, port in found), canary)
        obeyed += heeded((port for _, port in cluster), canary, address="127.0.0.1")
        ((_, gcs),) = listeners(each for each in of_ray if each.name() == "gcs_server")
        answered = intrude(gcs, (port for _, port in cluster), canary)
        before = len(steps(run))
        (tmp_path / "go").touch()
        done = running.finish()
    finally:
        running.end()
        end_all(marked(tmp_path))
    assert obeyed == []
    assert answered == []
    assert done.code == 0, done.err
    check_end(tmp_path, before, canary)


def intrude(gcs, ports, canary):
    """What servers of Ray at `ports` answered those who have no token, and another one."""
    addresses = [f"127.0.0.1:{port}" for port in (gcs, *ports)]
    quiet = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # On the loopback interface, as the cluster: Ray takes 127.0.0.1 for the network's address otherwise.
    of_one_machine = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    started = []
    for token in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": new_secret()}):
        command = [sys.executable, "-c", INTRUDER, addresses[0], Harm(canary).command, *addresses[1:]]
        started.append(subprocess.Popen(command, env=of_one_machine | token, **quiet))
    found = []
    try:
        for each in started:
            out, err = each.communicate(timeout=LIMIT_S)
            answered, refused = json.loads(out)
            found += answered
            assert found or refused >= 5, "all but that of runtime environments ask for a token by gRPC"
            assert found or "Failed to connect to Ray cluster" in err, err
    finally:
        end_all(psutil.Process(each.pid) for each in started if each.poll() is None)
    return found

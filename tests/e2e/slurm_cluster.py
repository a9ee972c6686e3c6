"""A Slurm of this machine's own: controller, munge and as many virtual nodes as wanted, all in one folder."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
PORTS = range(17000, 19000)  # of daemons

CONF = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
FirstJobId={job}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerParameters=bf_interval=5,batch_sched_delay=1
KillWait=60
MessageTimeout=60
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] {what} State=UNKNOWN
PartitionName=main Nodes=n[1-{nodes}] Default=YES MaxTime=INFINITE State=UP
{more}
"""


def why_not() -> str | None:
    """Why no Slurm can be started here; None if one can be."""
    if os.geteuid() != 0:
        return "starting Slurm takes root"
    missing = [name for name in COMMANDS if shutil.which(name) is None and not _daemon(name)]
    return f"not installed: {', '.join(missing)} (apt-get install slurm-wlm munge)" if missing else None


@contextmanager
def slurm(folder: Path, running: int, nodes: int, what: str, more: str = "") -> Iterator[dict[str, str]]:
    """Run a Slurm of `nodes` nodes, each with `what`, of which the first `running` are up. Gives the
    environment in which its commands find it.
    """
    host, first = socket.gethostname().partition(".")[0], _free_ports(running + 1)
    for name in ("state", *(f"spool-n{number}" for number in range(1, running + 1))):
        (folder / name).mkdir(parents=True)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    conf = folder / "slurm.conf"
    # Where nodes of a job meet follows from its number: those of two clusters at a time differ.
    numbers = {"port": first, "first": first + 1, "last": first + nodes, "job": 1 + (first - PORTS[0]) * 5}
    conf.write_text(CONF.format(host=host, folder=folder, nodes=nodes, what=what, more=more, **numbers))
    env = {**os.environ, "SLURM_CONF": str(conf)}
    with ExitStack() as up:
        munge = {"socket": "socket", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        own = [f"--{option}={folder}/munge.{name}" for option, name in munge.items()]
        up.enter_context(_daemon_of(["munged", "-F", "--force", f"--key-file={folder}/munge.key", *own], env))
        wait(lambda: (folder / "munge.socket").exists(), "munge")
        up.enter_context(_daemon_of(["slurmctld", "-D", "-c"], env))
        for number in range(1, running + 1):
            up.enter_context(_daemon_of(["slurmd", "-D", "-N", f"n{number}"], env))
        wait(lambda: _ask(["sinfo", "-h", "-o", "%T"], env) is not None, "the controller")
        idle = ["sinfo", "-h", "-t", "idle", "-o", "%D"]
        wait(lambda: running == 0 or (_ask(idle, env) or "0").strip() == str(running), "the nodes")
        try:
            yield env
        finally:
            # The daemon of a step reports its end, and waits for ever for those to whom it would.
            _ask(["scancel", "--user=root"], env)
            wait(lambda: not (_ask(["squeue", "-h"], env) or "").strip(), "the end of all jobs", 90)


def launcher(address: str) -> tuple[str, ...]:
    """Keys of a run of two ranks on two nodes, which meet at an `address` of this machine."""
    return (
        "hydra/launcher=slurm",
        "hydra.launcher.gpus=false",
        "hydra.launcher.ranks_per_node=1",
        f"+hydra.launcher.env.OMNI_HEAD={address}",
        f"+hydra.launcher.env.OMNI_NODE_ADDRESS={address}",
        "launch.ranks=2",
    )


@contextmanager
def _daemon_of(command: Sequence[str], env: dict[str, str]) -> Iterator[None]:
    quiet = subprocess.DEVNULL
    program = [_daemon(command[0]) or command[0], *command[1:]]
    process = subprocess.Popen(program, env=env, stdin=quiet, stdout=quiet, stderr=quiet)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _daemon(name: str) -> str | None:
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def _ask(command: Sequence[str], env: dict[str, str]) -> str | None:
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    return None if done.returncode else done.stdout


def wait(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Poll a condition; fails if it does not come to hold in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come in {seconds} s"
        time.sleep(0.2)


def _free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on. Two processes begin to look at others: a
    while passes before a daemon listens.
    """
    rows = range(PORTS[0], PORTS[-1] - count, count)
    own = os.getpid() % len(rows)
    for first in (*rows[own:], *rows[:own]):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")

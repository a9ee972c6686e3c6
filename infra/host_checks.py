"""What may be wrong with a machine before ranks start on it: a function for each thing that is looked at.

Each returns a `Finding`: what was looked at, whether it is as it should be, what was found, and what to do.
None needs torch or other processes; what ranks find together is in omni/doctor.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from ops.near_device import SYSFS, VARIABLE, cores_beside, listed, wants_node

PROBE_BYTES = 16 * 2**20
SLOW_BYTES_PER_S = 20e6
LEAST_FREE_BYTES = 2**30
ANSWER_S = 5.0
DESCRIPTORS = 256  # of a rank without its peers
THREADS = 64  # of a rank: torch's, the loader's, those of communicators
_NEEDED = ("numpy", "torch", "megatron", "hydra", "omegaconf", "pyarrow", "psutil", "PIL", "wandb")
OURS = ("omni", "infra", "dataloader", "pipeline", "parallel", "ops", "hydra_conf")
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Finding:
    """What was looked at, whether it is as it should be, what was found, and the remedy if it is not."""

    what: str
    ok: bool
    said: str
    remedy: str = ""


def check_descriptors(limit: int, ranks: int) -> Finding:
    """Whether a rank may open enough files: gloo connects it to all others, in several groups."""
    needed = DESCRIPTORS + 4 * ranks
    said = f"a process may open {limit:,}; a rank of {ranks} needs about {needed:,}"
    remedy = f"raise the limit (ulimit -n {needed}; LimitNOFILE of systemd, --ulimit nofile of docker)"
    return Finding("file descriptors", limit >= needed, said, remedy)


def check_processes(limit: int, running: int, ranks_here: int) -> Finding:
    """Whether the user may start the threads of all ranks of this machine."""
    needed = running + THREADS * ranks_here
    said = f"this user may have {limit:,} threads; there are {running:,}, and ranks add {needed - running:,}"
    remedy = f"raise the limit (ulimit -u {needed}; --pids-limit of docker), or start fewer ranks"
    return Finding("processes", limit >= needed, said, remedy)


def check_threads(environment: Mapping[str, str], cores: int, ranks_here: int) -> Finding:
    """Whether computing threads fit the cores."""
    text = environment.get("OMP_NUM_THREADS")
    threads = int(text) if text and text.isdigit() else max(1, cores // ranks_here)
    source = "OMP_NUM_THREADS" if text else "as omni train sets it"
    said = f"{ranks_here} ranks × {threads} threads ({source}) on {cores} cores"
    fits = ranks_here * threads <= max(cores, ranks_here) and (text is None or text.isdigit())
    remedy = f"unset OMP_NUM_THREADS, or set it to {max(1, cores // ranks_here)}"
    return Finding("threads", fits, said, remedy)


def check_binding(
    environment: Mapping[str, str], gpus: Sequence[str], given: AbstractSet[int], sysfs: Path = SYSFS
) -> Iterator[Finding]:
    """Which cores the rank of each GPU keeps to, of those `given` to it. `gpus` are their PCI addresses, by
    number; `environment` is that of ranks.
    """
    if not gpus:
        yield Finding("binding", True, "there are no GPUs, so ranks are bound to no cores")
        return
    try:
        binds = wants_node(environment)
    except ValueError as error:
        yield Finding("binding", False, str(error), f"unset {VARIABLE} for {VARIABLE}=node")
        return
    for number, address in enumerate(gpus):
        beside = cores_beside(address, sysfs)
        where = f"cores {listed(beside)} lie beside {address}"
        if not beside:
            said = f"the machine does not tell which cores lie beside {address}: its rank is not bound"
        elif not binds:
            said = f"{where}; {VARIABLE} is none: its rank is not bound"
        elif not given & beside:
            said = f"{where}, and ranks are given {listed(given)} alone: its rank is not bound"
        else:
            said = f"{where}: its rank keeps to {listed(given & beside)}"
        yield Finding(f"binding, GPU {number}", True, said)


def check_folder(path: Path) -> Finding:
    """Whether a folder, or the nearest above it that there is, can be written, how fast, and has space."""
    what, path = f"folder {path}", path.absolute()
    while not path.exists():
        path = path.parent
    remedy = "choose another run.dir, on a file system for large files, or free space"
    if not path.is_dir():
        return Finding(what, False, f"{path} is a file", remedy)
    try:
        rate = _write_rate(path)
    except OSError as error:
        return Finding(what, False, f"cannot be written: {error}", remedy)
    free = shutil.disk_usage(path).free
    said = f"writes {rate / 1e6:.0f} MB/s, {free / 2**30:.1f} GiB free"
    return Finding(what, rate >= SLOW_BYTES_PER_S and free >= LEAST_FREE_BYTES, said, remedy)


def _write_rate(folder: Path) -> float:
    block = os.urandom(2**20)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".omni-doctor-") as file:
        start = time.perf_counter()
        for _ in range(PROBE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return PROBE_BYTES / (time.perf_counter() - start)


def check_port(port: int, host: str = "") -> Finding:
    """Whether a port that agents are to meet at is free."""
    with socket.socket() as probe:
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            said = f"cannot be taken: {error}"
            return Finding(
                f"port {port}",
                False,
                said,
                f"end what has it (ss -ltnp 'sport = :{port}'), or choose another",
            )
    return Finding(f"port {port}", True, "is free")


def check_name(name: str) -> Finding:
    """Whether a machine's own name leads to an address: torchrun's agents on several nodes use it."""
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        remedy = f"enter {name} in /etc/hosts, or give torchrun --local-addr"
        return Finding("host name", False, f"{name} leads nowhere: {error}", remedy)
    return Finding("host name", True, f"{name} is {address}")


def check_shadowed(path: Iterable[str], working: Path) -> Finding:
    """Whether modules in folders of PYTHONPATH stand for Python's, for packages that are needed, or ours."""
    found = [str(file) for entry in path if entry for file in _shadows(Path(entry))]
    if found:
        remedy = "rename them, or take their folder out of PYTHONPATH"
        return Finding("names of modules", False, f"shadow others in every rank: {', '.join(found)}", remedy)
    here = [file.name for file in _shadows(working)]
    note = f"; ranks do not see {', '.join(here)} of the working folder, torchrun by hand may" if here else ""
    return Finding("names of modules", True, f"none in PYTHONPATH shadows another{note}")


def _shadows(folder: Path) -> Iterator[Path]:
    names = {*sys.stdlib_module_names, *_NEEDED, *(() if folder.resolve() == ROOT else OURS)}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_module = path.suffix == ".py" or (path / "__init__.py").exists()
        if is_module and path.stem in names:
            yield path


def check_wandb(kind: str, mode: str, environment: Mapping[str, str]) -> Finding:
    """Whether W&B will go where the user means it to."""
    if kind != "wandb":
        return Finding("W&B", True, f"not used (tracking={kind})")
    from infra.tracking_wandb import resolve_mode

    try:
        resolved = resolve_mode(mode)
    except ValueError as error:
        return Finding("W&B", False, str(error), "set tracking.mode to auto, offline or online")
    if resolved == "offline":
        said = "offline: the run folder keeps everything, nothing is sent"
        disagrees = mode == "offline" and environment.get("WANDB_MODE") == "online"
        remedy = "WANDB_MODE=online is not heeded: set tracking.mode=online"
        return Finding("W&B", not disagrees, said, remedy)
    host = environment.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].split("/")[0]
    name, _, port = host.partition(":")
    problem = unreachable(name, int(port or 443))
    said = f"online, {host}" + (f" does not answer: {problem}" if problem else " answers")
    return Finding(
        "W&B", problem is None, said, "mend the network or WANDB_BASE_URL, or set tracking.mode=offline"
    )


def unreachable(host: str, port: int) -> str | None:
    """Say why a port of a host does not answer, None if it does."""
    try:
        socket.create_connection((host, port), timeout=ANSWER_S).close()
    except OSError as error:
        return str(error)
    return None


def check_slurm(command: str | None) -> Finding:
    """Whether Slurm answers, where its `command` sinfo is installed."""
    if command is None:
        return Finding("Slurm", True, "not installed here")
    remedy = "start slurmctld and munged, or look at SLURM_CONF; other launchers do not need Slurm"
    try:
        done = subprocess.run(
            [command, "-h", "-o", "%D %T"], capture_output=True, text=True, timeout=ANSWER_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("Slurm", False, f"sinfo does not answer: {error}", remedy)
    if done.returncode:
        return Finding("Slurm", False, f"sinfo fails: {' '.join(done.stderr.split())}", remedy)
    return Finding("Slurm", True, f"nodes: {', '.join(done.stdout.splitlines())}")


def check_ray(environment: Mapping[str, str]) -> Finding:
    """Whether the Ray cluster that RAY_ADDRESS names answers."""
    address = environment.get("RAY_ADDRESS", "")
    if not address or address in ("auto", "local"):
        return Finding("Ray", True, "RAY_ADDRESS names no cluster")
    problem = ray_problem(address.removeprefix("ray://"))
    said = f"{address}" + (f" does not answer: {problem}" if problem else " answers")
    return Finding("Ray", problem is None, said, "start the cluster (ray start --head), or unset RAY_ADDRESS")


def ray_problem(address: str) -> str | None:
    """Say why the Ray cluster at an address does not answer, None if something does there."""
    host, _, port = address.rpartition(":")
    return unreachable(host, int(port)) if host and port.isdigit() else "it is no HOST:PORT"

"""What a launcher starts: a run whose folder holds its `config.yaml`, and the nodes and ranks that it takes.

Pure: no clock, no processes. Launchers differ in who starts the agent of each node, not in what a job is.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infra.secrets import SECRET

WORKER = "omni.training.worker"
# Variables by which loaders, shells, Python, and launches of ours choose code or whom to trust.
_RUNS_CODE = re.compile(
    r"LD_.*|DYLD_.*|GCONV_PATH|PATH|HOME|PYTHON(?!HASHSEED$|UNBUFFERED$|FAULTHANDLER$).*|BASH_.*|ENV|SHELL|IFS|"
    r"OMNI_(?!HEAD$|NODE_ADDRESS$).*|PET_.*|TORCHELASTIC_.*|SLURM_.*|NCCL_(NET|TUNER|PROFILER|ENV)_PLUGIN|TRITON_CACHE_DIR|"
    r"TORCHINDUCTOR_.*|CUDA_INJECTION.*|CC|CXX|NCCL_CONF_FILE"
)
QUEUED_AGAIN = "again"  # in place of an exit code: the job waits to be started again


@dataclass(frozen=True)
class Job:
    """A run on `nodes` nodes with `ranks_per_node` ranks each.

    `name` is what the scheduler and the tracker call it, `sets` what tells it from the other jobs of its
    sweep, `env` what its ranks find in their environment. A rank that dies has all ranks restarted
    `max_restarts` times.
    """

    number: int
    name: str
    folder: Path
    nodes: int
    ranks_per_node: int
    max_restarts: int = 0
    sets: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """All ranks of the job."""
        return self.nodes * self.ranks_per_node

    @property
    def config(self) -> Path:
        """The resolved configuration."""
        return self.folder / "config.yaml"

    @property
    def output(self) -> Path:
        """What its ranks print, where it does not go to the screen."""
        return self.folder / "output.log"

    @property
    def exit_code(self) -> Path:
        """Written when the job has ended: its exit code, or QUEUED_AGAIN."""
        return self.folder / "exit_code"

    @property
    def script(self) -> Path:
        """The batch script, for Slurm."""
        return self.folder / "job.sh"


def split_ranks(ranks: int | None, ranks_per_node: int) -> tuple[int, int]:
    """Return nodes and ranks of each for a job of `ranks`: one node that is not full, or full nodes alone.

    Raises:
        ValueError: if the number of ranks is not known, or leaves a node partly empty.
    """
    if ranks is None:
        raise ValueError(
            "launch.ranks=null: nobody counts the GPUs of other machines; set the ranks of the job"
        )
    if ranks <= ranks_per_node:
        return 1, ranks
    if ranks % ranks_per_node:
        raise ValueError(
            f"launch.ranks={ranks} does not fill nodes of {ranks_per_node} ranks: choose a multiple, or set "
            f"hydra.launcher.ranks_per_node (null takes cluster.ranks_per_node)"
        )
    return ranks // ranks_per_node, ranks_per_node


def check_environment(env: Mapping[str, str]) -> None:
    """Refuse names that sound like secrets, since what is set here is written to files, and those by which a
    configuration would bring code of its own.

    Raises:
        ValueError: naming the first, and where it belongs.
    """
    for name in env:
        if not name.isidentifier() or not name.isascii():
            raise ValueError(f"environment: {name!r} is no name of a variable")
        if _RUNS_CODE.fullmatch(name):
            raise ValueError(
                f"environment: {name} decides which code ranks run, and a configuration may be another's: "
                f"export it where you submit, schedulers pass your environment on"
            )
        if SECRET.search(name):
            raise ValueError(
                f"environment: {name} looks like a secret, and files of jobs hold none: export it where you "
                f"submit, schedulers pass your environment on"
            )


def agent_arguments(
    job: Job, node: int, head: str, port: int, launch: str, address: str | None = None
) -> list[str]:
    """Return torchrun's arguments on node `node` of a job: node 0, at `head`, keeps the rendezvous.

    `launch` tells one start of the job from others on the same port, `address` is how other nodes reach this
    one if not by its host name.
    """
    own = [] if address is None else [f"--local-addr={address}"]
    return [
        f"--nnodes={job.nodes}",
        f"--nproc-per-node={job.ranks_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={head}:{port}",
        f"--rdzv-id={launch}",
        # A client that is up before the host waits for it: images are not pulled in the same second.
        f"--rdzv-conf=is_host={int(node == 0)},read_timeout=300",
        *own,
        f"--max-restarts={job.max_restarts}",
        "-m",
        WORKER,
        str(job.config),
    ]


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines of aligned columns, the last one as long as it likes."""
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)

"""The batch script of a job: `sbatch` runs it once, its `srun` starts one agent a node.

Pure: the same job and settings give the same text.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.environment import WORKERS_GRACE_S
from infra.launchers.job import QUEUED_AGAIN, Job

NODE = "infra.launchers.node"
LAST_TASKS_S = 60  # between the end of the first agent and the end of all
LEAVE_S = 30  # of save_before_s: for the agents and the script to end after the ranks


@dataclass
class Batch:
    """What a cluster wants to be told. `directives` are further lines of `#SBATCH`, true for one without
    value.

    A node is asked for `cpus_per_rank` cores a rank, unless `directives` ask for cores or whole nodes.
    `time` is the limit in Slurm's notation; `save_before_s` seconds before it the ranks save and leave, for
    which they have all but LEAVE_S of these, and the job is queued again if `requeue`. A `container` image,
    its `mounts` and `container_flags` are said to srun, as pyxis reads them there. `setup` are lines of shell
    before it. The agents run under `python`, by default the one on the path.
    """

    python: str | None = None
    gpus: bool = True
    cpus_per_rank: int = 1
    account: str | None = None
    partition: str | None = None
    time: str | None = None
    save_before_s: int = 120
    requeue: bool = True
    directives: dict[str, Any] = field(default_factory=dict)
    srun: list[str] = field(default_factory=list)
    container: str | None = None
    mounts: list[str] = field(default_factory=list)
    container_flags: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)


def render(job: Job, batch: Batch, cwd: Path) -> str:
    """Return the script of a job that runs in the folder `cwd`, where paths of its configuration hold."""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in sorted(job.env.items())]
    exit_code = shlex.quote(str(job.exit_code))
    lines = [
        "#!/usr/bin/env bash",
        *(f"#SBATCH --{line}" for line in _directives(job, batch, cwd)),
        "",
        "# Submitting this file again continues the run after its newest checkpoint.",
        "set -euo pipefail",
        "export PYTHONSAFEPATH=1 # modules are not imported from the working folder",
        _SECRET,
        *exports,
        *batch.setup,
        _grace(batch),
        f"rm -f {exit_code}",
        "",
        _HEAD,
        *(["out_of_time=no", _trap("out_of_time=yes; ")] if batch.requeue else [_trap("")]),
        "trap : TERM",
        "",
        " \\\n    ".join(_srun(job, batch, cwd)) + " &",
        _WAIT + (_again(exit_code) if batch.requeue else ""),
        f'echo "$code" >{exit_code}',
        'exit "$code"\n',
    ]
    return "\n".join(lines)


# Made anew at each start, on the first node; srun hands it on with the environment, so no file holds it.
_SECRET = """\
OMNI_SECRET="$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n')"
export OMNI_SECRET"""

_HEAD = """\
# Nodes meet at the first one. OMNI_HEAD is its address where node names do not resolve.
head="${OMNI_HEAD:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"
port=$((20000 + SLURM_JOB_ID % 10000))

# Before the time limit Slurm says USR1 to this shell alone, and the ranks save a checkpoint and leave. To end
# the job it says TERM to all: here that must not end the wait for them."""

_WAIT = """\
step=$!

# A signal ends a wait, not the step.
while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
code=0
wait "$step" || code=$?
"""


def _grace(batch: Batch) -> str:
    """The seconds that agents give ranks to save after a signal, unless the user has set them."""
    name = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
    return f'export {name}="${{{name}:-{max(WORKERS_GRACE_S, batch.save_before_s - LEAVE_S)}}}"'


def _again(exit_code: str) -> str:
    """What a job that was queued again leaves in place of an exit code; Slurm counts how often it was."""
    return f"""\
if [ "$code" -gt 128 ]; then
    [ "$out_of_time" = no ] || scontrol requeue "$SLURM_JOB_ID" || true
    again="$(scontrol show job "$SLURM_JOB_ID" | grep -o 'Restarts=[0-9]*' || true)"
    if [ -n "$again" ] && [ "$again" != "Restarts=${{SLURM_RESTART_COUNT:-0}}" ]; then
        echo {QUEUED_AGAIN} >{exit_code}
        exit
    fi
fi
"""


def _trap(also: str) -> str:
    return f"""trap '{also}scancel --signal=TERM "$SLURM_JOB_ID"' USR1"""


OWN = {
    "job-name": "run.name",
    "nodes": "launch.ranks",
    "ntasks-per-node": "launch.ranks",
    "gpus-per-node": "hydra.launcher.gpus",
    "account": "hydra.launcher.account",
    "partition": "hydra.launcher.partition",
    "time": "hydra.launcher.time",
    "chdir": "the folder you start from",
    "output": "run.dir",
    "open-mode": "run.dir",
    "requeue": "hydra.launcher.requeue",
    "no-requeue": "hydra.launcher.requeue",
    "signal": "hydra.launcher.save_before_s",
}
_TIME = re.compile(r"(\d+)-(\d+)(?::(\d+)(?::(\d+))?)?|(?:(\d+):)?(\d+):(\d+)|(\d+)")
_MOST_BEFORE_S = 65535  # of Slurm's --signal
_WORD = re.compile(r"[\w.,:@/+=-]+")


def check_batch(job: Job, batch: Batch, cwd: Path) -> None:
    """Refuse what would end a line of the script and begin another, and what Slurm would refuse or misread.

    Raises:
        ValueError: naming the key, its value and the remedy.
    """
    said = {
        "run.name": job.name,
        "run.dir": str(job.folder),
        "the folder you start from": str(cwd),
        "hydra.launcher.python": batch.python or "",
        "hydra.launcher.container": batch.container or "",
        **{f"hydra.launcher.directives.{key}": str(value) for key, value in batch.directives.items()},
    }
    for flags in ("srun", "mounts", "container_flags"):
        said |= {f"hydra.launcher.{flags}[{n}]": text for n, text in enumerate(getattr(batch, flags))}
    for key, text in said.items():
        if not text.isprintable():
            raise ValueError(f"{key}={text!r}: leave out control characters: it is one line of a script")
    words = {f"a key of hydra.launcher.directives, {key!r}": key for key in batch.directives}
    words |= {f"hydra.launcher.{key}={text!r}": text for key, text in _given(batch) if text is not None}
    for what, text in words.items():
        if not _WORD.fullmatch(text):
            raise ValueError(f"{what}: letters, digits and .,:@/+=-_ alone stand in a directive of sbatch")
    for key in batch.directives:
        if key in OWN:
            raise ValueError(f"hydra.launcher.directives.{key}: the script says it already: set {OWN[key]}")
    _check_times(batch)


def _check_times(batch: Batch) -> None:
    before_s = batch.save_before_s
    if before_s > _MOST_BEFORE_S:
        raise ValueError(f"hydra.launcher.save_before_s={before_s}: Slurm takes {_MOST_BEFORE_S} at most")
    if batch.time is None or batch.time.upper() in ("INFINITE", "UNLIMITED"):
        return
    found = _TIME.fullmatch(batch.time)
    if found is None:
        raise ValueError(
            f"hydra.launcher.time={batch.time}: Slurm takes MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, "
            f"DAYS-HOURS, DAYS-HOURS:MINUTES or DAYS-HOURS:MINUTES:SECONDS"
        )
    days, hours, minutes, seconds, clock_hours, clock_minutes, clock_seconds, alone = (
        int(text or 0) for text in found.groups()
    )
    limit_s = ((days * 24 + hours + clock_hours) * 60 + minutes + clock_minutes + alone) * 60
    limit_s += seconds + clock_seconds
    if before_s >= limit_s:
        raise ValueError(
            f"hydra.launcher.save_before_s={before_s}: the limit of hydra.launcher.time={batch.time} is "
            f"{limit_s} s: the ranks would be stopped as they start"
        )


def _directives(job: Job, batch: Batch, cwd: Path) -> Iterator[str]:
    yield f"job-name={shlex.quote(job.name)}"
    yield f"nodes={job.nodes}"
    yield "ntasks-per-node=1"
    if batch.gpus:
        yield f"gpus-per-node={job.ranks_per_node}"
    yield from _cores(job, batch)
    yield from (f"{key}={value}" for key, value in _given(batch) if value is not None)
    yield f"chdir={shlex.quote(str(cwd))}"
    yield f"output={shlex.quote(str(job.output).replace('%', '%%'))}"
    yield "open-mode=append"
    yield "requeue" if batch.requeue else "no-requeue"
    yield f"signal=B:USR1@{batch.save_before_s}"
    for key, value in batch.directives.items():
        if value is not False:
            yield key if value is True else f"{key}={shlex.quote(str(value))}"


def _cores(job: Job, batch: Batch) -> list[str]:
    asked = {key.replace("_", "-") for key, value in batch.directives.items() if value is not False}
    if asked & {"exclusive", "cpus-per-task", "cpus-per-gpu", "c"}:
        return []
    return [f"cpus-per-task={job.ranks_per_node * batch.cpus_per_rank}"]


def _given(batch: Batch) -> Iterator[tuple[str, str | None]]:
    yield "account", batch.account
    yield "partition", batch.partition
    yield "time", batch.time


def _srun(job: Job, batch: Batch, cwd: Path) -> Iterator[str]:
    # The first agent to end, ended well or not, leaves the others a minute: they may be saving.
    yield f"srun --kill-on-bad-exit=0 --wait={LAST_TASKS_S}"
    yield from (f"--{line}" for line in _cores(job, batch))  # srun does not take it from sbatch
    yield from (shlex.quote(flag) for flag in batch.srun)
    if batch.container is not None:
        own = [f"{path}:{path}" for path in (job.folder, cwd)]
        mounts = ",".join([*own, *batch.mounts])
        yield shlex.quote(f"--container-image={batch.container}")
        yield shlex.quote(f"--container-mounts={mounts}")
        yield shlex.quote(f"--container-workdir={cwd}")
        yield from (shlex.quote(flag) for flag in batch.container_flags)
    python = shlex.quote(batch.python or "python")
    yield f"{python} -m {NODE} --nodes {job.nodes} --ranks {job.ranks_per_node}"
    yield f'--head "$head" --port "$port" --launch "$SLURM_JOB_ID" --max-restarts {job.max_restarts}'
    yield shlex.quote(str(job.config))

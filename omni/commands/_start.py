"""Starting jobs by the chosen launcher, and telling the user about them: a table, then how to go on."""

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from infra.last_words import last_words
from infra.launch import launch_local, new_launch
from infra.launchers.job import WORKER, Job, columns
from infra.launchers.local import own_gpus, run_jobs, verdict
from infra.launchers.ray_cluster import on_cluster
from infra.launchers.ray_jobs import run_on_ray
from infra.launchers.ray_nodes import RayNeeds
from infra.launchers.slurm import SlurmError, submit, wait_for, write_script
from infra.machine import oom_kills
from infra.run_folder import RunFolder, write_json
from infra.screen import keep_going_without
from omni.commands._jobs import Prepared, in_folder
from omni.commands._launchers import LauncherConfig

SWEEP = "sweep.json"  # in the folder of a sweep: its jobs


def start_jobs(
    prepared: Sequence[Prepared], launcher: LauncherConfig, sweep: Path | None, parent: int
) -> list[int]:
    """Start jobs and return their exit codes: 0 for one that was submitted and not waited for.

    `sweep` is the folder of the sweep, None for a single run, which has the screen to itself if it is local.
    What runs here ends with `parent`, which started this process.

    Raises:
        ValueError: if a folder cannot be written, no cluster answers, or the scheduler refuses a job; those
        before it are submitted.
    """
    if sweep is None and launcher.kind == "local":
        return [_run_here(prepared[0], parent)]
    if launcher.kind == "ray":
        return _run_on_ray(prepared, launcher, sweep, parent)
    jobs = _written(prepared)
    if launcher.kind == "local":
        return _run_local(jobs, launcher.parallel, sweep, parent)
    if launcher.python is None and launcher.container is None:
        launcher = replace(launcher, python=sys.executable)
    for job in jobs:
        write_script(job, launcher)
    if launcher.kind == "slurm":
        return _submit(jobs, sweep, launcher.wait)
    show_jobs(jobs, launcher.kind, sweep)
    _say("nothing is submitted; to submit a job, and later to resume it: sbatch FOLDER/job.sh")
    return [0] * len(jobs)


def show_jobs(
    jobs: Sequence[Job], kind: str, sweep: Path | None, more: Mapping[int, str] | None = None
) -> None:
    """Print the table of jobs, and keep it in the folder of a sweep. `more` are the scheduler's numbers."""
    more = more or {}
    heads = ["job", *(["NUMBER"] if more else []), "name", "nodes", "ranks", "FOLDER", "sets"]
    rows = [heads]
    for job in jobs:
        own = [more[job.number]] if more else []
        sizes = [str(job.nodes), str(job.ranks)]
        rows.append([str(job.number), *own, job.name, *sizes, near(job.folder), " ".join(job.sets)])
    _say(columns(rows))
    if sweep is not None:
        entries = [
            {
                "number": job.number,
                "name": job.name,
                "sets": list(job.sets),
                "folder": os.path.relpath(job.folder, sweep),
            }
            for job in jobs
        ]
        write_json(sweep / SWEEP, {"launcher": kind, "jobs": entries})
        _say(f"results:       omni sweep show {near(sweep)}")


def near(path: Path) -> str:
    """Return a path as short as it can be typed here."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def _written(prepared: Sequence[Prepared]) -> list[Job]:
    """Write the configurations of jobs into their folders."""
    for each in prepared:
        with in_folder(each, new_launch()):
            pass
    return [each.job for each in prepared]


def _run_here(prepared: Prepared, parent: int) -> int:
    """Train on this machine and on this screen, which the last words are said on."""
    launch = new_launch()
    keep_going_without(RunFolder(prepared.job.folder))
    with in_folder(prepared, launch) as job:
        ranks = f"{job.ranks} rank{'s' * (job.ranks > 1)}"
        print(f"starting {ranks} on this machine, which takes seconds to import torch ...", flush=True)
        start, killed_before = time.monotonic(), oom_kills()
        code = launch_local(
            job.config,
            job.ranks,
            WORKER,
            env=job.env,
            max_restarts=job.max_restarts,
            launch=launch,
            parent=parent,
        )
    seconds, out_of_memory = time.monotonic() - start, oom_kills() > killed_before
    steps = prepared.config.train.steps
    print(last_words(RunFolder(job.folder), code, steps, seconds, out_of_memory), file=sys.stderr)
    return code


def _run_local(jobs: Sequence[Job], parallel: int, sweep: Path | None, parent: int) -> list[int]:
    from ops.device import visible_devices

    show_jobs(jobs, "local", sweep)
    if parallel > 1:
        _say("follow a job:  tail -F FOLDER/output.log")
    _say("stop them all: Ctrl-C; ranks save a checkpoint and leave, a second one kills")
    _say("resume a job:  omni resume FOLDER")
    codes = run_jobs(jobs, parallel, own_gpus(visible_devices()), parent, _say)
    _conclude(jobs, [verdict(code) for code in codes])
    return [1 if code is None else code for code in codes]


def _run_on_ray(
    prepared: Sequence[Prepared], launcher: LauncherConfig, sweep: Path | None, parent: int
) -> list[int]:
    needs = RayNeeds(
        launcher.python or sys.executable,
        launcher.gpus,
        launcher.cpus_per_rank,
        launcher.room_s,
        launcher.requeue,
    )
    if launcher.address is None:
        _say("starting a Ray cluster of this machine ...")
    with on_cluster(launcher.address) as ray:
        jobs = _written(prepared)
        show_jobs(jobs, "ray", sweep)
        _say("follow a job:  tail -F FOLDER/output.log; node N > 0 writes output.N.log")
        _say("stop them all: Ctrl-C; ranks save a checkpoint and leave, a second one kills")
        _say("resume a job:  omni resume FOLDER hydra/launcher=ray")
        codes = run_on_ray(ray, jobs, needs, parent, _say)
    _conclude(jobs, [verdict(code) for code in codes])
    return [1 if code is None else code for code in codes]


def _submit(jobs: Sequence[Job], sweep: Path | None, wait: bool) -> list[int]:
    numbers: dict[int, str] = {}
    try:
        for job in jobs:
            numbers[job.number] = submit(job)
    finally:  # those before one that Slurm refuses are submitted
        if numbers:
            show_jobs(jobs[: len(numbers)], "slurm", sweep, numbers)
    _say("follow a job:  tail -F FOLDER/output.log")
    _say("stop a job:    scancel NUMBER; ranks save a checkpoint and leave")
    _say("resume a job:  sbatch FOLDER/job.sh; with other keys omni resume FOLDER hydra/launcher=slurm")
    if not wait:
        return [0] * len(jobs)
    try:
        states = wait_for(list(numbers.values()), _say)
    except KeyboardInterrupt:
        _say("no longer waiting: the jobs go on")
        return [128 + signal.SIGINT] * len(jobs)
    except SlurmError as error:
        _say(f"no longer waiting: the jobs go on, and Slurm does not answer: {error}")
        return [1] * len(jobs)
    ends = [states[numbers[job.number]] for job in jobs]
    _conclude(jobs, [end.lower() or "no longer known to Slurm" for end in ends])
    return [0 if end == "COMPLETED" else 1 for end in ends]


def _conclude(jobs: Sequence[Job], ends: Sequence[str]) -> None:
    rows = ([str(job.number), end, " ".join(job.sets)] for job, end in zip(jobs, ends, strict=True))
    _say(columns([["job", "ended", "sets"], *rows]))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)

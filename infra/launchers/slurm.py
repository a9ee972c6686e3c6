"""Jobs on Slurm: each is submitted as its script, and scheduled, requeued and cancelled by Slurm."""

import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from infra.launchers.job import Job
from infra.launchers.script import Batch, render
from infra.run_folder import write_text

COMMAND_S = 60.0  # for any command of Slurm to answer
POLL_S = 5.0
SILENT_S = 900.0  # that a controller may not answer while jobs are waited for: it may be restarted
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")


class SlurmError(ValueError):
    """Slurm cannot be asked, or refuses: the message has what it said."""


def write_script(job: Job, batch: Batch) -> None:
    """Write the script of a job into its folder."""
    write_text(job.script, render(job, batch, Path.cwd()))
    job.script.chmod(0o700)


def submit(job: Job) -> str:
    """Submit the script of a job and return Slurm's number for it.

    Raises:
        SlurmError: if sbatch is not there, does not answer or refuses.
    """
    return _ask(["sbatch", "--parsable", str(job.script)]).strip().split(";")[0]


def state_of(number: str) -> str:
    """Return the state of a job in Slurm's words, such as PENDING, or "" if Slurm has forgotten it.

    Raises:
        SlurmError: as `submit`.
    """
    try:
        shown = _ask(["scontrol", "--oneliner", "show", "job", number])
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return ""
        raise
    found = re.search(r"\bJobState=(\w+)", shown)
    return found[1] if found else ""


def wait_for(numbers: Sequence[str], say: Callable[[str], None]) -> dict[str, str]:
    """Wait until all jobs have ended and return their last states; changes are said as they happen.

    Slurm bounds the wait, by the jobs' time limits.

    Raises:
        SlurmError: if Slurm does not answer for SILENT_S seconds.
    """
    states: dict[str, str] = dict.fromkeys(numbers, "PENDING")
    answered, silent = time.monotonic(), False
    while any(state and state not in ENDED for state in states.values()):
        time.sleep(POLL_S)
        try:
            for number, before in states.items():
                if before and before not in ENDED and (now := state_of(number)) != before:
                    states[number] = now
                    say(f"Slurm job {number}: {now or 'ended'}")
            answered, silent = time.monotonic(), False
        except SlurmError as error:
            if time.monotonic() - answered > SILENT_S:
                raise
            if not silent:
                say(f"Slurm does not answer, and is asked again: {error}")
            silent = True
    return states


def _ask(command: Sequence[str]) -> str:
    # Submitted from within a job, a job must not inherit what that one was given.
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("SLURM_") or name == "SLURM_CONF"
    }
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
    except FileNotFoundError as error:
        raise SlurmError(
            f"hydra/launcher=slurm: there is no {command[0]} here: go where jobs are submitted, or choose "
            "hydra/launcher=render to write the scripts alone"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError(
            f"{command[0]} did not answer in {COMMAND_S:.0f} s: is the controller up?"
        ) from error
    if done.returncode:
        raise SlurmError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout

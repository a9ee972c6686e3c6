"""Faults that are done to processes from outside: they are killed, stopped, asked to leave, limited.

Each function does one to a trial. Its docstring says what, and after "Must:" what must come of it.
"""

import os
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
from fault_reference import check
from fault_runs import PLANNER, SAVE_EVERY, Trial

ROOT = Path(__file__).parents[1]
FAILED, MISTAKE, TRY_AGAIN = 1, 2, 75
FULL_AT = 400_000  # bytes of a file: more than records take, less than a rank's part of a checkpoint


# Kills.


def worker(trial: Trial) -> None:
    """A rank is killed. Must: survived; its agent restarts both, which go on from the last checkpoint."""
    trial.restarts = 3
    trial.train()
    trial.wait_for_moment()
    trial.kill(trial.rng.choice(trial.ranks()))
    _survived(trial)


def agent(trial: Trial) -> None:
    """The agent of both ranks is killed. Must: survived; the launcher starts another."""
    trial.restarts = 3
    trial.train()
    trial.wait_for_moment()
    trial.kill(*trial.find("agent"))
    _survived(trial)
    trial.says("the agent died of signal 9")


def first_agent(trial: Trial) -> None:
    """Of two agents the one of rank 0 is killed, and another one started in its place. Must: survived."""
    _one_of_two(trial, 0)


def other_agent(trial: Trial) -> None:
    """Of two agents that of rank 1 is killed, and another one started in its place. Must: survived."""
    _one_of_two(trial, 1)


def launcher(trial: Trial) -> None:
    """The launcher is killed. Must: all processes end with it; survived by hand (`omni resume`)."""
    trial.train()
    trial.wait_for_moment()
    trial.kill(*trial.find("launcher"))
    trial.ends_with(-signal.SIGKILL)
    _goes_on_timed(trial)


def whole_job(trial: Trial) -> None:
    """All processes are killed at once. Must: survived by hand (`omni resume`)."""
    trial.train()
    trial.wait_for_moment()
    trial.kill(*trial.processes())
    trial.end()
    _goes_on_timed(trial)


def planner(trial: Trial) -> None:
    """The planner process of a rank is killed. Must: named, survived by a restart."""
    trial.restarts = 3
    trial.train()
    trial.wait_until(lambda: trial.rows() > 2, "step 2")
    trial.wait_for_moment()
    trial.kill(trial.rng.choice(trial.find(PLANNER)))
    _survived(trial)
    trial.says("planner process", "was ended by SIGKILL")


# Stopped, and asked to leave.


def stopped(trial: Trial) -> None:
    """A rank is stopped (SIGSTOP) for ever. Must: the other says where it waits and for whom, then all are
    restarted and it is survived.
    """
    trial.restarts = 3
    trial.train("train.timeout_s=12", "health.report_hang_s=4")
    victim = _random_rank_at_work(trial)
    trial.strike()
    victim.send_signal(signal.SIGSTOP)
    _survived(trial)
    trial.says("watchdog: no progress")
    trial.says("waited", "for rank")


def paused(trial: Trial) -> None:
    """A rank is stopped for three seconds, as by a debugger. Must: nothing; the others wait."""
    trial.train()
    victim = _random_rank_at_work(trial)
    victim.send_signal(signal.SIGSTOP)
    time.sleep(3)
    victim.send_signal(signal.SIGCONT)
    trial.ends_with(0)
    trial.is_exact()


def preempted(trial: Trial) -> None:
    """SIGTERM, as schedulers send it before they take a node. Must: a checkpoint of the step under way, exit
    code 143; goes on by hand with no step repeated.
    """
    _asked_to_leave(trial, signal.SIGTERM)


def noticed(trial: Trial) -> None:
    """SIGUSR1, as Slurm sends it some time before the end. Must: a checkpoint, exit code 138; goes on by hand
    with no step repeated.
    """
    _asked_to_leave(trial, signal.SIGUSR1)


def requeued(trial: Trial) -> None:
    """SIGTERM to a single rank, not to the launcher. Must: all ranks save and leave with exit code 75, for
    the scheduler to queue the job again; goes on by hand with no step repeated.
    """
    trial.train()
    victim = _random_rank_at_work(trial)
    trial.strike()
    victim.send_signal(signal.SIGTERM)
    trial.ends_with(TRY_AGAIN)
    _saved_all(trial)


# Limits, and ranks that differ.


def full_disk(trial: Trial) -> None:
    """No file may be larger than 400 kB, as on a full disk. Must: exit code 1, a message that names the
    checkpoint, the cause and what is still good; goes on by hand.
    """
    trial.train()
    trial.wait_until(lambda: trial.rows() > 2 * SAVE_EVERY, "a checkpoint")
    trial.wait_for_moment()
    trial.strike()
    for process in trial.ranks():
        process.rlimit(psutil.RLIMIT_FSIZE, (FULL_AT, FULL_AT))
    trial.ends_with(FAILED)
    trial.says("the checkpoint of step", "could not be saved", "The last good one is step_")
    trial.goes_on()


def other_version(trial: Trial) -> None:
    """A node has the product's files with one line changed. Must: named with exit code 2 before a step."""
    copy = trial.folder / "copy"
    for package in ("dataloader", "hydra_conf", "infra", "omni", "ops", "parallel", "pipeline"):
        shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "omni" / "rank" / "totals.py").open("a") as file:
        file.write("\n_CHANGED = True\n")
    two_that_differ(trial, ({}, None), ({"PYTHONPATH": str(copy)}, None), "omni")


def other_environment(trial: Trial) -> None:
    """A node has other variables that decide how numbers are rounded. Must: named with exit code 2 before a
    step.
    """
    two_that_differ(trial, ({}, None), ({"NVIDIA_TF32_OVERRIDE": "1"}, None), "NVIDIA_TF32_OVERRIDE")


# What several of them do.


def _survived(trial: Trial) -> None:
    trial.wait_for_recovery()
    trial.ends_with(0)
    trial.is_exact()


def _one_of_two(trial: Trial, number: int) -> None:
    trial.restarts = 20
    trial.prepare()
    trial.agents(2)
    trial.wait_for_moment()
    victim = trial.ranks()[number].parent()
    check(victim is not None, f"rank {number} has no agent")
    trial.kill(victim)
    for starter in list(trial.starters):
        if starter.pid == victim.pid:
            starter.wait()
            trial.starters.remove(starter)
    trial.agents(1)
    _survived(trial)


def _goes_on_timed(trial: Trial) -> None:
    trial.resume()
    trial.wait_for_recovery()
    trial.ends_with(0)
    trial.is_exact()


def _random_rank_at_work(trial: Trial) -> psutil.Process:
    """A rank, at a random moment after the first steps."""
    trial.wait_until(lambda: trial.rows() > 2, "step 2")
    trial.wait_for_moment()
    return trial.rng.choice(trial.ranks())


def _asked_to_leave(trial: Trial, number: signal.Signals) -> None:
    trial.train()
    _random_rank_at_work(trial)
    trial.strike()
    for process in trial.find("launcher"):
        process.send_signal(number)
    trial.ends_with(128 + number)
    _saved_all(trial)


def _saved_all(trial: Trial) -> None:
    """The steps that are recorded are all in the last checkpoint; going on gives the reference."""
    trial.says("stopped after step", str(trial.rows()))
    trial.goes_on()
    trial.says(f"continued after step {_stopped_after(trial)}")


def _stopped_after(trial: Trial) -> int:
    words = trial.log.partition("stopped after step ")[2].split(":")[0]
    check(words.isdigit(), "no step that it stopped after")
    return int(words)


Node = tuple[dict[str, str], Path | None]  # more of the environment, and the folder that it starts in


def two_that_differ(trial: Trial, one: Node, other: Node, what: str) -> None:
    """Train on two nodes; they must be refused for `what` differs."""
    trial.prepare()
    trial.moment = "start"
    own = {"PYTHONPATH": os.environ.get("PYTHONPATH", "") or str(ROOT)}
    for extra, folder in (one, other):
        trial.agents(1, {**own, **extra}, folder)
    trial.wait_until(lambda: any(starter.poll() is not None for starter in trial.starters), "end of an agent")
    for starter in trial.starters:
        with suppress(Exception):
            starter.wait(30)
    codes = [starter.poll() for starter in trial.starters]
    check(MISTAKE in codes, f"exit codes {codes}, none is {MISTAKE}")
    check(0 not in codes and None not in codes, f"exit codes {codes}: one went on")
    trial.end()
    trial.says("error:", "rank 0", "rank 1", what)
    check(trial.rows() == 0, f"{trial.rows()} steps were done")


KILLS = (worker, agent, first_agent, launcher, whole_job)
OTHERS = (
    other_agent,
    planner,
    stopped,
    paused,
    preempted,
    noticed,
    requeued,
    full_disk,
    other_version,
    other_environment,
)

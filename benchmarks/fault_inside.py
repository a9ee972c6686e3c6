"""Faults inside a rank, which fault_worker.py does there, once, at a step and on a rank that are drawn.

Each function here begins a run with one and says what must come of it, after "Must:" in its docstring.
"""

import re

from fault_reference import check
from fault_runs import SAVE_EVERY, STEPS, Trial

from infra.run_folder import read_metrics
from infra.watchdog import EXIT_CODE as TRY_AGAIN

FAILED = 1
COMPARED_EVERY = 10  # health.compare_every
NAMED_WITHIN = 20  # steps, of a rank that is slow
SKIPPED = 4  # steps in a row that the run of nan_for_ever gives up after


def out_of_memory(trial: Trial) -> None:
    """A rank may take no more memory (RLIMIT_AS). Must: named, survived by a restart."""
    _survived(trial, "out_of_memory")
    trial.says("allocate memory")


def cut_sockets(trial: Trial) -> None:
    """All connections of a rank are cut at some moment of a step. Must: the ranks say who waited for whom;
    survived by a restart.
    """
    _survived(trial, "cut_sockets")
    trial.says("waited at", "for rank")


def slow_rank(trial: Trial) -> None:
    """All that a rank computes takes twice as long. Must: named within 20 steps; losses unchanged."""
    step, rank = _start(trial, "slow", last=STEPS - NAMED_WITHIN)
    trial.ends_with(0)
    trial.is_exact()
    named = re.findall(r"step (\d+): rank (\d) took ([\d.]+) times as long", trial.log)
    found = [int(at) - step for at, who, _ in named if int(who) == rank]
    check(found and min(found) < NAMED_WITHIN, f"slow from step {step} on; named: {named}")


def read_only(trial: Trial) -> None:
    """The file system of checkpoints becomes one that can only be read. Must: exit code 1, a message that
    names checkpoint, cause and what is still good; goes on by hand.
    """
    _start(trial, "read_only", first=SAVE_EVERY + 1)
    trial.ends_with(FAILED)
    trial.says("could not be saved", "Read-only file system", "The last good one is step_")
    trial.goes_on()


def stalling(trial: Trial) -> None:
    """Writes of checkpoints take four seconds each. Must: nothing but waiting."""
    _start(trial, "stalling", first=STEPS - 3 * SAVE_EVERY, last=STEPS - SAVE_EVERY)
    trial.ends_with(0)
    trial.is_exact()


def hung_tracker(trial: Trial) -> None:
    """Closing a tracker takes longer than ranks wait for each other. Must: nothing; exact."""
    _start(trial, "hung_tracker", "train.timeout_s=10")
    trial.ends_with(0)
    trial.is_exact()


def hanging(trial: Trial) -> None:
    """Writes of checkpoints never come to an end. Must: a message that says what is waited for, and a
    non-zero exit code; goes on by hand.
    """
    _start(trial, "hanging", "train.timeout_s=10", "health.report_hang_s=4")
    codes = trial.end()
    check(set(codes) <= {FAILED, TRY_AGAIN}, f"exit codes {codes}")
    trial.says("checkpoint")
    trial.goes_on()


def nan_gradient(trial: Trial) -> None:
    """The gradients of one step are not finite. Must: the step updates nothing and is not saved; an alert
    names it; the run goes on with the same samples.
    """
    step, _ = _start(trial, "nan_gradient")
    trial.ends_with(0)
    trial.is_whole()
    trial.says("step skipped", f"step {step} updated nothing")
    last = read_metrics(trial.run.metrics)[-1]
    check(last["optim/skipped_steps"] == 1, f"{last['optim/skipped_steps']} steps were skipped")


def nan_for_ever(trial: Trial) -> None:
    """The gradients of all steps from one on are not finite. Must: named with exit code 1 after
    optim.max_skipped steps; the checkpoints before are kept, and it goes on by hand.
    """
    step, _ = _start(trial, "nan_for_ever", f"optim.max_skipped={SKIPPED}", first=SAVE_EVERY + 1)
    trial.ends_with(FAILED)
    trial.says(f"step {step + SKIPPED - 1} updates nothing", "gradient norm is not finite")
    trial.goes_on()


def loss_spike(trial: Trial) -> None:
    """All weights of the LLM double in each of four steps. Must: an alert names source and step."""
    _start(trial, "loss_spike", first=STEPS // 2)
    trial.ends_with(0)
    trial.is_whole()
    trial.says("loss spike", "the median of")


def flipped_weight(trial: Trial) -> None:
    """A bit of a weight flips on one rank. Must: named within health.compare_every steps, before anything
    of it is saved; survived by a restart.
    """
    step, rank = _survived(trial, "flipped_weight")
    trial.says(f"step {step} is the first that computed with other bits", f"rank {rank}")
    done = [int(at) for at in re.findall(r"^ *(\d+)/\d+ ", trial.log.partition("failed:")[0], re.MULTILINE)]
    check(max(done) < step + COMPARED_EVERY, f"flipped before step {step}, found after step {max(done)}")


def flipped_moment(trial: Trial) -> None:
    """A bit of a moment of the optimizer, of which there is no copy, flips on one rank. Must: named before
    anything of it is saved; survived by a restart.
    """
    step, rank = _survived(trial, "flipped_moment", first=2)
    trial.says(f"the optimizer's state on rank {rank}", f"before the update of step {step}")


def decoder(trial: Trial) -> None:
    """The thread that decodes items ends in the middle of one. Must: named, survived by a restart."""
    _survived(trial, "decoder")
    trial.says("the decoding thread was told to end")


def clock(trial: Trial) -> None:
    """The clock jumps a day ahead, then two back. Must: nothing; exact."""
    _start(trial, "clock")
    trial.ends_with(0)
    trial.is_exact()


def _start(trial: Trial, name: str, *keys: str, first: int = 1, last: int = STEPS - 15) -> tuple[int, int]:
    """Begin a run with a fault; return its step and its rank."""
    step, rank = trial.rng.randint(first, last), trial.rng.randrange(2)
    trial.with_fault(name, step, rank, *keys)
    return step, rank


def _survived(trial: Trial, name: str, first: int = 1) -> tuple[int, int]:
    trial.restarts = 3
    drawn = _start(trial, name, first=first)
    trial.ends_with(0)
    trial.is_exact()
    return drawn


KINDS = (
    out_of_memory,
    cut_sockets,
    slow_rank,
    read_only,
    stalling,
    hung_tracker,
    hanging,
    nan_gradient,
    nan_for_ever,
    loss_spike,
    flipped_weight,
    flipped_moment,
    decoder,
    clock,
)

"""The last line of a run on the screen: how it ended, and where everything is."""

import math
import signal
import time
from datetime import timedelta

from infra.run_folder import RunFolder, step_of, tail_metrics
from infra.watchdog import EXIT_CODE as TRY_AGAIN

HELD_OUT = "loss/eval/"


def last_words(folder: RunFolder, code: int, steps: int, seconds: float, out_of_memory: bool = False) -> str:
    """Say in a line how a launch of a run of `steps` ended with exit code `code` after so many seconds, and
    whether the kernel killed for want of memory meanwhile.
    """
    try:
        records = [record for record in tail_metrics(folder.metrics) if step_of(record) < math.inf]
    except OSError:  # how a run ended is told without them, too
        records = []
    done = int(step_of(records[-1])) if records else 0
    succeeded = code == 0 and done == steps
    killed = out_of_memory and code == 128 + signal.SIGKILL
    verdict = f"FAILED: out of memory (exit code {code})" if killed else _verdict(code, succeeded)
    facts = [f"{done} of {steps} steps"]
    if records:
        facts.append(f"loss {records[-1].get('loss/train', math.nan):.4f}")
    heldout = next((found for record in reversed(records) if (found := _heldout(record))), "")
    if heldout:
        facts.append(f"held-out {heldout}")
    facts.append(str(timedelta(seconds=round(seconds))))
    if not succeeded:
        facts.append(_how_to_go_on(folder, verdict, done))
    if any(file.stat().st_mtime >= time.time() - seconds for file in folder.errors.glob("rank-*.txt")):
        facts.append(f"tracebacks of ranks are in {folder.errors}")
    facts.append(f"everything is in {folder.path}")
    return f"{verdict}: {'; '.join(facts)}"


def _how_to_go_on(folder: RunFolder, verdict: str, done: int) -> str:
    if not done:
        return "the reason is above"
    goes_on = f"`omni resume {folder.path}` goes on"
    if not verdict.startswith("FAILED") or verdict == _verdict(TRY_AGAIN, succeeded=False):
        return goes_on
    return f"the reason is above: once it is mended, and unless it says otherwise, {goes_on}"


def _heldout(record: dict[str, float]) -> str:
    losses = {key.removeprefix(HELD_OUT): v for key, v in record.items() if key.startswith(HELD_OUT)}
    return ", ".join(f"{source} {loss:.4f}" for source, loss in losses.items())


def _verdict(code: int, succeeded: bool) -> str:
    if succeeded:
        return "SUCCEEDED"
    if code == 0:
        return "STOPPED"
    if code > 128:
        try:
            return f"STOPPED by {signal.Signals(code - 128).name} (exit code {code})"
        except ValueError:
            pass
    return f"FAILED (exit code {code})"

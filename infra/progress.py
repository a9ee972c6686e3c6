"""The run on the screen: one line of fixed width a step, a bar below it in a terminal."""

import math
import sys
from collections import deque
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from dataloader.visible import visible

HEADER_EVERY = 50  # lines
ETA_STEPS = 20  # the remaining time is estimated from the mean of the last so many steps
BAR_WIDTH = 30
QUARTERS = 4
IMBALANCE = "balance/max_over_mean/"
LEGEND = {
    "loss": "mean of the step's target tokens, in nats",
    "|grad|": "norm of the gradient of all components, before clipping",
    "lr": "learning rate of the LLM",
    "tok/s": "tokens in the LLM a second, over all ranks",
    "MFU": "model FLOPs by what the cluster file says ranks can do; on a CPU a rough guide",
    "mem GB": "the most memory that a rank has held, in 10^9 bytes",
    "wait": "share of the step that ranks waited for data",
    "imbal": "planned work of the busiest rank by the mean, of the worst component: 1 is even",
    "ETA": "time left, without evaluation and saving",
}


class Progress:
    """Shows each step of a run of `total_steps`, as `metrics` under the names of docs/metrics.md.

    In a terminal every step's line scrolls above a live bar; anywhere else (a file, a pipe) every
    `every`-th step and the last one are written as plain ASCII lines without control characters. `out`
    defaults to stdout.
    """

    def __init__(self, total_steps: int, out: TextIO | None = None, every: int = 1) -> None:
        if total_steps < 1 or every < 1:
            raise ValueError(f"progress: total_steps={total_steps} and every={every} must be at least 1")
        self._total = total_steps
        self._out = sys.stdout if out is None else out
        self._every = every
        self._lines = 0
        self._step_s: deque[float] = deque(maxlen=ETA_STEPS)
        self._live: Live | None = None
        self._task = ("", 0)
        if self._out.isatty():
            self._live = Live(console=Console(file=self._out), refresh_per_second=4, transient=True)
            self._live.start()

    def step(self, metrics: Mapping[str, float]) -> None:
        """Show one step; missing metrics print as `-`. Raises ValueError without "progress/step"."""
        if "progress/step" not in metrics:
            raise ValueError("progress: the metrics of a step need the key 'progress/step'")
        step = int(metrics["progress/step"])
        if "perf/step_s" in metrics:
            self._step_s.append(metrics["perf/step_s"])
        if self._live is None and step % self._every and step != self._total:
            return
        left_s = (self._total - step) * sum(self._step_s) / len(self._step_s) if self._step_s else None
        if self._lines % HEADER_EVERY == 0:
            self._write(header(self._total))
        self._lines += 1
        self._write(step_line(self._total, left_s, metrics))
        if self._live is not None:
            self._live.update(Text(_bar(step, self._total)))

    def note(self, text: str) -> None:
        """Write a line that is not a step's. Control characters in it are shown as escapes."""
        self._write(visible(text))

    def task(self, what: str, done: int, of: int) -> None:
        """Show that `done` of `of` parts of something other than steps are done: below the lines in a
        terminal; elsewhere a line when it begins and whenever another quarter is done.
        """
        if self._live is not None:
            self._live.update(Text(f"{_bar(done, of)}  {what}: {done} of {of}"))
        elif self._task != (now := (what, QUARTERS * done // max(1, of))):
            self._task = now
            self._write(f"{what}: {done} of {of} done")

    def close(self) -> None:
        """Remove the live bar; harmless when called twice."""
        if self._live is not None:
            self._live.stop()

    def _write(self, text: str) -> None:
        if self._live is None:
            self._out.write(text + "\n")
            self._out.flush()
        else:
            self._live.console.print(Text(text), soft_wrap=True)  # by itself it would cut a long one


def header(total_steps: int) -> str:
    """The column titles over `step_line`; 79 characters wide for a run of 1,000 to 9,999 steps."""
    titles = f"{'loss':>8} {'|grad|':>8} {'lr':>8} {'tok/s':>6} {'MFU':>6} {'mem GB':>6}"
    return f"{'step':>{_step_width(total_steps)}} {titles} {'wait':>6} {'imbal':>5} {'ETA':>8}"


def step_line(total_steps: int, left_s: float | None, metrics: Mapping[str, float]) -> str:
    """One step in columns. `left_s`: seconds until the end of the run, None if unknown.

    Imbalance is the worst component's maximum over mean.
    """
    imbalance = max((value for key, value in metrics.items() if key.startswith(IMBALANCE)), default=None)
    columns = [
        f"{int(metrics['progress/step'])}/{total_steps}".rjust(_step_width(total_steps)),
        _number(metrics.get("loss/train"), 8, 4),
        _number(metrics.get("optim/grad_norm"), 8, 4),
        _scientific(metrics.get("optim/lr/llm"), 8),
        _thousands(metrics.get("perf/tokens_per_s"), 6),
        _percent(metrics.get("perf/mfu"), 6),
        _number(metrics.get("mem/peak_gb"), 6, 2),
        _percent(metrics.get("data/wait_frac"), 6),
        _number(imbalance, 5, 2),
        _duration(left_s, 8),
    ]
    return " ".join(columns)


def _step_width(total_steps: int) -> int:
    return max(len("step"), 2 * len(str(total_steps)) + 1)


def _number(value: float | None, width: int, decimals: int) -> str:
    """Fixed point while it fits the column, else scientific."""
    if value is None:
        return "-".rjust(width)
    text = f"{value:.{decimals}f}"
    return text.rjust(width) if len(text) <= width else _scientific(value, width)


def _scientific(value: float | None, width: int) -> str:
    if value is None:
        return "-".rjust(width)
    text = f"{value:.2e}"
    return (text if len(text) <= width else f"{value:.0e}").rjust(width)


def _thousands(value: float | None, width: int) -> str:
    """Three or four digits and a unit: 950, 12.3k, 4.56M."""
    if value is None or not math.isfinite(value):
        return _number(value, width, 0)
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}".rjust(width)
    return f"{value:.4g}".rjust(width)


def _percent(fraction: float | None, width: int) -> str:
    if fraction is None or not math.isfinite(fraction):
        return _number(fraction, width, 0)
    return f"{_number(100 * fraction, width - 1, 1)}%"


def _duration(seconds: float | None, width: int) -> str:
    if seconds is None or not math.isfinite(seconds):
        return "-".rjust(width)
    days, rest = divmod(round(seconds), 86400)
    hours, rest = divmod(rest, 3600)
    clock = f"{hours}:{rest // 60:02d}:{rest % 60:02d}"
    text = clock if not days else f"{days}d {hours:02d}h" if days < 1000 else f"{days}d"
    return text.rjust(width)


def _bar(step: int, total: int) -> str:
    total = max(1, total)
    filled = BAR_WIDTH * min(step, total) // total
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {100 * step / total:5.1f} %"

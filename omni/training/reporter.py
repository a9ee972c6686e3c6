"""What a user sees of a run: the screen, metrics, sample records, the summary."""

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.json_lines import JsonLines
from infra.progress import Progress
from infra.run_folder import RunFolder, set_aside, tail_metrics, truncate_after
from infra.saver import Saved
from infra.timelines import TimelineError, drawn, forget_after
from infra.tracker import TIMELINE
from infra.tracking import Trackers, make_tracker
from omni.about import about_run
from omni.config import ConfigError
from omni.planning.loads import Largest
from omni.planning.run_spec import RunSpec
from omni.rank.optimizer import JointOptimizer
from omni.training.alerts import Alert, Alerts
from omni.training.choice_watch import ChoiceWatch
from omni.training.evaluate import Transcription
from omni.training.figures import StepRun, metrics_of, metrics_of_all
from omni.training.idle import OfAllRanks
from omni.training.opening import opening
from omni.training.progression import Progression
from omni.training.slowness import Slowest
from omni.training.transcriptions import lines_of, summed_up
from parallel.warmup import Warmed
from pipeline.plan import StepPlan, Taken


@dataclass(frozen=True)
class _Untold:
    """A step that is done, of which all ranks have not told yet."""

    plan: StepPlan
    loss: float
    largest: Largest
    metrics: dict[str, float]
    heldout: dict[str, float]
    recorded: bool


NUM_SLOWEST = 5
NUM_NAMED = 3  # samples that were too long
LEFT_OUT = ("data/skipped/too_long", "data/truncated", "data/skipped/bad_item")
SLOWEST_STEPS = 100  # the last steps, of each of which the slowest sample is recorded


class Silent:
    """The reporter of a rank that reports nothing: all but the first. It has every method, and none does a
    thing.
    """

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Reporter:
    """Writes the run folder and the screen, on the first rank.

    `resumed` is the step of the checkpoint that was loaded, None for a run from the start.
    """

    def __init__(
        self, spec: RunSpec, folder: RunFolder, progression: Progression, resumed: int | None
    ) -> None:
        self.spec = spec
        self.folder = folder
        self.progression = progression
        self.started = time.time()
        self.heldout: dict[str, float] = {}
        self.loss = float("nan")
        self.saves_s = 0.0
        self.beside: dict[str, float] = {}
        self.read_bytes, self.prepare_s = 0, 0.0
        self.schedules = Counter[str]()
        self.left_out_said = 0
        self.alerts = Alerts(spec.config.health.choice_costs)
        self.untold = deque[_Untold]()
        self.tracker = _tracker(spec, folder, resumed)
        earlier = tail_metrics(folder.metrics)
        since = spec.config.choice.since
        self.choice = ChoiceWatch(earlier if resumed and spec.choice is None else [], since)
        if earlier:  # a run that only lacks its summary takes the last losses from its records
            last = earlier[-1]
            self.loss = last.get("loss/train", self.loss)
            self.heldout = {key: value for key, value in last.items() if key.startswith("loss/eval/")}
        if resumed is None:
            set_aside(folder.timelines)
        else:
            forget_after(folder, resumed)
        self.slowest = _open_records(folder.slowest, resumed)
        last_lines = folder.slowest.read_text(encoding="utf-8").splitlines()[-SLOWEST_STEPS:]
        self.slow = deque[dict[str, Any]](map(json.loads, last_lines), SLOWEST_STEPS)
        self.samples = _open_records(folder.samples, resumed) if spec.config.data.record_samples else None
        self.progress = Progress(spec.config.train.steps)
        self.progress.note("\n".join(opening(spec, folder, resumed, self.tracker.where)))

    def began(self, warmed: Warmed) -> None:
        """Report with the first step what using all communicators once has taken."""
        if warmed.groups:
            self.beside |= warmed.metrics()

    def loaded(self, read_bytes: int, prepare_s: float, cached_bytes: int) -> None:
        """Report with the next step what loading has taken since the one before, of what it has taken in all,
        and holds now.
        """
        self.beside["data/read_bytes"] = read_bytes - self.read_bytes
        self.beside["data/decode_s"] = prepare_s - self.prepare_s
        self.beside["data/cache_mb"] = cached_bytes / 1e6
        self.read_bytes, self.prepare_s = read_bytes, prepare_s

    def step(
        self,
        run: StepRun,
        optimizer: JointOptimizer,
        step_s: float,
        heldout: dict[str, float],
        recorded: bool,
    ) -> None:
        """Take in one step that took `step_s` seconds, and any held-out losses measured after it. Of a
        `recorded` one the timeline is there. It is reported when all ranks have `told` of it.
        """
        step = run.prepared.plan.step
        norms = optimizer.norms(step, run.totals)
        rates = {name: optimizer.learning_rate(name, step) for name in norms}
        metrics = metrics_of(self.spec, run, norms, rates, self.progression, step_s)
        metrics |= self.beside
        self.beside = {}
        largest = run.of_plan.largest
        self.untold.append(_Untold(run.prepared.plan, run.totals.loss, largest, metrics, heldout, recorded))

    def told(self, ranks: OfAllRanks, slow_rank: Slowest | None) -> None:
        """Report the first step that is not reported yet, with what all ranks told of it, and the slowest
        rank if it has just been found.
        """
        metrics = metrics_of_all(ranks, self.spec.arrangement.world)
        self._report(self.untold.popleft(), metrics, slow_rank)

    def _report(self, untold: "_Untold", of_all: dict[str, float], slow_rank: Slowest | None) -> None:
        plan, heldout = untold.plan, untold.heldout
        step, taken, most = plan.step, plan.taken, untold.largest
        metrics = untold.metrics | of_all | (slow_rank.metrics() if slow_rank is not None else {})
        if untold.recorded:
            self._draw(step)
        metrics |= self.choice.step(metrics)
        self.tracker.log(step, metrics | heldout)
        self.progress.step(metrics)
        self.loss = untold.loss
        source = taken.sources[taken.source[most.sample]]
        slow = {"source": source, "sample": taken.ids[most.sample], "planned_ms": most.sample_ns / 1e6}
        self.slow.append({"step": step, **slow})
        self.slowest.append(self.slow[-1])
        if heldout:
            self.heldout |= heldout
            losses = ", ".join(f"{key.rpartition('/')[2]} {value:.4f}" for key, value in heldout.items())
            self.progress.note(f"held-out loss after step {step}: {losses}")
        if self.samples is not None:
            self.samples.append(_record(plan))
        self._say_schedule(plan)
        self._say_left_out(taken, metrics)
        for alert in self.alerts.step(metrics | heldout):
            self._alert(alert)
        if slow_rank is not None and slow_rank.is_slow:
            self._alert(Alert("slow rank", f"step {step}: {slow_rank}"))

    def settle(self) -> None:
        """Have the records of all steps on the disk, before a checkpoint says that they are done. Samples may
        be missing there, metrics may not.
        """
        self.tracker.settle()
        for records in filter(None, (self.slowest, self.samples)):
            with suppress(OSError):  # it has been told, and the run needs none of them to go on
                records.settle()

    def held_up(self, seconds: float) -> None:
        """Count seconds that a save held training up."""
        self.saves_s += seconds
        self.beside["perf/save_s"] = self.beside.get("perf/save_s", 0.0) + seconds

    def saved(self, saved: Saved | None) -> None:
        """Say that a checkpoint is there, if one has been written since the last step."""
        if saved is None:
            return
        self.beside |= {"perf/save_write_s": saved.seconds, "perf/save_gb": saved.bytes / 1e9}
        self.progress.note(
            f"checkpoint of step {saved.step} saved in {saved.seconds:.2f} s, {saved.bytes / 1e6:,.1f} MB: "
            f"{saved.where}"
        )
        self.tracker.checkpoint(saved.step, saved.where)

    def note(self, text: str) -> None:
        """Say something between steps."""
        self.progress.note(text)

    def generating(self, source: str, done: int, of: int) -> None:
        """Show how many samples of a source have their text generated."""
        self.progress.task(f"generating texts of held-out {source}", done, of)

    def finish(self, transcriptions: dict[str, list[Transcription]], peaks: Sequence[int]) -> None:
        """Sum up a run that reached its last step, on the screen and in `summary.json`; `peaks` are the most
        bytes that each rank has held.
        """
        summary: dict[str, object] = {
            "steps": self.spec.config.train.steps,
            "tokens": self.progression.tokens,
            "seconds": round(time.time() - self.started, 1),
            "layout": self.spec.arrangement.describe(),
            "loss/train": self.loss,
            "data/skipped/too_long": self.progression.dropped,
            "data/skipped/bad_item": self.progression.bad_samples,
            "data/truncated": self.progression.truncated,
            "mem/peak_gb/by_rank": [peak / 1e9 for peak in peaks],
            "perf/save_s/all": round(self.saves_s, 3),
            "plan/schedule": dict(self.schedules),
            **self.heldout,
        }
        summary["balance/slowest_samples"] = self._slowest()
        for source, results in transcriptions.items():
            summary |= summed_up(source, results)
            for line in lines_of(source, results):
                self.progress.note(line)
        self.tracker.summary(summary)

    def _slowest(self) -> list[dict[str, Any]]:
        """The samples of the last steps that were planned to take longest, each once."""
        found = {
            (of["source"], of["sample"]): of for of in sorted(self.slow, key=lambda of: of["planned_ms"])
        }
        return sorted(found.values(), key=lambda of: (-of["planned_ms"], of["step"]))[:NUM_SLOWEST]

    def close(self, exit_code: int) -> None:
        """Say what was not trained on, if anything, and close all files and trackers."""
        while self.untold:  # a run that fails: all ranks will not tell of them any more
            self._report(self.untold.popleft(), {}, None)
        if slowest := self._slowest():
            named = (f"{of['source']} {of['sample']} ({of['planned_ms']:.3g} ms)" for of in slowest)
            self.progress.note(f"slowest samples of the last steps (planned, forward): {', '.join(named)}")
        left_out = (self.progression.dropped, self.progression.truncated, self.progression.bad_samples)
        if any(left_out):
            self.progress.note(f"left out so far: {_left_out(*left_out)}")
        self.progress.close()
        self.tracker.finish(exit_code)
        self.slowest.close()
        if self.samples is not None:
            self.samples.close()
        sys.stdout.flush()

    def _alert(self, alert: Alert) -> None:
        self.progress.note(f"{alert.title}: {alert.text}")
        self.tracker.alert(alert.title, alert.text)

    def _draw(self, step: int) -> None:
        """Hand the timeline of a recorded step to trackers that show pictures."""
        if self.tracker.shows_pictures:
            try:
                self.tracker.picture(step, TIMELINE, drawn(self.folder, step))
            except (TimelineError, OSError) as error:  # a shared disk may be slow to show what others wrote
                self.progress.note(f"the timeline of step {step} is not tracked: {error}")

    def _say_schedule(self, plan: StepPlan) -> None:
        """Say once which schedule was chosen, where the configuration leaves that to the planner; and once
        for each number of rounds that a step does not fit at once.
        """
        chosen, asked = plan.domain.scheduled, self.spec.policies["pipeline"].name
        if not self.schedules and plan.domain.schedule != asked:
            self.progress.note(
                f"pipeline={asked} chose {chosen} for step {plan.step}; it chooses anew for each step"
            )
        elif plan.domain.rounds > 1 and chosen not in self.schedules and not self.spec.config.pipeline.rounds:
            self.progress.note(f"step {plan.step} does not fit cluster.memory_bytes at once: {chosen}")
        self.schedules[chosen] += 1

    def _say_left_out(self, taken: Taken, metrics: Mapping[str, float]) -> None:
        """Say that samples are left out or truncated: of the first one, and then whenever they have doubled.
        Those of this step that were too long are named, a few at most.
        """
        dropped, truncated, bad = (int(metrics[name]) for name in LEFT_OUT)
        if dropped + truncated + bad >= max(1, 2 * self.left_out_said):
            self.left_out_said = dropped + truncated + bad
            cut = self.spec.planner.world.truncated(taken)
            long = [*taken.skipped, *((taken.sources[taken.source[n]], taken.ids[n]) for n in cut)]
            named = ", ".join(f"{source} {sample}" for source, sample in long[:NUM_NAMED])
            more = f" and {len(long) - NUM_NAMED} more" if len(long) > NUM_NAMED else ""
            of_step = f"; too long in this step: {named}{more}" if long else ""
            self.progress.note(f"left out so far: {_left_out(dropped, truncated, bad)}{of_step}")


def _left_out(dropped: int, truncated: int, bad: int) -> str:
    cut = f" and {truncated} truncated" if truncated else ""
    return (
        f"{dropped} samples that are too long or have an item that its encoder does not take{cut} "
        f"(data.on_long), {bad} with a bad item (data.on_error)"
    )


def _tracker(spec: RunSpec, folder: RunFolder, resumed: int | None) -> Trackers:
    try:
        return make_tracker(spec.config.tracking.kind, folder, about_run(spec.config, folder.path), resumed)
    except ValueError as error:  # what it cannot start with was configured
        raise ConfigError(str(error)) from error


def _open_records(path: Path, resumed: int | None) -> JsonLines:
    if resumed is None:
        set_aside(path)
    else:
        truncate_after(path, resumed)
    return JsonLines(path)


def _record(plan: StepPlan) -> dict[str, Any]:
    taken = plan.taken
    samples = [[taken.sources[n], sample] for n, sample in zip(taken.source, taken.ids, strict=True)]
    return {"step": plan.step, "samples": samples}

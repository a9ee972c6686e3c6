"""What a user sees of a run: the progress line, metrics, sample records, the summary."""

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from infra.progress import Progress
from infra.run_folder import RunFolder, append_line, read_metrics, set_aside, truncate_after
from infra.timelines import forget_after
from infra.tracking import make_tracker
from omni.about import about_run
from omni.planning.pools import without_effect
from omni.planning.run_spec import RunSpec
from omni.rank.optimizer import JointOptimizer
from omni.training.evaluate import Transcription
from omni.training.figures import Progression, StepRun, metrics_of
from pipeline.plan import StepPlan

NUM_EXAMPLES = 8


class Reporter:
    """Writes the run folder and the screen on the first rank; on the others (`active` false) does nothing."""

    def __init__(
        self, spec: RunSpec, folder: RunFolder, progression: Progression, resumed: int | None, active: bool
    ) -> None:
        self.spec = spec
        self.progression = progression
        self.active = active
        self.started = time.time()
        self.heldout: dict[str, float] = {}
        self.loss = float("nan")
        if not active:
            return
        about = about_run(spec.config, folder.path)
        self.tracker = make_tracker(spec.config.tracking.kind, folder, about, resumed)
        earlier = read_metrics(folder.metrics)
        if earlier:  # a run that only lacks its summary takes the last losses from its records
            last = earlier[-1]
            self.loss = last["loss/train"]
            self.heldout = {key: value for key, value in last.items() if key.startswith("loss/eval/")}
        if resumed is None:
            set_aside(folder.timelines)
        else:
            forget_after(folder, resumed)
        self.samples = _open_records(folder.samples, resumed) if spec.config.data.record_samples else None
        self.progress = Progress(spec.config.train.steps)
        self.progress.note(_opening(spec, folder, resumed))

    def step(
        self,
        run: StepRun,
        idle: Mapping[str, float],
        optimizer: JointOptimizer,
        step_s: float,
        heldout: dict[str, float],
    ) -> None:
        """Report one step that took `step_s` seconds, of which all ranks spent the shares `idle` standing
        still, with any held-out losses measured after it.
        """
        if not self.active:
            return
        plan, totals = run.prepared.plan, run.totals
        step, norms = plan.step, optimizer.norms(totals)
        rates = {name: optimizer.learning_rate(name, step) for name in norms}
        metrics = metrics_of(self.spec, run, idle, norms, rates, self.progression, step_s)
        self.tracker.log(step, metrics | heldout)
        self.progress.step(metrics)
        self.loss = totals.loss
        if heldout:
            self.heldout |= heldout
            losses = ", ".join(f"{key.rpartition('/')[2]} {value:.4f}" for key, value in heldout.items())
            self.progress.note(f"held-out loss after step {step}: {losses}")
        if self.samples is not None:
            append_line(self.samples, _record(plan))

    def settle(self) -> None:
        """Have the records of all steps on the disk, before a checkpoint says that they are done."""
        if self.active:
            self.tracker.settle()
            if self.samples is not None:
                os.fsync(self.samples.fileno())

    def note(self, text: str) -> None:
        """Say something between steps."""
        if self.active:
            self.progress.note(text)

    def finish(self, transcriptions: dict[str, list[Transcription]]) -> None:
        """Sum up a run that reached its last step, on the screen and in `summary.json`."""
        if not self.active:
            return
        summary: dict[str, object] = {
            "steps": self.spec.config.train.steps,
            "tokens": self.progression.tokens,
            "seconds": round(time.time() - self.started, 1),
            "layout": self.spec.arrangement.describe(),
            "loss/train": self.loss,
            "data/skipped/too_long": self.progression.dropped,
            "data/skipped/bad_item": self.progression.tombstones,
            **self.heldout,
        }
        for source, results in transcriptions.items():
            summary |= self._sum_up(source, results)
        self.tracker.summary(summary)

    def _sum_up(self, source: str, results: list[Transcription]) -> dict[str, object]:
        exact = sum(t.exact for t in results)
        words = sorted({len(t.expected.split()) for t in results})
        by_length = {n: [t.exact for t in results if len(t.expected.split()) == n] for n in words}
        # Examples of every length, mistakes first: they teach more.
        ordered = sorted(results, key=lambda t: (t.exact, len(t.expected), t.sample))
        examples = ordered[:: max(1, len(ordered) // NUM_EXAMPLES)][:NUM_EXAMPLES]
        self.progress.note(
            f"held-out {source}: {exact} of {len(results)} freely generated transcriptions are exact "
            f"({exact / max(1, len(results)):.1%})"
        )
        for example in examples:
            mark = "=" if example.exact else "x"
            self.progress.note(f"  {mark} expected   {example.expected}\n    generated  {example.generated}")
        return {
            f"eval/exact_match/{source}": exact / max(1, len(results)),
            f"eval/generated/{source}": len(results),
            f"eval/exact_match_by_words/{source}": {
                str(n): sum(hits) / len(hits) for n, hits in by_length.items()
            },
            f"eval/examples/{source}": [
                {"sample": t.sample, "expected": t.expected, "generated": t.generated} for t in examples
            ],
        }

    def close(self, exit_code: int) -> None:
        """Say what was not trained on, if anything, and close all files and trackers."""
        if not self.active:
            return
        dropped, tombstones = self.progression.dropped, self.progression.tombstones
        if dropped or tombstones:
            self.progress.note(
                f"left out so far: {dropped} samples that are too long or have an item that its encoder does "
                f"not take (data.on_long), {tombstones} with a bad item (data.on_error)"
            )
        self.progress.close()
        self.tracker.finish(exit_code)
        if self.samples is not None:
            self.samples.close()
        sys.stdout.flush()


def _opening(spec: RunSpec, folder: RunFolder, resumed: int | None) -> str:
    config = spec.config
    model = f"LLM of {config.model.llm.layers} layers, width {config.model.llm.hidden}"
    encoders = ", ".join(f"{name} ({encoder.modality})" for name, encoder in spec.encoders.items()) or "none"
    start = "from the start" if resumed is None else f"continued after step {resumed}"
    lines = (
        f"run folder {folder.path}",
        f"{model}; encoders: {encoders}; {spec.arrangement.world} ranks, {spec.arrangement.describe()}; "
        f"{spec.policies.placement.name}, {spec.policies.pipeline.name}; {start}",
        *(f"note: {text}" for text in without_effect(spec.planner.sharing)),
    )
    return "\n".join(lines)


def _open_records(path: Path, resumed: int | None) -> TextIO:
    if resumed is None:
        set_aside(path)
    else:
        truncate_after(path, resumed)
    return path.open("a", encoding="utf-8")


def _record(plan: StepPlan) -> dict[str, Any]:
    taken = plan.taken
    samples = [[taken.sources[n], sample] for n, sample in zip(taken.source, taken.ids, strict=True)]
    return {"step": plan.step, "samples": samples}

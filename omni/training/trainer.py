"""Train: plan → verify → engine, one step after the other.

This is the first file to read. A step is: take what was prepared ahead, settle that all ranks hold the same
plan, run it, sum its figures in one reduction, update, settle: learn what it came to, and report. A GPU is
given the next step before the host settles one, unless something is due after it, so it never waits for the
host. Everything a policy decides has been decided in the plan; everything a rank does is in its op list. What
lies between taking and settling is written in `omni/rank/step.py`.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from dataloader.loader import Loader
from dataloader.node_cache import NodeCache, cache_folder
from dataloader.shared_files import SharedFiles
from dataloader.sources.reader import open_reader
from dataloader.within import within
from infra.run_folder import RunFolder
from infra.screen import beside
from infra.shutdown import StopFlag
from infra.watchdog import Watchdog
from omni.config import Config
from omni.models.registry import prepare_item
from omni.planning.plan_process import PlanStep, plan_step
from omni.planning.run_spec import RunSpec
from omni.rank.bad_samples import BadSamples
from omni.rank.build import Rank, build_rank
from omni.rank.step import execute, sum_step, update, waiting_at
from omni.training.ahead import Ahead, Prepared, loader_threads
from omni.training.augmenting import augmenting_of
from omni.training.evaluate import Evaluator, Transcription
from omni.training.figures import StepRun, Unsettled
from omni.training.file_hashes import hashing_files
from omni.training.garbage import held_in
from omni.training.generate import Limit
from omni.training.health import Health
from omni.training.learning import CostTables
from omni.training.profile import Profile
from omni.training.progression import Progression, check_failures
from omni.training.reporter import Reporter, Silent
from omni.training.saving import Saving
from omni.training.telling import Spent, Telling
from omni.training.timeline import meet, record
from omni.training.vector import OfPlan
from ops.device import peak_memory_bytes
from parallel.consensus import DivergenceError, explain
from parallel.control_of_run import connected
from parallel.warmup import warm_up
from pipeline.laps import DATA, END, PLAN, SAVE, idle_of, whole_ns
from pipeline.ops import Op
from pipeline.plan import StepPlan, diff
from pipeline.stopwatch import Stopwatch

SETTLED_S = 5.0  # how long a run that has failed waits to learn what the step before came to


class Trainer:
    """One rank of a run. `run` trains from the folder's last checkpoint, or from the start, to the end.

    Steps are planned by `plan_step`, or on a thread if it is not given.
    """

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        rank: int,
        device: torch.device,
        plan_step: PlanStep | None = None,
    ) -> None:
        self.spec = spec
        self.config: Config = spec.config
        self.folder = folder
        self.plan_step = plan_step
        self.number = rank
        self.where = "start-up"
        self.watch = Stopwatch(device)
        self.watchdog = self.watching()
        self.stop = StopFlag()
        self.first = rank == 0
        world = spec.arrangement.world
        self.say(f"building the model on {world} rank{'s' * (world > 1)}")
        self.control = connected(rank, world, self.config.train.timeout_s)
        self.rank: Rank = build_rank(spec, rank, device, self.note)
        self.warmed = warm_up(self.rank.groups, device, wraps=spec.arrangement.llm.vpp > 1)
        if self.first and world > 1:
            print(self.warmed, flush=True)
        data = self.config.data
        cache = NodeCache(cache_folder(data.cache_dir), int(data.cache_gb * 1e9), beside)
        self.files = SharedFiles(node=cache)
        self.readers = {
            name: open_reader(index.path, self.files, spec.tokenizer) for name, index in spec.indexes.items()
        }
        heldout = {
            name: open_reader(index.path, self.files, spec.tokenizer) for name, index in spec.heldout.items()
        }
        self.tables = CostTables(spec.table)
        self.evaluator = Evaluator(spec, self.rank, heldout, self.control)
        self.health = Health(self.config.health, self.rank, spec.table.parts, folder, self.control)
        self.telling = Telling(self.control, spec, self.rank, self.tables, self.health)
        self.save_is_due = self.stopped = False
        self.queues = device.type == "cuda"  # the device computes behind the host
        self.unsettled: Unsettled | None = None
        self.settled_s = 0.0  # when the last step was, by time.perf_counter()
        self.progression = Progression(folder.metrics)
        beat = self.watchdog.beat
        self.saving = Saving(spec, folder, self.rank, self.control, self.progression, self.tables, beat)
        self.reporter: Reporter | Silent = Silent()

    @property
    def step(self) -> int:
        """The last step that is settled."""
        return self.progression.step

    def run(self) -> bool:
        """Train. Returns True when all steps are done, False after saving if a signal asked to stop."""
        # Ranks that wait for one that reads on do not know of it but from the control plane.
        with self.watching(heeds=lambda: self.control.came_at):
            resumed = self.saving.restore()
        if self.step >= self.config.train.steps and self.folder.summary.exists():
            if self.rank.is_first:
                print(f"run folder {self.folder.path}: all {self.step} steps are done; nothing to train")
            with self.stop, self.hashing():
                return True
        with (
            self.watchdog,
            self.stop,
            self.reporting(resumed) as report,
            self.saving.finishing(report),
            self.ahead() as ahead,
            self.hashing(),
            self.settling(),
        ):
            profile = Profile(
                self.config.profile.steps, self.config.train.steps, self.folder.profile, self.number
            )
            for step in range(self.step + 1, self.config.train.steps + 1):
                stays = meet(self.rank, step) if self.is_due(step, self.config.train.timeline_every) else ()
                start = time.perf_counter()
                profile.before(step)
                with held_in(step):
                    prepared = self.begin(ahead, step)
                    start += self.save_if_due(report)  # of the step before
                    done = self.run_step(prepared, self.watch)
                    self.update_weights(done)
                start += profile.after(step)
                self.unsettled = Unsettled(done, start, stays, ahead.loader)
                if not self.goes_on(step):
                    self.settle()
                if self.stopped:
                    break
            self.end()
            self.save_if_due(report)
            self.saving.finish(report)  # first: whatever ends generation, the run is done
            if self.stopped:
                report.note(
                    f"stopped after step {self.step}: {self.stop.signal_name or 'a signal to another rank'}"
                )
                return False
            self.progression.check_end()
            transcriptions = self.transcribe(report.generating, report.note)
            report.finish(transcriptions, self.control.gather("peaks", peak_memory_bytes()))
        return True

    def watching(self, heeds: Callable[[], float] = lambda: 0.0) -> Watchdog:
        """A watchdog of this rank."""
        seconds, report_s = self.config.train.timeout_s * 1.5, self.config.health.report_hang_s
        return Watchdog(seconds, self.standing, report_s=report_s, heeds=heeds)

    def hashing(self) -> contextlib.AbstractContextManager[None]:
        """Hash this rank's part of the files of published weights that the run began with, if it did."""
        return hashing_files(self.folder, self.number, self.spec.arrangement.world, self.stop)

    # One step.

    @contextlib.contextmanager
    def ahead(self) -> Iterator[Ahead]:
        """Start preparing steps, and tell of the plan of the first one."""
        first, last = self.step + 1, self.config.train.steps
        items = {e.modality: partial(prepare_item, e) for e in self.spec.encoders.values()}
        ahead = Ahead(
            self.spec.planner,
            self.plan_step or partial(plan_step, self.spec.planner, predicts=self.first),
            Loader(self.readers, self.spec.tokenizer, items, loader_threads(self.spec)),
            self.rank.assembler,
            domain=self.rank.domain,
            first=first,
            last=last,
            cursor=self.progression.cursor,
            timeout_s=self.config.train.timeout_s,
            table_at=self.tables.at,
            augmenting=augmenting_of(self.spec),
        )
        try:
            self.say(f"planning and loading step {first}")
            self.telling.open(ahead, first)
            yield ahead
        finally:
            ahead.close()

    def begin(self, ahead: Ahead, step: int) -> Prepared:
        """Hear what all ranks told of the step before the last one, take the next, and tell of the last: see
        `Telling`. What is waited for is timed from here on.
        """
        self.watch = Stopwatch(self.rank.device)
        self.hear(step - 2)
        prepared = ahead.take(step)
        self.watch.done(DATA)
        self.telling.tell(step - 1, ahead, prepared)
        self.watch.done(PLAN)
        return prepared

    def end(self) -> None:
        """Let the last update's weights arrive, tell of the last step, and hear all that is left to hear."""
        with waiting_at(self.rank, f"step {self.step}: weights of the last update", self.rank.groups.world):
            self.rank.optimizer.arrive()
        if self.telling.spent:
            self.hear(self.step - 1)
            self.telling.tell(self.step, None, None)
            self.hear(self.step)

    def hear(self, number: int) -> None:
        """Heed what all ranks told in a vector, once, waiting if it is not there yet."""
        self.where = f"step {number}: hearing what all ranks told of it"
        for heard in self.telling.hear(number):
            self.reporter.told(*heard)

    def agree_on(self, plan: StepPlan) -> OfPlan:
        """Settle that all ranks hold the same plans, level by level, before any of them runs.

        Returns what all ranks told of theirs.
        """
        self.where = f"step {plan.step}: comparing plans"
        found = self.telling.of_plan(plan.step)
        if found.divergence is not None:
            behind = self.spec.policies.behind
            raise DivergenceError(explain(plan, found.divergence, diff, self.control, behind))
        return found

    def lost_here(self, plan: StepPlan) -> frozenset[int]:
        """The samples of this rank's domain that lost an item on any of its ranks."""
        self.rank.note(f"step {plan.step}: sharing which items are bad")
        lost = self.telling.lost(plan.step)
        return frozenset(sample for domain, sample in lost if domain == plan.number)

    def run_step(self, prepared: Prepared, watch: Stopwatch | None = None) -> StepRun:
        """Run a step once all ranks agree on its plan, and sum its figures, with laps on `watch`. The step
        before is settled when this one's passes are launched.
        """
        plan, watch = prepared.plan, watch or Stopwatch(self.rank.device)
        of_plan = self.agree_on(plan)
        check_failures(prepared.failures, self.config.data.on_error, self.number)
        bad = BadSamples(plan, partial(self.lost_here, plan))
        inputs = replace(prepared.inputs, before_loss=bad.mask)
        result = execute(self.rank, plan, inputs, watch)
        self.settle()
        differing = self.health.compare(plan.step)
        sums = sum_step(self.rank, plan, result, stop=self.stop.requested, differing=differing)
        table, lost = self.tables.at(plan.step), len(self.telling.lost(plan.step))
        done = StepRun(prepared.emptied(), table, self.rank.domain_rank, result, sums, of_plan, lost)
        if differing is not None:
            self.health.judge(done.totals.corrupted)
        watch.done(END)
        return done

    def update(self, done: StepRun) -> None:
        """Update weights and settle the step: what whoever takes single steps calls."""
        self.update_weights(done)
        self.count(done)

    def update_weights(self, done: StepRun) -> None:
        """Update weights by what the device has summed."""
        update(self.rank, done.prepared.plan, done.sums)
        self.health.seal()

    def count(self, done: StepRun) -> None:
        """Learn what a step came to, count what it did and move on in the stream."""
        plan = done.prepared.plan
        self.rank.note(f"step {plan.step}: totals on the host")
        updated = self.rank.optimizer.is_sound(plan.step, done.totals)
        laps = done.result.watch.laps()
        idle_ns = idle_of(laps, plan.domain, self.rank.domain_rank)
        passes = done.passes if self.config.costs.learn else ()
        self.telling.spent.append(Spent(idle_ns, whole_ns(laps), passes, done.spans, done.table))
        truncated = len(self.spec.planner.world.truncated(plan.taken))
        most = self.config.data.max_error_share
        self.progression.advance(plan, done.totals, done.lost, truncated, updated, most)
        self.watchdog.beat()

    def goes_on(self, step: int) -> bool:
        """Whether the next step begins before this one is settled: on a GPU, if nothing is due after it. All
        ranks say the same.
        """
        train = self.config.train
        every = (train.checkpoint_every or train.steps, train.eval_every, train.timeline_every)
        due = any(self.is_due(step, each) for each in every)
        return self.queues and not (due or self.save_is_due or self.stopped)

    def settle(self) -> None:
        """Learn what the step that is not settled came to, if there is one, and do what is due after it."""
        if self.unsettled is None:
            return
        unsettled, self.unsettled = self.unsettled, None
        done, train, heldout, recorded = unsettled.done, self.config.train, dict[str, float](), False
        step, step_s = done.prepared.plan.step, self.counted(unsettled)
        try:
            # A signal leaves little time: save, and measure another day.
            heldout = {} if done.totals.stop else self.evaluate(step)
            if unsettled.stays:
                record(self.folder, self.spec, self.rank, done, unsettled.stays, self.control)
                recorded = True
        finally:  # whatever fails behind a step, it is done
            self.report(unsettled, step_s, heldout, recorded)
        # All ranks have the same totals: they stop at the same step.
        norms, most = self.rank.optimizer.norms(step, done.totals), self.config.optim.max_skipped
        self.progression.check_updates(done.totals, norms, most)
        self.stopped |= done.totals.stop
        self.save_is_due |= self.stopped or self.is_due(step, train.checkpoint_every or train.steps)

    def counted(self, unsettled: Unsettled) -> float:
        """Count a step, and return how many seconds it took: from its start, but not while the device was
        still at the step before.
        """
        self.count(unsettled.done)
        step_s = time.perf_counter() - max(unsettled.start_s, self.settled_s)
        self.settled_s = time.perf_counter()
        return step_s

    def report(self, of: Unsettled, step_s: float, heldout: dict[str, float], recorded: bool) -> None:
        """Report a step that is counted, and what has been saved and loaded meanwhile."""
        report = self.reporter
        report.saved(self.saving.checkpoints.finished())
        report.loaded(self.files.bytes_read, of.loader.prepare_s, self.files.cached_bytes)
        report.step(of.done, self.rank.optimizer, step_s, heldout, recorded)

    @contextlib.contextmanager
    def settling(self) -> Iterator[None]:
        """Where a run fails in a step, report the one before as well, which is not settled then on a GPU."""
        try:
            yield
        except BaseException:
            if (unsettled := self.unsettled) is not None and self.first:
                try:
                    within(SETTLED_S, lambda: unsettled.done.totals)  # a device may be what fails
                    self.report(unsettled, self.counted(unsettled), {}, recorded=False)
                except Exception as error:
                    self.reporter.note(f"step {self.step + 1} was done and is not reported: {error!r}")
            raise

    def standing(self) -> str:
        """Say where this rank is: the watchdog asks, from a thread of its own."""
        device = self.watch.standing()
        return f"rank {self.number} on {socket.gethostname()} at {self.where}{device and '; ' + device}"

    def note(self, where: Op | str) -> None:
        """Note where this rank stands, for the watchdog."""
        if isinstance(where, Op):
            self.where = f"step {self.step + 1 + (self.unsettled is not None)}: {where}"
            self.watchdog.beat()
        else:
            self.where = where

    def say(self, what: str) -> None:
        """Say on the screen what is being done while nothing trains yet."""
        if self.first:
            print(f"{what} ...", flush=True)

    def close(self) -> None:
        """Leave the other ranks."""
        self.control.close()

    # Now and then.

    def is_due(self, step: int, every: int) -> bool:
        """Whether something done every so many steps, and at the end, is due after `step`."""
        return every > 0 and (step % every == 0 or step == self.config.train.steps)

    def evaluate(self, step: int) -> dict[str, float]:
        """Held-out losses, where they are due: every `eval_every` steps and at the end. A signal leaves
        little time to save: those that it finds under way are left out.
        """
        if not self.is_due(step, self.config.train.eval_every):
            return {}
        losses = self.evaluator.losses(step, self.asked_to_stop)
        if len(losses) < len(self.config.data.heldout):
            self.reporter.note(
                f"held-out losses of step {step} are left out for a signal: omni eval has them"
            )
        return losses

    def asked_to_stop(self) -> bool:
        """Whether a signal has asked this rank to stop. Who asks amid something long has gone on."""
        self.watchdog.beat()
        return self.stop.requested

    def transcribe(
        self, show: Callable[[str, int, int], None], note: Callable[[str], None]
    ) -> dict[str, list[Transcription]]:
        """Freely generated transcriptions of the held-out sources that ask for them: as many as there are
        after `train.generate_s` seconds, or when a signal asks to stop. `show` hears of each source how many
        of how many are done, `note` why there are fewer.
        """

        def told(name: str, done: int, of: int) -> None:
            self.watchdog.beat()  # a rank may wait for those of other domains
            show(name, done, of)

        limit = Limit(self.config.train.generate_s, self.stop, told)
        return self.evaluator.transcribe_all(self.step, limit, note)

    def save_if_due(self, report: Reporter | Silent) -> float:
        """Save the step done last if that is due; return how many seconds that held training up.

        A step that was skipped, or whose loss is not finite, is not saved: the next that is sound will be.
        """
        if not (self.save_is_due and self.progression.sound):
            return 0.0
        start = time.perf_counter()
        self.hear(self.step)  # its record comes before the checkpoint
        self.health.compare_now(self.step)
        report.settle()
        self.saving.save(report)
        self.save_is_due = False
        self.watch.done(SAVE)
        return time.perf_counter() - start

    @contextlib.contextmanager
    def reporting(self, resumed: int | None) -> Iterator[Reporter | Silent]:
        """Report on the first rank; close the trackers whatever happens."""
        self.control.barrier("start")  # every rank has read the folder before it is written to
        if self.rank.is_first:
            self.reporter = Reporter(self.spec, self.folder, self.progression, resumed)
        reporter = self.reporter
        reporter.began(self.warmed)
        try:
            yield reporter
        except BaseException:
            reporter.close(1)
            raise
        self.where = "the end of the run"
        self.control.barrier("the end of the run")  # from here on nobody waits for this rank
        self.where = "closing trackers"
        reporter.close(0)

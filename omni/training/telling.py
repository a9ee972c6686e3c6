"""What all ranks tell each other of a step: one vector of named integers, told once and heard a step later.

    step n + 1 is handed out, and a rank tells vector n: how it idled in the steps that were settled since the
               vector before (step n; on a GPU mostly step n - 1) and what it has held, what its ops took,
               which samples of steps n + 1 and, if they are loaded already, n + 2 lost an item on it, and of
               the plan of step n + 2 its weighed digests and its loads
    step n + 2 is about to be handed out: it hears what all ranks told

So an answer has a step's time to come, and nobody waits for it but where an item of step n + 1 had not been
loaded a step ahead, on whatever rank: then whoever computes losses of step n + 1 waits for it before the
first. The first vector tells of the first plan alone.
"""

from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

from omni.planning.loads import largest, planned_sums
from omni.planning.run_spec import RunSpec
from omni.rank.build import Rank
from omni.training.ahead import Ahead, Prepared
from omni.training.health import Health
from omni.training.idle import OfAllRanks, hear_idle, tell_idle
from omni.training.learning import CostTables
from omni.training.slowness import Slowest
from omni.training.vector import Found, Lost, OfPlan, hear_lost, hear_plan, tell_lost, tell_plan
from ops.device import peak_memory_bytes
from parallel.consensus import Among, weighed
from parallel.control import Control
from parallel.control_values import Part
from parallel.costs import CostTable
from parallel.learning import Sample
from pipeline.plan import StepPlan

TAG = "plans and times"  # as errors name it


class Spent(NamedTuple):
    """What a rank keeps of a settled step until it tells of it: nanoseconds that it idled by cause, and those
    of the whole step; the passes of its ops, by what a core computed and by the clock, and the table
    that the step was planned with.
    """

    idle_ns: dict[str, int]
    whole_ns: int
    passes: tuple[Sample, ...]
    spans: tuple[Sample, ...]
    table: CostTable


class Telling:
    """One rank's vectors. All ranks tell and hear the same ones, in the same order."""

    def __init__(
        self, control: Control, spec: RunSpec, rank: Rank, tables: CostTables, health: Health
    ) -> None:
        self.control = control
        self.spec = spec
        self.rank = rank
        self.tables = tables
        self.health = health
        self.opened = 0
        self.spent: list[Spent] = []
        """Of the steps that were settled and not told of: whoever steps adds them."""

    def open(self, ahead: Ahead, first: int) -> None:
        """Begin to tell of steps from `first` on."""
        self.opened += 1
        self.tag = TAG if self.opened == 1 else f"{TAG} ({self.opened})"
        self.heeded = first - 3  # the last vector
        self.found: dict[int, Found] = {}
        self.known: dict[int, set[tuple[int, int]]] = defaultdict(set)  # samples that were lost, by step
        self.whole: set[int] = set()  # steps of which all that was lost is known
        if first <= ahead.last:
            self.tell(first - 2, ahead, None)

    def tell(self, number: int, ahead: Ahead | None, prepared: Prepared | None) -> None:
        """Tell all ranks of steps that are settled, of what the one after `number`, `prepared`, lost, and of
        the plan of the one after that, waiting until it is there.
        """
        parts = self._of_step()
        lost: list[Lost] = [] if prepared is None else [(prepared.plan, prepared.failures)]
        if ahead is not None and number + 2 <= ahead.last:
            plan = ahead.plan(number + 2)
            parts |= self._of_plan(plan)
            if lost:
                lost.append((plan, ahead.failures(number + 2)))
        self.control.offer(self.tag, number, parts | (tell_lost(lost) if lost else {}))

    def hear(self, number: int) -> list[tuple[OfAllRanks, Slowest | None]]:
        """Heed what all ranks told in a vector, once and in the order of vectors. Returns what they told of
        each step, and with the last one the slowest rank if it has just been found.

        Raises:
            StallError: naming the ranks that have not told theirs.
        """
        if number <= self.heeded:
            return []
        self.heeded = number
        found = self._found(number)
        self.tables.hear(number, found)
        slowest = self.health.hear(number, found)
        steps = hear_idle(found)
        return [(of, slowest if n == len(steps) else None) for n, of in enumerate(steps, 1)]

    def of_plan(self, step: int) -> OfPlan:
        """Return what all ranks told of their plans of a step; raises as `hear`."""
        return hear_plan(self._found(step - 2))

    def lost(self, step: int) -> set[tuple[int, int]]:
        """Return the samples of a step that lost an item on any rank, as (domain, number in its plan); raises
        as `hear`.
        """
        if step not in self.whole:
            self._found(step - 1)
        return self.known[step]

    def _found(self, number: int) -> Found:
        """Return a vector's answer, waiting if it is not there yet."""
        if number not in self.found:
            found = self.found[number] = self.control.settle(self.tag, number)
            if "lost" in found:
                for step, samples in hear_lost(number, found).items():
                    self.known[step] |= samples
                self.whole |= {number + 1} if found["unloaded"][0] else {number + 1, number + 2}
            for old in [of for of in self.found if of < number - 2]:
                del self.found[old]
                self.known.pop(old, None)
                self.whole.discard(old)
        return self.found[number]

    def _of_step(self) -> dict[str, Part]:
        steps, self.spent = self.spent, []
        if not steps:
            return {}
        parts = tell_idle(self.rank.rank, [(of.idle_ns, of.whole_ns) for of in steps], peak_memory_bytes())
        for spent in steps:
            parts |= self.health.tell(spent.spans, spent.table)
            if self.spec.config.costs.learn:
                parts |= self.tables.tell(spent.passes)
        return parts

    def _of_plan(self, plan: StepPlan) -> dict[str, Part]:
        spec, domain_rank = replace(self.spec, table=self.tables.at(plan.step)), self.rank.domain_rank
        ranks = len(spec.arrangement.global_ranks(plan.number))
        among = (
            Among(0, self.rank.rank, spec.arrangement.world),
            Among(
                plan.group.number,
                (plan.number - plan.group.first) * ranks + domain_rank,
                len(plan.group.replicas) * ranks,
            ),
            Among(plan.number, domain_rank, ranks),
        )
        planned = planned_sums(spec, plan, counts=domain_rank == 0)  # for its domain
        return tell_plan(weighed(plan.digests, among), largest(spec, plan), planned)

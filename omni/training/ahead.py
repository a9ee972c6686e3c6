"""Work done before its step, off the critical path: plan three steps ahead, load and assemble one ahead.

One thread asks for plans, one after the other, because each begins at the stream position where the one
before it ended. They are made in a process apart or, where there is none, in that thread: see `plan_process`.
The loader's threads read texts and prepare items; one more thread builds tensors. `take` hands out a step and
waits only if one of them is late. Whatever goes wrong in a thread is raised by `take` of that step.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from dataloader.loader import Failure, Loader, default_threads
from infra.machine import cores_of_ranks
from omni.models.registry import ItemArrays
from omni.planning.plan_process import Planned, PlanStep, Predicted
from omni.planning.planner import Planner
from omni.planning.run_spec import RunSpec
from omni.rank.inputs import Assembler
from omni.training.augmenting import Augmenting
from parallel.costs import CostTable
from pipeline.anchor import StepInputs
from pipeline.plan import StepPlan

PLANS_AHEAD = 3

T = TypeVar("T")


@dataclass(frozen=True)
class Prepared:
    """A step that is ready to run on this rank. `plan_s` is how long its plan took and `plan_cpu_s` how much
    of that a core worked; `predicted` is what it was simulated to be, where that was asked for.
    """

    plan: StepPlan
    inputs: StepInputs
    failures: tuple[Failure, ...]
    plan_s: float
    plan_cpu_s: float
    predicted: Predicted | None

    def emptied(self) -> "Prepared":
        """Return what is to be known of a step that has run: all but its tensors."""
        return replace(self, inputs=StepInputs((), {}, ()))


def loader_threads(spec: RunSpec) -> int:
    """How many threads load for a rank on this machine."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", spec.arrangement.world))
    return spec.config.data.loader_threads or default_threads(cores_of_ranks(), ranks)


class Ahead:
    """Prepares the steps from `first` (at stream position `cursor`) to `last` for one domain.

    `table_at` tells the cost table of a step, when its plan is begun: PLANS_AHEAD steps before it is taken.
    """

    def __init__(
        self,
        planner: Planner,
        plan_step: PlanStep,
        loader: Loader[ItemArrays],
        assembler: Assembler,
        *,
        domain: int,
        first: int,
        last: int,
        cursor: int,
        timeout_s: float,
        table_at: Callable[[int], CostTable | None],
        augmenting: Augmenting | None = None,
    ) -> None:
        self.planner = planner
        self.plan_step = plan_step
        self.loader = loader
        self.assembler = assembler
        self.domain = domain
        self.last = last
        self.cursor = cursor
        self.timeout_s = timeout_s
        self.table_at = table_at
        self.augmenting = augmenting
        self.plans: dict[int, Future[Planned]] = {}
        self.ready: dict[int, Future[Prepared]] = {}
        self.loaded: dict[int, tuple[Failure, ...]] = {}  # by step that is not handed out
        self.planning = ThreadPoolExecutor(1, "planner")
        self.assembling = ThreadPoolExecutor(1, "assembler")
        for step in range(first, first + PLANS_AHEAD):
            self._start_plan(step)
        self._start_preparing(first)

    def plan(self, step: int) -> StepPlan:
        """Return the plan of a step whose planning has begun, waiting for it if need be.

        Raises:
            TimeoutError: naming the step, if it is not planned in time.
        """
        return self._result(self.plans[step], f"the plan of step {step}").plan

    def take(self, step: int) -> Prepared:
        """Hand out a step once and start preparing the next one in line.

        Raises:
            TimeoutError: naming the step, if it is not ready in time.
        """
        prepared = self._result(self.ready.pop(step), f"step {step}, to be planned and loaded")
        del self.plans[step], self.loaded[step]
        self._start_plan(step + PLANS_AHEAD)
        self._start_preparing(step + 1)
        return prepared

    def failures(self, step: int) -> tuple[Failure, ...] | None:
        """Return which items of a step that is planned could not be prepared, None if not all of them have
        been loaded yet. Waits for nothing.
        """
        return self.loaded[step] if step in self.loaded else self.loader.failures(step)

    def close(self) -> None:
        """Stop preparing; steps under way are dropped."""
        self.loader.close()
        self.planning.shutdown(wait=False, cancel_futures=True)
        self.assembling.shutdown(wait=False, cancel_futures=True)

    def _start_plan(self, step: int) -> None:
        if step <= self.last:
            self.plans[step] = self.planning.submit(self._plan, step, self.table_at(step))

    def _start_preparing(self, step: int) -> None:
        if step <= self.last:
            self.ready[step] = self.assembling.submit(self._prepare, step, self.plans[step])

    def _plan(self, step: int, table: CostTable | None) -> Planned:
        planned = self.plan_step(step, self.cursor, self.domain, table)
        plan = planned.plan
        self.cursor = plan.taken.next_cursor
        metas = self.planner.metas_of(plan.domain)
        fetch = self.assembler.fetch_of(plan.domain, metas)
        if self.augmenting is not None:
            fetch = self.augmenting.fetch(fetch, metas, plan.taken)
        self.loader.submit(step, fetch)
        return planned

    def _prepare(self, step: int, future: Future[Planned]) -> Prepared:
        planned = future.result()
        plan = planned.plan
        fetched = self.loader.get(step, self.timeout_s)
        self.loaded[step] = fetched.failures
        inputs = self.assembler.assemble(plan.domain, fetched, predict=False)
        return Prepared(plan, inputs, fetched.failures, planned.wall_s, planned.cpu_s, planned.predicted)

    def _result(self, future: Future[T], what: str) -> T:
        """Wait a little longer than those who plan and load, whose own errors say more."""
        try:
            return future.result(self.timeout_s + 10)
        except TimeoutError as error:
            if future.done():  # raised by the work itself
                raise
            raise TimeoutError(f"waited {self.timeout_s + 10:g} s for {what} (train.timeout_s)") from error

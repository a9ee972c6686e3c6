"""Work done before its step, off the critical path: plan two steps ahead, load and assemble one ahead.

One thread plans, because each plan begins at the stream position where the one before it ended; the loader's
threads read and decode; one more thread builds tensors. `take` hands out a step and waits only if one of
them is late. Whatever goes wrong in a thread is raised by `take` of that step.
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

from dataloader.loader import Failure, Loader
from omni.training.inputs import Assembler
from omni.training.planner import Planner
from pipeline.anchor import StepInputs
from pipeline.plan import StepPlan

PLANS_AHEAD = 2


@dataclass(frozen=True)
class Prepared:
    """A step that is ready to run on this rank. `wait_s` is how long the rank waited for it."""

    plan: StepPlan
    inputs: StepInputs
    failures: tuple[Failure, ...]
    plan_s: float
    wait_s: float


class Ahead:
    """Prepares the steps from `first` (at stream position `cursor`) to `last` for one domain."""

    def __init__(
        self,
        planner: Planner,
        loader: Loader,
        assembler: Assembler,
        *,
        domain: int,
        first: int,
        last: int,
        cursor: int,
        timeout_s: float,
    ) -> None:
        self.planner = planner
        self.loader = loader
        self.assembler = assembler
        self.domain = domain
        self.last = last
        self.cursor = cursor
        self.timeout_s = timeout_s
        self.plans: dict[int, Future[tuple[StepPlan, float]]] = {}
        self.ready: dict[int, Future[Prepared]] = {}
        self.planning = ThreadPoolExecutor(1, "planner")
        self.assembling = ThreadPoolExecutor(1, "assembler")
        for step in range(first, first + PLANS_AHEAD):
            self._start_plan(step)
        self._start_preparing(first)

    def plan(self, step: int) -> StepPlan:
        """Return the plan of a step that is at most two ahead, waiting for it if need be."""
        return self.plans[step].result(self.timeout_s)[0]

    def take(self, step: int) -> Prepared:
        """Hand out a step once and start preparing the next one in line.

        Raises:
            TimeoutError: naming the step, if it is not ready in time.
        """
        start = time.perf_counter()
        prepared = self.ready.pop(step).result(self.timeout_s + 10)
        del self.plans[step]
        self._start_plan(step + PLANS_AHEAD)
        self._start_preparing(step + 1)
        wait_s = time.perf_counter() - start
        return replace(prepared, wait_s=wait_s)

    def close(self) -> None:
        """Stop preparing; steps under way are dropped."""
        self.loader.close()
        self.planning.shutdown(wait=False, cancel_futures=True)
        self.assembling.shutdown(wait=False, cancel_futures=True)

    def _start_plan(self, step: int) -> None:
        if step <= self.last:
            self.plans[step] = self.planning.submit(self._plan, step)

    def _start_preparing(self, step: int) -> None:
        if step <= self.last:
            self.ready[step] = self.assembling.submit(self._prepare, step, self.plans[step])

    def _plan(self, step: int) -> tuple[StepPlan, float]:
        start = time.perf_counter()
        plan = self.planner.next_step(step, self.cursor, self.domain)
        self.planner.verify(plan)
        _ = plan.digests  # hash it here, not in the step
        self.cursor = plan.taken.next_cursor
        self.loader.submit(step, self.assembler.fetch_of(plan.domain, self.planner.metas_of(plan.domain)))
        return plan, time.perf_counter() - start

    def _prepare(self, step: int, planned: "Future[tuple[StepPlan, float]]") -> Prepared:
        plan, plan_s = planned.result()
        fetched = self.loader.get(step, self.timeout_s)
        inputs = self.assembler.assemble(plan.domain, fetched, predict=False)
        return Prepared(plan, inputs, fetched.failures, plan_s, fetched.wait_s)

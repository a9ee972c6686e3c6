"""Plan in a process of one's own, so that planning and the engine do not take turns in one interpreter.

Planning a step takes Python 50 to 600 ms in large domains, and the engine launches its kernels from Python:
as threads of one process they share one lock, and a thread that wants it back waits 5 ms each time. So a rank
forks a planner process before it has a process group, a device context or threads. The child has the planner
and its memory-mapped indexes from the fork; it gets (step, cursor, domain, cost table) over a pipe and
answers with the plan, or with the error that planning raised. Ranks of a node share plans (`node_plans.py`).
It never touches torch.distributed or a device.
"""

import contextlib
import ctypes
import gc
import io
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from infra.launch import ENDING
from infra.lineage import KILLED_S, end_with_parent, unended
from infra.screen import beside
from omni.planning.node_plans import NodePlans
from omni.planning.planner import Planner
from parallel.costs import CostTable
from parallel.policy import PolicyError
from pipeline.costs import simulate
from pipeline.drawing import idle_ns, rows_of
from pipeline.ops import Kind, Op
from pipeline.plan import StepPlan

NAME = b"omni-planner"  # as top and ps -L show the process; at most 15 letters
_PR_SET_NAME = 15
_LOOK_S = 0.005  # between looks whether the child has ended


@dataclass(frozen=True)
class Predicted:
    """What a simulated step of a domain is like: the share of it that ranks idle, by cause (nothing for a
    step without work), and the seconds until its last op ends that does not reduce (0 if it has none).
    """

    idle: Mapping[str, float]
    ops_s: float


@dataclass(frozen=True)
class Planned:
    """The plan of a step, verified and hashed, and the seconds that this took: of a clock and of a core.

    `predicted` is there if it was asked for; simulating is not part of the seconds.
    """

    plan: StepPlan
    wall_s: float
    cpu_s: float
    predicted: Predicted | None = None


PlanStep = Callable[[int, int, int, CostTable | None], Planned]
"""Of step, cursor, domain, and the cost table unless it is the planner's own; raises what planning raises."""


class PlannerEndedError(RuntimeError):
    """A rank's planner process ended; the message says how, and during which step's plan."""


def plan_step(
    planner: Planner,
    step: int,
    cursor: int,
    domain: int,
    table: CostTable | None = None,
    predicts: bool = False,
) -> Planned:
    """Plan, verify and hash a step in this thread, with the planner's own cost table unless given another,
    and simulate it if it `predicts`.

    Raises:
        PolicyError: naming the step and the policy, if one raises or breaks its promise.
    """
    planner = planner if table is None else planner.with_table(table)
    start, cpu = time.perf_counter(), time.thread_time()
    plan = _made(planner, step, cursor, domain)
    wall_s, cpu_s = time.perf_counter() - start, time.thread_time() - cpu
    return Planned(plan, wall_s, cpu_s, predict(planner, plan) if predicts else None)


def _made(planner: Planner, step: int, cursor: int, domain: int) -> StepPlan:
    try:
        plan = planner.next_step(step, cursor, domain)
    except PolicyError as error:
        raise PolicyError(f"step {step} cannot be planned: {error}") from error
    planner.verify(plan)
    _ = plan.digests  # hash it here, not in the step; the plan keeps them, also through a pickle
    return plan


@dataclass(frozen=True)
class Pickled:
    """A planned step on its way to the rank, its plan as bytes, which a reader of shared ones hands on."""

    plan: bytes
    wall_s: float
    cpu_s: float
    predicted: Predicted | None

    def planned(self) -> Planned:
        """Read the plan."""
        return Planned(_load(self.plan), self.wall_s, self.cpu_s, self.predicted)


def pickled_step(
    planner: Planner, step: int, cursor: int, domain: int, predicts: bool, shared: NodePlans | None
) -> Pickled:
    """Plan a step as `plan_step` does; a plan that another rank of the node has `shared` is taken from there,
    if this rank admits it.
    """
    start, cpu, own = time.perf_counter(), time.thread_time(), list[StepPlan]()

    def make() -> bytes:
        own.append(_made(planner, step, cursor, domain))
        return pickle.dumps(own[0], protocol=5)

    if shared is None:
        content = make()
    else:
        table = planner.domain.table
        content = shared.plan((step, cursor, domain, table.number, table.learnt), make)
    if not own:
        own.append(pickle.loads(content))
        planner.admit(own[0])  # each rank has a memory of its own
    wall_s, cpu_s = time.perf_counter() - start, time.thread_time() - cpu
    return Pickled(content, wall_s, cpu_s, predict(planner, own[0]) if predicts else None)


def predict(planner: Planner, plan: StepPlan) -> Predicted:
    """Simulate a plan with the planner's cost table."""
    timeline = simulate(plan.domain, planner.domain.table, planner.domain.single_queue)
    teams = plan.domain.teams
    whole = timeline.makespan_ns * len(teams)
    idle = idle_ns(rows_of(timeline, [""] * len(teams)))
    shares = {cause: ns / whole for cause, ns in idle.items()} if whole else {}
    ends = [event.end_ns for team in timeline.events for event in team if not reduces(event.op)]
    return Predicted(shares, max(ends, default=0) / 1e9)


def reduces(op: Op) -> bool:
    """Whether an op issues a reduction or waits for one."""
    return Kind.REDUCE in (op.kind, op.on)


@contextlib.contextmanager
def planning_apart(
    planner: Planner, timeout_s: float, predicts: bool = False, shared: NodePlans | None = None
) -> Iterator[PlanStep]:
    """Plan in a process apart inside the block, and simulate there what is planned if it `predicts`; on
    systems other than Linux, in the thread that asks. All plans but the first are `shared`.
    """
    if sys.platform != "linux":  # elsewhere forking is unsafe or unknown, and a child outlives its parent
        yield partial(plan_step, planner, predicts=predicts)
        return
    process = PlannerProcess(planner, timeout_s, predicts, shared)
    try:
        yield process
    finally:
        process.close()


class PlannerProcess:
    """A child that plans: call it like `plan_step`. Calls from several threads wait for each other.

    The child ends when this process does, however it does, and at `close`. Until then it ignores the signals
    that ask a launch to stop, which torchrun sends to whole process groups: the rank decides.
    """

    def __init__(
        self, planner: Planner, timeout_s: float, predicts: bool = False, shared: NodePlans | None = None
    ) -> None:
        """Fork. Raises RuntimeError where that is unsafe: with threads, a process group or a device."""
        _check_fork()
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        self._pipe, theirs = Pipe()
        # The child collects no garbage among what both share, which would copy the memory it lies in.
        gc.collect()
        gc.freeze()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._pipe.close()
            _serve(planner, theirs, parent, predicts, shared)
        theirs.close()

    def __call__(self, step: int, cursor: int, domain: int, table: CostTable | None = None) -> Planned:
        """Plan a step in the child.

        Raises:
            PlannerEndedError: if the child is no more.
            TimeoutError: after `timeout_s` seconds without an answer. The child is then killed.
            Exception: what planning raised, with the child's traceback as a note.
        """
        with self._lock:
            try:
                self._pipe.send((step, cursor, domain, table))
                answer = self._pipe.recv_bytes() if self._pipe.poll(self.timeout_s) else None
            except (EOFError, OSError) as error:
                raise PlannerEndedError(
                    f"this rank's planner process {self.pid} {self._end()} during the plan of step {step}"
                ) from error
            if answer is None:
                os.kill(self.pid, signal.SIGKILL)  # its answer, if it came, would be taken for the next
                raise TimeoutError(
                    f"this rank's planner process {self.pid} has not made the plan of step {step} in "
                    f"{self.timeout_s:g} s (train.timeout_s)"
                )
        result = pickle.loads(answer)
        if isinstance(result, Exception):
            raise result
        planned: Planned = result.planned()
        return planned

    def close(self) -> None:
        """End the child, with whatever it is planning. Harmless when called twice."""
        if self._pipe.closed:
            return
        os.kill(self.pid, signal.SIGKILL)  # it is ours until it is waited for, below
        if _ends(self.pid):
            with self._lock:  # whoever asks for a plan learns of the end
                self._pipe.close()
                os.waitpid(self.pid, 0)
        else:
            beside(unended("this rank's planner process", [self.pid]))

    def _end(self) -> str:
        """How the child ended."""
        if self._pipe.closed:
            return "was closed"
        if (status := _ends(self.pid)) is None:
            return "has let go of its pipe"
        if status.si_code == os.CLD_EXITED:
            return f"ended with exit code {status.si_status}"
        name = signal.Signals(status.si_status).name
        hint = " (out of memory, if nobody sent it)" if name == "SIGKILL" else ""
        return f"was ended by {name}{hint}"


def _ends(pid: int) -> "os.waitid_result | None":
    """Return how a child ends, None if it does not in KILLED_S seconds. It is not waited for: while it is a
    zombie, no other process gets its number.
    """
    until = time.monotonic() + KILLED_S
    while (status := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None:
        if time.monotonic() > until:
            return None
        time.sleep(_LOOK_S)
    return status


def _check_fork() -> None:
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]
    found = [f"threads ({', '.join(threads)})"] if threads else []
    found += ["a process group"] if dist.is_available() and dist.is_initialized() else []
    found += ["a device context"] if torch.cuda.is_initialized() else []
    if found:
        raise RuntimeError(
            f"a planner process cannot be forked from a process that has {' and '.join(found)}: what they "
            f"hold would be stuck in the child. Fork first"
        )


def _serve(
    planner: Planner, pipe: Connection, parent: int, predicts: bool, shared: NodePlans | None
) -> NoReturn:
    """Be the child: answer requests until the parent lets go of the pipe or ends."""
    code = 1
    known: NodePlans | None = None
    try:
        end_with_parent(parent)  # a closed pipe is noticed after a plan only
        ctypes.CDLL(None).prctl(_PR_SET_NAME, NAME)
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN)
        os.dup2(2, 1)  # what a policy prints is seen, but nobody waits for an end of the rank's output
        gc.disable()  # among a plan's many small objects there is little garbage to look for
        while True:
            gc.collect()
            step, cursor, domain, table = pipe.recv()
            if table is not None:
                planner = planner.with_table(table)  # kept: what it derives of a table serves many steps
            pipe.send_bytes(_answer(planner, step, cursor, domain, predicts, known))
            known = shared  # the first plan is its own: see `node_plans.py`
    except (EOFError, OSError):  # of the pipe: what planning raises is answered
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)  # never back into the code that forked


def _answer(
    planner: Planner, step: int, cursor: int, domain: int, predicts: bool, shared: NodePlans | None
) -> bytes:
    try:
        return pickle.dumps(pickled_step(planner, step, cursor, domain, predicts, shared), protocol=5)
    except Exception as error:
        return pickle.dumps(_portable(error))


def _portable(error: Exception) -> Exception:
    """The error, or one with its name and message if it does not survive a pickle; with its traceback."""
    note = f"In the planner process:\n{traceback.format_exc()}"
    try:
        copy = pickle.loads(pickle.dumps(error))
        same = type(copy) is type(error) and str(copy) == str(error)
    except Exception:
        same = False
    portable = error if same else RuntimeError(f"{type(error).__name__}: {error}")
    portable.add_note(note)
    return portable


def _load(answer: bytes) -> Any:
    return pickle.Unpickler(_Frames(answer)).load()


class _Frames:
    """Reads a pickle frame by frame, each of 64 KiB, by a function in Python: there the thread that reads
    makes way for others, while `pickle.loads` would keep the interpreter for as long as it takes.
    """

    def __init__(self, content: bytes) -> None:
        self._file = io.BytesIO(content)

    def read(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        return self._file.read(size)

    def readline(self) -> bytes:
        """Return the bytes up to the next line's end."""
        return self._file.readline()

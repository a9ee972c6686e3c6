"""Planning in a process apart: the same plans, and nothing left hanging or alive when something ends."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ranks import RankPool
from small import overrides, write_mixed

from omni.compose import compose_config
from omni.planning.plan_process import Planned, PlannerEndedError, PlannerProcess, plan_step, planning_apart
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.training.ahead import Ahead
from pipeline.costs import simulate
from pipeline.verifier import PlanRefusedError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="planner processes are forked on Linux only")


def job_of(folder: Path) -> RunSpec:
    write_mixed(folder / "mixed")
    return prepare_run(compose_config(overrides(folder / "mixed", folder / "run", "layout=pp2")), 4)


class Broken:
    """A planner that does what a test needs, by the step asked for."""

    def next_step(self, step: int, cursor: int, domain: int) -> Any:
        """Fail, die, sleep or answer."""
        if step == 1:
            raise PlanRefusedError("refused: R7")
        if step == 2:
            raise Unportable("two", "arguments")
        if step == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 4:
            os._exit(7)
        if step == 5:
            time.sleep(3600)
        return SimpleNamespace(digests=(step, cursor, domain))

    def verify(self, plan: Any) -> None:
        """Accept."""


class Unportable(ValueError):
    """Its pickle cannot be read back."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


def same_plans(folder: Path) -> None:
    planner = job_of(folder).planner
    process = PlannerProcess(planner, timeout_s=120)
    cursor = 0
    for step in range(1, 6):
        for domain in range(2):
            ours, theirs = plan_step(planner, step, cursor, domain), process(step, cursor, domain)
            assert "digests" in theirs.plan.__dict__, "hashed there, not here"
            assert "digest" in theirs.plan.domain.__dict__
            assert theirs.plan == ours.plan
            assert theirs.plan.digests == ours.plan.digests
            fresh = replace(theirs.plan, domain=replace(theirs.plan.domain))
            assert fresh.digests == theirs.plan.digests, "the digests are of what came"
        assert theirs.cpu_s > 0
        cursor = theirs.plan.taken.next_cursor
    learnt = planner.domain.table.with_laws(1, {"image": planner.domain.table.parts["llm/0"].stated})
    for table in (learnt, planner.domain.table):
        ours, theirs = plan_step(planner, 6, cursor, 0, table), process(6, cursor, 0, table)
        assert theirs.plan == ours.plan
        assert (theirs.plan.cost_table, theirs.plan.learnt) == (table.number, table.learnt)
    process.close()
    process.close()
    assert not psutil.pid_exists(process.pid)
    with pytest.raises(PlannerEndedError, match="was closed during the plan of step 9"):
        process(9, 0, 0)


def predictions(folder: Path) -> None:
    planner = job_of(folder).planner
    learnt = planner.domain.table.with_laws(1, {"image": planner.domain.table.parts["llm/0"].stated})
    with planning_apart(planner, 120, predicts=True) as process:
        for table in (planner.domain.table, learnt):
            planned = process(1, 0, 0, table)
            timeline = simulate(planned.plan.domain, table, planner.domain.single_queue)
            assert planned.predicted is not None
            assert 0 < planned.predicted.ops_s <= timeline.makespan_ns / 1e9
            assert 0 <= sum(planned.predicted.idle.values()) < 1
            assert planned.predicted == plan_step(planner, 1, 0, 0, table, predicts=True).predicted
    with planning_apart(planner, 120) as process:
        assert process(1, 0, 0).predicted is None, "other ranks report nothing, so they simulate nothing"


def errors(folder: Path) -> None:
    process = PlannerProcess(Broken(), timeout_s=60)  # type: ignore[arg-type]
    with pytest.raises(PlanRefusedError) as refused:
        process(1, 0, 0)
    assert str(refused.value) == "refused: R7"
    (note,) = refused.value.__notes__
    assert "In the planner process" in note
    assert "in next_step" in note
    with pytest.raises(RuntimeError) as told:
        process(2, 0, 0)
    assert str(told.value) == "Unportable: two arguments"
    assert process(6, 7, 8).plan.digests == (6, 7, 8), "it goes on"


def ends(folder: Path) -> None:
    for step, how in ((3, "was ended by SIGKILL"), (4, "ended with exit code 7")):
        process = PlannerProcess(Broken(), timeout_s=60)  # type: ignore[arg-type]
        for _ in range(2):
            with pytest.raises(PlannerEndedError, match=f"{process.pid} {how}.* the plan of step {step}"):
                process(step, 0, 0)
        process.close()
    process = PlannerProcess(Broken(), timeout_s=0.2)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError, match=r"not made the plan of step 5 in 0\.2 s"):
        process(5, 0, 0)
    process.timeout_s = 60  # that it has ended is told at once, but on a busy machine not in 0.2 s
    with pytest.raises(PlannerEndedError, match="SIGKILL"):
        process(6, 0, 0)


def signals(folder: Path) -> None:
    process = PlannerProcess(Broken(), timeout_s=60)  # type: ignore[arg-type]
    process(6, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        os.kill(process.pid, number)
    process(7, 0, 0)


def unsafe(folder: Path) -> None:
    import threading

    import torch.distributed as dist

    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="mine")
    thread.start()
    with pytest.raises(RuntimeError, match=r"threads \(mine\)"):
        PlannerProcess(Broken(), timeout_s=1)  # type: ignore[arg-type]
    stop.set()
    thread.join()
    dist.init_process_group("gloo", f"file://{folder / 'store'}", rank=0, world_size=1)
    with pytest.raises(RuntimeError, match="a process group"):
        PlannerProcess(Broken(), timeout_s=1)  # type: ignore[arg-type]


def closing_while_it_plans(folder: Path) -> None:
    process = PlannerProcess(Broken(), timeout_s=60)  # type: ignore[arg-type]
    loader = SimpleNamespace(close=lambda: None)
    ahead = Ahead(
        None,
        process,
        loader,
        None,
        domain=0,
        first=5,
        last=5,
        cursor=0,
        timeout_s=60,
        table_at=lambda _: None,
    )  # type: ignore[arg-type]
    time.sleep(0.3)
    start = time.monotonic()
    ahead.close()
    process.close()
    assert time.monotonic() - start < 20
    with pytest.raises(PlannerEndedError, match="step 5"):
        ahead.plan(5)


def late(folder: Path) -> None:
    """Names the step that is waited for, whoever plans it."""
    loader = SimpleNamespace(close=lambda: None)
    ahead = Ahead(
        None,
        partial(plan_step, Broken()),
        loader,
        None,
        domain=0,
        first=5,
        last=5,
        cursor=0,
        timeout_s=-9.8,
        table_at=lambda _: None,
    )  # type: ignore[arg-type]
    with pytest.raises(TimeoutError, match="the plan of step 5"):
        ahead.plan(5)
    with pytest.raises(TimeoutError, match="step 5, to be planned and loaded"):
        ahead.take(5)
    sys.stdout.flush()
    os._exit(0)  # the thread that plans sleeps on


def test_comparing_plans_waits_for_none_that_has_just_been_begun() -> None:
    slow, go = threading.Event(), threading.Event()

    def plan(step: int, cursor: int, domain: int, table: object) -> Planned:
        if step == 4:  # begun when step 1 is taken
            slow.set()
            assert go.wait(60)
        taken = SimpleNamespace(next_cursor=step)
        return Planned(SimpleNamespace(step=step, taken=taken, domain=None), 0.0, 0.0)  # type: ignore[arg-type]

    fetched = SimpleNamespace(failures=())
    loader = SimpleNamespace(close=lambda: None, submit=lambda *_: None, get=lambda *_: fetched)
    assembler = SimpleNamespace(fetch_of=lambda *_: None, assemble=lambda *_, **__: None)
    planner = SimpleNamespace(metas_of=lambda _: None)
    among = {"domain": 0, "first": 1, "last": 9, "cursor": 0, "timeout_s": 20.0, "table_at": lambda _: None}
    ahead = Ahead(planner, plan, loader, assembler, **among)  # type: ignore[arg-type]
    try:
        assert ahead.take(1).plan.step == 1
        assert slow.wait(20)
        assert ahead.plan(3).step == 3, "while that of step 4 is being made"
        assert ahead.take(2).plan.step == 2
    finally:
        go.set()
        ahead.close()


def unending(folder: Path) -> None:
    """A child that no signal ends, as one that hangs in a call of the kernel: it is left, and named."""
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("omni.planning.plan_process.KILLED_S", 0.1)
        patch.setattr("omni.planning.plan_process.beside", said.append)
        process = PlannerProcess(Broken(), timeout_s=60)  # type: ignore[arg-type]
        patch.setattr("os.kill", lambda *_: None)
        process.close()
        process._pipe.close()
    os.waitpid(process.pid, 0)
    (text,) = said
    assert f"planner process has not ended in 10 s after SIGKILL (process {process.pid})" in text


# Forks, says the child's number, plans for ever.
PARENT = """
import sys, time
from types import SimpleNamespace
sys.path[:0] = {path!r}
from omni.planning.plan_process import PlannerProcess
class Sleeping(SimpleNamespace):
    def next_step(self, step, cursor, domain):
        time.sleep(3600 * (step > 1))
        return SimpleNamespace(digests=(step, cursor, domain))
process = PlannerProcess(Sleeping(verify=lambda plan: None), timeout_s=3600)
process(1, 0, 0)  # by now it has a name
print(process.pid, flush=True)
process(2, 0, 0)
"""


@pytest.mark.parametrize(
    "function",
    [same_plans, predictions, errors, ends, signals, unsafe, closing_while_it_plans, unending, late],
    ids=lambda function: function.__name__,
)
def test_in_a_process_of_its_own(ranks: RankPool, function: Callable[[Path], None], tmp_path: Path) -> None:
    # That of pytest may have threads, or a process group.
    ranks.apart(function, tmp_path)


def test_the_child_of_a_killed_parent_ends_at_once_and_lets_go_of_its_output() -> None:
    code = PARENT.format(path=sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        child = psutil.Process(int(process.stdout.readline()))
        assert child.name() == "omni-planner"
    finally:
        process.kill()
    process.communicate(timeout=30)  # waits for the end of the output, which the child had from its parent
    _, alive = psutil.wait_procs([child], 10)
    assert not [left for left in alive if left.status() != psutil.STATUS_ZOMBIE]


def test_errors_of_ours_survive_a_pickle() -> None:
    for error in (PlanRefusedError("R1: …"), PlannerEndedError("ended")):
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy)) == (type(error), str(error))

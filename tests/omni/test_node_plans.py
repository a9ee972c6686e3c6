"""Ranks of a node make a plan once: the same plans, and whoever ends, the others go on."""

import os
import pickle
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from ranks import RankPool
from small import overrides, write_mixed

from dataloader.node_cache import NodeCache
from omni.compose import compose_config
from omni.planning.node_plans import KEPT, NodePlans, node_plans
from omni.planning.plan_process import PlannerEndedError, PlannerProcess, pickled_step, plan_step
from omni.planning.planner import Planner
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from pipeline.plan import StepPlan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="planner processes are forked on Linux only")


class Told(Planner):
    """A planner that leaves a line in a file for each step that it plans, and ends there if told to."""

    def next_step(self, step: int, cursor: int, number: int) -> StepPlan:
        """Plan as planners do."""
        folder = Path(os.environ["TOLD"])
        with (folder / "planned").open("a") as file:
            file.write(f"{step} ")
        if (folder / "ends").exists():
            (folder / "ends").unlink()
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().next_step(step, cursor, number)


def job_of(folder: Path, *more: str) -> RunSpec:
    if not (folder / "mixed").exists():
        write_mixed(folder / "mixed")
    return prepare_run(compose_config(overrides(folder / "mixed", folder / "run", "layout=pp2", *more)), 4)


def told(folder: Path) -> Told:
    os.environ["TOLD"] = str(folder)
    return Told(**vars(job_of(folder).planner))


def shared_in(folder: Path, run: str = "run") -> NodePlans:
    return NodePlans(NodeCache(folder / "plans", 1 << 28, print), run, b"secret")


def step_of(planner: Planner, step: int, cursor: int, domain: int, shared: NodePlans) -> StepPlan:
    return pickled_step(planner, step, cursor, domain, False, shared).planned().plan


def planned(folder: Path) -> list[int]:
    return list(map(int, (folder / "planned").read_text().split()))


def once(folder: Path) -> None:
    planner = told(folder)
    ranks = [PlannerProcess(planner, 120, shared=shared_in(folder)) for _ in range(3)]
    cursor = 0
    for step in range(1, 6):
        ours = plan_step(planner, step, cursor, 0)
        with ThreadPoolExecutor(len(ranks)) as pool:
            asked = [pool.submit(rank, step, cursor, 0) for rank in ranks]
            found = [each.result().plan for each in asked]
        assert found == [ours.plan] * 3
        assert all("digests" in plan.__dict__ for plan in found)
        assert {plan.digests for plan in found} == {ours.plan.digests}
        cursor = ours.plan.taken.next_cursor
    for rank in ranks:
        rank.close()
    # Each makes its first by itself, and one of them each of the others; one more is ours.
    assert sorted(planned(folder)) == [1] * 4 + [step for step in range(2, 6) for _ in range(2)]


def one_ends(folder: Path) -> None:
    planner = told(folder)
    first, second = (PlannerProcess(planner, 60, shared=shared_in(folder)) for _ in range(2))
    for rank in (first, second):
        rank(1, 0, 0)
    (folder / "ends").touch()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(first, 2, 0, 0)
        while (folder / "ends").exists():
            time.sleep(0.01)
        assert second(2, 0, 0).plan == plan_step(planner, 2, 0, 0).plan, "whoever waits for it goes on"
        with pytest.raises(PlannerEndedError, match=r"was ended by SIGKILL .* the plan of step 2"):
            asked.result()
    for rank in (first, second):
        rank.close()


CASES = (once, one_ends)


@pytest.mark.parametrize("case", CASES, ids=[case.__name__ for case in CASES])
def test_planner_processes_of_a_node(case, ranks: RankPool, tmp_path):
    ranks.apart(case, tmp_path)


def test_only_the_same_is_shared(tmp_path):
    planner = job_of(tmp_path).planner
    of_run = shared_in(tmp_path)
    learnt = planner.domain.table.with_laws(1, {"image": planner.domain.table.parts["llm/0"].stated})
    cursor = plan_step(planner, 1, 0, 0).plan.taken.next_cursor
    other = planner.with_table(learnt)
    cases = [
        (planner, 1, 0, 0),
        (planner, 2, 0, 0),
        (planner, 1, cursor, 0),
        (planner, 1, 0, 1),
        (other, 1, 0, 0),
    ]
    for shared in (of_run, shared_in(tmp_path, "another run")):
        for case in cases:
            made = len(list((tmp_path / "plans").glob("*.arrow")))
            for _ in range(2):
                assert step_of(*case, shared) == plan_step(*case).plan
            assert len(list((tmp_path / "plans").glob("*.arrow"))) == made + 1


def test_each_rank_checks_its_own_memory(tmp_path):
    def refuse(plan: StepPlan) -> None:
        raise ValueError(f"rank 1 cannot hold step {plan.step}")

    planner, shared = job_of(tmp_path).planner, shared_in(tmp_path)
    step_of(planner, 1, 0, 0, shared)
    with pytest.raises(ValueError, match="rank 1 cannot hold step 1"):
        step_of(replace(planner, admit=refuse), 1, 0, 0, shared)


def test_what_fails_is_not_shared_and_what_is_damaged_is_made_anew(tmp_path):
    planner, shared = job_of(tmp_path).planner, shared_in(tmp_path)

    def fail(plan: StepPlan) -> None:
        raise ValueError("refused")

    for _ in range(2):
        with pytest.raises(ValueError, match="refused"):
            step_of(replace(planner, admit=fail), 1, 0, 0, shared)
    assert not list((tmp_path / "plans").glob("*.arrow"))
    ours = step_of(planner, 1, 0, 0, shared)
    (file,) = (tmp_path / "plans").glob("*.arrow")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert step_of(planner, 1, 0, 0, shared) == ours


class Harm:
    """A pickle that leaves a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_plan_of_a_stranger_is_not_unpickled_and_said(tmp_path, capsys):
    planner, shared = job_of(tmp_path).planner, shared_in(tmp_path)
    ours = step_of(planner, 1, 0, 0, shared)
    (file,) = (tmp_path / "plans").glob("*.arrow")
    with pa.memory_map(str(file)) as mapped:
        signed = pa.ipc.open_file(mapped).read_all()["plan"][0].as_py()
    harm, schema = pickle.dumps(Harm(tmp_path / "harm")), pa.schema([("plan", pa.large_binary(), False)])
    tables = [pa.table([[forged + harm]], schema) for forged in (signed[:32], b"\0" * 32)]
    tables += [pa.table([[]], schema), pa.table({"other": [harm]}), pa.table({"plan": [None, harm]})]
    for table in tables:
        with pa.OSFile(str(file), "wb") as out, pa.ipc.new_file(out, table.schema) as writer:
            writer.write_table(table)
        assert step_of(planner, 1, 0, 0, shared) == ours
        assert not (tmp_path / "harm").exists()
    assert capsys.readouterr().out.count("none of this run's ranks") == 1


def test_the_last_few_plans_stay(tmp_path):
    planner, shared = job_of(tmp_path).planner, shared_in(tmp_path)
    for step in range(1, KEPT + 4):
        step_of(planner, step, 0, 0, shared)
    assert len(list((tmp_path / "plans").glob("*.arrow"))) == KEPT


def test_who_shares(tmp_path):
    spec, cache = job_of(tmp_path), NodeCache(tmp_path / "plans", 1 << 28, print)
    who = partial(node_plans, spec, secret=b"secret", start=0, cache=cache)
    # Of four ranks, pp2: 0 and 2 are one domain, 1 and 3 the other.
    assert [spec.arrangement.domain(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert who(0, range(1)) is None
    assert who(0, range(2)) is None, "of another domain"
    all_four = [who(rank, range(4)) for rank in range(4)]
    assert len({shared.run for shared in all_four if shared is not None}) == 1
    again = node_plans(spec, 0, range(4), b"secret", 1, cache)
    other = node_plans(job_of(tmp_path, "optim.lr=1e-5"), 0, range(4), b"secret", 0, cache)
    launch = node_plans(spec, 0, range(4), b"another", 0, cache)
    assert len({shared.run for shared in (all_four[0], again, other, launch) if shared is not None}) == 4


def test_a_plan_survives_its_pickle_with_its_digests(tmp_path):
    plan = plan_step(job_of(tmp_path).planner, 1, 0, 0).plan
    assert "digests" in pickle.loads(pickle.dumps(plan, protocol=5)).__dict__

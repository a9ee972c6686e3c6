"""What a plan says of moments: the bytes that a rank keeps of them, and the time in which it updates."""

from pathlib import Path

import pytest
from small import overrides, write_mixed

from omni.commands.plan import plan_of_step
from omni.compose import compose_config
from omni.planning.memory import by_kind, model_peak
from omni.planning.prepare import prepare_run
from omni.planning.rank_work import rank_work
from omni.planning.run_spec import RunSpec
from omni.planning.update_time import update_ns
from omni.rehearsal.rehearse import rehearse
from pipeline.plan import StepPlan

WORLD, RANK = 4, 3
KEYS = ("cluster=h100", "layout.llm.pp=2", "model.llm.hidden=256", "model.llm.ffn=1024")
FROZEN = "+optim.components={image: {frozen: true}}"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("planned") / "mixed"
    write_mixed(path)
    return path


def planned(data: Path, *more: str) -> tuple[RunSpec, StepPlan]:
    spec = prepare_run(compose_config(overrides(data, data / "run", *KEYS, *more)), WORLD)
    return spec, plan_of_step(spec, 1, spec.arrangement.domain(RANK))


# Bytes of optimizer state for each number of a rank's shares, and those that an update moves.
CASES = {
    "fp32": (("train.precision=fp32",), 8, 2 * 4 + 2 * 4 + 2 * 8),
    "bf16": (("train.precision=bf16",), 12, 2 * 4 + 2 * 4 + 2 * 8 + 2),
    "moments in bf16": (("train.precision=bf16", "optim.moments_dtype=bf16"), 8, 2 * 4 + 2 * 4 + 2 * 4 + 2),
    "fp32, moments in bf16": (("train.precision=fp32", "optim.moments_dtype=bf16"), 4, 2 * 4 + 2 * 4 + 2 * 4),
}


@pytest.mark.parametrize("case", CASES)
def test_state_and_time_are_those_of_the_numbers_that_a_rank_updates(data: Path, case: str) -> None:
    more, kept, moved = CASES[case]
    spec, plan = planned(data, *more)
    rehearsed = rehearse(spec, plan, RANK).footprint
    numbers = 0.5 * rehearsed.parameters["llm"] + 0.25 * rehearsed.parameters["image"]  # of 2 and 4 replicas
    held = by_kind(model_peak(spec, rank_work(spec, plan, RANK))[0])["optimizer"]
    # Buckets are filled up, and 24 bytes say of each parameter where it is and how it learns.
    assert held == pytest.approx(kept * numbers, rel=0.01)
    assert held == pytest.approx(rehearsed.peak["optimizer"], rel=1e-3)
    assert update_ns(spec, plan, RANK) == pytest.approx(
        moved * numbers / spec.cluster.moved_per_s * 1e9, rel=0.01
    )


def test_what_is_frozen_is_not_updated(data: Path) -> None:
    whole, frozen = (update_ns(spec, plan, RANK) for spec, plan in (planned(data), planned(data, FROZEN)))
    assert 0 < frozen < whole

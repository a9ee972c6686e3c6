"""ZeRO-2 and 3: partitions equal one rank, hold what is stated, and go on under another layout."""

from pathlib import Path

import pytest
from parity_matrix import Case
from parity_runs import configure, distance, run, write_data
from ranks import RankPool
from small import with_values

from omni.config import Config
from omni.training.parity import TOLERANCE, WEIGHT_TOLERANCE, Measurement

ZERO = "layout.llm.zero"
POOL = {"domain": "dp", "dp": 2}
CASES = (
    (2, Case(cp=2)),
    (3, Case(cp=2)),
    (2, Case(**POOL, pp=2, schedule="zero_bubble_h1")),
    (3, Case(**POOL, pp=2, schedule="joint_zero_bubble_h1", recompute="full")),
    (3, Case(**POOL, cp=2, llm_sp="dynamic", schedule="one_f_one_b", frozen="in_turn")),
    (3, Case(**POOL, tp=2, pp=2, encoder_tp=2, schedule="joint", encoder_sp="dynamic")),
    (2, Case(**POOL, tp=2, ep=2, model="experts", recompute="full", frozen="llm")),
    (3, Case(**POOL, pp=2, ep=2, model="experts", schedule="interleaved", frozen="image")),
    (3, Case(dp=2, cp=2, tp=2, placement="stage0", recompute="full")),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("zero")
    write_data(path)
    return path


def partitioned(case: Case, folder: Path, zero: int) -> Config:
    return with_values(configure(case, folder), {ZERO: zero})


_references: dict[Case, Measurement] = {}


@pytest.mark.parametrize(("zero", "case"), CASES, ids=lambda of: getattr(of, "name", of))
def test_partitions_equal_one_rank(ranks: RankPool, folder: Path, zero: int, case: Case) -> None:
    alone = case.reference
    if alone not in _references:
        _references[alone] = run(ranks, configure(alone, folder), 1)
    found = distance(_references[alone], run(ranks, partitioned(case, folder, zero), case.world))
    assert found.loss <= TOLERANCE
    assert found.square.relative <= TOLERANCE, found.square
    assert found.gradient.relative <= TOLERANCE, found.gradient
    assert found.weights.relative <= WEIGHT_TOLERANCE, found.weights

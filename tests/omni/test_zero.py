"""ZeRO-2 and 3: partitions equal one rank, hold and send what is stated, and go on under another layout."""

from pathlib import Path

import pytest
import torch
from parity_matrix import Case
from parity_runs import configure, distance, run, write_data
from ranks import RankPool
from small import overrides, with_values, write_mixed

from infra.run_folder import RunFolder
from omni.commands.plan import plan_of_step
from omni.compose import compose_config
from omni.config import Config
from omni.planning.prepare import prepare_run
from omni.rehearsal.footprint_model import model_footprint
from omni.rehearsal.rehearse import owned_parameters, rehearse
from omni.training.parity import TOLERANCE, WEIGHT_TOLERANCE, Measurement
from omni.training.trainer import Trainer
from parallel.layout import LayoutError

CPU = torch.device("cpu")
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


def held_whole(rank: int, config: Config, world: int) -> list[tuple[int, int]]:
    """Train a step; how many matrices were whole before its update, and after it, in each virtual stage."""
    trainer = Trainer(prepare_run(config, world), RunFolder.create(Path(config.run.dir)), rank, CPU)
    assert trainer.rank.stage is not None
    counts = []
    with trainer.ahead() as ahead:
        done = trainer.run_step(trainer.begin(ahead, 1))
        parts = trainer.rank.stage.partitioned
        counts.append([sum(map(len, part.whole.values())) for part in parts])
        trainer.update(done)
        counts.append([sum(map(len, part.whole.values())) for part in parts])
    return list(zip(*counts, strict=True))


@pytest.mark.parametrize(("zero", "stays"), [(2, 2 * 4), (3, 0)])
def test_matrices_are_whole_for_a_step_or_a_layer(
    ranks: RankPool, folder: Path, zero: int, stays: int
) -> None:
    """Two layers of four matrices on each stage."""
    case = Case(**POOL, pp=2, schedule="one_f_one_b")
    found = ranks.run(case.world, held_whole, partitioned(case, folder, zero), case.world)
    assert found == [[(stays, 0)]] * case.world


MOE = "model.llm.moe={experts: 4, topk: 2, ffn: 64, shared_ffn: 128, dense_layers: 1}"
HELD = {
    "layers are the fullest": ["model.llm.hidden=512", "model.llm.ffn=2048", "model.llm.vocab=300"],
    "losses are": ["model.llm.hidden=64", "model.llm.vocab=16384"],
    "recomputed": ["model.llm.hidden=256", "model.llm.ffn=1024", "model.llm.recompute=full"],
    "put off": ["model.llm.hidden=256", "layout.llm.pp=2", "pipeline=zero_bubble_h1"],
    "frozen": ["model.llm.hidden=256", "+optim.components={llm: {frozen: [[1, 9]]}}"],
    "adapters": ["model.llm.hidden=256", "model.llm.lora={rank: 8, targets: [linear_qkv]}"],
    "experts": ["model.llm.hidden=256", MOE, "layout.llm.ep=2"],
}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("held") / "mixed"
    write_mixed(path)
    return path


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("what", HELD)
def test_what_is_stated_is_sent_and_holds_no_less(mixed: Path, what: str, zero: int) -> None:
    """The model counts two whole layers wherever layers are fullest, when some matrices may have gone."""
    line = overrides(mixed, mixed / "run", "model.llm.layers=4", "train.precision=bf16", *HELD[what])
    line += ["layout.llm.tp=2", "layout.domain=2", f"{ZERO}={zero}"]
    world = 16 if "layout.llm.pp=2" in line else 8
    spec = prepare_run(compose_config(line), world)
    plan = plan_of_step(spec, 1, spec.arrangement.domain(3))
    found, modelled = rehearse(spec, plan, 3).footprint, model_footprint(spec, plan, 3)
    assert modelled.parameters == found.parameters
    traffic = dict(found.traffic)
    if what == "frozen" and zero == 2:
        del traffic["llm partition", "all_gather"]  # once in a run: matrices stay whole as nothing learns
    assert modelled.traffic == traffic
    assert found.bytes * 0.998 <= modelled.bytes <= found.bytes * 1.1


def test_ranks_own_every_parameter_once(mixed: Path) -> None:
    line = overrides(mixed, mixed / "run", MOE, "layout.llm.ep=2", "layout.llm.tp=2", "layout.domain=2")
    line += ["model.llm.layers=2"]
    counts = []
    for zero in (1, 3):
        spec = prepare_run(compose_config([*line, f"{ZERO}={zero}"]), 4)
        counts.append(sum(owned_parameters(spec, rank)["llm"] for rank in range(4)))
    assert counts[0] == counts[1]


def test_a_pool_of_one_has_nothing_to_divide(mixed: Path) -> None:
    def prepare(world: int, *more: str) -> int:
        line = overrides(mixed, mixed / "run", *more)
        return prepare_run(compose_config(line), world).arrangement.partitions

    with pytest.raises(LayoutError, match=r"layout\.llm\.zero=3 .* set layout\.domain=3, or zero=1"):
        prepare(9, f"{ZERO}=3", "layout.domain=1")
    with pytest.raises(LayoutError, match=r"launch\.ranks so that there are replicas"):
        prepare(1, f"{ZERO}=2")
    with pytest.raises(LayoutError, match=r"layout\.llm\.zero=4: 1 divides"):
        prepare(2, f"{ZERO}=4")
    assert prepare(2, f"{ZERO}=3", "layout.llm.cp=2") == 2
    # Where the size of a domain is chosen, it is one that has something to divide.
    assert prepare(8, f"{ZERO}=3", "system=omni") > 1

"""One model and one batch under many configurations: loss, every gradient, and weights after some steps."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import RankPool
from small import overrides, write_mixed, write_one_item

from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.training import inputs, parity
from omni.training.job import prepare_job
from omni.training.parity import TOLERANCE, WEIGHT_TOLERANCE, Measurement, compare, compare_weights
from parallel.boundary import Ends, Route, make_ends

MOE = "model.llm.moe={experts: 4, topk: 2, ffn: 48, shared_ffn: 32, dense_layers: 1}"
CASES = {
    "dp2": (2, []),
    "pp2": (2, ["layout=pp2"]),
    "pp2 one_f_one_b": (2, ["layout=pp2", "pipeline=one_f_one_b"]),
    "pp2 stage0": (2, ["layout=pp2", "system=stage0"]),
    "pp2 untied": (2, ["layout=pp2", "model.llm.tied=false"]),
    "pp2 qkv bias": (2, ["layout=pp2", "model.llm.qkv_bias=true"]),
    "pp2 recompute": (2, ["layout=pp2", "model.llm.recompute=full", "model.encoders.image.recompute=full"]),
    "dp2 selective": (2, ["model.llm.recompute=selective", "model.encoders.image.recompute=selective"]),
    "dp2 layernorm": (2, ["model.llm.norm=LayerNorm", "model.encoders.image.norm=LayerNorm"]),
    "pp4": (4, ["layout.llm.pp=4"]),
    "dp2 pp2": (4, ["layout=pp2"]),
    "dp3": (3, ["balance=none"]),
    "tp2": (2, ["layout.llm.tp=2"]),
    "tp2 pp2": (4, ["layout.llm.tp=2", "layout.llm.pp=2"]),
    "tp2 dp2 enc tp2": (4, ["layout.llm.tp=2", "+layout.encoders.image.tp=2"]),
    "dp2 enc tp2": (2, ["+layout.encoders.image.tp=2"]),
    "pp2 enc tp2": (2, ["layout.llm.pp=2", "+layout.encoders.image.tp=2"]),
    "cp2": (2, ["layout.llm.cp=2"]),
    "cp3 pp2": (6, ["layout.llm.cp=3", "layout.llm.pp=2"]),
    "tp2 cp2": (4, ["layout.llm.cp=2", "layout.llm.tp=2"]),
    "dp2 enc dynamic": (2, ["encoder_sp=dynamic"]),
    "pp2 enc all": (2, ["encoder_sp=all", "layout.llm.pp=2"]),
    "pool 2 dynamic": (2, ["encoder_sp=long_short", "llm_sp=dynamic", "layout.domain=2"]),
    "moe dp2": (2, [MOE]),
    "moe ep2": (2, [MOE, "layout.llm.ep=2"]),
    "moe tp2 ep2": (2, [MOE, "layout.llm.tp=2", "layout.llm.ep=2"]),
    "moe dp2 pp2 ep2": (4, [MOE, "layout.llm.pp=2", "layout.llm.ep=2"]),
    "moe cp2 tp2 ep4": (4, [MOE, "layout.llm.cp=2", "layout.llm.tp=2", "layout.llm.ep=4"]),
    "moe dp3 recompute": (3, [MOE, "balance=none", "model.llm.recompute=full"]),
    "pp4 two_level": (4, ["layout.llm.pp=4", "boundary=two_level", "cluster.ranks_per_node=2"]),
    "pp2 reduce_scatter": (2, ["layout.llm.pp=2", "boundary=reduce_scatter"]),
    "beside 1+1": (2, ["placement=disaggregated"]),
    "beside dp2+1": (3, ["placement=disaggregated"]),
    "beside dp1+2": (3, ["placement=disaggregated", "placement.ranks=2", "layout.llm.dp=1", "+layout.encoders.image.tp=2"]),
    "beside dp2+3 1f1b": (5, ["placement=disaggregated", "placement.ranks=3", "pipeline=one_f_one_b"]),
}
# What changes the model must be changed in the reference as well.
MODEL_KEYS = (
    "model.llm.tied",
    "model.llm.qkv_bias",
    "model.llm.norm",
    "model.llm.moe",
    "model.encoders.image.norm",
    "optim.comp",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parity")
    write_mixed(path / "mixed")
    write_one_item(path / "one")
    return path


def measure(rank: int, line: list[str], world: int, shift: bool, single_queue: bool) -> Measurement | None:
    if shift:
        inputs.make_ends = shifted_ends
    try:
        job = prepare_job(compose_config(line), world)
        job = replace(job, planner=replace(job.planner, single_queue=single_queue))
        folder = RunFolder.create(Path(job.config.run.dir))
        return parity.measure(job, folder, rank, torch.device("cpu"), steps=job.config.train.steps)
    finally:
        inputs.make_ends = make_ends


def shifted_ends(route: Route, rank: int, device: torch.device) -> Ends:
    ends = make_ends(route, rank, device)
    return Ends(ends.is_local, ends.send, ends.receive - 1, ends.send_counts, ends.receive_counts)


def run(
    ranks: RankPool, line: list[str], world: int, shift: bool = False, single_queue: bool = False
) -> Measurement:
    measurement = ranks.run(world, measure, line, world, shift, single_queue)[0]
    assert measurement is not None
    return measurement


_references: dict[tuple[str, ...], Measurement] = {}


def reference(ranks: RankPool, data: Path, folder: Path, more: list[str]) -> Measurement:
    model = tuple(key for key in more if key.startswith(MODEL_KEYS))
    if model not in _references:
        _references[model] = run(ranks, overrides(data / "mixed", folder / "reference", *model), 1)
    return _references[model]


def assert_equal(one: Measurement, two: Measurement) -> None:
    worst = compare(one, two)[0]
    assert worst.relative <= TOLERANCE, worst
    worst = compare_weights(one, two)[0]
    assert worst.relative <= WEIGHT_TOLERANCE, worst


@pytest.mark.parametrize("case", CASES)
def test_layouts_and_policies_equal_one_rank(ranks: RankPool, data: Path, tmp_path: Path, case: str) -> None:
    world, more = CASES[case]
    expected = reference(ranks, data, tmp_path, more)
    assert_equal(expected, run(ranks, overrides(data / "mixed", tmp_path / "candidate", *more), world))


def test_lists_for_a_single_queue_equal_one_rank(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    expected = reference(ranks, data, tmp_path, [])
    line = overrides(data / "mixed", tmp_path / "candidate", "layout.llm.pp=3", "pipeline=one_f_one_b")
    assert_equal(expected, run(ranks, line, 3, single_queue=True))


def test_the_batch_is_uneven(data: Path, tmp_path: Path) -> None:
    job = prepare_job(compose_config(overrides(data / "mixed", tmp_path, "layout=pp2")), 2)
    replica = job.planner.next_step(1, 0).replicas[0]
    assert None in replica.routes, "no microbatch is without items"
    rows = [sum(c.rows for c in replica.chunks if c.rank == rank) for rank in (0, 1)]
    assert rows[0] != rows[1]
    assert min(rows) > 0


@pytest.mark.parametrize(("world", "more"), [(2, ["layout=pp2"]), (2, []), (3, [])])
def test_ranks_without_items(
    ranks: RankPool, data: Path, tmp_path: Path, world: int, more: list[str]
) -> None:
    line = overrides(data / "one", tmp_path / "reference", samples=3)
    candidate = overrides(data / "one", tmp_path / "candidate", *more, samples=3)
    assert_equal(run(ranks, line, 1), run(ranks, candidate, world))


def test_shifted_placeholders_are_caught(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    expected = reference(ranks, data, tmp_path, [])
    line = overrides(data / "mixed", tmp_path / "candidate", "layout=pp2")
    worst = compare(expected, run(ranks, line, 2, shift=True))[0]
    assert worst.relative > 100 * TOLERANCE


@pytest.mark.parametrize("frozen", ["image", "llm"])
def test_frozen_components_stay_and_the_rest_agrees(
    ranks: RankPool, data: Path, tmp_path: Path, frozen: str
) -> None:
    more = [f"+optim.components={{{frozen}: {{frozen: [[1, 3]]}}}}"]
    one = run(ranks, overrides(data / "mixed", tmp_path / "reference", *more), 1)
    two = run(ranks, overrides(data / "mixed", tmp_path / "candidate", *more, "layout=pp2"), 2)
    assert not any(name.startswith(frozen + "/") for name in one.gradients)
    assert_equal(one, two)


def test_a_component_that_is_frozen_throughout_does_not_change(
    ranks: RankPool, data: Path, tmp_path: Path
) -> None:
    before = run(ranks, overrides(data / "mixed", tmp_path / "a", "train.steps=1", "optim.lr=0"), 1)
    more = "+optim.components={image: {frozen: [[1, 9]]}}"
    after = run(ranks, overrides(data / "mixed", tmp_path / "b", more), 1)
    for name, weight in after.weights.items():
        assert torch.equal(weight, before.weights[name]) == name.startswith("image/"), name


def test_bf16_is_close_to_fp32(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    expected = reference(ranks, data, tmp_path, [])
    line = overrides(data / "mixed", tmp_path / "candidate", "layout=pp2", "train.precision=bf16")
    candidate = run(ranks, line, 2)
    assert abs(candidate.loss - expected.loss) / expected.loss < 5e-3
    assert 1e-4 < compare(expected, candidate)[0].relative < 0.3

"""Rows that enter the LLM at several stages: an image encoder with taps, under many layouts."""

from pathlib import Path

import pytest
import torch
from ranks import RankPool
from small import overrides, write_mixed

from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.config import Config, ConfigError
from omni.models.llm import attach_points
from omni.planning.prepare import prepare_run
from omni.training import parity
from omni.training.parity import TOLERANCE, Measurement, compare
from pipeline.ops import Kind, Op

# Rows enter at the embedding, before layer 1 and before layer 2 of 4.
TAPS = ("model.encoders.image.layers=3", "+model.encoders.image.taps=[1,2]")
CHEAP_LINKS = (
    "cluster.link_latency_ns=0",
    "cluster.node_link_latency_ns=0",
    "cluster.link_bytes_per_s=1000000000000",
    "cluster.op_overhead_ns=0",
)
CASES = {
    "dp2": (2, ["layout.llm.dp=2"]),
    "pp2": (2, ["layout.llm.pp=2"]),
    "pp2 one_f_one_b": (2, ["layout.llm.pp=2", "pipeline=one_f_one_b"]),
    "pp4": (4, ["layout.llm.pp=4"]),
    "pp2 recompute": (2, ["layout.llm.pp=2", "model.llm.recompute=full"]),
    "tp2 pp2 encoder tp2": (4, ["layout.llm.tp=2", "layout.llm.pp=2", "+layout.encoders.image.tp=2"]),
    "cp2 pp2 shared items": (4, ["layout.llm.cp=2", "layout.llm.pp=2", "encoder_sp=all", *CHEAP_LINKS]),
    "beside pp2": (3, ["layout.llm.pp=2", "placement=disaggregated"]),
    "two levels": (4, ["layout.llm.pp=4", "boundary=two_level", "cluster.ranks_per_node=2"]),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("taps")
    write_mixed(path)
    return path


def measure(rank: int, config: Config, world: int) -> Measurement | None:
    spec = prepare_run(config, world)
    folder = RunFolder.create(Path(spec.config.run.dir))
    return parity.measure(spec, folder, rank, torch.device("cpu"), steps=1)


@pytest.fixture(scope="module")
def one(ranks: RankPool, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    return ranks.run(1, measure, compose_config(overrides(data, tmp_path_factory.mktemp("one"), *TAPS)), 1)[0]


@pytest.mark.parametrize("case", CASES)
def test_rows_at_several_stages_equal_one_rank(
    ranks: RankPool, data: Path, tmp_path: Path, one: Measurement, case: str
) -> None:
    world, more = CASES[case]
    many = ranks.run(world, measure, compose_config(overrides(data, tmp_path, *TAPS, *more)), world)[0]
    assert compare(one, many)[0].relative <= TOLERANCE, compare(one, many)[0]


def test_every_tap_is_used(one: Measurement) -> None:
    taps = [tensor for name, tensor in one.gradients.items() if "tap_projectors" in name]
    assert len(taps) == 10
    assert min(float(tensor.norm()) for tensor in taps) > 0


def test_every_row_is_delivered_once_for_each_point_and_stages_wait_for_theirs(
    data: Path, tmp_path: Path
) -> None:
    line = overrides(data, tmp_path, *TAPS, "layout.llm.pp=4")
    domain = prepare_run(compose_config(line), 4).planner.next_step(1, 0, 0).domain
    assert [len(domain.points(rank)) for rank in range(4)] == [1, 1, 1, 0]
    for m, route in enumerate(domain.routes):
        if route is None:
            continue
        rows = sum(item.rows for item in domain.items if item.microbatch == m)
        for stage in range(4):
            arriving = sum(s.length for s in route.segments if s.destination == stage)
            assert arriving == (rows if stage < 3 else 0)
            ops = domain.ops[stage]
            waits = ops.index(Op(Kind.WAIT, m, Kind.SHIP)) < ops.index(
                Op(Kind.FORWARD, m, virtual_stage=stage)
            )
            assert waits or stage == 3


def test_points_are_placed_stage_by_stage() -> None:
    points = attach_points(["llm.embed", "llm.layers.5", "llm.layers.4", "llm.layers.0"], [3, 3])
    assert {name: (p.virtual_stage, p.place) for name, p in points.items()} == {
        "llm.embed": (0, 0),
        "llm.layers.0": (0, 1),
        "llm.layers.4": (1, 0),
        "llm.layers.5": (1, 1),
    }


@pytest.mark.parametrize("name", ["llm.layers.6", "llm.layers.", "encoder", "llm.layers.-1"])
def test_points_that_there_are_not_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"attach point {name}"):
        attach_points([name], [3, 3])

"""Presets of `hydra_conf/system`: each plans what it is named after, and trains as one rank does."""

from pathlib import Path

import pytest
from parity_runs import measure
from ranks import RankPool
from small import overrides, write_mixed

import hydra_conf
from omni.compose import compose_config
from omni.planning.choice import open_keys
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.training.parity import TOLERANCE, WEIGHT_TOLERANCE, Measurement, compare, compare_weights
from pipeline.domain_plan import DomainPlan
from pipeline.plan import StepPlan

SYSTEMS = sorted(path.stem for path in (Path(hydra_conf.__file__).parent / "system").glob("*.yaml"))
PAGE = Path(__file__).parents[2] / "docs" / "systems.md"
# Who encodes, and in which order; None where that is chosen.
NAMED_AFTER = {
    "dhp": ("stage0", "one_f_one_b"),
    "disttrain": ("beside", "one_f_one_b"),
    "encode_first": ("all", "encode_first"),
    "entrain": ("beside", "zero_bubble_h1"),
    "megascale_omni": ("all", "joint_uniform"),
    "megatron": ("stage0", "one_f_one_b"),
    "mimo_colocated": ("all", "encode_first"),
    "mimo_disaggregated": ("beside", "one_f_one_b"),
    "multiplexed": ("all", "encode_first"),
    "omni": ("all", None),
}
BESIDE = {"mimo_disaggregated": 1, "disttrain": 1, "entrain": 1}  # ranks that encode alone
# Short sequences are shared where links cost nothing; four ranks of the LLM, two stages and two replicas.
LINKS = (
    *(f"cluster.{key}=0" for key in ("link_latency_ns", "node_link_latency_ns", "op_overhead_ns")),
    *(f"cluster.{key}=1000000000000" for key in ("link_bytes_per_s", "node_link_bytes_per_s")),
)
LINE = (*LINKS, "layout.llm.pp=2", "data.sample_tokens=160", "train.steps=2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("systems")
    write_mixed(path)
    return path


def line_of(system: str, data: Path, folder: Path, llm_ranks: int = 4) -> list[str]:
    beside = BESIDE.get(system, 0)
    ranks = (f"launch.ranks={llm_ranks + beside}", *[f"placement.ranks={beside}"] * (beside > 0))
    return overrides(data, folder, f"system={system}", *LINE, *ranks)


def planned(system: str, data: Path, folder: Path, *more: str) -> tuple[RunSpec, list[StepPlan]]:
    """The run of a preset, and the plans of its first step, verified."""
    config = compose_config([*line_of(system, data, folder), *more])
    spec = prepare_run(config, config.launch.ranks or 0)
    plans = list(spec.planner.all_domains(1, 0))
    for plan in plans:
        spec.planner.verify(plan)
    return spec, plans


def encoding(domain: DomainPlan) -> set[int]:
    return {rank for encoder_batch in domain.encoder_batches for rank in encoder_batch.ranks}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_plans_what_it_is_named_after(system: str, data: Path, tmp_path: Path) -> None:
    spec, plans = planned(system, data, tmp_path)
    who, schedule = NAMED_AFTER[system]
    world = spec.arrangement
    llm = range(world.llm_size)
    own = {"all": llm, "stage0": range(world.stage_size), "beside": range(len(llm), world.domain_size)}[who]
    assert not open_keys(spec.config)
    assert (spec.choice is not None) == (system in ("omni", "dhp"))
    for domain in (plan.domain for plan in plans):
        assert encoding(domain) <= set(own)
        assert schedule in (None, domain.schedule)
    assert {rank for plan in plans for rank in encoding(plan.domain)} == set(own), "some rank never encodes"
    if system == "dhp":
        _, plans = planned(system, data, tmp_path / "together", "layout.domain=2", "packing.divisor=2")
        shards = [of for plan in plans for batch in plan.domain.microbatches for of in batch.layout.shards]
        assert max(map(len, shards)) > 1, "no sequence is shared"
    if system == "megascale_omni":
        assert any(
            len(of) > 1
            for plan in plans
            for encoder_batch in plan.domain.encoder_batches
            for of in encoder_batch.layout.shards
        )


def test_every_system_has_a_row_in_its_page() -> None:
    table, *_ = PAGE.read_text().split("## Side by side")
    _, *rows = [row.split("|")[1].strip() for row in table.splitlines() if row.startswith("| `")]
    assert sorted(rows) == [f"`{name}`" for name in SYSTEMS]


@pytest.fixture(scope="module")
def alone(ranks: RankPool, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    line = overrides(data, tmp_path_factory.mktemp("alone"), "data.sample_tokens=160", "train.steps=2")
    found: Measurement = ranks.run(1, measure, compose_config(line), 1)[0]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_trains_as_one_rank_does(
    system: str, ranks: RankPool, alone: Measurement, data: Path, tmp_path: Path
) -> None:
    config = compose_config(line_of(system, data, tmp_path, 2 if system in BESIDE else 4))
    world = config.launch.ranks or 0
    found = ranks.run(world, measure, config, world)[0]
    worst = compare(alone, found)[0]
    assert worst.relative <= TOLERANCE, worst
    assert compare_weights(alone, found)[0].relative <= WEIGHT_TOLERANCE

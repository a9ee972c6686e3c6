"""A policy of each kind from a package of its own: chosen by `section=name`, it shapes the plan."""

from dataclasses import fields
from pathlib import Path

import pytest
from packages import install
from planners import plans_of_all_domains
from small import overrides, write_mixed

from omni.compose import compose_config
from omni.config import ConfigError
from omni.encoders import EncoderPart, Load, Work
from omni.planning.plan_process import plan_step
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.policies import KINDS, DomainPlan, DomainSizes, Facts, Op, Pool
from parallel.policy import PolicyError
from pipeline.ops import Kind
from pipeline.plan import StepPlan

MODULE = """
from omni.policies import *  # every kind, and what their functions are given

def first_two(lengths, pool):
    def shards(length):
        units = -(-length // pool.unit)
        half = min(length, -(-units // min(2, pool.num_cp_ranks)) * pool.unit)
        return (Shard(0, 0, half), Shard(1, half, length - half)) if half < length else (Shard(0, 0, length),)
    return SequenceLayout(pool.num_cp_ranks, tuple(map(shards, lengths)))

def one_after_the_other(domain, costs):
    def ops(rank):
        for m in range(len(domain.microbatches)):
            own = enumerate(domain.encoder_batches)
            mine = [c for c, of in own if of.microbatches == (m,) and rank in of.ranks]
            yield from (Op(Kind.ENCODE, c) for c in mine)
            yield from (Op(Kind.FORWARD, m, virtual_stage=v) for v in domain.virtual_stages(rank))
            back = reversed(domain.virtual_stages(rank))
            yield from (Op(Kind.BACKWARD, m, virtual_stage=v) for v in back)
            yield from (Op(Kind.ENCODE_BACKWARD, c) for c in mine)
    return [list(ops(team * domain.team)) for team in domain.teams]

def apart(packs, room, stages):
    each = [(r, p) for r, own in enumerate(packs) for p in range(len(own))]
    return tuple(tuple(p if r == mine else None for r in range(len(packs))) for mine, p in each)

DEAL = DealPolicy("mine", lambda work, sizes: [len(sizes) - 1] * len(work))
BALANCE = BalancePolicy("mine", lambda samples, bins: (bins.count - 1,) * len(samples))
PACKING = PackingPolicy("mine", lambda samples, budget: [[i] for i in range(len(samples))])
PAIRING = PairingPolicy("mine", apart)
PLACEMENT = PlacementPolicy("mine", lambda sizes: (sizes.llm_size - sizes.stage_size, sizes.llm_size))
BESIDE = PlacementPolicy("beside_all", lambda sizes: (0, sizes.size), beside=True)
SHARING = SharingPolicy("mine", first_two, forced=True)
TRANSPORT = TransportPolicy("mine", lambda traffic, nodes, row_bytes, links: "all_gather")
SCHEDULE = SchedulePolicy("mine", one_after_the_other)
"""
POINTS = {
    f"omni.{kind}": f"mine = mine_of_all_kinds:{kind.upper()}"
    for kind in ("deal", "balance", "packing", "pairing", "placement", "sharing", "transport", "schedule")
}
POINTS["omni.placement"] += "\nbeside_all = mine_of_all_kinds:BESIDE"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path, monkeypatch, "mine_of_all_kinds", MODULE, POINTS)
    write_mixed(tmp_path / "mixed")
    return tmp_path


def planned(folder: Path, ranks: int, *more: str) -> tuple[RunSpec, list[StepPlan]]:
    """The first step of a small run, as all its domains plan it and the verifier accepts it."""
    config = compose_config(overrides(folder / "mixed", folder / "run", *more))
    spec = prepare_run(config, ranks)
    plans = plans_of_all_domains(spec.planner, 1, 0)
    for plan in plans:
        spec.planner.verify(plan)
    return spec, plans


@pytest.mark.parametrize("section", [section.name for section in KINDS])
def test_every_section_offers_it_and_its_name_is_what_is_printed(folder, section):
    spec, _ = planned(folder, 2, f"{section}=mine")
    assert getattr(spec.config, section).policy == "mine"
    assert f"{section}=mine" in spec.policies.describe()


def test_balance_is_asked_for_domains_and_then_for_their_replicas(folder):
    _, plans = planned(folder, 4, "balance=mine", "layout.domain=2")
    held = [{s.cp_rank for b in p.domain.microbatches for of in b.layout.shards for s in of} for p in plans]
    assert held == [set(), {1}]


def test_deal_says_which_group_takes_a_sample(folder):
    _, plans = planned(folder, 4, "deal=mine", "balance.group=2")
    counts = [len(plan.domain.samples) for plan in plans]
    assert counts[:2] == [0, 0]
    assert sum(counts[2:]) == 8


def test_packing_makes_the_packs(folder):
    _, plans = planned(folder, 1, "packing=mine")
    assert [len(batch.samples) for batch in plans[0].domain.microbatches] == [1] * 8


def test_pairing_says_which_packs_pass_together(folder):
    _, plans = planned(folder, 2, "pairing=mine", "layout.domain=2")
    cp_ranks = [{s.cp_rank for of in b.layout.shards for s in of} for b in plans[0].domain.microbatches]
    assert cp_ranks == sorted(cp_ranks, key=min)
    assert all(len(of) == 1 for of in cp_ranks)
    assert set.union(*cp_ranks) == {0, 1}


def test_placement_says_where_encoders_live(folder):
    spec, plans = planned(folder, 2, "placement=mine", "layout=pp2")
    assert plans[0].domain.homes[1] == spec.arrangement.home == (1, 2)
    assert {encoder_batch.ranks for encoder_batch in plans[0].domain.encoder_batches} == {(1,)}


def test_a_placement_may_take_ranks_beside_the_llm_and_those_of_the_llm(folder):
    spec, plans = planned(folder, 3, "placement=beside_all")
    assert (spec.layout.dp, spec.arrangement.encoder_ranks, spec.arrangement.home) == (2, 1, (0, 3))
    assert {encoder_batch.ranks for encoder_batch in plans[0].domain.encoder_batches} == {(0,), (1,), (2,)}


def test_sharing_serves_the_llm_and_encoders(folder):
    _, plans = planned(folder, 3, "llm_sp=mine", "encoder_sp=mine", "layout.domain=3")
    domain = plans[0].domain
    parts = [of for batch in domain.microbatches for of in batch.layout.shards]
    assert {tuple(s.cp_rank for s in shards) for shards in parts} == {(0, 1)}
    assert {encoder_batch.ranks for encoder_batch in domain.encoder_batches} == {(0, 1, 2)}
    assert {
        s.cp_rank
        for encoder_batch in domain.encoder_batches
        for of in encoder_batch.layout.shards
        for s in of
    } == {0, 1}


def test_transport_carries_every_route_that_leaves_its_rank(folder):
    _, plans = planned(folder, 2, "boundary=mine", "layout=pp2")
    assert {route.transport for route in plans[0].domain.routes if route is not None} == {"all_gather"}


def test_schedule_orders_the_work(folder):
    _, plans = planned(folder, 1, "pipeline=mine", "packing=mine")
    compute = (Kind.ENCODE, Kind.FORWARD, Kind.BACKWARD, Kind.ENCODE_BACKWARD)
    kinds = [op.kind for op in plans[0].domain.ops[0] if op.kind in compute]
    first = kinds.index(Kind.BACKWARD)
    assert kinds[: first + 1].count(Kind.FORWARD) == 1
    assert Kind.ENCODE in kinds[first:], "later microbatches are encoded after the first went back"


def test_a_choice_that_an_experiment_overrules_is_still_refused(folder):
    (folder / "conf" / "experiment").mkdir(parents=True)
    (folder / "conf" / "experiment" / "own.yaml").write_text(
        "# @package _global_\nbalance:\n  policy: none\n"
    )
    more = [f"hydra.searchpath=[file://{folder / 'conf'}]", "experiment=own", "balance=mine"]
    line = [key for key in overrides(folder / "mixed", folder / "run", *more) if key != "~experiment"]
    with pytest.raises(
        ConfigError, match=r"balance=mine sets balance.policy=mine, but .* has balance.policy=none"
    ):
        compose_config(line)


def test_one_that_raises_is_named_with_its_key_and_the_step(folder, monkeypatch):
    module = "from omni.policies import *\nRAISING = BalancePolicy('raising', lambda samples, bins: 1 // 0)\n"
    points = {"omni.balance": "raising = one_that_raises:RAISING"}
    install(folder, monkeypatch, "one_that_raises", module, points)
    config = compose_config(overrides(folder / "mixed", folder / "run", "balance=raising"))
    planner = prepare_run(config, 2).planner
    words = r"^step 7 cannot be planned: the policy balance\.policy=raising raised Zero.*, line 2\)$"
    with pytest.raises(PolicyError, match=words):
        plan_step(planner, 7, 0, 0)


@pytest.mark.parametrize("given", [Pool, DomainSizes, Facts, DomainPlan, Op, Load, Work, EncoderPart])
def test_a_page_lists_every_fact_that_functions_are_given(given):
    page = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    listed = page[page.index("## What functions are given") : page.index("## What is refused")]
    names = {field.name for field in fields(given)} - (
        {"width", "token_bytes"} if given is EncoderPart else set()
    )
    assert not [name for name in names if f"`{name}`" not in listed]

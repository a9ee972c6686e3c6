"""Planners of made-up runs, and the plans that all domains of such a run make of one step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import lcm
from random import Random
from typing import Any

import numpy as np
from hypothesis import strategies as st
from own_policies import own
from work_costs import work_cost

from dataloader.balance import BalancePolicy
from dataloader.balance.simple import LPT, NONE
from dataloader.dealing import BY_LENGTH, DealPolicy
from dataloader.global_batch import Budget, Lengths
from dataloader.packing import PackingPolicy
from dataloader.packing.first_fit import FIRST_FIT_DECREASING
from dataloader.pairing import PairingPolicy
from dataloader.pairing.simple import IN_ORDER
from dataloader.samples import ItemTokens, Samples
from dataloader.stream import Order, SourceSpec, Stream
from dataloader.tokens import ItemMeta, SampleMeta, fit, length
from omni.planning.domain_planner import DomainPlanner, TransportChoice
from omni.planning.group_planner import GroupPlanner
from omni.planning.planner import Planner
from omni.planning.sharing import Sharing
from omni.planning.world_planner import WorldPlanner
from parallel.cluster import Link, Links
from parallel.costs import CostTable
from parallel.layout import Arrangement, Layout, arrange
from parallel.placements import COLOCATED, DISAGGREGATED, PlacementPolicy
from parallel.policies import SharingPolicy, make_pool
from parallel.schemes import sequence_cost
from parallel.tiles import AttentionShape
from parallel.transport_policies import AUTO
from pipeline.builders import ENCODE_FIRST, SchedulePolicy
from pipeline.plan import StepPlan

SHARING = own(SharingPolicy)
BEYOND_REPLICAS = [name for name, policy in SHARING.items() if not policy.within_replica]
SCHEDULES = list(own(SchedulePolicy).values())
PLACEMENTS = list(own(PlacementPolicy).values())
PACKING = list(own(PackingPolicy).values())
PAIRING = list(own(PairingPolicy).values())


@dataclass(frozen=True)
class Policies:
    """Policies of all levels."""

    balance: BalancePolicy
    packing: PackingPolicy
    pairing: PairingPolicy
    schedule: SchedulePolicy
    deal: DealPolicy


def policies_of(balance: BalancePolicy, schedule: SchedulePolicy) -> Policies:
    return Policies(balance, FIRST_FIT_DECREASING, IN_ORDER, schedule, BY_LENGTH)


POLICIES = [policies_of(balance, schedule) for balance in (NONE, LPT) for schedule in SCHEDULES]
SOURCES = {"pairs": SourceSpec(40, 8, 2), "text": SourceSpec(25, 8, 1)}
COMPONENTS = ("ear", "eye", "llm")
BUDGET = Budget(microbatch_tokens=40, step_tokens=150, step_samples=None, on_long="error")
LINK = Link(100, 10**12)
UNIT = 4  # tokens of an item for each row


def meta_of(source: str, sample: int) -> SampleMeta:
    random = Random(f"{source}/{sample}")
    text = random.randint(0, 12)
    items = []
    if source == "pairs":
        for at in sorted(random.randint(0, text) for _ in range(random.randint(0, 3))):
            rows = random.randint(1, 5)
            items.append(ItemMeta(random.choice(("image", "audio")), UNIT * rows, rows, at, ()))
    return SampleMeta(sample, source, text, tuple(items), 100)


def lengths_of(metas: Callable[[str, int], SampleMeta]) -> Lengths:
    def lengths(source: str, ids: np.ndarray, budget: int, policy: str) -> np.ndarray:
        dropped = "drop" if policy == "error" else policy
        kept = [fit(metas(source, i), budget, dropped) for i in ids.tolist()]
        return np.array([length(meta) if meta else 0 for meta in kept])

    return lengths


def items_of(metas: Callable[[str, int], SampleMeta]) -> ItemTokens:
    def items(source: str, ids: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        found: dict[str, list[tuple[int, int]]] = {"image": [], "audio": []}
        for place, i in enumerate(ids.tolist()):
            for item in metas(source, i).items:
                found[item.modality].append((place, item.tokens))
        columns = {name: np.array(of, np.int64).reshape(-1, 2) for name, of in found.items()}
        return {name: (of[:, 0], of[:, 1]) for name, of in columns.items()}

    return items


def table(stages: int) -> CostTable:
    parts = {f"llm/{stage}": work_cost(2_000_000, 1_000, 10, exchanges=2) for stage in range(stages)}
    parts |= {
        "eye": work_cost(1_000_000, 3_000, 10, exchanges=2),
        "ear": work_cost(500_000, 100, 10, exchanges=2),
    }
    return CostTable(4, parts, Links(LINK, LINK), 64, COMPONENTS)


def sharing_of(world: Arrangement, llm_sp: str, encoder_sp: str, budget: Budget) -> dict:
    """How each component shares sequences, as a run's configuration would have it."""
    costs = table(world.llm.pp)
    out = {}
    for name in COMPONENTS:
        shape = AttentionShape(4, 2 if name == "llm" else 4, causal=name == "llm")
        cost = sequence_cost(costs, "llm/0" if name == "llm" else name, shape, 16, LINK)
        policy = SHARING[llm_sp if name == "llm" else encoder_sp]
        if name == "llm":
            over = world.llm.cp if policy.within_replica else world.pool
            # Room for sequences that a policy leaves whole, or cuts unevenly.
            own_share = -(-budget.microbatch_tokens // world.llm.cp)
            most = own_share if policy.finds_room else 2 * budget.microbatch_tokens
            out[name] = Sharing(policy, make_pool(cost, over, 1, most), world.pool)
        else:
            num_tp_groups = len(world.tp_groups(name))
            whole = num_tp_groups == 1 or not policy.cuts
            out[name] = Sharing(policy, make_pool(cost, num_tp_groups, UNIT), num_tp_groups, whole=whole)
    return out


def alone(world: Arrangement, llm_sp: str) -> bool:
    """Whether cp ranks share no sequence."""
    return (world.llm.cp if SHARING[llm_sp].within_replica else world.pool) == 1


def colocated(dp: int = 1, pp: int = 1) -> Arrangement:
    return arrange(Layout(dp=dp, pp=pp), {"eye": 1, "ear": 1}, COLOCATED, 0)


def planner(
    dp: int = 1,
    pp: int = 1,
    *,
    world: Arrangement | None = None,
    llm_sp: str = "uniform",
    encoder_sp: str = "none",
    policies: Policies | None = None,
    metas: Callable[[str, int], SampleMeta] = meta_of,
    lengths: Lengths | None = None,
    stream: Order | None = None,
    budget: Budget = BUDGET,
    group_size: int = 32,
    frozen: Callable[[int], tuple[str, ...]] = lambda step: (),
    **of_domain: Any,
) -> Planner:
    world = world or colocated(dp, pp)
    own = policies or policies_of(LPT, ENCODE_FIRST)
    sharing = sharing_of(world, llm_sp, encoder_sp, budget)
    samples = Samples(stream or Stream(SOURCES, seed=3), metas, lengths or lengths_of(metas), items_of(metas))
    domain = DomainPlanner(
        encoders={"image": "eye", "audio": "ear"},
        components=COMPONENTS,
        arrangement=world,
        llm="llm",
        sharing=sharing,
        transport=TransportChoice(AUTO, 2, 64, Links(Link(10, 10**9), Link(1000, 10**8))),
        feeds=(),
        packing=own.packing,
        pairing=own.pairing,
        schedule=own.schedule,
        microbatch_tokens=budget.microbatch_tokens,
        table=table(world.llm.pp),
        collective_group=lcm(world.llm.tp, world.llm.ep) if alone(world, llm_sp) else world.stage_size,
    )
    return Planner(
        world=WorldPlanner(samples, budget, own.deal, world.num_domains, group_size),
        group=GroupPlanner(own.balance, world.replicas),
        domain=replace(domain, **of_domain),
        frozen=frozen,
        share=lambda _: sharing,
    )


def plans_of_all_domains(planner: Planner, step: int, cursor: int) -> list[StepPlan]:
    """The plan of a step that the ranks of each domain make."""
    domains = range(planner.domain.arrangement.num_domains)
    return [planner.next_step(step, cursor, number) for number in domains]


def budgets(least: int) -> st.SearchStrategy[Budget]:
    on_long = st.sampled_from(("drop", "truncate"))
    return st.builds(
        Budget, st.integers(max(least, 36), 80), st.integers(1, 300), st.none(), on_long
    ) | st.builds(Budget, st.integers(max(least, 8), 80), st.none(), st.integers(1, 20), on_long)


@st.composite
def settings_of_planners(draw) -> dict:
    """Any layout of the LLM, encoders and domains that fit each other, under any policies."""
    tp, cp, dp, pp = (draw(st.sampled_from(sizes)) for sizes in ((1, 2), (1, 1, 2), (1, 2, 3, 4), (1, 2, 3)))
    placement = draw(st.sampled_from(PLACEMENTS))
    beside = draw(st.sampled_from([dp, 2 * dp, 3])) if placement is DISAGGREGATED else 0
    shared = draw(st.sampled_from([k for k in range(1, dp + 1) if dp % k == 0]))
    size = tp * cp * (pp if placement is COLOCATED else 1) * shared
    if beside:
        size = beside if beside % (dp // shared) else beside // (dp // shared)
    sizes = [k for k in (1, 2, 3) if size % k == 0]
    encoder_tp = {name: draw(st.sampled_from(sizes)) for name in ("eye", "ear")}
    world = arrange(Layout(tp, cp, dp, pp), encoder_tp, placement, beside, shared)
    llm_sp = draw(st.sampled_from(["uniform", "uniform", *SHARING]))
    budget = draw(budgets(least=0))
    if SHARING[llm_sp].finds_room and world.pool > 1:
        longest = draw(st.none() | st.integers(1, 8 * budget.microbatch_tokens))
        budget = replace(budget, sample_tokens=longest)
    return {
        "world": world,
        "llm_sp": llm_sp,
        "encoder_sp": draw(st.sampled_from(["none", "none", *BEYOND_REPLICAS])),
        "policies": replace(
            draw(st.sampled_from(POLICIES)),
            packing=draw(st.sampled_from(PACKING)),
            pairing=draw(st.sampled_from(PAIRING)),
        ),
        "single_queue": draw(st.booleans()),
        "rounds": draw(st.sampled_from([None, None, 2, 3])),
        "group_size": draw(st.sampled_from([1, 2, 3, 32])),
        "budget": budget,
    }

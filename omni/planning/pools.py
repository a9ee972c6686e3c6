"""How the configuration lets components share sequences: over which ranks, at which cost, by which policy."""

from collections.abc import Mapping, Sequence

from omni.config import ConfigError
from omni.data_config import DataConfig
from omni.llm_config import LLMConfig
from omni.models.llm import NAME as LLM
from omni.models.registry import Attention, Encoder
from omni.planning.choices import Chosen
from omni.planning.sharing import Sharing
from parallel.cluster import Cluster
from parallel.costs import CostTable
from parallel.layout import Arrangement
from parallel.policies import SharingPolicy, make_pool
from parallel.schemes import SequenceCost, sequence_cost
from parallel.tiles import AttentionShape
from parallel.transports import node_map
from parallel.work import virtual_stage_name


def sharing_of(
    llm: LLMConfig,
    microbatch_tokens: int,
    policies: Chosen,
    encoders: Mapping[str, Encoder],
    arrangement: Arrangement,
    cluster: Cluster,
    element: int,
    table: CostTable,
) -> dict[str, Sharing]:
    """Say for the LLM and each encoder how it shares sequences, with `element` bytes a number.

    Raises:
        ConfigError: for heads that a tensor-parallel size does not divide, and for a policy that items cannot
            be shared by.
    """

    def cost(
        name: str, part: str, attention: Attention, tp: int, cp_ranks: Sequence[Sequence[int]]
    ) -> SequenceCost:
        for kind in ("heads", "kv_heads"):
            if getattr(attention, kind) % tp:
                raise ConfigError(
                    f"tp={tp} of {name} does not divide {kind}={getattr(attention, kind)}: choose a divisor"
                )
        shape = AttentionShape(attention.heads // tp, attention.kv_heads // tp, attention.causal)
        links, nodes = cluster.links, _nodes(arrangement, cp_ranks, cluster)
        if len(set(nodes)) == 1:
            return sequence_cost(table, part, shape, attention.head_dim * element, links.inside)
        head_bytes = attention.head_dim * element
        return sequence_cost(table, part, shape, head_bytes, links.across, links.inside, nodes)

    attention = Attention(llm.layers, llm.heads, llm.kv_heads, llm.head_size, causal=True)
    # The first stage speaks for all: stages take about equally long.
    tp = arrangement.llm.tp
    cp_ranks = [range(first, first + tp) for first in range(0, arrangement.stage_size, tp)]
    of_llm = cost(LLM, virtual_stage_name(LLM, 0), attention, tp, cp_ranks)
    out = {LLM: _llm_sharing(policies["llm_sp"], arrangement, microbatch_tokens, of_llm)}
    for name, encoder in encoders.items():
        tp_groups = arrangement.tp_groups(name)
        own = cost(name, name, encoder.attention(), arrangement.encoder_tp[name], tp_groups)
        out[name] = _encoder_sharing(policies["encoder_sp"], encoder, len(tp_groups), own)
    return out


def check_long_samples(
    data: DataConfig, policy: SharingPolicy, arrangement: Arrangement, was_chosen: bool = False
) -> None:
    """Refuse samples longer than a microbatch where ranks do not share them. Where their length `was_chosen`,
    for ranks that there were, a run goes on with fewer: one passes by itself, if its rank has the memory.

    Raises:
        ConfigError: naming both keys and the remedy.
    """
    longest = data.sample_tokens
    if longest is None or longest <= data.pass_tokens:
        return
    if not policy.finds_room:
        why = f"llm_sp={policy.name} bounds no rank's tokens: choose one that does, such as dynamic"
    elif arrangement.pool == 1 and not was_chosen:
        why = "nobody shares it: raise layout.domain or layout.llm.cp"
    else:
        return
    raise ConfigError(
        f"data.sample_tokens={longest}: a sample of more than "
        f"data.microbatch_tokens={data.microbatch_tokens} is spread over the ranks that share sequences, and "
        f"{why}; or raise data.microbatch_tokens"
    )


def without_effect(sharing: Mapping[str, Sharing]) -> list[str]:
    """Say which policies were chosen that have nobody to share sequences with."""
    notes = []
    for name, of in sharing.items():
        policy = of.policy
        if not policy.cuts:
            continue
        if name == LLM and of.num_cp_ranks == 1 and not policy.within_replica:
            notes.append(
                f"llm_sp={policy.name} has no effect: nobody to share with; raise layout.domain or "
                "layout.llm.cp"
            )
        if name != LLM and of.whole:
            why = (
                "its items stay whole"
                if of.num_cp_ranks > 1
                else "a domain has one tp group; raise layout.domain"
            )
            notes.append(f"encoder_sp={policy.name} has no effect on {name}: {why}")
    return notes


def _nodes(arrangement: Arrangement, cp_ranks: Sequence[Sequence[int]], cluster: Cluster) -> tuple[int, ...]:
    """The node of each cp rank, of which `cp_ranks` give the domain ranks: these exchange with those
    of others at the same places. CP ranks are on one node if they are in every domain.
    """
    places: list[list[int]] = [[] for _ in cp_ranks]
    for domain in range(arrangement.num_domains):
        nodes = node_map(arrangement.global_ranks(domain), cluster.ranks_per_node)
        for place, own in zip(places, cp_ranks, strict=True):
            place += [nodes[at] for at in own]
    numbers: dict[tuple[int, ...], int] = {}
    return tuple(numbers.setdefault(tuple(place), len(numbers)) for place in places)


def _llm_sharing(policy: SharingPolicy, arrangement: Arrangement, budget: int, cost: SequenceCost) -> Sharing:
    over = arrangement.llm.cp if policy.within_replica else arrangement.pool
    # A pool that is full holds what its replicas would hold without sharing.
    most = -(-budget // arrangement.llm.cp) if policy.finds_room else None
    pool = make_pool(cost, over, tokens_per_rank=most)
    return Sharing(policy, pool, arrangement.pool)


def _encoder_sharing(
    policy: SharingPolicy, encoder: Encoder, num_tp_groups: int, cost: SequenceCost
) -> Sharing:
    if policy.within_replica:
        raise ConfigError(
            f"encoder_sp.policy={policy.name}: this policy shares a replica's sequences over the replica's "
            "ranks, and items belong to no replica: choose one that shares over all tp groups of a domain"
        )
    return Sharing(
        policy,
        make_pool(cost, num_tp_groups, encoder.unit or 1),
        num_tp_groups,
        num_points=len(encoder.attach),
        # Whole items are best spread together with those of other encoders on the same ranks.
        whole=not policy.cuts or num_tp_groups == 1 or encoder.unit is None,
    )

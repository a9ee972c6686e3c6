"""How even a step comes out: samples dealt, balanced and shared by policies, then timed by the cost table.

A score takes milliseconds where plans take seconds, so many policies, sizes of domains and thousands of ranks
can be compared. Who gets which sample is what a plan would say. What follows is coarser than a plan:

- the samples of a domain are one microbatch, whatever their tokens: its ranks share sequences once, wait for
  each other once in the encoders and once in the LLM, and no bound on tokens limits who holds what;
- the two phases stand one after the other, forward passes only; the first virtual stage of the LLM speaks for
  all;
- exchanges are charged to each rank apart, in turn with its work or hidden behind the attention of sequences
  that live on it alone, as the engine overlaps them;
- bytes that cross nodes are counted by shares: a rank sends each other rank that shares a sequence as much,
  and a row of an item comes from every token of it, and goes to every token of its sample, alike.

Pure: no clock. Times are integer nanoseconds, M cp ranks or tp groups of a domain, S sequences.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dataloader.balance import SampleCosts
from dataloader.tokens import SampleMeta, length
from omni.planning.domain_planner import DomainPlanner
from omni.planning.planner import Planner
from omni.planning.sharing import Sharing
from ops.ints import Ints
from parallel.schemes import Exchanges, SequenceCost, choose_tiling
from parallel.sequence import SequenceLayout, Shard
from parallel.tiles import pairs_before
from parallel.transports import node_map
from pipeline.plan import Taken
from pipeline.policies import spread

Groups = Sequence[Sequence[int]]
"""Samples, by number, of each domain or of each replica."""
EVEN = 1000  # what a cost is multiplied by, in thousandths, where it is as planned


@dataclass(frozen=True)
class Step:
    """The samples of a step: what it takes of the stream, their metadata and costs, in its order."""

    taken: Taken
    metas: Sequence[SampleMeta]
    costs: SampleCosts


def step_of(planner: Planner, cursor: int = 0) -> Step:
    """Take a step's samples from stream position `cursor` on."""
    taken = planner.world.take(cursor)
    metas = [planner.world.meta_of(taken, number) for number in range(len(taken))]
    return Step(taken, metas, planner.domain.costing.costs(metas))


def groups_of(planner: Planner, taken: Taken) -> list[list[int]]:
    """Deal the samples of a step to groups of domains; return those of each group, by number."""
    groups: list[list[int]] = [[] for _ in planner.world.groups]
    for sample, group in enumerate(planner.world.groups_of(taken, planner.domain.costing)):
        groups[group].append(sample)
    return groups


def divide_group(planner: Planner, group: int, samples: Sequence[int], costs: SampleCosts) -> list[Groups]:
    """Divide the samples of a group, of `costs`, over its domains and those of each over its replicas: by
    domain, those of each replica.
    """
    divided = planner.group.divide(costs, len(planner.world.groups[group]), planner.domain.costing.alone)
    return [[[samples[i] for i in own] for own in of] for of in divided]


@dataclass(frozen=True)
class Factors:
    """What costs are multiplied by, in thousandths: each sample's in the LLM, int64 [S], and each item's."""

    llm: Ints
    items: Sequence[Sequence[int]]


def as_planned(metas: Sequence[SampleMeta]) -> Factors:
    """Costs as they are planned with."""
    return Factors(np.full(len(metas), EVEN), [[EVEN] * len(meta.items) for meta in metas])


def perturbed(metas: Sequence[SampleMeta], share: float, seed: int) -> Factors:
    """Costs of which each sample's in the LLM and each item's is off by up to `share`, drawn evenly."""
    draw = np.random.default_rng(seed)
    low, high = round(EVEN * (1 - share)), round(EVEN * (1 + share)) + 1
    items = [draw.integers(low, high, len(meta.items)).tolist() for meta in metas]
    return Factors(draw.integers(low, high, len(metas)), items)


@dataclass(frozen=True)
class Phase:
    """What each cp rank of a domain spends with a component's forward passes, int64 [M] each: work on tokens,
    attention of sequences that it has alone and of its tiles, exchanges. Its ranks send `across_bytes` to
    other nodes, all together.
    """

    linear: Ints
    alone: Ints
    tiles: Ints
    exchange: Ints
    across_bytes: int

    @property
    def work(self) -> int:
        """Work of all cp ranks together."""
        return int((self.linear + self.alone + self.tiles).sum())

    @property
    def in_turn(self) -> Ints:
        """Each cp rank's time [M], exchanges after its work."""
        return self.linear + self.alone + self.tiles + self.exchange

    @property
    def overlapped(self) -> Ints:
        """Each cp rank's time [M], exchanges hidden behind the attention of what it has alone."""
        return self.linear + self.tiles + np.maximum(self.alone, self.exchange)


def time_layout(layout: SequenceLayout, cost: SequenceCost, nodes: Sequence[int], factors: Ints) -> Phase:
    """Time every cp rank of a layout, of which each is on one of `nodes` [M], with the tiles that
    `choose_tiles` gives, as `rank_times` does, where sequences take `factors` [S] thousandths of their cost.
    """
    size = layout.num_cp_ranks
    tokens, alone, work = (np.zeros(size, np.int64) for _ in range(3))
    exchanges, across = Exchanges(cost, size), 0.0
    whole: list[tuple[int, int, int]] = []
    for number, shards in enumerate(layout.shards):
        factor = int(factors[number])
        found = choose_tiling(shards, cost) if len(shards) > 1 else None
        if found is None:
            holder = next((s.cp_rank for s in shards if s.length), 0)
            whole.append((holder, sum(s.length for s in shards), factor))
            continue
        ranks, tiling = found
        work[ranks] += tiling.work * factor
        exchanges.add(ranks, tiling)
        across += _to_other_nodes(tiling.volumes, [nodes[rank] for rank in ranks])
        for shard in shards:
            tokens[shard.cp_rank] += shard.length * factor
    if whole:
        cp_rank, lengths, scale = np.array(whole, np.int64).T
        np.add.at(tokens, cp_rank, lengths * scale)
        np.add.at(alone, cp_rank, pairs_of(lengths, cost) * scale)
    return Phase(
        linear=_each(cost.linear_ns, tokens),
        alone=_each(cost.attention_ns, alone),
        tiles=_each(cost.attention_ns, work),
        exchange=np.array(exchanges.ns(cost.layers), np.int64),
        across_bytes=int(across * cost.layers * cost.head_bytes),
    )


@dataclass(frozen=True)
class DomainPlaces:
    """Where the samples of a domain are: `samples` by number, `items` as (sample, its item), and where the
    tokens of the former are in the pool and those of the latter on the tp groups of each encoder.
    """

    samples: tuple[int, ...]
    llm: SequenceLayout
    items: Mapping[str, tuple[tuple[int, int], ...]]
    encoders: Mapping[str, SequenceLayout]


def place_domain(planner: DomainPlanner, replicas: Groups, metas: Sequence[SampleMeta]) -> DomainPlaces:
    """Share the samples of a domain's replicas, and their items, as the sharing policies decide."""
    if not planner.sharing[planner.llm].policy.within_replica:
        # All of a domain share what all have: which replica a sample belongs to decides nothing more.
        replicas = [sorted(n for own in replicas for n in own)]
    packs = [[length(metas[n]) for n in own] for own in replicas]
    samples = tuple(n for own in replicas for n in own)
    items: dict[str, list[tuple[int, int]]] = {name: [] for name in planner.arrangement.encoder_tp}
    for n in samples:
        for number, item in enumerate(metas[n].items):
            items[planner.encoders[item.modality]].append((n, number))
    tokens = {name: [metas[n].items[i].tokens for n, i in of] for name, of in items.items()}
    layouts = _spread_whole(planner, {k: v for k, v in tokens.items() if planner.sharing[k].whole})
    for name, lengths in tokens.items():
        if name not in layouts:
            layouts[name] = planner.sharing[name].layout([lengths])
    llm = planner.sharing[planner.llm].layout(packs)
    return DomainPlaces(samples, llm, {name: tuple(of) for name, of in items.items()}, layouts)


def _spread_whole(planner: DomainPlanner, tokens: Mapping[str, Sequence[int]]) -> dict[str, SequenceLayout]:
    """Lay out the items that stay whole: each on one tp group of its encoder, all encoders together."""
    tp_groups = {name: planner.arrangement.tp_groups(name) for name in tokens}
    costs = [planner.sharing[name].whole_ns(n) for name, of in tokens.items() for n in of]
    chosen = iter(spread(costs, [tp_groups[name] for name, of in tokens.items() for _ in of]))
    return {
        name: SequenceLayout.whole(
            of,
            [(next(chosen)[0] - tp_groups[name][0][0]) // len(tp_groups[name][0]) for _ in of],
            len(tp_groups[name]),
        )
        for name, of in tokens.items()
    }


@dataclass(frozen=True)
class DomainTimes:
    """What the ranks of a domain spend: the LLM by cp rank of the pool, and all encoders of a rank
    together by domain rank, work alone, in turn with exchanges and with these overlapped, [P] each; bytes of
    exchanges and rows that ranks send to other nodes.
    """

    llm: Phase
    encoder_work: Ints
    encoder_in_turn: Ints
    encoder_overlapped: Ints
    across_bytes: int


def time_domain(
    planner: DomainPlanner, domain: int, places: DomainPlaces, metas: Sequence[SampleMeta], factors: Factors
) -> DomainTimes:
    """Time every rank of a domain whose samples and items take `factors` of their costs."""
    samples = np.array(places.samples, np.int64)
    cp_ranks = cp_rank_nodes(planner, domain)
    llm = time_layout(places.llm, planner.sharing[planner.llm].cost, cp_ranks, factors.llm[samples])
    size = planner.arrangement.domain_size
    work, in_turn, overlapped = (np.zeros(size, np.int64) for _ in range(3))
    # Every stage and every tensor-parallel rank sends for layers and heads of its own.
    across = llm.across_bytes * planner.arrangement.llm.tp * planner.arrangement.llm.pp
    for name, layout in places.encoders.items():
        nodes = tp_group_nodes(planner, domain, name)
        of_items = np.array([factors.items[n][i] for n, i in places.items[name]], np.int64)
        phase = time_layout(layout, planner.sharing[name].cost, nodes, of_items)
        tp = planner.arrangement.encoder_tp[name]
        home = slice(*planner.arrangement.home)
        work[home] += np.repeat(phase.linear + phase.alone + phase.tiles, tp)
        in_turn[home] += np.repeat(phase.in_turn, tp)
        overlapped[home] += np.repeat(phase.overlapped, tp)
        across += phase.across_bytes * tp + _rows_across(planner, domain, name, places, metas)
    return DomainTimes(llm, work, in_turn, overlapped, across)


def cp_rank_nodes(planner: DomainPlanner, domain: int) -> list[int]:
    """Return the node of each cp rank of a domain's pool, of its first stage."""
    world = planner.arrangement
    return domain_rank_nodes(planner, domain)[: world.stage_size : world.llm.tp]


def tp_group_nodes(planner: DomainPlanner, domain: int, encoder: str) -> list[int]:
    """Return the node of each tp group of an encoder in a domain."""
    nodes = domain_rank_nodes(planner, domain)
    return [nodes[tp_group[0]] for tp_group in planner.arrangement.tp_groups(encoder)]


def domain_rank_nodes(planner: DomainPlanner, domain: int) -> list[int]:
    """Return the node of each rank of a domain."""
    return list(node_map(planner.arrangement.global_ranks(domain), planner.transport.ranks_per_node))


def _rows_across(
    planner: DomainPlanner, domain: int, encoder: str, places: DomainPlaces, metas: Sequence[SampleMeta]
) -> int:
    """Bytes of rows that go from the tp groups of an encoder to cp ranks on other nodes."""
    cp_ranks, tp_groups = cp_rank_nodes(planner, domain), tp_group_nodes(planner, domain, encoder)
    if len({*cp_ranks, *tp_groups}) == 1:
        return 0
    homes = {n: _node_shares(s, cp_ranks) for n, s in zip(places.samples, places.llm.shards, strict=True)}
    rows = 0.0
    for (n, i), shards in zip(places.items[encoder], places.encoders[encoder].shards, strict=True):
        stay = sum(share * homes[n].get(node, 0.0) for node, share in _node_shares(shards, tp_groups).items())
        rows += metas[n].items[i].rows * (1 - stay)
    return int(rows * planner.table.row_bytes)


def _node_shares(shards: Sequence[Shard], nodes: Sequence[int]) -> dict[int, float]:
    """The share of a sequence's tokens on each node."""
    total, found = sum(shard.length for shard in shards) or 1, dict[int, float]()
    for shard in shards:
        node = nodes[shard.cp_rank]
        found[node] = found.get(node, 0.0) + shard.length / total
    return found


@dataclass(frozen=True)
class Score:
    """How even a step is, over all domains. Ratios, 1 is perfect:

    encoder, llm     the slowest rank's phase, exchanges overlapped, over the mean of its work
    overlapped       both slowest phases together, exchanges overlapped, over the mean work of both
    in_turn          the same with exchanges in turn
    bound            what `overlapped` cannot be below: in each phase the mean, or the costliest sequence
                     spread over all ranks that may share it, over the mean work of both

    `across_bytes` are sent to other nodes in forward passes, a rank on average; `slowest` is the domain of
    the slowest rank of either phase, that adds most to the step.
    """

    encoder: float
    llm: float
    overlapped: float
    in_turn: float
    bound: float
    across_bytes: float
    slowest: int


def score_step(planner: Planner, step: Step, factors: Sequence[Factors]) -> list[Score]:
    """Divide the samples of a step, place those of every domain, and score the step once for each of the
    `factors` that costs may take.
    """
    domain = without_bounds(planner.domain)
    times: list[list[DomainTimes]] = [[] for _ in factors]
    for group, samples in enumerate(groups_of(planner, step.taken)):
        for replicas in divide_group(planner, group, samples, step.costs.take(samples)):
            places = place_domain(domain, replicas, step.metas)
            for found, scale in zip(times, factors, strict=True):
                found.append(time_domain(domain, len(found), places, step.metas, scale))
    least = unsplittable_ns(domain, step.metas)
    return [score(domain, of, least) for of in times]


def without_bounds(planner: DomainPlanner) -> DomainPlanner:
    """Return a planner whose pools may hold any number of tokens: all of a domain are placed at once."""
    sharing = {
        name: replace(of, pool=replace(of.pool, tokens_per_rank=None)) for name, of in planner.sharing.items()
    }
    return replace(planner, sharing=sharing)


def score(planner: DomainPlanner, times: Sequence[DomainTimes], unsplittable_ns: tuple[int, int]) -> Score:
    """Score a step of the `times` of all domains, in order; the costliest sequences spread as far as can be
    take `unsplittable_ns` in the encoders and in the LLM.
    """
    world = planner.arrangement
    encoding = max(1, world.home[1] - world.home[0]) * len(times)
    means = (
        sum(int(of.encoder_work.sum()) for of in times) / encoding,
        sum(of.llm.work for of in times) / (world.pool * len(times)),
    )
    whole = sum(means)
    overlapped = [(int(of.encoder_overlapped.max()), int(of.llm.overlapped.max())) for of in times]
    in_turn = [(int(of.encoder_in_turn.max()), int(of.llm.in_turn.max())) for of in times]
    most, most_in_turn = (tuple(map(max, zip(*of, strict=True))) for of in (overlapped, in_turn))
    phase = 0 if most[0] - means[0] > most[1] - means[1] else 1
    return Score(
        encoder=most[0] / means[0] if means[0] else 1.0,
        llm=most[1] / means[1],
        overlapped=sum(most) / whole,
        in_turn=sum(most_in_turn) / whole,
        bound=sum(map(max, zip(means, unsplittable_ns, strict=True))) / whole,
        across_bytes=sum(of.across_bytes for of in times) / (world.domain_size * len(times)),
        slowest=max(range(len(times)), key=lambda domain: overlapped[domain][phase]),
    )


def unsplittable_ns(planner: DomainPlanner, metas: Sequence[SampleMeta]) -> tuple[int, int]:
    """The costliest item and the costliest sample, each spread over all cp ranks that may share it."""
    items = [0]
    for name, sharing in planner.sharing.items():
        if name != planner.llm:
            own = (i.tokens for m in metas for i in m.items if planner.encoders[i.modality] == name)
            tokens = max(own, default=0)
            items.append(_spread_ns(sharing, 1 if sharing.whole else sharing.num_cp_ranks, tokens))
    llm = planner.sharing[planner.llm]
    longest = max(map(length, metas))
    return max(items), _spread_ns(llm, llm.pool.num_cp_ranks if llm.policy.cuts else 1, longest)


def _spread_ns(sharing: Sharing, cp_ranks: int, tokens: int) -> int:
    """The longest sequence's time, evenly over as many cp ranks as it has units for."""
    return sharing.whole_ns(tokens) // max(1, min(cp_ranks, -(-tokens // sharing.pool.unit)))


def pairs_of(lengths: Ints, cost: SequenceCost) -> Ints:
    """Pairs of tokens that attend, in all heads, of sequences [S] that live on one rank each."""
    found: Ints = np.array([pairs_before(n, n, cost.shape) for n in lengths.tolist()], np.int64)
    return found * cost.shape.heads


def _each(ns: Callable[[int], int], amounts: Ints) -> Ints:
    """Nanoseconds [M] of amounts of work [M] that were multiplied by thousandths."""
    return np.array([ns(amount) // EVEN for amount in amounts.tolist()], np.int64)


def _to_other_nodes(volumes: Ints, nodes: Sequence[int]) -> float:
    """Head rows that the ranks of a shared sequence send to other nodes, of what they send, [R, 4]."""
    sent = (volumes[:, 0] + volumes[:, 2]).tolist()
    elsewhere = [sum(other != node for other in nodes) / max(1, len(nodes) - 1) for node in nodes]
    return sum(rows * share for rows, share in zip(sent, elsewhere, strict=True))

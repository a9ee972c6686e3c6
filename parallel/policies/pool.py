"""What the policies of sequence sharding share: a pool of ranks, predicted times, and layouts in the making.

Times of even cuts come from a table that is made once for a pool, so that planning a microbatch is cheap.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from parallel.least_loaded import place
from parallel.policy import PolicyError
from parallel.schemes import SequenceCost, scheme_tiles, transfers_ns
from parallel.sequence import SequenceLayout, Shard
from parallel.tiles import pairs_before
from parallel.tilings import compare

Times = npt.NDArray[np.int64]
Degrees = npt.NDArray[np.int64]
Shares = tuple[tuple[tuple[int, int], ...], ...]
Parts = Sequence[tuple[int, int]]
"""Ranks that hold a sequence, with the weight of what each holds, in the order of its tokens."""
NEVER = 2**46  # nanoseconds, 19 hours: what cannot be; sums of 2**16 of them stay in int64
_SCALE = 1 << 14
_REFERENCE = 1 << 16  # tokens at which the schemes' shares are taken: rounding to rows is negligible there


@dataclass(frozen=True)
class Pool:
    """Ranks that may share sequences, and what sequences cost there. Make it with `make_pool`, once for a
    cost table and not for each plan.

    `unit` tokens of a sequence stay together (a merge window); a rank holds at most `tokens_per_rank`.
    """

    cost: SequenceCost
    num_cp_ranks: int
    unit: int
    tokens_per_rank: int | None

    def holding(self, tokens: int) -> "Pool":
        """Return the pool whose ranks may hold so many tokens together: each its even share, if that is more
        than `tokens_per_rank`.
        """
        even = -(-tokens // (self.num_cp_ranks * self.unit)) * self.unit
        if self.tokens_per_rank is None or even <= self.tokens_per_rank:
            return self
        wider = replace(self, tokens_per_rank=even)
        # Made once for a cost table.
        vars(wider).update(shares=self.shares, shares_apart=self.shares_apart)
        return wider

    @cached_property
    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The cp ranks of each node, in the order of their first ones; one of all where there is one link."""
        of_node: dict[int, list[int]] = {}
        for cp_rank in range(self.num_cp_ranks):
            of_node.setdefault(self.cost.nodes[cp_rank] if self.cost.nodes else 0, []).append(cp_rank)
        return tuple(map(tuple, of_node.values()))

    def on_one_node(self, ranks: Sequence[int]) -> bool:
        """Whether cp ranks are on one node, or there is one link."""
        if len(self.nodes) == 1:
            return True
        return len(ranks) <= self.node_size and len({self.cost.nodes[rank] for rank in ranks}) == 1

    @cached_property
    def sharing_ns(self) -> tuple[int, int]:
        """What a rank pays for sharing a sequence at all, with ranks of several nodes and of one node."""
        cost = self.cost
        return cost.far.sharing_ns, (cost.near if cost.nodes else cost).sharing_ns

    @cached_property
    def node_size(self) -> int:
        """CP ranks of the node that has the most: so many may share a sequence and leave no node."""
        return max(map(len, self.nodes))

    @cached_property
    def shares(self) -> Shares:
        """`shares[k - 1]` are the schemes of attention for an even cut over k ranks that no other scheme
        beats in both its figures: the slowest rank's part of the attention, in 1 / 2**14, and its exchange,
        in femtoseconds for a token of the sequence. The ranks are of one node if one has k, else of the
        fewest nodes that have, and as many of each.
        """
        size = self.node_size
        return tuple(
            _scheme_shares(self.cost, degree, -(-degree // size))
            for degree in range(1, self.num_cp_ranks + 1)
        )

    @cached_property
    def shares_apart(self) -> Shares:
        """The same where the ranks are on several nodes, if there are: on two at least."""
        if len(self.nodes) == 1:
            return self.shares
        few = tuple(_scheme_shares(self.cost, degree, 2) for degree in range(1, self.node_size + 1))
        return few + self.shares[self.node_size :]


def make_pool(
    cost: SequenceCost, num_cp_ranks: int, unit: int = 1, tokens_per_rank: int | None = None
) -> Pool:
    """Return a pool of so many cp ranks. ValueError for sizes that cannot be."""
    if num_cp_ranks < 1:
        raise ValueError(f"num_cp_ranks={num_cp_ranks}: a pool has at least one cp rank")
    if unit < 1:
        raise ValueError(f"unit={unit}: a splittable unit has at least one token")
    if tokens_per_rank is not None and tokens_per_rank < unit:
        raise ValueError(f"tokens_per_rank={tokens_per_rank}: a rank must hold a unit of {unit} tokens")
    assert cost.shape.window is None, "windowed layers belong to the cost of a token"
    return Pool(cost, num_cp_ranks, unit, tokens_per_rank)


def _scheme_shares(cost: SequenceCost, degree: int, num_nodes: int) -> tuple[tuple[int, int], ...]:
    if degree == 1:
        return ((_SCALE, 0),)
    parts, ranks = [(rank, 1) for rank in range(degree)], range(degree)
    of_nodes = replace(cost, nodes=tuple(rank * num_nodes // degree for rank in ranks))
    if num_nodes > 1 and cost.shape.causal:
        parts = mirrored(parts, of_nodes.nodes)
    cost, nodes = of_nodes.over(ranks), of_nodes.places(ranks)
    shards = cut(_REFERENCE, parts, 1)
    total = pairs_before(_REFERENCE, _REFERENCE, cost.shape) * cost.shape.heads
    tilings = [tiles for _, tiles in scheme_tiles(shards, cost.shape, nodes)]
    works, volumes, leaving = compare(tilings, shards, cost.shape, nodes)
    slowest = zip(works.max(1).tolist(), transfers_ns(volumes, leaving, cost), strict=True)
    found = {(-(-work * _SCALE // total), max(spent) * 1_000_000 // _REFERENCE) for work, spent in slowest}
    ordered = sorted(found)
    return tuple(s for i, s in enumerate(ordered) if all(s[1] < other[1] for other in ordered[:i]))


def degree_times(lengths: Sequence[int], pool: Pool, apart: bool = False) -> Times:
    """Predicted nanoseconds [S, P] of the slowest rank when sequence s is cut evenly over 1 … P ranks, of one
    node as far as one has so many; all are on several nodes if `apart`.

    Latency is apart, since a rank pays it once. NEVER where a sequence has fewer units than ranks.
    """
    cost, shares = pool.cost, pool.shares_apart if apart else pool.shares
    most = max(map(len, shares))
    table = np.array([[*s, *[s[-1]] * (most - len(s))] for s in shares], np.int64)  # [P, schemes, 2]
    tokens = np.array(lengths, np.int64)[:, None]
    degrees = np.arange(1, pool.num_cp_ranks + 1)
    pairs = tokens * (tokens + 1) // 2 if cost.shape.causal else tokens * tokens
    millions, rest = np.divmod(pairs, 1_000_000)  # femtoseconds of the whole could overflow
    attention = millions * cost.pair_fs + rest * cost.pair_fs // 1_000_000
    spent = np.full((len(lengths), pool.num_cp_ranks), NEVER)
    for scheme in range(most):
        share, exchange_fs = table[:, scheme, 0], table[:, scheme, 1]
        np.minimum(spent, attention * share // _SCALE + tokens * exchange_fs // 1_000_000, out=spent)
    units = -(-tokens // pool.unit)
    held = np.minimum(-(-units // degrees) * pool.unit, tokens)  # by the rank with the most
    spent += held * cost.token_fs // 1_000_000
    spent[(degrees > units) & (degrees > 1)] = NEVER
    return spent


def within_memory(lengths: Sequence[int], times: Times, pool: Pool) -> Times:
    """Times with NEVER where so few ranks do not hold a sequence's tokens."""
    if pool.tokens_per_rank is None:
        return times
    room = np.arange(1, pool.num_cp_ranks + 1) * pool.tokens_per_rank
    return np.where(np.array(lengths, np.int64)[:, None] > room, NEVER, times)


def cut(length: int, parts: Sequence[tuple[int, int]], unit: int) -> tuple[Shard, ...]:
    """Shards in proportion to the weights of (rank, weight), cut at the nearest units; parts that come out
    empty are left out, but an empty sequence is one empty shard.
    """
    units, total = -(-length // unit), sum(weight for _, weight in parts)
    start = before = 0
    shards = []
    for rank, weight in parts:
        before += weight
        stop = min(length, (2 * units * before + total) // (2 * total) * unit)
        if stop > start:
            shards.append(Shard(rank, start, stop - start))
            start = stop
    return tuple(shards) or (Shard(parts[0][0], 0, 0),)


def mirrored(parts: Parts, nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Parts of a sequence, (rank, weight), in an order in which each node, of which every rank's is one of
    `nodes`, gets as many early rows as late ones: node by node and back, the last node once.

    Of ranks 0 and 1 on one node and 2 and 3 on another, all of weight 1: 0, 1, then twice as much of 2 and
    of 3, then 1, 0. So causal rows of a node are its share of the work (as the zigzag of ring attention has
    it for ranks), and its ranks can divide them by heads.
    """
    order = sorted(parts, key=lambda part: nodes[part[0]])
    last = [(rank, 2 * weight) for rank, weight in order if nodes[rank] == nodes[order[-1][0]]]
    before = order[: -len(last)]
    return [*before, *last, *reversed(before)]


@lru_cache(maxsize=1 << 14)
def even_sizes(length: int, parts: int, unit: int) -> tuple[int, ...]:
    """Tokens of each of so many even shares of a sequence, as `cut` cuts it."""
    sizes = [0] * parts
    for shard in cut(length, [(number, 1) for number in range(parts)], unit):
        sizes[shard.cp_rank] = shard.length
    return tuple(sizes)


def most_ranks(length: int, pool: Pool) -> int:
    """Ranks that a sequence can be cut over: at most one for each unit."""
    return max(1, min(pool.num_cp_ranks, -(-length // pool.unit)))


def costliest_first(rows: Sequence[Sequence[int]]) -> list[int]:
    """Sequences by the time of one rank, `rows[s][0]`, ties by number."""
    return sorted(range(len(rows)), key=lambda s: -rows[s][0])


class Build:
    """A layout in the making, with predicted nanoseconds of each rank. `rows[s][k - 1]` times sequence s over
    k ranks, of one node if one has so many, and `apart[s][k - 1]` over k ranks of several nodes.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        rows: Sequence[Sequence[int]],
        pool: Pool,
        apart: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.lengths, self.rows, self.pool = lengths, rows, pool
        self.apart = rows if apart is None else apart
        self.ns = [0] * pool.num_cp_ranks
        self.tokens = [0] * pool.num_cp_ranks
        self.placed: dict[int, int] = {}
        self.parts: dict[int, Parts] = {}
        self.latency = [0] * pool.num_cp_ranks

    def share(self, number: int, ranks: Sequence[int]) -> None:
        """Cut a sequence evenly over `ranks`, of which there are not more than it has units."""
        near, cap, length = self.pool.on_one_node(ranks), self.pool.tokens_per_rank, self.lengths[number]
        parts, sizes = [(rank, 1) for rank in ranks], even_sizes(length, len(ranks), self.pool.unit)
        if not near and self.pool.cost.shape.causal:
            both_ways = mirrored(parts, self.pool.cost.nodes)
            held = SequenceLayout(self.pool.num_cp_ranks, (cut(length, both_ways, self.pool.unit),))
            found = tuple(map(held.local_tokens, ranks))
            # Cut twice, a rank may hold a unit more than its even share, or of a short one none.
            fits = (cap is None or self.tokens[rank] + n <= cap for rank, n in zip(ranks, found, strict=True))
            if all(found) and all(fits):
                parts, sizes = both_ways, found
        self.parts[number] = parts
        if cap is not None:
            for rank, size in zip(ranks, sizes, strict=True):
                self.tokens[rank] += size
        spent = (self.rows if near else self.apart)[number][len(ranks) - 1]
        latency, ns, paid = self.pool.sharing_ns[near], self.ns, self.latency
        for rank in ranks:
            ns[rank] += spent
            if latency > paid[rank]:
                ns[rank] += latency - paid[rank]
                paid[rank] = latency

    def shared_ns(self, number: int, ranks: Sequence[int]) -> int:
        """What a sequence takes each of `ranks` that it is cut over evenly, latency apart."""
        table = self.rows if self.pool.on_one_node(ranks) else self.apart
        return table[number][len(ranks) - 1]

    def pour(self, number: int, parts: Sequence[tuple[int, int]]) -> None:
        """Cut a sequence in proportion to the weights of (rank, weight). Its time is not counted."""
        self.parts[number] = parts
        if self.pool.tokens_per_rank is not None:
            for shard in cut(self.lengths[number], parts, self.pool.unit):
                self.tokens[shard.cp_rank] += shard.length

    def place(self, order: Iterable[int]) -> bool:
        """Put each sequence of `order` whole on the least loaded rank with room; tell if all found one."""
        numbers = list(order)
        cap, sizes = self.pool.tokens_per_rank, [self.lengths[number] for number in numbers]
        rooms = None if cap is None else [cap - tokens for tokens in self.tokens]
        ranks = place([self.rows[number][0] for number in numbers], self.ns, sizes, rooms)
        if ranks is None:
            return False
        self.placed.update(zip(numbers, ranks, strict=True))
        if cap is not None and rooms is not None:
            self.tokens = [cap - room for room in rooms]
        return True

    @property
    def fits(self) -> bool:
        """Whether no rank holds more tokens than it may."""
        cap = self.pool.tokens_per_rank
        return cap is None or max(self.tokens) <= cap

    @property
    def makespan(self) -> int:
        """Predicted nanoseconds of the slowest rank."""
        return max(self.ns)

    def shards(self, number: int) -> tuple[Shard, ...]:
        """The shards of a sequence that was placed, shared or poured."""
        if number in self.parts:
            return cut(self.lengths[number], self.parts[number], self.pool.unit)
        return (Shard(self.placed[number], 0, self.lengths[number]),)

    def layout(self) -> SequenceLayout:
        """The finished layout."""
        return SequenceLayout(self.pool.num_cp_ranks, tuple(map(self.shards, range(len(self.lengths)))))


def no_room(lengths: Sequence[int], pool: Pool) -> PolicyError:
    """The error of a policy whose sequences do not fit."""
    return PolicyError(
        f"tokens_per_rank={pool.tokens_per_rank}: {len(lengths)} sequences of {sum(lengths)} tokens, the "
        f"longest {max(lengths)}, find no room on {pool.num_cp_ranks} ranks with this policy; raise it, take "
        "fewer samples a step, or choose a policy that splits sequences"
    )

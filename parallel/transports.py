"""How rows travel between the ranks of a group, what that moves over which links, and which way is cheapest.

Invariant: every transport brings the same rows to the same places, bit for bit; only the links differ.

    local           no row leaves its rank: no collective
    direct          one uneven all-to-all: a row moves once, the least that can be sent
    two_level       rows for other nodes gather inside their node on the rank that has the destination's
                    number there, and cross to it in one message for each node: few large messages between
                    nodes, for rows that move twice inside one. Two uneven all-to-alls
    two_level_back  its transpose: cross first, then spread inside the destination's node
    reduce_scatter  every rank writes its rows into a buffer of all places, whose sum is scattered. No place
                    is written twice, so the sum is exact. Few steps, for a volume that grows with the group
    all_gather      its transpose: every rank gets all rows and takes its own

A transport sees how many rows go from whom to whom and which node each rank is on. Its collectives are in
`parallel/collectives.py`.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ops.ints import Ints
from parallel.cluster import Links

# Each transport and the one that carries the transposed route.
TRANSPOSED: Mapping[str, str] = {
    "local": "local",
    "direct": "direct",
    "two_level": "two_level_back",
    "two_level_back": "two_level",
    "reduce_scatter": "all_gather",
    "all_gather": "reduce_scatter",
}
TWO_LEVEL = frozenset({"two_level", "two_level_back"})

RowCounts = Mapping[tuple[int, int], int]  # rows by (source, destination)
_SAFE_BYTES = 2**63 // 10**9


@dataclass(frozen=True)
class RouteBytes:
    """Bytes sent inside nodes and across nodes, over all ranks; the most that one rank sends or receives."""

    inside: int
    across: int
    busiest: int

    @property
    def total(self) -> int:
        """Bytes sent over all ranks."""
        return self.inside + self.across


def node_map(ranks: Sequence[int], ranks_per_node: int) -> tuple[int, ...]:
    """Return the node of each global rank of a group, where nodes hold consecutive ranks."""
    return tuple(rank // ranks_per_node for rank in ranks)


def relays(transport: str, nodes: Sequence[int]) -> Callable[[int, int], int]:
    """Return the function that names the stop of a two-level transport between a source and a destination.

    It is the rank of the source's node that has the destination's number there: the destination itself if
    both are in one node. So between nodes of one size, every rank meets one peer of each other node.
    """
    members: dict[int, list[int]] = defaultdict(list)
    number = []
    for rank, node in enumerate(nodes):
        number.append(len(members[node]))
        members[node].append(rank)

    def relay(source: int, destination: int) -> int:
        peers = members[nodes[source]]
        return peers[number[destination] % len(peers)]

    assert transport in TWO_LEVEL, f"{transport} has no stop on the way"
    return relay if transport == "two_level" else lambda source, destination: relay(destination, source)


def hops(transport: str, traffic: RowCounts, nodes: Sequence[int]) -> list[RowCounts]:
    """Return what travels between different ranks, hop after hop: rows by (sender, receiver).

    The buffers of reduce_scatter and all_gather travel in ⌈log2 n⌉ steps, as in the concatenation algorithm
    of Bruck et al. (1997, section 4) and its transpose; what that sends in total is the same for every
    algorithm that reduces on the way.
    """
    if transport in TWO_LEVEL:
        relay = relays(transport, nodes)
        first: Counter[tuple[int, int]] = Counter()
        second: Counter[tuple[int, int]] = Counter()
        for (source, destination), rows in traffic.items():
            stop = relay(source, destination)
            first[source, stop] += rows
            second[stop, destination] += rows
        return [_between_ranks(first), _between_ranks(second)]
    if transport == "all_gather":
        return _gathering(_largest(traffic, 0), len(nodes))
    if transport == "reduce_scatter":
        back = reversed(_gathering(_largest(traffic, 1), len(nodes)))
        return [{(b, a): rows for (a, b), rows in hop.items()} for hop in back]
    assert transport in ("local", "direct"), f"unknown transport {transport}"
    return [_between_ranks(traffic)]


def _between_ranks(traffic: RowCounts) -> RowCounts:
    return {(a, b): rows for (a, b), rows in traffic.items() if a != b and rows}


def _largest(traffic: RowCounts, end: int) -> int:
    """The most rows of any source (end 0) or destination (end 1): what every rank's share is padded to."""
    rows_of: Counter[int] = Counter()
    for pair, rows in traffic.items():
        rows_of[pair[end]] += rows
    return max(rows_of.values(), default=0)


def _gathering(block: int, num_ranks: int) -> list[RowCounts]:
    out: list[RowCounts] = []
    distance = 1
    while distance < num_ranks and block:
        rows = block * min(distance, num_ranks - distance)
        out.append({(rank, (rank - distance) % num_ranks): rows for rank in range(num_ranks)})
        distance *= 2
    return out


def route_bytes(transport: str, traffic: RowCounts, nodes: Sequence[int], row_bytes: int) -> RouteBytes:
    """Return the bytes that a transport moves; those of the transposed traffic back are the same."""
    tiers = {False: 0, True: 0}
    of_rank: Counter[tuple[int, bool]] = Counter()
    for hop in hops(transport, traffic, nodes):
        for (sender, receiver), rows in hop.items():
            tiers[nodes[sender] != nodes[receiver]] += rows * row_bytes
            of_rank[sender, True] += rows * row_bytes
            of_rank[receiver, False] += rows * row_bytes
    return RouteBytes(tiers[False], tiers[True], max(of_rank.values(), default=0))


def transport_ns(
    transport: str, traffic: RowCounts, nodes: Sequence[int], row_bytes: int, links: Links
) -> int:
    """Return the modelled time of a transport: of each hop, that of the busiest link of any rank.

    The way back, over the transposed traffic, takes as long.
    """
    return _Clock(traffic, nodes, row_bytes, links).ns(transport)


def choose_transport(traffic: RowCounts, nodes: Sequence[int], row_bytes: int, links: Links) -> str:
    """Return the transport that takes the least modelled time; among equals, the simplest."""
    if not any(rows and a != b for (a, b), rows in traffic.items()):
        return "local"
    among = ("direct", "two_level", "two_level_back", "reduce_scatter", "all_gather")
    return min(among, key=_Clock(traffic, nodes, row_bytes, links).ns)


class _Clock:
    """Times the transports of one traffic, over pairs of ranks all at once: the same hops as `hops` gives.

    A planner asks for each microbatch of up to a thousand ranks, so this is arrays where `hops` is readable.
    """

    def __init__(self, traffic: RowCounts, nodes: Sequence[int], row_bytes: int, links: Links) -> None:
        pairs = np.array([(a, b, rows) for (a, b), rows in traffic.items() if rows], np.int64).reshape(-1, 3)
        self.sources, self.destinations, self.rows = pairs.T
        self.nodes = np.unique(np.array(nodes, np.int64), return_inverse=True)[1]
        self.row_bytes, self.links = row_bytes, links

    def ns(self, transport: str) -> int:
        """Modelled time of a transport."""
        sources, destinations = self.sources, self.destinations
        if transport in ("all_gather", "reduce_scatter"):
            ends = sources if transport == "all_gather" else destinations
            return self._gathering_ns(int(_totals(ends, self.rows, len(self.nodes)).max(initial=0)))
        if transport in TWO_LEVEL:
            there = transport == "two_level"
            stops = self._relay(sources, destinations) if there else self._relay(destinations, sources)
            return self._hop_ns(sources, stops) + self._hop_ns(stops, destinations)
        assert transport in ("local", "direct"), f"unknown transport {transport}"
        return self._hop_ns(sources, destinations)

    def _hop_ns(self, senders: Ints, receivers: Ints) -> int:
        """Time of one hop of all rows, in which the rows of one pair of ranks are one message."""
        size = len(self.nodes)
        moving = senders != receivers
        pairs, message = np.unique(senders[moving] * size + receivers[moving], return_inverse=True)
        senders, receivers = np.divmod(pairs, size)
        across = self.nodes[senders] != self.nodes[receivers]
        num_bytes = self._bytes(_totals(message, self.rows[moving], len(pairs)))
        inside, beyond = self.links.inside.message_ns(num_bytes), self.links.across.message_ns(num_bytes)
        ns = np.where(across, beyond, inside).astype(np.int64)
        # Of every rank four links: inside its node and across nodes, out and in.
        links = np.concatenate([4 * senders + across, 4 * receivers + 2 + across])
        return int(_totals(links, np.concatenate([ns, ns]), 4 * size).max(initial=0))

    def _bytes(self, rows: Ints) -> Any:
        """Bytes of rows, int64, or Python's integers where nanoseconds of so many may overflow on the way."""
        fits = int(rows.max(initial=0)) * self.row_bytes < _SAFE_BYTES
        return (rows if fits else rows.astype(object)) * self.row_bytes

    def _relay(self, near: Ints, far: Ints) -> Ints:
        """The rank of the node of each `near` rank that has the number of its `far` rank, as in `relays`."""
        of_node = np.argsort(self.nodes, kind="stable")  # ranks, node by node
        sizes = np.bincount(self.nodes)
        first = np.cumsum(sizes) - sizes
        numbers = np.empty_like(of_node)
        numbers[of_node] = np.arange(len(of_node)) - np.repeat(first, sizes)
        node = self.nodes[near]
        return of_node[first[node] + numbers[far] % sizes[node]]

    def _gathering_ns(self, block: int) -> int:
        """Time of the steps of `_gathering`: in each, every rank sends one message and receives one."""
        size, total, distance = len(self.nodes), 0, 1
        while distance < size and block:
            num_bytes = block * min(distance, size - distance) * self.row_bytes
            inside, across = (link.message_ns(num_bytes) for link in (self.links.inside, self.links.across))
            crossing = self.nodes != np.roll(self.nodes, distance)
            total += max(across if crossing.any() else 0, 0 if crossing.all() else inside)
            distance *= 2
        return total


def _totals(keys: Ints, values: Ints, size: int) -> Ints:
    """Sum the values of each key in [0, size)."""
    sums = np.zeros(size, np.int64)
    np.add.at(sums, keys, values)
    return sums

"""The tree along which small numbers of all ranks meet: ranks send to the leader of their node, leaders to
leaders.

Nodes are numbered as ranks are, `per_node` ranks each, and stand in a binary heap: node n is below node
(n - 1) // 2. The first rank of a node leads it, so rank 0 is the root. For n nodes of k ranks, a rank has at
most k + 2 connections, a reduction and its answer take at most 2 · ⌈log2 n⌉ + 2 messages one after the other,
and no rank sends or receives more than k + 2 messages in one.

Nothing here opens a connection: what 16,384 ranks would do is counted without them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tree:
    """The tree of `world` ranks on nodes of `per_node`, of which the last may have fewer.

    Raises:
        ValueError: if either number is below 1.
    """

    world: int
    per_node: int

    def __post_init__(self) -> None:
        if self.world < 1 or self.per_node < 1:
            raise ValueError(f"no tree has {self.world} ranks on nodes of {self.per_node}")

    @property
    def num_nodes(self) -> int:
        """How many nodes there are."""
        return -(-self.world // self.per_node)

    def leader(self, rank: int) -> int:
        """The first rank of a rank's node."""
        return rank - rank % self.per_node

    def node(self, rank: int) -> range:
        """The ranks of a rank's node."""
        first = self.leader(rank)
        return range(first, min(first + self.per_node, self.world))

    def parent(self, rank: int) -> int | None:
        """The rank that this one sends to; None for the root."""
        if rank != self.leader(rank):
            return self.leader(rank)
        return (rank // self.per_node - 1) // 2 * self.per_node if rank else None

    def children(self, rank: int) -> tuple[int, ...]:
        """The ranks that send to this one: others of its node, then leaders of nodes below."""
        if rank != self.leader(rank):
            return ()
        node = rank // self.per_node
        members = self.node(rank)[1:]
        below = (child for child in (2 * node + 1, 2 * node + 2) if child < self.num_nodes)
        return (*members, *(child * self.per_node for child in below))

    def level(self, rank: int) -> int:
        """How many messages lie between a rank and the root."""
        level, parent = 0, self.parent(rank)
        while parent is not None:
            level, parent = level + 1, self.parent(parent)
        return level

    def connections(self, rank: int) -> int:
        """How many connections a rank has."""
        return len(self.children(rank)) + (rank > 0)

    def messages(self, rank: int) -> tuple[int, int]:
        """How many messages a rank sends and receives in one reduction that all learn the result of."""
        return self.connections(rank), self.connections(rank)

    @property
    def depth(self) -> int:
        """How many messages follow each other until the last rank has the result of a reduction."""
        # Levels grow with the number of a node, and its last rank is as far as any: the last node may have
        # its leader alone, which the one before it does not.
        last = range(max(0, self.world - 2 * self.per_node), self.world)
        return 2 * max(map(self.level, last))

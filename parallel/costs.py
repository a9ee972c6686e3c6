"""What work costs: clusters, and a numbered table of integer nanoseconds that every planner reads.

No floating point enters a decision. Coefficients are integers in femtoseconds, results integers in
nanoseconds, so all ranks, machines and Python versions agree on them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_FS_PER_NS = 1_000_000


@dataclass(frozen=True)
class Link:
    """What one message costs between two ranks."""

    latency_ns: int
    bytes_per_s: int

    def bytes_ns(self, num_bytes: int) -> int:
        """Nanoseconds that so many bytes take, latency apart."""
        return num_bytes * 10**9 // self.bytes_per_s

    def message_ns(self, num_bytes: int) -> int:
        """Nanoseconds of one message."""
        return self.latency_ns + self.bytes_ns(num_bytes)


@dataclass(frozen=True)
class Links:
    """The links of a rank: `inside` its node and `across` nodes.

    Both kinds work at the same time, and in both directions.
    """

    inside: Link
    across: Link


@dataclass(frozen=True)
class Cluster:
    """What a rank and the links between ranks can do.

    `flops` is the peak of one rank in FLOP/s at the training precision and `efficiency` the share of it that
    layers reach; `memory_bytes_per_s` is what it reads and writes its own memory at; `link_bytes_per_s` and
    `link_latency_ns` describe one message between two nodes, the `node_link` ones one inside a node of
    `ranks_per_node` neighbouring ranks; `op_overhead_ns` is what starting any op costs.
    """

    name: str
    flops: int
    efficiency: float
    memory_bytes_per_s: int
    link_bytes_per_s: int
    link_latency_ns: int
    ranks_per_node: int
    node_link_bytes_per_s: int
    node_link_latency_ns: int
    op_overhead_ns: int

    @property
    def links(self) -> Links:
        """The links inside a node and between nodes."""
        return Links(
            Link(self.node_link_latency_ns, self.node_link_bytes_per_s),
            Link(self.link_latency_ns, self.link_bytes_per_s),
        )


@dataclass(frozen=True)
class WorkCost:
    """Time of one forward pass over tokens: linear in their number and in the sum of squared lengths.

    Each of `exchanges` layers exchanges shared sequences, once in and once out.
    """

    token_fs: int
    square_fs: int
    overhead_ns: int
    backward_factor: int = 2
    exchanges: int = 0

    def forward_ns(self, tokens: int, squares: int, exchange_ns: int = 0) -> int:
        """Nanoseconds of a forward pass over `tokens` in sequences whose squared lengths sum to `squares`;
        what a layer exchanges takes `exchange_ns`.
        """
        return self.overhead_ns + self.marginal_ns(tokens, squares) + self.exchanges * exchange_ns

    def marginal_ns(self, tokens: int, squares: int) -> int:
        """Nanoseconds that more tokens add to a pass: what balancing compares."""
        return (self.token_fs * tokens + self.square_fs * squares) // _FS_PER_NS

    def backward_ns(self, tokens: int, squares: int, exchange_ns: int = 0) -> int:
        """Nanoseconds of the backward pass; recomputation counts as another forward. Gradients are exchanged
        once, whatever they take to compute.
        """
        exchanged = (self.backward_factor - 1) * self.exchanges * exchange_ns
        return self.backward_factor * self.forward_ns(tokens, squares) + exchanged


@dataclass(frozen=True)
class CostTable:
    """Numbered costs of every part: those of the LLM as "llm/0", "llm/1", encoders by name.

    The number is part of every plan made with it.
    """

    number: int
    parts: Mapping[str, WorkCost]
    links: Links
    row_bytes: int

    def message_ns(self, rows: int) -> int:
        """Nanoseconds to move `rows` activations of the LLM's width between two nodes."""
        return self.links.across.message_ns(rows * self.row_bytes)


@dataclass(frozen=True)
class PartWork:
    """What a forward pass of a part takes: FLOPs and bytes read or written, for each token, for each unit of
    the sum of squared lengths, and once a pass for the weights. `exchanges` are the layers that exchange
    shared sequences.
    """

    flops_per_token: int
    flops_per_square: int
    bytes_per_token: int
    weight_bytes: int
    recomputed: bool = False
    exchanges: int = 0

    def flops(self, tokens: int, squares: int) -> int:
        """Forward FLOPs over `tokens` in sequences whose squared lengths sum to `squares`."""
        return self.flops_per_token * tokens + self.flops_per_square * squares


def table_from_work(
    parts: Mapping[str, PartWork], cluster: Cluster, row_bytes: int, number: int = 0
) -> CostTable:
    """Derive the first table from arithmetic and the cluster's figures; measurement corrects it later.

    A roofline (Williams, Waterman and Patterson, 2009): a token takes the longer of its arithmetic and its
    memory traffic. `row_bytes` is the size of one activation of the LLM's width.
    """
    effective = max(1, int(cluster.flops * cluster.efficiency))
    costs = {
        name: WorkCost(
            token_fs=max(
                part.flops_per_token * 10**15 // effective,
                part.bytes_per_token * 10**15 // cluster.memory_bytes_per_s,
            ),
            square_fs=part.flops_per_square * 10**15 // effective,
            overhead_ns=cluster.op_overhead_ns + part.weight_bytes * 10**9 // cluster.memory_bytes_per_s,
            backward_factor=3 if part.recomputed else 2,
            exchanges=part.exchanges,
        )
        for name, part in parts.items()
    }
    return CostTable(number, costs, cluster.links, row_bytes)

"""What work costs: clusters, and a numbered table of integer nanoseconds that every planner reads.

No floating point enters a decision. Coefficients are integers in femtoseconds, results integers in
nanoseconds, so all ranks, machines and Python versions agree on them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

_FS_PER_NS = 1_000_000


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


@dataclass(frozen=True)
class WorkCost:
    """Time of one forward pass over tokens: linear in their number and in the sum of squared lengths."""

    token_fs: int
    square_fs: int
    overhead_ns: int
    backward_factor: int = 2

    def forward_ns(self, tokens: int, squares: int) -> int:
        """Nanoseconds of a forward pass over `tokens` in sequences whose squared lengths sum to `squares`."""
        return self.overhead_ns + self.marginal_ns(tokens, squares)

    def marginal_ns(self, tokens: int, squares: int) -> int:
        """Nanoseconds that more tokens add to a pass: what balancing compares."""
        return (self.token_fs * tokens + self.square_fs * squares) // _FS_PER_NS

    def backward_ns(self, tokens: int, squares: int) -> int:
        """Nanoseconds of the backward pass; recomputation counts as another forward."""
        return self.backward_factor * self.forward_ns(tokens, squares)


@dataclass(frozen=True)
class CostTable:
    """Numbered costs of every part: the stages of the LLM as "llm/0", "llm/1", encoders by name.

    The number is part of every plan made with it.
    """

    number: int
    parts: Mapping[str, WorkCost]
    link_latency_ns: int
    link_ns_per_kib: int
    row_bytes: int

    def message_ns(self, rows: int) -> int:
        """Nanoseconds to move `rows` activations of the LLM's width between two ranks."""
        return self.link_latency_ns + rows * self.row_bytes * self.link_ns_per_kib // 1024


@dataclass(frozen=True)
class PartWork:
    """What a forward pass of a part takes: FLOPs and bytes read or written, for each token, for each unit of
    the sum of squared lengths, and once a pass for the weights.
    """

    flops_per_token: int
    flops_per_square: int
    bytes_per_token: int
    weight_bytes: int
    recomputed: bool = False

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
        )
        for name, part in parts.items()
    }
    return CostTable(
        number=number,
        parts=costs,
        link_latency_ns=cluster.link_latency_ns,
        link_ns_per_kib=max(1, 1024 * 10**9 // cluster.link_bytes_per_s),
        row_bytes=row_bytes,
    )

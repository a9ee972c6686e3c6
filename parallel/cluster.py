"""What a rank and the links between ranks can do, as plain integers: what costs are read off.

The rates are those that work reaches, not peaks: a cluster's file states both, and `of_precision` in
`omni/config.py` puts them together for the number format of a run.
"""

from dataclasses import dataclass

QUEUES = ("one", "per_communicator")


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
    """The links of a rank: `inside` its node, `across` nodes, and `beyond` a rail, which is as `across` where
    it is None. A rail is nodes behind the same first switches.

    All kinds work at the same time, and in both directions.
    """

    inside: Link
    across: Link
    beyond: Link | None = None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What a rank and the links between ranks reach.

    `flops` is the peak of one rank in FLOP/s in the run's precision, which MFU is a share of. Products of
    large matrices reach `products` FLOP/s in that precision and `plain_products` in that of activations;
    attention reaches `attention` in a forward and `attention_backward` in a backward, which counts twice a
    forward's FLOPs. Memory is read and written at `moved_per_s` bytes/s. Starting any op costs
    `op_overhead_ns`, the kernels of a layer `launch_ns` on top, and those of a layer that dispatches tokens
    to experts `dispatch_ns`. A rank that computes itself spends `issue_ns` on issuing a communication, and
    again on taking in what came (0 where a host does that meanwhile). `ranks_per_node` neighbouring ranks
    share a node, and `ranks_per_rail` a rail, None if all do. Communicators of a rank run in `queues`: one
    for all, or each in its own. A rank's device holds `memory_bytes`, and passes of a rank may keep
    `host_bytes` on its host, None if that is not to be checked; the device copies `host_per_s` bytes/s to the
    host or back, None if that is not known.
    """

    name: str
    flops: int
    products: int
    plain_products: int
    attention: int
    attention_backward: int
    moved_per_s: int
    links: Links
    ranks_per_node: int
    ranks_per_rail: int | None = None
    op_overhead_ns: int = 0
    launch_ns: int = 0
    dispatch_ns: int = 0
    issue_ns: int = 0
    queues: str = "one"
    memory_bytes: int | None = None
    host_bytes: int | None = None
    host_per_s: int | None = None

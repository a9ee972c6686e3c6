"""How the rows of each route travel: policies that choose among the transports of `parallel.transports`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from parallel.cluster import Links
from parallel.policy import Policy
from parallel.transports import TRANSPOSED, RowCounts, choose_transport


@dataclass(frozen=True)
class TransportPolicy(Policy):
    """Which transport carries a route.

    `decide(traffic, nodes, row_bytes, links)` gives the name of a transport: `traffic` has the rows by
    (source, destination) in domain ranks, of which some change their rank; `nodes[p]` is the node
    of domain rank p; a row has `row_bytes`, and `links` are those inside a node and between nodes.
    """

    group: ClassVar[str] = "omni.transport"
    decide: Callable[[RowCounts, Sequence[int], int, Links], str]

    def __call__(self, traffic: RowCounts, nodes: Sequence[int], row_bytes: int, links: Links) -> str:
        """Return the name of the transport."""
        with self.asked():
            name = self.decide(traffic, nodes, row_bytes, links)
        known = [transport for transport in TRANSPOSED if transport != "local"]
        self.require(name in known, f"rows that leave their rank go by one of {', '.join(known)}, not {name}")
        return name


def _always(name: str) -> TransportPolicy:
    return TransportPolicy(name, lambda traffic, nodes, row_bytes, links: name)


AUTO = TransportPolicy("auto", choose_transport)
DIRECT = _always("direct")
TWO_LEVEL = _always("two_level")
TWO_LEVEL_BACK = _always("two_level_back")
REDUCE_SCATTER = _always("reduce_scatter")
ALL_GATHER = _always("all_gather")

"""What one rank holds and sends in a step, as plain numbers: measured in a rehearsal, or modelled.

Bytes are those that the rank sends. Collectives over n ranks are counted as a ring in order of rank, in which
each rank sends to the next: all-gather and reduce-scatter (n - 1) shards, all-reduce twice that (Patarasuk
and Yuan, 2009, section 3). All-to-all and point-to-point are counted pair by pair. What a rank keeps for
itself is not sent. A link is inside a node or between nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.ops import Op


@dataclass(frozen=True)
class Sent:
    """What a rank sends over a group by one kind of collective: bytes inside its node and across nodes."""

    calls: int
    inside: int
    across: int

    @property
    def total(self) -> int:
        """Bytes over all links."""
        return self.inside + self.across

    def __add__(self, other: "Sent") -> "Sent":
        return Sent(self.calls + other.calls, self.inside + other.inside, self.across + other.across)

    def times(self, calls: int) -> "Sent":
        """Return what so many equal calls send."""
        return Sent(self.calls * calls, self.inside * calls, self.across * calls)


NOTHING = Sent(0, 0, 0)
Traffic = Mapping[tuple[str, str], Sent]
"""By group ("llm tp") and collective ("all_gather")."""


@dataclass(frozen=True)
class Footprint:
    """One rank in one step.

    `parameters` counts those it holds by component. `peak` is what it holds at the moment when it holds
    most, in bytes by kind (`omni/planning/memory.py`), and `at` the op that then runs. `encoding` is the most
    bytes that it holds during each pass of an encoder, `host` the most that its passes keep on the host.
    """

    parameters: Mapping[str, int]
    peak: Mapping[str, int]
    at: str
    traffic: Traffic
    encoding: Mapping[Op, int] = field(default_factory=dict)
    host: int = 0

    @property
    def bytes(self) -> int:
        """Most bytes held at once."""
        return sum(self.peak.values())


def ring(ranks: Sequence[int], rank: int) -> int:
    """Return the rank that `rank` sends to in a ring of its group."""
    return ranks[(ranks.index(rank) + 1) % len(ranks)]


def send(nodes: Mapping[int, int] | Sequence[int], rank: int, messages: Mapping[int, int]) -> Sent:
    """Count one collective of `rank`: bytes by receiving rank; `nodes` gives the node of a rank."""
    inside = sum(size for to, size in messages.items() if nodes[to] == nodes[rank] and to != rank)
    return Sent(1, inside, sum(size for to, size in messages.items() if to != rank) - inside)

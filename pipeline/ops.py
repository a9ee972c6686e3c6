"""Ops: what a rank does, one after the other.

An op names what it works on completely, so that lists of ops can be verified, simulated and run by code that
knows no schedule.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from parallel.work import Grad


class Kind(StrEnum):
    """What an op does. Communication is issued by one op and waited for by another."""

    ENCODE = "encode"
    ENCODE_BACKWARD = "encode_backward"
    FORWARD = "forward"
    BACKWARD = "backward"
    SHIP = "ship"
    RETURN = "return"
    SEND_FORWARD = "send_forward"
    RECV_FORWARD = "recv_forward"
    SEND_BACKWARD = "send_backward"
    RECV_BACKWARD = "recv_backward"
    WAIT = "wait"
    REDUCE = "reduce"

    __hash__ = str.__hash__  # an enumeration's own is in Python, and plans are full of kinds


COMPUTE = frozenset({Kind.ENCODE, Kind.ENCODE_BACKWARD, Kind.FORWARD, Kind.BACKWARD})
PASSES = frozenset({Kind.FORWARD, Kind.BACKWARD})
FORWARDS = frozenset({Kind.ENCODE, Kind.FORWARD})
BACKWARDS = frozenset({Kind.ENCODE_BACKWARD, Kind.BACKWARD})
COLLECTIVE = frozenset({Kind.SHIP, Kind.RETURN})
POINT_TO_POINT = frozenset({Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD})
ISSUED = COLLECTIVE | POINT_TO_POINT | {Kind.REDUCE}


PARTS = 8
"""Parts of a pass of the LLM, between which messages may go."""


@dataclass(frozen=True)
class Op:
    """One action of one rank.

    `index` is an encoder batch for encode ops, a component for REDUCE, else a microbatch. `virtual_stage` is
    that of the LLM which the op works on or serves: SEND_FORWARD sends its output, RECV_FORWARD receives its
    input, SEND_BACKWARD sends the gradient of its input, RECV_BACKWARD receives that of its output; REDUCE
    sums its gradients. It is 0 for encoders, which are not divided into any. `grad` tells what a backward
    makes. A WAIT is for the op of kind `on` with the same index and virtual stage. A message that is issued
    `within` a pass stands behind it in a list, in their order, and goes when so many of the `PARTS` of the
    pass are done: where a rank has one queue, it need not wait there for the rest.
    """

    kind: Kind
    index: int
    on: Kind | None = None
    virtual_stage: int = 0
    grad: Grad = Grad.BOTH
    within: int = 0

    def __str__(self) -> str:
        of_llm = f", virtual stage {self.virtual_stage}" if self.virtual_stage else ""
        grad = f", {self.grad}" if self.grad is not Grad.BOTH else ""
        within = f", within {self.within}/{PARTS}" if self.within else ""
        return f"{self.kind}({self.on + ' ' if self.on else ''}{self.index}{of_llm}{grad}{within})"

    @property
    def makes_input(self) -> bool:
        """Whether a backward makes the gradient that goes on to other virtual stages or ranks."""
        return self.grad is not Grad.WEIGHT

    @property
    def makes_weight(self) -> bool:
        """Whether a backward makes the gradients of weights."""
        return self.grad is not Grad.INPUT


def issued_within(ops: Sequence[Op], at: int) -> Sequence[Op]:
    """Return the messages behind the pass at a place of a list that are issued within it."""
    stop = at + 1
    while stop < len(ops) and ops[stop].within:
        stop += 1
    return ops[at + 1 : stop]


def parts_done(layers: int, of: int) -> int:
    """Return how many parts of a pass are done where a rank has left so many layers `of` those of the pass.

    All ranks of a stage have the same layers, so all of them issue a message between the same two.
    """
    return PARTS * layers // of

"""The plan of one step: everything that every rank will do, as plain integers.

A StepPlan is a pure function of sample metadata, layouts, policies and a numbered cost table. Every rank
computes it alone; equal plans have equal digests, and a plan runs only after the digests were compared.
It holds no tensor, no clock reading and no float, and it can be written, hashed, compared and printed.

    StepPlan
      samples      what the step trains on, with the length each one has in the LLM
      replicas     one ReplicaPlan for each copy of the LLM in this rank's planning group
        microbatches   which samples are packed together
        items          images, clips, recordings: how large, where their rows belong
        chunks         which rank of the replica encodes which items, as one quantum of work
        routes         for each microbatch, from which rank to which rank its rows travel
        ops            for each rank of the replica, the ordered list of its actions
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from parallel.boundary import Route
from parallel.sequence import SequenceLayout


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


COMPUTE = frozenset({Kind.ENCODE, Kind.ENCODE_BACKWARD, Kind.FORWARD, Kind.BACKWARD})
COLLECTIVE = frozenset({Kind.SHIP, Kind.RETURN})
POINT_TO_POINT = frozenset({Kind.SEND_FORWARD, Kind.RECV_FORWARD, Kind.SEND_BACKWARD, Kind.RECV_BACKWARD})
ISSUED = COLLECTIVE | POINT_TO_POINT


@dataclass(frozen=True)
class Op:
    """One action of one rank.

    `index` is a chunk for encode ops, a component for REDUCE, else a microbatch. A WAIT is for the op of kind
    `on` with the same index.
    """

    kind: Kind
    index: int
    on: Kind | None = None

    def __str__(self) -> str:
        return f"{self.kind}({self.on + ' ' if self.on else ''}{self.index})"


@dataclass(frozen=True)
class PlannedSample:
    """A sample of the step: where it comes from and its tokens in the LLM after any truncation."""

    source: str
    id: int
    length: int


@dataclass(frozen=True)
class PlannedItem:
    """An item: its place in its sample, its encoder tokens, its LLM rows and their start in the pack."""

    component: str
    sample: int
    index: int
    microbatch: int
    tokens: int
    rows: int
    start: int


@dataclass(frozen=True)
class Microbatch:
    """What one pass of the LLM pipeline consumes: samples (indices into the plan) packed in this order."""

    samples: tuple[int, ...]
    layout: SequenceLayout

    @property
    def tokens(self) -> int:
        """Tokens of the pack."""
        return sum(self.layout.lengths)

    @property
    def squares(self) -> int:
        """Sum of squared sequence lengths: what attention costs."""
        return sum(n * n for n in self.layout.lengths)


@dataclass(frozen=True)
class Chunk:
    """A quantum of encoder work: items of one microbatch that one rank of the replica encodes together."""

    component: str
    microbatch: int
    rank: int
    items: tuple[int, ...]
    tokens: int
    squares: int
    rows: int


@dataclass(frozen=True)
class ReplicaPlan:
    """The work of one copy of the LLM, over the ranks of that copy (numbered 0 … within the replica).

    `routes[m]` is None for a microbatch without items: nobody ships anything for it.
    """

    num_stages: int
    microbatches: tuple[Microbatch, ...]
    items: tuple[PlannedItem, ...]
    chunks: tuple[Chunk, ...]
    routes: tuple[Route | None, ...]
    ops: tuple[tuple[Op, ...], ...]


@dataclass(frozen=True)
class StepPlan:
    """The plan of one step. `cursor` and `next_cursor` are positions of the global sample stream."""

    step: int
    train: bool
    cursor: int
    next_cursor: int
    cost_table: int
    components: tuple[str, ...]
    frozen: tuple[str, ...]
    samples: tuple[PlannedSample, ...]
    skipped: tuple[tuple[str, int], ...]
    replicas: tuple[ReplicaPlan, ...]

    @cached_property
    def digest(self) -> int:
        """A 63-bit hash of the whole plan."""
        code = hashlib.blake2b(repr(self).encode(), digest_size=8).digest()
        return int.from_bytes(code, "big") >> 1


def diff(a: Any, b: Any, path: str = "plan") -> list[str]:
    """Return where two plans differ, as lines like "plan.replicas[0].chunks[2].rank: 1 != 0"."""
    return list(_differences(a, b, path))


def _differences(a: Any, b: Any, path: str) -> Iterator[str]:
    if type(a) is not type(b):
        yield f"{path}: {_short(a)} != {_short(b)}"
    elif is_dataclass(a):
        for field in fields(a):
            yield from _differences(getattr(a, field.name), getattr(b, field.name), f"{path}.{field.name}")
    elif isinstance(a, tuple):
        if len(a) != len(b):
            yield f"{path}: {len(a)} entries != {len(b)}"
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from _differences(x, y, f"{path}[{i}]")
    elif a != b:
        yield f"{path}: {_short(a)} != {_short(b)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

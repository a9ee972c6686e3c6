"""The plan of one step: everything that every rank will do, as plain integers.

A StepPlan is a pure function of sample metadata, layouts, policies and a numbered cost table. Every rank
computes it alone; equal plans have equal digests, and a plan runs only after the digests were compared.
It holds no tensor, no clock reading and no float, and it can be written, hashed, compared and printed.

    StepPlan
      samples      what the step trains on, with the length each one has in the LLM
      domains      one DomainPlan for each group of replicas that share work
        microbatches   which samples are packed together, and which ranks hold their tokens
        items          images, clips, recordings: how large, where their rows belong
        chunks         which ranks of the domain encode which items, as one quantum of work
        routes         for each microbatch, from which rank to which rank its rows travel
        ops            for each rank of the domain, the ordered list of its actions
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

from parallel.boundary import Route
from parallel.sequence import SequenceLayout
from parallel.tiles import Tile


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
class Point:
    """An attach point of the LLM, where rows enter: `place` counts the points of its part."""

    name: str
    part: int
    place: int


EMBEDDING = Point("llm.embed", 0, 0)


Work = tuple[int, int, int]
"""Tokens, the share in squared lengths that attention costs, and nanoseconds of exchanges in a layer."""


@dataclass(frozen=True)
class Microbatch:
    """What one pass of the LLM pipeline consumes: samples (indices into the plan) packed in this order.

    `layout` says which members of the domain's pool hold them. A pass of several replicas is one
    microbatch: each of them has its own samples in it, or none. `tiles` divide the attention of each
    sequence that several members share; `exchange_ns` is what exchanging them takes each member in a layer,
    nothing if there are none.
    """

    samples: tuple[int, ...]
    layout: SequenceLayout
    tiles: tuple[tuple[Tile, ...], ...]
    exchange_ns: tuple[int, ...] = ()

    def work(self, member: int) -> Work:
        """Return the work of a member of the pool."""
        return _work(self.layout, member, self.exchange_ns)


@dataclass(frozen=True)
class Chunk:
    """A quantum of encoder work: items of one microbatch, encoded together.

    `ranks` are the positions that encode it, slot by slot; `layout` says which of these slots hold which
    tokens of which item, `tiles` divide the attention of each shared item, `rows` count what each of `ranks`
    puts out for all attach points of the component, and `exchange_ns` is as for a microbatch, by slot.
    """

    component: str
    microbatch: int
    ranks: tuple[int, ...]
    items: tuple[int, ...]
    layout: SequenceLayout
    tiles: tuple[tuple[Tile, ...], ...]
    rows: tuple[int, ...]
    exchange_ns: tuple[int, ...] = ()

    @property
    def tp(self) -> int:
        """Ranks of a slot."""
        return len(self.ranks) // self.layout.num_ranks

    def slot(self, rank: int) -> int:
        """Return which slot of the chunk the position `rank` belongs to."""
        return self.ranks.index(rank) // self.tp

    def rows_of(self, rank: int) -> int:
        """Rows that the position `rank` puts out."""
        return self.rows[self.ranks.index(rank)]

    def work(self, rank: int) -> Work:
        """Return the work of the slot of `rank`."""
        return _work(self.layout, self.slot(rank), self.exchange_ns)


def _work(layout: SequenceLayout, rank: int, exchange_ns: tuple[int, ...]) -> Work:
    squares = 0
    for pieces, length in zip(layout.shards, layout.lengths, strict=True):
        squares += sum(piece.length * length for piece in pieces if piece.rank == rank)
    return layout.local_tokens(rank), squares, exchange_ns[rank] if exchange_ns else 0


@dataclass(frozen=True)
class DomainPlan:
    """The work of one domain, over its ranks by position: those of the LLM, stage by stage, then encoders'.

    A stage has `pool` members of `tp` ranks. `party` neighbouring ranks of a stage communicate inside layers,
    so they run the passes of a microbatch together. `beside` ranks hold encoders only. `homes` are, for each
    component of the plan, the first position that holds it and the one after the last; `routes[m]` is
    None for a microbatch without items: nobody ships anything for it. `feeds` name the attach points of
    components whose rows enter elsewhere than at the embedding alone.
    """

    num_stages: int
    pool: int
    tp: int
    party: int
    beside: int
    homes: tuple[tuple[int, int], ...]
    microbatches: tuple[Microbatch, ...]
    items: tuple[PlannedItem, ...]
    chunks: tuple[Chunk, ...]
    routes: tuple[Route | None, ...]
    ops: tuple[tuple[Op, ...], ...]
    feeds: tuple[tuple[str, tuple[Point, ...]], ...] = ()

    @property
    def stage_size(self) -> int:
        """Positions of a stage: the distance between neighbours in the pipeline."""
        return self.pool * self.tp

    @property
    def num_ranks(self) -> int:
        """Positions of the domain."""
        return self.beside + self.num_stages * self.stage_size

    def stage(self, rank: int) -> int | None:
        """Return the stage of a position, None for one beside the LLM."""
        stage = rank // self.stage_size
        return stage if stage < self.num_stages else None

    def member(self, rank: int) -> int:
        """Return the member of the pool that a position of the LLM belongs to."""
        return rank % self.stage_size // self.tp

    def is_first(self, rank: int) -> bool:
        """Whether a position holds the first stage."""
        return self.stage(rank) == 0

    def is_last(self, rank: int) -> bool:
        """Whether a position holds the last stage."""
        return self.stage(rank) == self.num_stages - 1

    def fed_by(self, component: str) -> tuple[Point, ...]:
        """Return the attach points that a component puts out rows for, in the order of its rows."""
        return dict(self.feeds).get(component, (EMBEDDING,))

    def points(self, rank: int) -> tuple[Point, ...]:
        """Return the attach points of the stage of a position, by place."""
        fed = {point for _, points in self.feeds for point in points} | {EMBEDDING}
        here = (point for point in fed if point.part == self.stage(rank))
        return tuple(sorted(here, key=lambda point: point.place))

    def reports(self, rank: int) -> bool:
        """Whether a position reports losses: the first of the tp ranks, which all compute the same ones."""
        return self.is_last(rank) and rank % self.tp == 0

    def parties(self, op: Op, rank: int) -> range:
        """Return the positions that run a compute op together because its layers communicate."""
        if op.kind in (Kind.ENCODE, Kind.ENCODE_BACKWARD):
            ranks = self.chunks[op.index].ranks
            return range(ranks[0], ranks[-1] + 1)
        first = rank - rank % self.party
        return range(first, first + self.party)


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
    domains: tuple[DomainPlan, ...]

    @cached_property
    def digest(self) -> int:
        """A 63-bit hash of the whole plan."""
        code = hashlib.blake2b(repr(self).encode(), digest_size=8).digest()
        return int.from_bytes(code, "big") >> 1


def diff(a: Any, b: Any, path: str = "plan") -> list[str]:
    """Return where two plans differ, as lines like "plan.domains[0].chunks[2].microbatch: 1 != 0"."""
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

"""The plan of one domain: what its ranks do together. A rank's number in it is its domain rank.

The levels above it, and how plans are compared: `pipeline/plan.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from parallel.boundary import Route
from parallel.sequence import SequenceLayout
from parallel.tiles import Tile
from parallel.work import Grad
from pipeline.digest import digest_of
from pipeline.ops import BACKWARDS, Kind, Op


@dataclass(frozen=True)
class PlannedSample:
    """A sample of the step: where it comes from and its tokens in the LLM after any truncation; `targets` are
    the runs [start, stop) of them whose next token carries loss, as if all text were target text.
    """

    source: str
    id: int
    length: int
    targets: tuple[tuple[int, int], ...]


RowRuns = tuple[tuple[int, tuple[int, ...]], ...]
"""Runs of an item's rows, each with the ids of the literal tokens that follow it."""


@dataclass(frozen=True)
class PlannedItem:
    """An item: its place in its sample, its encoder tokens, its LLM rows and where it starts in the pack.

    Rows form a `grid` (frames, rows, columns) in time and place, () where they count on as text does. They
    stand in `runs`, numbers of rows with the ids of the literal tokens that follow them, () for all in one.
    """

    component: str
    sample: int
    index: int
    microbatch: int
    tokens: int
    rows: int
    start: int
    grid: tuple[int, ...] = ()
    runs: RowRuns = ()

    def places(self, first: int, rows: int) -> Iterator[tuple[int, int]]:
        """Where rows [first, first + rows) stand: start in the pack and rows of each of their runs."""
        at, row = self.start, 0
        for count, after in self.runs or ((self.rows, ()),):
            low, high = max(row, first), min(row + count, first + rows)
            if low < high:
                yield at + low - row, high - low
            at, row = at + count + len(after), row + count

    def literals(self) -> Iterator[tuple[int, int]]:
        """Where literal tokens stand in the pack, and their ids."""
        at = self.start
        for count, after in self.runs:
            yield from enumerate(after, at + count)
            at += count + len(after)


@dataclass(frozen=True)
class Point:
    """An attach point of the LLM, where rows enter: before a layer of a virtual stage; `place` counts the
    points of that one.
    """

    name: str
    virtual_stage: int
    place: int


EMBEDDING = Point("llm.embed", 0, 0)


class Share(NamedTuple):
    """What a cp rank has of a microbatch, or a tp group of an encoder batch: tokens, their part of the sum of
    squared lengths, which attention costs, and nanoseconds of exchanges in a layer; and whether all layers
    are computed `anew` for its backward.
    """

    tokens: int
    squares: int
    exchange_ns: int
    anew: bool = False


@dataclass(frozen=True)
class Microbatch:
    """What one pass of the LLM pipeline consumes: samples (by number in the domain) packed in this order.

    `layout` says which cp ranks of the domain's pool hold them. A pass of several replicas is one
    microbatch: each of them has its own samples in it, or none. `tiles` divide the attention of each
    sequence that several cp ranks share; `exchange_ns` is what exchanging them takes each cp rank in a layer,
    nothing if there are none. All layers are computed `anew` for its backward if so, whatever those of other
    microbatches keep.
    """

    samples: tuple[int, ...]
    layout: SequenceLayout
    tiles: tuple[tuple[Tile, ...], ...]
    exchange_ns: tuple[int, ...] = ()
    anew: bool = False

    def share(self, cp_rank: int) -> Share:
        """Return what a cp rank of the pool has of it."""
        return self._shares[cp_rank]

    @cached_property
    def _shares(self) -> tuple[Share, ...]:
        return _shares(self.layout, self.exchange_ns, self.anew)


@dataclass(frozen=True)
class ItemRows:
    """Rows [first, first + rows) of an item for one attach point, by its number among those of the item's
    component.
    """

    item: int
    point: int
    first: int
    rows: int


@dataclass(frozen=True)
class EncoderBatch:
    """A unit of encoder work: items of any microbatches, encoded together.

    `ranks` are the domain ranks that encode it, tp group by tp group; `layout` says which of these tp groups
    hold which tokens of which item, `tiles` divide the attention of each shared item, `outputs` name the rows
    that each of `ranks` puts out, in their order, and `exchange_ns` is as for a microbatch, by tp group.
    """

    component: str
    microbatches: tuple[int, ...]
    ranks: tuple[int, ...]
    items: tuple[int, ...]
    layout: SequenceLayout
    tiles: tuple[tuple[Tile, ...], ...]
    outputs: tuple[tuple[ItemRows, ...], ...]
    exchange_ns: tuple[int, ...] = ()

    @property
    def tp(self) -> int:
        """Ranks of a tp group."""
        return len(self.ranks) // self.layout.num_cp_ranks

    def tp_group(self, rank: int) -> int:
        """Return which of its tp groups domain rank `rank` belongs to."""
        return self.ranks.index(rank) // self.tp

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Rows that each of `ranks` puts out."""
        return tuple(sum(block.rows for block in blocks) for blocks in self.outputs)

    def rows_of(self, rank: int) -> int:
        """Rows that domain rank `rank` puts out."""
        return self.rows[self.ranks.index(rank)]

    def tail(self, rank: int, unit: int | None) -> int:
        """Empty tokens that the tp group of `rank` encodes where it has none of the encoder batch's: it runs
        all layers with the others. `unit` are those that must stay together, None for any number.
        """
        return 0 if self.layout.local_tokens(self.tp_group(rank)) else unit or 1

    def share(self, rank: int) -> Share:
        """Return what the tp group of `rank` has of it."""
        return self._shares[self.tp_group(rank)]

    @cached_property
    def _shares(self) -> tuple[Share, ...]:
        return _shares(self.layout, self.exchange_ns)


def _shares(layout: SequenceLayout, exchange_ns: tuple[int, ...], anew: bool = False) -> tuple[Share, ...]:
    squares = [0] * layout.num_cp_ranks
    for pieces, length in zip(layout.shards, layout.lengths, strict=True):
        for piece in pieces:
            squares[piece.cp_rank] += piece.length * length
    exchanges = exchange_ns or (0,) * layout.num_cp_ranks
    return tuple(
        Share(layout.local_tokens(rank), squares[rank], ns, anew) for rank, ns in enumerate(exchanges)
    )


@dataclass(frozen=True)
class DomainPlan:
    """The work of one domain, over its domain ranks: those of the LLM, stage by stage, then encoders'.

    `team` neighbouring ranks share one op list, because they share every layer that they run: the ops of
    domain rank r are `ops[r // team]`. `holds` are the virtual stages of the LLM that the ranks of each team
    hold, () beside it: from this table follow the neighbours that messages go to. A stage has `pool` cp ranks
    of `tp` ranks. `collective_group` neighbouring ranks of a stage communicate inside layers, so they run the
    passes of a microbatch together. `llm` is the number of the LLM among the components of the plan; `homes`
    are, for each of them, the neighbouring ranks that it lives on: the first, and the one after the last, as
    in `Arrangement.home`. `routes[m]` is None for a microbatch without items: nobody ships anything for it.
    Gradients are reduced in the order of `reductions`, pairs of a component's number and its virtual stage, 0
    of an encoder. `bounds` are, by part ("llm/0", "image"), the bytes of activations that a domain rank may
    hold at once. `feeds` name the attach points of components whose rows enter elsewhere than at the
    embedding alone. `schedule` names who placed the ops, in so many `rounds`: of a schedule with candidates,
    the one that was chosen. `costliest` is, for reports, the costliest sample: its planned nanoseconds and
    its number in the step.
    """

    team: int
    holds: tuple[tuple[int, ...], ...]
    pool: int
    tp: int
    collective_group: int
    llm: int
    homes: tuple[tuple[int, int], ...]
    samples: tuple[PlannedSample, ...]
    microbatches: tuple[Microbatch, ...]
    items: tuple[PlannedItem, ...]
    encoder_batches: tuple[EncoderBatch, ...]
    routes: tuple[Route | None, ...]
    ops: tuple[tuple[Op, ...], ...]
    reductions: tuple[tuple[int, int], ...] = ()
    bounds: tuple[tuple[str, int], ...] = ()
    feeds: tuple[tuple[str, tuple[Point, ...]], ...] = ()
    schedule: str = ""
    rounds: int = 1
    costliest: tuple[int, int] = (0, 0)

    @property
    def scheduled(self) -> str:
        """Who placed the ops, in words: "joint in 3 rounds"."""
        return self.schedule if self.rounds == 1 else f"{self.schedule} in {self.rounds} rounds"

    @property
    def num_ranks(self) -> int:
        """Ranks of the domain."""
        return len(self.holds) * self.team

    @cached_property
    def teams(self) -> tuple[int, ...]:
        """All teams, by number."""
        return tuple(range(len(self.holds)))

    @property
    def stage_size(self) -> int:
        """Ranks of a stage."""
        return self.pool * self.tp

    @cached_property
    def llm_size(self) -> int:
        """Ranks that hold a virtual stage of the LLM: those before the others."""
        return sum(1 for held in self.holds if held) * self.team

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline: domain ranks that one replica of one cp rank and one tp rank has."""
        return self.llm_size // self.stage_size

    @cached_property
    def num_virtual_stages(self) -> int:
        """Virtual stages of the LLM."""
        return 1 + max((number for held in self.holds for number in held), default=-1)

    @cached_property
    def _holders(self) -> tuple[tuple[int, ...], ...]:
        """The first ranks of the teams that hold each virtual stage, in order."""
        return tuple(
            tuple(t * self.team for t, held in enumerate(self.holds) if number in held)
            for number in range(self.num_virtual_stages)
        )

    @cached_property
    def llm_learns(self) -> bool:
        """Whether weights of the LLM learn in this step: their gradients are reduced."""
        return any(number == self.llm for number, _ in self.reductions)

    def made_by(self, op: Op) -> Grad | None:
        """Return which gradients an op makes, None for a forward. The backward of a frozen LLM makes those of
        its inputs alone, although it is not split.
        """
        if op.kind not in BACKWARDS:
            return None
        return op.grad if op.kind is Kind.ENCODE_BACKWARD or self.llm_learns else Grad.INPUT

    def ops_of(self, rank: int) -> tuple[Op, ...]:
        """Return the op list of a domain rank."""
        return self.ops[rank // self.team]

    def virtual_stages(self, rank: int) -> tuple[int, ...]:
        """Return the virtual stages of the LLM that a domain rank holds, none beside it."""
        return self.holds[rank // self.team]

    def holder(self, virtual_stage: int, rank: int) -> int:
        """Return the domain rank that holds a virtual stage where `rank`, one of the LLM's, holds its own."""
        place = self._holders[self.virtual_stages(rank)[0]].index(rank - rank % self.team)
        return self._holders[virtual_stage][place] + rank % self.team

    def sender(self, op: Op, rank: int) -> tuple[int, int]:
        """Return the domain ranks that a message goes from and to; `rank` runs `op`, one end of it."""
        other = {
            Kind.SEND_FORWARD: op.virtual_stage + 1,
            Kind.RECV_FORWARD: op.virtual_stage - 1,
            Kind.SEND_BACKWARD: op.virtual_stage - 1,
            Kind.RECV_BACKWARD: op.virtual_stage + 1,
        }[op.kind]
        peer = self.holder(other, rank)
        return (rank, peer) if op.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD) else (peer, rank)

    def hands_on(self, virtual_stage: int, rank: int) -> bool:
        """Whether the output of a virtual stage, held by `rank`, goes to another domain rank."""
        after = virtual_stage + 1
        return after < self.num_virtual_stages and after not in self.virtual_stages(rank)

    def stage(self, rank: int) -> int | None:
        """Return the stage of a domain rank, None for one beside the LLM."""
        return rank // self.stage_size if rank < self.llm_size else None

    def cp_rank(self, rank: int) -> int:
        """Return the cp rank of the pool that a rank of the LLM belongs to."""
        return rank % self.stage_size // self.tp

    def is_first(self, rank: int) -> bool:
        """Whether a domain rank holds the first virtual stage."""
        return 0 in self.virtual_stages(rank)

    def is_last(self, rank: int) -> bool:
        """Whether a domain rank holds the last virtual stage."""
        return self.num_virtual_stages - 1 in self.virtual_stages(rank)

    def fed_by(self, component: str) -> tuple[Point, ...]:
        """Return the attach points that a component puts out rows for, in the order of its rows."""
        return self._feeds.get(component, (EMBEDDING,))

    @cached_property
    def _feeds(self) -> dict[str, tuple[Point, ...]]:
        return dict(self.feeds)

    @cached_property
    def all_points(self) -> tuple[Point, ...]:
        """The attach points that rows may enter at, by virtual stage and place."""
        fed = {point for _, points in self.feeds for point in points} | {EMBEDDING}
        return tuple(sorted(fed, key=lambda point: (point.virtual_stage, point.place)))

    @cached_property
    def encoder_batches_of(self) -> tuple[tuple[int, ...], ...]:
        """The encoder batches that hold items of each microbatch, in order."""
        found: list[list[int]] = [[] for _ in self.microbatches]
        for number, batch in enumerate(self.encoder_batches):
            for m in batch.microbatches:
                found[m].append(number)
        return tuple(map(tuple, found))

    def joined(self, microbatch: int, rank: int) -> tuple[int, ...]:
        """Return the encoder batches of a domain rank that hold items of a microbatch, in the order in which
        their rows are counted by its route.
        """
        return tuple(c for c in self.encoder_batches_of[microbatch] if rank in self.encoder_batches[c].ranks)

    def points(self, rank: int) -> tuple[Point, ...]:
        """Return the attach points of the virtual stages that a domain rank holds, stage by stage."""
        return tuple(point for point in self.all_points if point.virtual_stage in self.virtual_stages(rank))

    def virtual_stages_with_rows(self, rank: int) -> tuple[int, ...]:
        """Return those virtual stages of a domain rank that rows may enter."""
        fed = {point.virtual_stage for point in self.all_points}
        return tuple(number for number in self.virtual_stages(rank) if number in fed)

    def reports(self, rank: int) -> bool:
        """Whether a domain rank reports losses: the first of the tp ranks, which all compute the same."""
        return self.is_last(rank) and rank % self.tp == 0

    def collective_group_of(self, op: Op, rank: int) -> range:
        """Return the domain ranks that run a compute op together because its layers communicate."""
        if op.kind in (Kind.ENCODE, Kind.ENCODE_BACKWARD):
            ranks = self.encoder_batches[op.index].ranks
            return range(ranks[0], ranks[-1] + 1)
        first = rank - rank % self.collective_group
        return range(first, first + self.collective_group)

    def reducing(self, op: Op) -> tuple[int, ...]:
        """Return the teams whose gradients a REDUCE sums: those of this domain that hold what it reduces."""
        if op.index == self.llm:
            return tuple(rank // self.team for rank in self._holders[op.virtual_stage])
        first, stop = self.homes[op.index]
        return self.teams[first // self.team : stop // self.team]

    @cached_property
    def digest(self) -> int:
        """A 63-bit hash of the domain's plan."""
        return digest_of(self)

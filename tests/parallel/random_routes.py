"""Routes for tests: random problems, oracles that go one row at a time, and all ranks in one process."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch

from parallel.boundary import Route, Rows, make_route
from parallel.sequence import SequenceLayout, Shard
from parallel.shipping import Ends

Move = tuple[int, int, int, int]  # source, row, destination, token


@dataclass(frozen=True)
class Problem:
    """Runs of rows over a layout whose cp ranks are `tp` ranks each; the ranks after them only encode."""

    runs: tuple[Rows, ...]
    layout: SequenceLayout
    tp: int
    num_ranks: int

    def route(self) -> Route:
        return make_route(self.runs, self.layout.intervals(self.tp), self.num_ranks)

    def rows_out(self, rank: int) -> int:
        return sum(run.length for run in self.runs if run.source == rank)

    def places(self) -> list[tuple[int, int]]:
        """Rank and local index of every packed token, one token at a time."""
        held = [0] * self.layout.num_cp_ranks
        order = []
        for pieces in self.layout.shards:
            for piece in pieces:
                for _ in range(piece.length):
                    order.append((piece.cp_rank, held[piece.cp_rank]))
                    held[piece.cp_rank] += 1
        shares = [max(1, -(-tokens // self.tp)) for tokens in held]
        return [(cp_rank * self.tp + at // shares[cp_rank], at % shares[cp_rank]) for cp_rank, at in order]

    def tokens(self, rank: int) -> int:
        """Places that a rank holds, padding left out."""
        return sum(holder == rank for holder, _ in self.places())

    def wanted_moves(self) -> list[Move]:
        """Every row, one at a time."""
        place = self.places()
        return sorted(
            (run.source, run.source_start + i, *place[run.start + i])
            for run in self.runs
            for i in range(run.length)
        )


def moves(route: Route) -> list[Move]:
    return sorted(
        (s.source, s.source_start + i, s.destination, s.destination_start + i)
        for s in route.segments
        for i in range(s.length)
    )


def random_layout(random: Random, num_cp_ranks: int) -> SequenceLayout:
    """Up to five sequences, each cut into up to five shards of any length on any cp ranks."""
    shards = []
    for _ in range(random.choice((0, 1, 2, 3, 4, 5, 5, 5))):
        start, cut = 0, []
        for _ in range(random.randint(0, 5)):
            length = random.choice((0, 1, *(random.randint(2, 9) for _ in range(3))))
            cut.append(Shard(random.randrange(num_cp_ranks), start, length))
            start += length
        shards.append(tuple(cut))
    return SequenceLayout(num_cp_ranks, tuple(shards))


def random_problem(random: Random, num_ranks: int | None = None) -> Problem:
    """Disjoint runs of rows in any order over cp ranks of any number and tp, with ranks that only encode.

    Each source's rows are counted run by run. Any rank may encode, and any may get nothing.
    """
    if num_ranks is None:
        tp, num_cp_ranks = random.randint(1, 4), random.randint(1, 5)
        num_ranks = tp * num_cp_ranks + random.randint(0, 3)
    else:
        tp = random.randint(1, num_ranks)
        num_cp_ranks = random.randint(1, num_ranks // tp)
    layout = random_layout(random, num_cp_ranks)
    total = sum(layout.lengths)
    cuts = sorted(random.randint(0, total) for _ in range(random.choice((0, *range(2, 14)))))
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    sources = random.sample(range(num_ranks), random.randint(1, num_ranks))
    runs = random_runs(random, spans, sources, num_ranks)
    return Problem(tuple(runs), layout, tp, num_ranks)


def random_runs(
    random: Random, spans: Sequence[tuple[int, int]], sources: Sequence[int], num_ranks: int
) -> list[Rows]:
    """Give each span of places to one of the sources."""
    filled = [0] * num_ranks
    runs = []
    for start, stop in random.sample(list(spans), len(spans)):
        source = random.choice(sources)
        runs.append(Rows(source, filled[source], start, stop - start))
        filled[source] += stop - start
    return random.sample(runs, len(runs))


def carry(ends: Sequence[Ends], outgoing: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What a transport brings to each rank, for all ranks in one process."""
    if ends[0].slots is not None:
        return _carry_in_slots(ends, outgoing)
    if ends[0].stop is None:
        return _exchange([e.send_counts for e in ends], outgoing)
    held = _exchange([e.send_counts for e in ends], outgoing)
    assert [len(rows) for rows in held] == [sum(e.stop.receive_counts) for e in ends]
    passed = [rows[e.stop.order] for e, rows in zip(ends, held, strict=True)]
    return _exchange([e.stop.send_counts for e in ends], passed)


def _exchange(counts: Sequence[Sequence[int]], outgoing: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = [x.split(list(of_rank)) for of_rank, x in zip(counts, outgoing, strict=True)]
    return [torch.cat([row[rank] for row in parts]) for rank in range(len(outgoing))]


def _carry_in_slots(ends: Sequence[Ends], outgoing: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    block, width = ends[0].slots.block, outgoing[0].shape[1]
    buffer = torch.zeros(block * len(ends), width, dtype=outgoing[0].dtype)
    for rank, (e, rows) in enumerate(zip(ends, outgoing, strict=True)):
        if e.transport == "reduce_scatter":
            buffer.index_add_(0, e.slots.index, rows)
        else:
            buffer[rank * block : rank * block + len(rows)] = rows
    if ends[0].transport == "reduce_scatter":
        return [buffer[r * block : r * block + sum(e.receive_counts)] for r, e in enumerate(ends)]
    return [buffer[e.slots.index] for e in ends]

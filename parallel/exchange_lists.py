"""Which cells of its tensors a rank packs for an exchange and unpacks from it, as lists of numbers.

A cell is so many neighbouring heads of a row that every block and every tensor of a side consists of whole
cells. Cells of tensors are numbered tensor by tensor, row by row. Cells of a buffer are numbered in order,
what the rank keeps first, then the messages of the other ranks. With these lists a side is packed and
unpacked in a few copies, however many blocks it has.

The lists are int32, as a device reads them. `sizes_of` says how long they are without making them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import gcd
from typing import Any, Generic, TypeVar

import numpy as np

from parallel.exchange_plan import Block, Parcel, Side

A = TypeVar("A")
B = TypeVar("B")
Array = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class Sums(Generic[A]):
    """Cells each of which is a sum: cell i is that of cells `index[starts[i]:starts[i + 1]]`, added in this
    order. Without `starts` it is the one cell `index[i]`.
    """

    index: A
    starts: A | None

    def each(self, change: Callable[[A], B]) -> "Sums[B]":
        """Change the lists, the index first."""
        return Sums(change(self.index), None if self.starts is None else change(self.starts))


@dataclass(frozen=True)
class Lists(Generic[A]):
    """The lists of one side, for cells of so many `heads`. `others` and `own` make what is sent, and what the
    rank keeps, from the cells of its tensors; `tensors` make each tensor from the cells of a buffer.
    """

    heads: int
    others: Sums[A]
    own: Sums[A]
    tensors: tuple[Sums[A], ...]

    def each(self, change: Callable[[A], B]) -> "Lists[B]":
        """Change the lists, in their order."""
        return Lists(
            self.heads,
            self.others.each(change),
            self.own.each(change),
            tuple(of.each(change) for of in self.tensors),
        )


def lists_of(side: Side, rank: int) -> Lists[Array]:
    """Make the lists of a side of `rank`."""
    heads, (own, others) = heads_of_cell(side), _own_and_others(side, rank)
    firsts = np.cumsum([0, *(rows * of // heads for rows, of, _ in side.shapes)])

    def cells(block: Block) -> Array:
        rows = np.arange(block.row, block.row + block.rows)[:, None]
        row = np.arange(block.head // heads, (block.head + block.heads) // heads)
        numbers: Array = firsts[block.tensor] + rows * (side.shapes[block.tensor][1] // heads) + row
        return numbers.reshape(-1)

    of_parcels = [np.stack([cells(block) for block in parcel], 1) for parcel in (*own, *others)]
    return Lists(
        heads,
        _packed(of_parcels[len(own) :]),
        _packed(of_parcels[: len(own)]),
        tuple(_unpacked(of_parcels, firsts)),
    )


def sizes_of(side: Side, rank: int) -> Lists[int]:
    """Say how many numbers the lists of a side of `rank` have."""
    heads, (own, others) = heads_of_cell(side), _own_and_others(side, rank)

    def packed(parcels: Sequence[Parcel]) -> Sums[int]:
        cells = [parcel[0].rows * parcel[0].heads // heads for parcel in parcels]
        every = sum(count * len(parcel) for count, parcel in zip(cells, parcels, strict=True))
        return Sums(every, sum(cells) + 1 if every > sum(cells) else None)

    written = [0] * len(side.shapes)
    for block in (block for parcel in (*own, *others) for block in parcel):
        written[block.tensor] += block.rows * block.heads // heads
    tensors = [
        Sums(every, None if complete else rows * of // heads + 1)
        for every, complete, (rows, of, _) in zip(written, side.complete, side.shapes, strict=True)
    ]
    return Lists(heads, packed(others), packed(own), tuple(tensors))


def total(lists: Lists[int]) -> int:
    """Return the numbers of all lists together."""
    every: list[int] = []
    lists.each(every.append)
    return sum(every)


def beside(sums: Sums[int]) -> int:
    """Return the numbers that torch makes for a moment to add up, which nobody reads: the bag of each cell
    that is added, and two of each bag, as on fake tensors; a GPU makes one.
    """
    return 0 if sums.starts is None else sums.index + 2 * sums.starts - 1


def heads_of_cell(side: Side) -> int:
    """The most heads that every block of a side, and every tensor that has rows, consists of whole times."""
    tensors = (heads for rows, heads, _ in side.shapes if rows)
    blocks = {(b.head, b.heads) for message in side.parcels for parcel in message for b in parcel}
    return gcd(*tensors, *(number for pair in blocks for number in pair)) or 1


def _own_and_others(side: Side, rank: int) -> tuple[Sequence[Parcel], Sequence[Parcel]]:
    """Parcels in the order of a buffer: those that the rank keeps, then the others."""
    others = (message for peer, message in enumerate(side.parcels) if peer != rank)
    return side.parcels[rank], [parcel for message in others for parcel in message]


def _packed(parcels: Sequence[Array]) -> Sums[Array]:
    """Parcels one after the other, each of [cells, blocks]: their cells are sums over blocks."""
    index = _joined(parcel.reshape(-1) for parcel in parcels)
    counts = _joined(np.full(len(parcel), parcel.shape[1]) for parcel in parcels)
    return Sums(index, _starts(counts))


def _unpacked(parcels: Sequence[Array], firsts: np.ndarray[Any, Any]) -> Iterator[Sums[Array]]:
    """Tensors whose cells begin at `firsts`, from parcels of [cells, blocks] one after the other: each cell
    is the sum of all that are meant for it, in the order of parcels and their blocks.
    """
    ends = np.cumsum([0, *map(len, parcels)])
    places = zip(pairwise(ends), parcels, strict=True)
    at = _joined(np.tile(np.arange(*place), parcel.shape[1]) for place, parcel in places)
    meant = _joined(parcel.T.reshape(-1) for parcel in parcels)
    index, counts = at[np.argsort(meant, kind="stable")], np.bincount(meant, minlength=firsts[-1])
    before = np.concatenate([[0], np.cumsum(counts)])
    for first, end in pairwise(firsts):
        yield Sums(index[before[first] : before[end]], _starts(counts[first:end]))


def _starts(counts: np.ndarray[Any, Any]) -> Array | None:
    """Where the sums of so many cells each begin and the last ends, None where each is of one."""
    if (counts == 1).all():
        return None
    return _joined([np.zeros(1, np.int32), np.cumsum(counts)])


def _joined(parts: Iterable[np.ndarray[Any, Any]]) -> Array:
    return np.concatenate([np.zeros(0, np.int32), *parts], dtype=np.int32, casting="same_kind")

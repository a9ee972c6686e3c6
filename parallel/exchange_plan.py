"""What an exchange moves: blocks of the tensors of ranks, in messages that sender and receiver list alike.

An exchange is planned from numbers alone, and run by `parallel/exchange.py`. Tensors are [rows, heads, size].
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """Rows [row, row + rows) of heads [head, head + heads) of tensor number `tensor` of one side."""

    tensor: int
    row: int
    rows: int
    head: int
    heads: int


# Blocks of one shape that share a place in a message: read, it holds their sum; written, each receives it.
Parcel = tuple[Block, ...]


@dataclass(frozen=True)
class Side:
    """One rank's sources or targets: tensors of `shapes` and, for each peer, the `parcels` of the message.

    `counts` are the elements of each message. `disjoint` says of each tensor that no cell is in two blocks,
    `complete` that in addition every cell is in one.
    """

    shapes: tuple[tuple[int, int, int], ...]
    parcels: tuple[tuple[Parcel, ...], ...]
    counts: tuple[int, ...]
    disjoint: tuple[bool, ...]
    complete: tuple[bool, ...]

    @property
    def size(self) -> int:
        """The size of a head, which all tensors have."""
        return self.shapes[0][2]

    def elements(self, parcel: Parcel) -> int:
        """Elements that a parcel takes in a message."""
        return parcel[0].rows * parcel[0].heads * self.size


def make_side(shapes: Sequence[tuple[int, int, int]], parcels: Sequence[Sequence[Parcel]]) -> Side:
    """Describe one side; `parcels[p]` are those exchanged with peer `p`, in the order of the message."""
    assert len({size for _, _, size in shapes}) == 1, f"{shapes} are of several sizes"
    blocks: list[list[Block]] = [[] for _ in shapes]
    for parcel in (parcel for message in parcels for parcel in message):
        for block in parcel:
            rows, heads, _ = shapes[block.tensor]
            assert block.rows > 0 < block.heads, f"{block} is empty"
            assert 0 <= block.row <= rows - block.rows, f"{block} reaches beyond {rows} rows"
            assert 0 <= block.head <= heads - block.heads, f"{block} reaches beyond {heads} heads"
            assert (block.rows, block.heads) == (parcel[0].rows, parcel[0].heads), f"{parcel} differ in shape"
            blocks[block.tensor].append(block)
    single = [are_disjoint(members) for members in blocks]
    filled = [sum(block.rows * block.heads for block in members) for members in blocks]
    side = Side(
        shapes=tuple(shapes),
        parcels=tuple(tuple(message) for message in parcels),
        counts=(),
        disjoint=tuple(single),
        complete=tuple(
            one and cells == rows * heads
            for one, cells, (rows, heads, _) in zip(single, filled, shapes, strict=True)
        ),
    )
    counts = tuple(sum(side.elements(parcel) for parcel in message) for message in side.parcels)
    return Side(side.shapes, side.parcels, counts, side.disjoint, side.complete)


def are_disjoint(blocks: Iterable[Block]) -> bool:
    """Return whether no cell is in two of the `blocks`, all of one tensor."""
    open_blocks: list[Block] = []
    for block in sorted(blocks, key=lambda b: b.row):
        open_blocks = [b for b in open_blocks if b.row + b.rows > block.row]
        if any(b.head < block.head + block.heads and block.head < b.head + b.heads for b in open_blocks):
            return False
        open_blocks.append(block)
    return True


@dataclass(frozen=True)
class Exchange:
    """What `rank` sends from `source` and receives in `target`."""

    rank: int
    source: Side
    target: Side

    def transpose(self) -> "Exchange":
        """Return the adjoint: what was sent is received, and added up where it was sent more than once."""
        return Exchange(self.rank, self.target, self.source)

    def moved_elements(self, *tensors: int) -> int:
        """Elements that this rank sends to others, from all source tensors or from the named ones."""
        return sum(
            self.source.elements(parcel)
            for peer, message in enumerate(self.source.parcels)
            for parcel in message
            if peer != self.rank and (not tensors or parcel[0].tensor in tensors)
        )

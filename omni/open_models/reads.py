"""Which bytes of a folder's files ranks need, and how the ranks of a node divide the reading of them.

Numbers alone, of headers and boxes: what a rank of a large model would read is counted without its data.

Invariants: every needed byte is in exactly one read, and a read has no byte that lies outside of all needs
(of columns, outside of their rows). No row of a tensor is cut apart. Where at least `GOAL` bytes lie
together that any rank of the node needs, no read is smaller than 8 MiB, unless its tensors' rows are larger
than the difference; and no read is larger than two goals and a row.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omni.open_models.folder import BYTES, Stored, Tensor
from omni.open_models.rules import Box, Rule

GOAL = 10 * 2**20
"""Bytes. A rank holds what it reads, what it sends of that and what it receives: three reads in 64 MiB."""


@dataclass(frozen=True)
class Extent:
    """Bytes `columns` [low, high) of each of `rows` [low, high) of a matrix that begins at byte `origin` of
    `file` and has `width` bytes a row.
    """

    file: str
    origin: int
    width: int
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def start(self) -> int:
        """The first byte of the file."""
        return self.origin + self.rows[0] * self.width + self.columns[0]

    @property
    def stop(self) -> int:
        """The byte of the file after the last one."""
        return self.origin + (self.rows[1] - 1) * self.width + self.columns[1]

    @property
    def row(self) -> int:
        """Bytes that are needed of a row."""
        return self.columns[1] - self.columns[0]

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """The rows that begin in bytes [start, stop) of the file."""
        first = self.origin + self.columns[0]
        low, high = (-((first - at) // self.width) for at in (start, stop))
        return max(low, self.rows[0]), min(high, self.rows[1])


def numbers_of(stored: Stored, rule: Rule, box: Box) -> Extent:
    """Where the numbers of a box lie; those of an expert that must be taken apart whole, all of them."""
    tensor, slab = stored.data, rule.slab
    if slab is not None and is_whole(stored, rule):
        return _slab(tensor, slab.index)
    element, first = BYTES[tensor.dtype], 0 if slab is None else slab.index * tensor.shape[1]
    rows = tensor.shape[0] * (1 if slab is None else tensor.shape[1])
    low, high = box.rows
    columns = box.columns[0] * element, box.columns[1] * element
    width = (tensor.stop - tensor.start) // rows
    return Extent(tensor.file, tensor.start, width, (first + low, first + high), columns)


def scales_of(stored: Stored, rule: Rule) -> Extent | None:
    """Where the scales of a box's numbers lie: those of its expert, or all of the tensor's."""
    scales = stored.scales
    if scales is None:
        return None
    if rule.slab is not None:
        return _slab(scales, rule.slab.index)
    width = (scales.stop - scales.start) // scales.shape[0]
    return Extent(scales.file, scales.start, width, (0, scales.shape[0]), (0, width))


def is_whole(stored: Stored, rule: Rule) -> bool:
    """Whether an expert's numbers are taken apart as a whole: it is transposed, mixed or quantised."""
    slab = rule.slab
    return slab is not None and (slab.transposed or slab.parts > 1 or stored.scales is not None)


def _slab(tensor: Tensor, index: int) -> Extent:
    count, each = tensor.shape[:2]
    width = (tensor.stop - tensor.start) // (count * each)
    return Extent(tensor.file, tensor.start, width, (index * each, (index + 1) * each), (0, width))


@dataclass(frozen=True)
class Part:
    """What rank `rank` of a node needs of a read: `rows` [low, high) of its need number `number`."""

    rank: int
    number: int
    rows: tuple[int, int]


@dataclass(frozen=True)
class Read:
    """Bytes [start, stop) of a file, and who needs what of them."""

    file: str
    start: int
    stop: int
    parts: tuple[Part, ...]


def reads_of_node(needs: Sequence[Sequence[tuple[Extent, Extent]]]) -> list[Read]:
    """Return what the ranks of a node read, in order: read number n falls to rank n modulo their number.

    `needs` are those of each rank, with the need that each serves, which is itself for numbers: scales are
    read shortly before these.
    """
    found: list[tuple[tuple[str, int, bool], Read]] = []
    for file in sorted({need.file for own in needs for need, _ in own}):
        here = [
            (rank, number, need, served)
            for rank, own in enumerate(needs)
            for number, (need, served) in enumerate(own)
            if need.file == file
        ]
        ranges = list(_ranges([need for _, _, need, _ in here]))
        starts = [start for start, _ in ranges]
        parts: list[list[Part]] = [[] for _ in ranges]
        turns: list[list[tuple[str, int, bool]]] = [[] for _ in ranges]
        for rank, number, need, served in here:
            first, last = (bisect_right(starts, byte) - 1 for byte in (need.start, need.stop - 1))
            for at in range(first, last + 1):
                parts[at].append(Part(rank, number, need.within(*ranges[at])))
                is_numbers = need == served
                turns[at].append(
                    (file, starts[at], True) if is_numbers else (served.file, served.start, False)
                )
        for turn, range_, of in zip(turns, ranges, parts, strict=True):
            found.append((min(turn), Read(file, *range_, tuple(of))))
    found.sort(key=lambda one: (one[0], one[1].file, one[1].start))
    return [read for _, read in found]


def _ranges(needs: Sequence[Extent]) -> Iterator[tuple[int, int]]:
    """Yield the bytes [start, stop) of a file that needs lie in, cut into reads between rows."""
    rows = {need.origin: need.width for need in needs}
    origins = sorted(rows)
    for start, stop in _merged(sorted((need.start, need.stop) for need in needs)):
        count, before = max(1, (stop - start) // GOAL), start
        for piece in range(1, count):
            at = start + (stop - start) * piece // count
            origin = origins[bisect_right(origins, at) - 1]
            at -= (at - origin) % rows[origin]
            if at > before:
                yield before, at
                before = at
        yield before, stop


def _merged(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Put spans together that touch or overlap; they are in order of their starts."""
    start, stop = spans[0]
    for low, high in spans[1:]:
        if low > stop:
            yield start, stop
            start, stop = low, high
        stop = max(stop, high)
    yield start, stop

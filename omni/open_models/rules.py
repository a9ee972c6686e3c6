"""Which part of a parameter of ours each tensor of a published model is.

Every tensor of theirs is some rows of one parameter of ours, so a rule is plain numbers: it is read one way
to load, the other way to export, and without any data to say what a rank would have to read.

Invariant: the tensors of a rule divide the rows of ours among them, but for padding, each row once. So for
any x in our shape, putting together what is cut out of it gives x again, bit for bit; and the boxes of any
part of ours cover that part exactly once, whichever layout asks for it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import prod

VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Parameters of ours that have a row for each id, and may have rows of padding."""
Runs = tuple[tuple[int, int], ...]
"""(start, length) of neighbouring rows or columns, one run after the other."""


@dataclass(frozen=True)
class Slab:
    """Where a parameter of ours lies in a tensor of theirs that holds `count` of them, one after the other:
    as number `index`, which `Rule.named` says. There ours is `transposed`, and the rows of its `parts` equal
    pieces take turns.
    """

    count: int
    parts: int = 1
    transposed: bool = False
    index: int = 0


@dataclass(frozen=True)
class Rule:
    """A parameter of ours, and the tensors of theirs that it is made of.

    Each of `theirs`, with as many `rows` as are said for it, is cut into `groups` equal pieces. Ours has the
    first piece of each, then the second of each, and so on:

        one tensor                  the same tensor under another name
        gate, up                    gate over up
        q, k, v in n groups         for each of n key/value heads its queries, its key, its value

    Where theirs are mixed otherwise, `order` says of each which rows of ours its own are, in their order.
    Ours has `pad` rows more at its end, of zeros.

    All have `columns`, None for vectors, several for tensors of more dimensions. Names hold `{}` for a number
    out of each range of `each`: the layer, then the expert. With a `slab`, `theirs` is one tensor for all
    experts of a layer.

    Raises:
        ValueError: for rows that do not divide into the groups, an `order` that is no order of the rows, and
            a slab of several tensors.
    """

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...]
    columns: int | tuple[int, ...] | None = None
    groups: int = 1
    each: tuple[Sequence[int], ...] = ()
    slab: Slab | None = None
    order: tuple[Runs, ...] | None = None
    pad: int = 0

    def __post_init__(self) -> None:
        if self.slab is not None and (len(self.theirs) > 1 or self.groups > 1):
            raise ValueError(f"{self.ours}: a slab is of one tensor, not of {self.theirs}")
        if self.order is not None:
            counts = tuple(sum(length for _, length in runs) for runs in self.order)
            at = 0
            for start, length in sorted(run for runs in self.order for run in runs):
                at = at + length if start == at else -1
            if counts != self.rows or at != sum(self.rows):
                raise ValueError(
                    f"{self.ours}: {self.order} is no order of rows {self.rows} of {self.theirs}"
                )
        if len(self.rows) != len(self.theirs) or any(rows % self.groups for rows in self.rows):
            raise ValueError(f"{self.ours}: rows {self.rows} of {self.theirs} in {self.groups} groups")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of ours."""
        return self._shape(sum(self.rows) + self.pad)

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shape of each of theirs."""
        if self.slab is not None:
            shape = self.shape[::-1] if self.slab.transposed else self.shape
            return ((self.slab.count, *shape),)
        return tuple(map(self._shape, self.rows))

    @property
    def runs(self) -> tuple[Runs, ...]:
        """Which rows of ours each of theirs is, in the order of its own."""
        if self.order is not None:
            return self.order
        pieces = [rows // self.groups for rows in self.rows]
        starts, size = accumulate(pieces, initial=0), sum(pieces)
        return tuple(
            tuple((group * size + start, piece) for group in range(self.groups))
            for start, piece in zip(starts, pieces, strict=False)
        )

    def named(self) -> Iterator["Rule"]:
        """Yield the rule for every layer and expert, with whole names."""
        for numbers in product(*self.each):
            theirs = tuple(name.format(*numbers) for name in self.theirs)
            slab = self.slab and replace(self.slab, index=numbers[-1])
            ours = self.ours.format(*numbers)
            yield replace(self, ours=ours, theirs=theirs, each=(), slab=slab)

    def _shape(self, rows: int) -> tuple[int, ...]:
        columns = (self.columns,) if isinstance(self.columns, int) else self.columns or ()
        return (rows, *columns)


@dataclass(frozen=True)
class Box:
    """Rows [low, high) and columns [low, high) of number `tensor` among a rule's tensors. Its element (i, j)
    goes to place `at` + i · `stride` + j of what a rank holds flat.
    """

    tensor: int
    rows: tuple[int, int]
    columns: tuple[int, int]
    at: int
    stride: int


def boxes(rule: Rule, dim: int, runs: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[Box]:
    """Yield what of theirs elements [start, stop) of a part of ours need. The part is that in `runs` along
    dimension `dim`, flattened, as a `Region` says it.
    """
    width = prod(rule.shape[1:])
    rows = tuple(runs) if dim == 0 else ((0, rule.shape[0]),)
    columns = ((0, width),) if dim == 0 else tuple(runs)
    held = sum(length for _, length in columns)
    for (first, last), (left, right) in _blocks(start, stop, held):
        for row, place, count in _within(rows, first, last):
            for tensor, theirs in enumerate(rule.runs):
                for own, below, high in _meeting(theirs, place, place + count):
                    for column, beside, wide in _within(columns, left, right):
                        at = (row + below - place) * held + column - start
                        yield Box(tensor, (own, own + high), (beside, beside + wide), at, held)


def _blocks(start: int, stop: int, width: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Divide elements [start, stop) of a matrix of `width` into rows × columns: what is left of a first row,
    whole rows, what there is of a last one.
    """
    while start < stop:
        row, column = divmod(start, width)
        if column or stop - start < width:
            end = min(width, column + stop - start)
            yield (row, row + 1), (column, end)
        else:
            end = (stop - start) // width * width
            yield (row, row + end // width), (0, width)
        start += end - column


def _within(runs: Runs, low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number, place, length) of those numbers [low, high) that lie in each run, counted along runs."""
    at = 0
    for start, length in runs:
        first, last = max(low, at), min(high, at + length)
        if first < last:
            yield first, start + first - at, last - first
        at += length


def _meeting(runs: Runs, low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Yield (number, place, length) of those numbers that lie at places [low, high)."""
    at = 0
    for start, length in runs:
        first, last = max(low, start), min(high, start + length)
        if first < last:
            yield at + first - start, first, last - first
        at += length

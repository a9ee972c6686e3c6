"""A rank's weights out of a folder of published ones, which it reads together with the ranks of its node.

Shards of data-parallel ranks are apart, and those of tensor-parallel ones rows or columns of one matrix: what
a rank needs is often small pieces, what a node needs is large ranges. So the ranks of a node divide these
among them, each reads its own, and hands on what others need of them. What goes to whom is decided by
`omni.open_models.reads`, alike on all ranks.
"""

from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from infra.shard_file import CheckpointError
from omni.models.adapters import A, B
from omni.models.regions import Numbering, Region
from omni.open_models.decode import from_mxfp4, out_of_slab, times_scales
from omni.open_models.folder import Folder, Stored
from omni.open_models.reads import Extent, Read, is_whole, numbers_of, reads_of_node, scales_of
from omni.open_models.rules import Box, Rule, boxes
from omni.rank.optimizer import ComponentOptimizer
from omni.rank.state import owned
from parallel.plain import gather_plain
from parallel.waiting import waiting

DTYPES = {
    **{"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16},
    **{"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8},
}
_AT_ONCE = 2**22  # numbers that are multiplied by their scales at once


@dataclass(frozen=True)
class Wanted:
    """A box of a tensor of theirs, which lies in the files as `stored` says, and what it goes to: flat, in
    fp32. `block` is how many rows and columns a scale is for.
    """

    rule: Rule
    stored: Stored
    block: tuple[int, int]
    box: Box
    target: torch.Tensor

    @cached_property
    def numbers(self) -> Extent:
        """Where its numbers lie."""
        return numbers_of(self.stored, self.rule, self.box)

    @cached_property
    def scales(self) -> Extent | None:
        """Where their scales lie."""
        return scales_of(self.stored, self.rule)

    def fill(self, data: torch.Tensor, first: int = 0, scales: torch.Tensor | None = None) -> None:
        """Copy bytes of uint8, [rows, bytes of a row]: those of the box from its row `first` on, or all of an
        expert.
        """
        values = _as(data, self.stored.data.dtype)
        if is_whole(self.stored, self.rule):
            self._put(self._out_of_slab(values, scales), 0)
        elif scales is None:
            self._put(values, first)
        else:
            assert self.stored.scales is not None
            of_blocks = _as(scales, self.stored.scales.dtype)
            step = max(1, _AT_ONCE // values.shape[1])
            for at in range(0, len(values), step):
                place = self.box.rows[0] + at, self.box.columns[0]
                self._put(times_scales(values[at : at + step], of_blocks, self.block, place), at)

    def _put(self, values: torch.Tensor, first: int) -> None:
        at = self.target.storage_offset() + self.box.at + first * self.box.stride
        self.target.as_strided(tuple(values.shape), (self.box.stride, 1), at).copy_(values)

    def _out_of_slab(self, values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        slab, shape = self.rule.slab, self.stored.data.shape[1:]
        assert slab is not None
        theirs = values.view(shape)
        if scales is not None:  # rows of MXFP4 are ours
            slab, theirs = replace(slab, transposed=False), from_mxfp4(theirs, scales.view(shape[:-1]))
        ours = out_of_slab(theirs, slab)
        return ours.view(len(ours), -1)[slice(*self.box.rows), slice(*self.box.columns)]


def _as(data: torch.Tensor, dtype: str) -> torch.Tensor:
    """Bytes as numbers, which must lie at a multiple of their size."""
    kind = DTYPES[dtype]
    aligned = data.storage_offset() % kind.itemsize == 0 and data.stride(0) % kind.itemsize == 0
    return (data if aligned else data.clone()).view(kind)


def wanted_of(
    folder: Folder,
    component: ComponentOptimizer,
    numberings: Mapping[int, Numbering],
    only: Container[str] | None = None,
) -> list[Wanted]:
    """Return what this rank's shards of a component need of a folder, which knows no adapters; `only` these
    parameters of it, None for all.

    Raises:
        CheckpointError: for a parameter that no rule gives, or of another shape.
    """
    return [
        wanted
        for shard in owned(component, numberings)
        if not shard.name.endswith((A, B)) and (only is None or shard.name in only)
        for wanted in wanted_by(folder, shard.name, shard.region, shard.start, shard.main.data.view(-1))
    ]


def wanted_by(
    folder: Folder, name: str, region: Region, start: int, target: torch.Tensor
) -> Iterator[Wanted]:
    """Yield what elements of a flattened region need of a folder: from `start` on, as many as `target` has.
    Where the folder has nothing for them, because they pad a vocabulary, they are set to zero.

    Raises:
        CheckpointError: if no rule gives the parameter of this name, or one of another shape.
    """
    rule = folder.rule(name, region.shape)
    if rule is None:
        means = f"the shape {folder.rules[name].shape}" if name in folder.rules else "nothing of it"
        raise CheckpointError(f"{name} has shape {region.shape}, and {folder.url} means {means}")
    if rule.pad:
        target.zero_()
    block = folder.quantised.block if folder.quantised else (1, 1)
    for box in boxes(rule, region.dim, region.runs, start, start + target.numel()):
        yield Wanted(rule, folder.stored[rule.theirs[box.tensor]], block, box, target)


def needs_of(wanted: Sequence[Wanted]) -> dict[Extent, Extent]:
    """Return what a rank needs of the files, each with the numbers that it serves."""
    needs = {each.numbers: each.numbers for each in wanted}
    for each in sorted(wanted, key=lambda one: (one.numbers.file, one.numbers.start)):
        if (scales := each.scales) is not None:
            needs.setdefault(scales, each.numbers)
    return needs


class FolderReader:
    """Fills shards from the files of a folder, together with the ranks of `group`, those of a node; without
    a group, alone. `bytes` counts what it has read.

    What cannot be read is noted in `problem` instead of raised: other ranks may be waiting for it.
    """

    def __init__(self, folder: Folder, group: dist.ProcessGroup | None = None) -> None:
        self.folder = folder
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.bytes = 0
        self.problem: str | None = None
        self.opened: dict[str, Any] = {}

    def fill(self, wanted: Sequence[Wanted], going_on: Callable[[], object] = lambda: None) -> None:
        """Read all boxes. The ranks of the group call it together. `going_on` is called after each round of
        reads: other nodes may wait for this one.

        Raises:
            StallError: naming the ranks of the node, if one of them does not hand on in time what it read.
        """
        own = list(needs_of(wanted).items())
        every = [own]
        if self.size > 1:
            assert self.group is not None
            with waiting("what its node needs of published weights", self.group):
                told = gather_plain([(astuple(need), astuple(serves)) for need, serves in own], self.group)
            every = [[(Extent(*need), Extent(*serves)) for need, serves in of] for of in told]
        needs = [[need for need, _ in of] for of in every]
        reads = reads_of_node(every)
        arrivals = _Arrivals(wanted)
        with ExitStack() as self.stack:
            for first in range(0, len(reads), self.size):
                self._round(reads[first : first + self.size], needs, arrivals)
                going_on()
        self.opened.clear()
        assert not any(arrivals.left.values()), "no read had what a box needs"

    def _round(self, reads: Sequence[Read], needs: Sequence[Sequence[Extent]], arrivals: "_Arrivals") -> None:
        """Each rank reads one range at most. Then each hands on to one other at a time: what is sent and what
        is received is never more than was read.
        """
        own = reads[self.rank] if self.rank < len(reads) else None
        data = self._read(own) if own is not None else torch.empty(0, dtype=torch.uint8)
        start = own.start if own is not None else 0
        for need, rows in _parts(reads, self.rank, needs[self.rank], self.rank):
            arrivals.take(need, rows, _cut(data, start, need, rows))
        for shift in range(1, self.size):
            target, source = (self.rank + shift) % self.size, (self.rank - shift) % self.size
            sent = _parts(reads, self.rank, needs[target], target)
            got = _parts(reads, source, needs[self.rank], self.rank)
            if sent or got:
                came = self._swap(_packed(data, start, sent), target, _bytes(got), source)
                for (need, rows), piece in zip(got, came.split([_bytes([of]) for of in got]), strict=True):
                    arrivals.take(need, rows, piece.view(-1, need.row))

    def _swap(self, sent: torch.Tensor, target: int, count: int, source: int) -> torch.Tensor:
        """Send bytes to one rank of the group, return as many as `count` from another one."""
        came, group = torch.empty(count, dtype=torch.uint8), self.group
        assert group is not None
        with waiting("weights that its node reads", group):
            works = []
            if len(sent):
                works.append(dist.isend(sent, dist.get_global_rank(group, target), group=group))
            if count:
                works.append(dist.irecv(came, dist.get_global_rank(group, source), group=group))
            for work in works:
                assert work is not None
                work.wait()
        return came

    def _read(self, read: Read) -> torch.Tensor:
        """The bytes of a read; zeros where they cannot be read."""
        data = torch.zeros(read.stop - read.start, dtype=torch.uint8)
        view, done = data.numpy().data, 0
        try:
            if read.file not in self.opened:
                self.opened[read.file] = self.stack.enter_context(self.folder.storage.open(read.file))
            file = self.opened[read.file]
            file.seek(read.start)
            while done < len(view):
                more = file.readinto(view[done:])
                if not more:
                    raise OSError("it is cut short")
                done += more
        except OSError as error:
            self.problem = self.problem or f"{read.file} in {self.folder.url}: {error}"
        self.bytes += done
        return data


class _Arrivals:
    """Boxes that wait for their bytes. Rows go to a shard as they come, but where an expert is taken apart
    whole, or numbers are multiplied by scales: these are kept until all are there.
    """

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self.boxes: dict[Extent, list[Wanted]] = defaultdict(list)
        self.served: dict[Extent, set[Extent]] = defaultdict(set)  # by scales, the numbers that wait for them
        self.left: dict[Extent, int] = {}  # rows
        self.kept: dict[Extent, torch.Tensor] = {}
        for each in wanted:
            self.boxes[each.numbers].append(each)
            if each.scales is not None:
                self.served[each.scales].add(each.numbers)
            for need in filter(None, (each.numbers, each.scales)):
                self.left[need] = need.rows[1] - need.rows[0]

    def take(self, need: Extent, rows: tuple[int, int], data: torch.Tensor) -> None:
        """Take rows of a need, [rows, bytes of a row]."""
        first = rows[0] - need.rows[0]
        self.left[need] -= len(data)
        boxes = self.boxes.get(need, [])
        if boxes and boxes[0].scales is None and not is_whole(boxes[0].stored, boxes[0].rule):
            for each in boxes:
                each.fill(data, first)
            return
        if need not in self.kept:
            self.kept[need] = torch.empty(need.rows[1] - need.rows[0], need.row, dtype=torch.uint8)
        self.kept[need][first : first + len(data)] = data
        if not self.left[need]:
            for numbers in [need] if boxes else list(self.served[need]):
                self._fill(numbers)

    def _fill(self, numbers: Extent) -> None:
        """Fill boxes if all is there, and keep their bytes no longer."""
        scales = self.boxes[numbers][0].scales
        if self.left[numbers] or (scales is not None and self.left[scales]):
            return
        data = self.kept.pop(numbers)
        for each in self.boxes[numbers]:
            each.fill(data, 0, None if scales is None else self.kept[scales])
        if scales is not None:
            self.served[scales].discard(numbers)
            if not self.served[scales]:
                del self.kept[scales]


_Rows = tuple[Extent, tuple[int, int]]


def _parts(reads: Sequence[Read], number: int, needs: Sequence[Extent], rank: int) -> list[_Rows]:
    """What a rank needs of read `number` of a round."""
    parts = reads[number].parts if number < len(reads) else ()
    return [(needs[part.number], part.rows) for part in parts if part.rank == rank]


def _bytes(parts: Sequence[_Rows]) -> int:
    return sum((high - low) * need.row for need, (low, high) in parts)


def _cut(data: torch.Tensor, start: int, need: Extent, rows: tuple[int, int]) -> torch.Tensor:
    """Rows of a need, [rows, bytes of a row], out of what was read from byte `start` of the file on."""
    at = need.origin + rows[0] * need.width + need.columns[0] - start
    return data.as_strided((rows[1] - rows[0], need.row), (need.width, 1), at)


def _packed(data: torch.Tensor, start: int, parts: Sequence[_Rows]) -> torch.Tensor:
    """What is sent: the rows of all parts, one after the other."""
    sent, at = torch.empty(_bytes(parts), dtype=torch.uint8), 0
    for need, rows in parts:
        piece = sent[at : at + _bytes([(need, rows)])].view(-1, need.row)
        piece.copy_(_cut(data, start, need, rows))
        at += piece.numel()
    return sent

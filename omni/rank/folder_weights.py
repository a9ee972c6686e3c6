"""A rank's weights out of a folder of published ones: it reads the boxes that its own shards need.

Shards of data-parallel ranks are apart, so all ranks together read the model once. Rows of a matrix that
tensor-parallel ranks divide by columns are read whole, each rank some of them, and the columns exchanged:
strided reads are what shared storage is worst at.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from infra.shard_file import REQUEST, CheckpointError
from omni.models.regions import Numbering
from omni.open_models.decode import from_mxfp4, out_of_slab, times_scales
from omni.open_models.folder import BYTES, Folder, Stored, Tensor
from omni.open_models.rules import Box, Rule, boxes
from omni.rank.optimizer import ComponentOptimizer
from omni.rank.state import owned

DTYPES = {
    **{"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16},
    **{"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8},
}


@dataclass(frozen=True)
class Wanted:
    """A box of a tensor of theirs, which lies in the files as `stored` says, and what it goes to: flat, in
    fp32. `block` is how many rows and columns a scale is for. Of a tensor with a slab for each expert, the
    box is of ours, and the whole slab is read for it.
    """

    rule: Rule
    stored: Stored
    block: tuple[int, int]
    box: Box
    target: torch.Tensor

    @property
    def name(self) -> str:
        """That of the tensor, as rules call it."""
        return self.rule.theirs[self.box.tensor]

    @property
    def tensor(self) -> Tensor:
        """Its numbers."""
        return self.stored.data

    @property
    def dtype(self) -> torch.dtype:
        """That of the file."""
        return DTYPES[self.tensor.dtype]

    @property
    def width(self) -> int:
        """Bytes of a row of the tensor."""
        return (self.tensor.stop - self.tensor.start) // self.tensor.shape[0]

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the box."""
        (low, high), (left, right) = self.box.rows, self.box.columns
        return high - low, right - left

    @property
    def is_strided(self) -> bool:
        """Whether it lies in the file in several pieces."""
        rows, columns = self.size
        return self.rule.slab is None and rows > 1 and columns * BYTES[self.tensor.dtype] < self.width

    @property
    def span(self) -> tuple[int, int]:
        """The bytes of the file that it lies in, unless it is strided."""
        if self.rule.slab is not None:
            start = self.tensor.start + self.rule.slab.index * self.width
            return start, start + self.width
        rows, columns = self.size
        element = BYTES[self.tensor.dtype]
        start = self.tensor.start + self.box.rows[0] * self.width + self.box.columns[0] * element
        return start, start + rows * columns * element

    @property
    def scales_span(self) -> tuple[int, int]:
        """The bytes of the file that its scales lie in: those of its slab, or all of the tensor's."""
        scales, slab = self.stored.scales, self.rule.slab
        assert scales is not None
        size = scales.stop - scales.start
        each = size // scales.shape[0] if slab is not None else size
        start = scales.start + (slab.index * each if slab is not None else 0)
        return start, start + each

    def fill(self, data: torch.Tensor, scales: torch.Tensor | None, first: int = 0) -> None:
        """Copy bytes of uint8: whole rows of the box from its row `first` on, or a whole slab."""
        values = self._slab(data, scales) if self.rule.slab is not None else self._rows(data, scales, first)
        rows, at = len(values), self.box.at + first * self.box.stride
        self.target.as_strided(
            (rows, self.size[1]), (self.box.stride, 1), at + self.target.storage_offset()
        ).copy_(values)

    def _rows(self, data: torch.Tensor, scales: torch.Tensor | None, first: int) -> torch.Tensor:
        values = data.view(self.dtype).view(-1, self.size[1])
        if scales is None:
            return values
        assert self.stored.scales is not None
        of_blocks = scales.view(DTYPES[self.stored.scales.dtype]).view(self.stored.scales.shape)
        return times_scales(values, of_blocks, self.block, (self.box.rows[0] + first, self.box.columns[0]))

    def _slab(self, data: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        slab, shape = self.rule.slab, self.tensor.shape[1:]
        assert slab is not None
        theirs = data.view(self.dtype).view(shape)
        if scales is not None:  # rows of MXFP4 are ours
            slab, theirs = replace(slab, transposed=False), from_mxfp4(theirs, scales.view(shape[:-1]))
        ours = out_of_slab(theirs, slab)
        return ours.view(len(ours), -1)[slice(*self.box.rows), slice(*self.box.columns)]


def wanted_of(
    folder: Folder, component: ComponentOptimizer, numberings: Mapping[int, Numbering]
) -> list[Wanted]:
    """Return what this rank's shards of the LLM need of a folder.

    Raises:
        CheckpointError: for a parameter that no rule gives, or of another shape.
    """
    wanted = []
    block = folder.quantised.block if folder.quantised else (1, 1)
    for shard in owned(component, numberings):
        rule, region = folder.rules.get(shard.name), shard.region
        if rule is None or rule.shape != region.shape:
            means = "nothing of it" if rule is None else f"the shape {rule.shape}"
            raise CheckpointError(f"{shard.name} has shape {region.shape}, and {folder.url} means {means}")
        target = shard.main.data.view(-1)
        for box in boxes(rule, region.dim, region.runs, shard.start, shard.start + shard.main.numel()):
            stored = folder.stored[rule.theirs[box.tensor]]
            wanted.append(Wanted(rule, stored, block, box, target))
    return wanted


class FolderReader:
    """Fills shards from the files of a folder; `bytes` counts what it has read.

    What cannot be read is noted in `problem` instead of raised: other ranks may be waiting for their columns.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.bytes = 0
        self.problem: str | None = None
        self.opened: dict[str, Any] = {}

    def fill(self, wanted: Sequence[Wanted], group: dist.ProcessGroup) -> None:
        """Read all boxes. The ranks of the tensor-parallel `group` call it together."""
        with ExitStack() as self.stack:
            self._fill_whole([each for each in wanted if not each.is_strided])
            self._fill_strided([each for each in wanted if each.is_strided], group)
        self.opened.clear()

    def _fill_whole(self, wanted: Sequence[Wanted]) -> None:
        """Neighbours are read at once, up to REQUEST bytes."""
        request: list[Wanted] = []
        for each in sorted(wanted, key=lambda one: (one.tensor.file, one.span)):
            if request and (
                each.tensor.file != request[0].tensor.file
                or each.span[0] not in (request[-1].span[1], request[-1].span[0])
                or each.span[1] - request[0].span[0] > REQUEST
            ):
                self._fill_neighbours(request)
                request = []
            request.append(each)
        if request:
            self._fill_neighbours(request)

    def _fill_neighbours(self, request: Sequence[Wanted]) -> None:
        first = request[0].span[0]
        data = self._read(request[0].tensor.file, first, request[-1].span[1])
        for each in request:
            start, stop = each.span
            # A copy: numbers of another type must lie at a multiple of their size.
            each.fill(data[start - first : stop - first].clone(), self._scales(each))

    def _fill_strided(self, wanted: Sequence[Wanted], group: dist.ProcessGroup) -> None:
        """All ranks of the group want the same rows, each its own columns."""
        if group.size() == 1:
            assert not wanted
            return
        own = [(each.name, each.box.rows, each.box.columns) for each in wanted]
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, own, group=group)
        for peers in every:
            assert [of[:2] for of in peers] == [of[:2] for of in own], "tensor-parallel ranks own other rows"
        for number, each in enumerate(wanted):
            self._exchange(each, [peers[number][2] for peers in every], group)

    def _exchange(self, each: Wanted, columns: Sequence[tuple[int, int]], group: dist.ProcessGroup) -> None:
        """Read a share of the rows whole, send every rank of the group its `columns` of them."""
        size, rank, device = group.size(), group.rank(), each.target.device
        element, (low, high) = BYTES[each.tensor.dtype], each.box.rows
        scales = self._scales(each)
        most = size * max(1, REQUEST // each.width)
        for first in range(low, high, most):
            rows = min(most, high - first)
            cuts = [first + rows * share // size for share in range(size + 1)]
            start, stop = (each.tensor.start + cut * each.width for cut in cuts[rank : rank + 2])
            data = self._read(each.tensor.file, start, stop).view(-1, each.width)
            sent = [data[:, left * element : right * element].reshape(-1) for left, right in columns]
            share = each.size[1] * element
            got = torch.empty(rows * share, dtype=torch.uint8, device=device)
            dist.all_to_all_single(
                got,
                torch.cat(sent).to(device),
                [(cuts[peer + 1] - cuts[peer]) * share for peer in range(size)],
                [len(part) for part in sent],
                group=group,
            )
            each.fill(got, scales, first - low)

    def _scales(self, each: Wanted) -> torch.Tensor | None:
        """The bytes of what numbers are to be multiplied by, None where they are not."""
        scales = each.stored.scales
        return None if scales is None else self._read(scales.file, *each.scales_span)

    def _read(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Bytes [start, stop) of a file; zeros where they cannot be read."""
        data = torch.zeros(stop - start, dtype=torch.uint8)
        view, done = data.numpy().data, 0
        try:
            if name not in self.opened:
                self.opened[name] = self.stack.enter_context(self.folder.storage.open(name))
            file = self.opened[name]
            file.seek(start)
            while done < len(view):
                more = file.readinto(view[done:])
                if not more:
                    raise OSError("it is cut short")
                done += more
        except OSError as error:
            self.problem = self.problem or f"{name} in {self.folder.url}: {error}"
        self.bytes += done
        return data

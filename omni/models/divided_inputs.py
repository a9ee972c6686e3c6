"""Layers whose inputs are divided over tp ranks, until they are computed anew.

Where tp ranks run layers without dividing the tokens, as those of encoders, each of them takes in the same. A
layer that is computed anew keeps nothing else, and of that each rank a part: in its backward the ranks gather
the whole (Megatron-LM's `distribute_saved_activations`). Of layers that take in 48 MB on eight ranks, each
keeps 6 MB a layer, and for a moment the 48 MB of the one that goes back.

The first layer of a block keeps its input whole, since what is in front of it does too. `Stack` states what
this takes (`stack.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from omni.models.anew import follow_inputs
from parallel.megatron import TransformerBlock


class _Piece:
    """This rank's part of what a layer took in."""

    def __init__(self, whole: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.shape = whole.shape
        self.own: torch.Tensor | None = whole.view(-1).chunk(group.size())[group.rank()].clone()

    def gathered(self, group: dist.ProcessGroup) -> torch.Tensor:
        """Return the whole, and let go of the part."""
        assert self.own is not None
        whole = torch.empty(self.shape, dtype=self.own.dtype, device=self.own.device)
        dist.all_gather_into_tensor(whole.view(-1), self.own, group=group)
        self.own = None
        return whole


class _Dividing:
    """What a block hears of its passes: `input` is that of a layer behind the first, in a pass forward that
    keeps inputs; None elsewhere, as in a layer that is computed anew.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.passes = False
        self.input: torch.Tensor | None = None

    def comes(self, number: int, hidden: torch.Tensor) -> None:
        """Hear that a pass comes to a layer, counted from the block's first, which takes in `hidden`."""
        if self.passes:
            self.input = hidden if number and hidden.requires_grad else None

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A forward that keeps inputs of layers runs inside the block."""
        self.passes = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self.passes, self.input = False, None

    def _pack(self, saved: torch.Tensor) -> "_Piece | torch.Tensor":
        return _Piece(saved, self.group) if saved is self.input else saved

    def _unpack(self, packed: "_Piece | torch.Tensor") -> torch.Tensor:
        return packed.gathered(self.group) if isinstance(packed, _Piece) else packed


def divide_inputs(block: TransformerBlock, group: dist.ProcessGroup) -> None:
    """Have the layers of a block that are computed anew keep their inputs divided over a group, each rank of
    which takes in the same numbers, as many as divide by its size.
    """
    dividing = _Dividing(group)
    follow_inputs(block, dividing.comes, dividing.passing)

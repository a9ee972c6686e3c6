"""Layers whose inputs wait on the host: what a layer that is computed anew keeps travels there and back.

A layer that is computed anew keeps what it took in, which the layer in front of it put out. Of a virtual
stage's layers those behind the first, as many as `model.llm.offload` says, take in what goes to pinned memory
of the host while they run, and comes back while the layer behind them goes back:

    forward of     layer 1    layer 2    layer 3        backward of    layer 3    layer 2    layer 1
    to the host   1's input  2's input                  to the device 2's input  1's input

How much is on the device beside the layers that run is bounded: what goes is gone when the next layer begins,
what comes has left no earlier than one layer ahead. The stream that computes waits for that, the host never
does; what copies take longer than a layer is time of the step. Copies have a stream of their own, so both
directions are in one order: nothing is read from the host before it has come there.

Memory of the host is that of torch's allocator of pinned memory, which hands it to nobody while a copy uses
it, and keeps it for later passes. Since it rounds up to powers of two, and hands out no part of what it
keeps, a tensor is there in blocks of `BLOCK` bytes, which passes of any length use again. A pass that fails
lets go of it with the graph. On a CPU the same code makes plain copies.

The statement of what this takes is `offloading.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from omni.models.anew import follow_inputs
from parallel.megatron import TransformerBlock

BLOCK = 1 << 26  # bytes of pinned memory: so large that a copy takes a millisecond


class _Input:
    """What a layer took in: `here` on the device, or in `blocks` on the host, or on its way. `before` is that
    of the layer in front of it, until this one is taken.
    """

    def __init__(self, hidden: torch.Tensor, before: "_Input | None") -> None:
        self.here: torch.Tensor | None = hidden
        self.shape = hidden.shape
        self.before = before
        self.blocks: list[torch.Tensor] = []
        self.copied: torch.cuda.Event | None = None

    def send(self, copies: torch.cuda.Stream | None) -> None:
        """Start to copy it to the host."""
        assert self.here is not None
        parts = _parts(self.here)
        self.blocks = [host_buffer(part) for part in parts]
        self.copied = _copy(self.blocks, parts, copies)

    def leave(self) -> None:
        """Let go of the device's memory of what was sent, behind the copy."""
        if self.blocks:
            _wait(self.copied)
            self.here = None

    def fetch(self, copies: torch.cuda.Stream | None) -> None:
        """Start to copy it back, unless it is here or on its way."""
        if self.here is None:
            device = copies.device if copies is not None else None
            self.here = torch.empty(self.shape, dtype=self.blocks[0].dtype, device=device)
            self.copied = _copy(_parts(self.here), self.blocks, copies)

    def take(self, copies: torch.cuda.Stream | None) -> torch.Tensor:
        """Return it to be used by what the current stream is given next, and fetch the one before it."""
        self.fetch(copies)
        if self.before is not None:
            self.before.fetch(copies)
        if self.blocks:
            _wait(self.copied)
        hidden, self.here, self.blocks, self.before = self.here, None, [], None
        assert hidden is not None
        return hidden


class Offload:
    """What the layers of a virtual stage send to the host: the inputs of `count` of them, from the second on.

    Invariant: outside of a pass forward nothing is sent, so neither is it when a layer is computed anew.
    """

    def __init__(self, count: int, copies: torch.cuda.Stream | None) -> None:
        self.count = count
        self.copies = copies
        self.last: _Input | None = None
        self.passes = False

    def comes(self, number: int, hidden: torch.Tensor) -> None:
        """Hear that a pass comes to a layer, counted from the first here, which takes in `hidden`."""
        if not self.passes or not hidden.requires_grad:
            return  # computed anew, or nothing that it takes in goes back
        if self.last is not None:
            self.last.leave()
        self.last = _Input(hidden, self.last)
        if 1 <= number <= self.count:
            self.last.send(self.copies)

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A forward that keeps inputs of layers runs inside the block."""
        self.passes = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, partial(_unpack, self.copies)):
                yield
            if self.last is not None:
                self.last.leave()
        finally:
            self.passes, self.last = False, None

    def _pack(self, saved: torch.Tensor) -> "_Input | torch.Tensor":
        return self.last if self.last is not None and saved is self.last.here else saved


def offload_layers(block: TransformerBlock, count: int, copies: torch.cuda.Stream | None) -> None:
    """Have the layers of a block that are computed anew send the inputs of `count` of them to the host, on a
    stream of copies; None on a CPU. To be called before other hooks change what layers take in.
    """
    offload = Offload(count, copies)
    follow_inputs(block, offload.comes, offload.passing)


def host_buffer(like: torch.Tensor) -> torch.Tensor:
    """Memory of the host for a tensor of the device."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)


def _unpack(copies: torch.cuda.Stream | None, packed: "_Input | torch.Tensor") -> torch.Tensor:
    return packed.take(copies) if isinstance(packed, _Input) else packed


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views [n] of a tensor, of a block each."""
    return tensor.view(-1).split(BLOCK // tensor.element_size())


def _copy(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], copies: torch.cuda.Stream | None
) -> torch.cuda.Event | None:
    """Copy behind what the current stream has been given; the event is over when that is done. Gradients are
    off: a layer that is to be computed anew runs without, and so does a backward.
    """
    if copies is None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)
        return None
    copies.wait_stream(torch.cuda.current_stream(copies.device))
    with torch.cuda.stream(copies):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        return copies.record_event()


def _wait(copied: torch.cuda.Event | None) -> None:
    if copied is not None:
        torch.cuda.current_stream().wait_event(copied)

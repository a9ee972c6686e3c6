"""Tensors that wait on the host: copied there while the device goes on, let go of here, and brought back.

Copies have a stream of their own, so both directions are in one order: nothing is read from the host before
it has come there. The stream that computes waits for a copy where it needs that, the host never does.

Memory of the host is that of torch's allocator of pinned memory, which hands it to nobody while a copy uses
it, and keeps it for later passes. Since it rounds up to powers of two, and hands out no part of what it
keeps, a tensor is there in blocks of `BLOCK` bytes, which passes of any length use again. On a CPU the same
code makes plain copies.
"""

from collections.abc import Sequence

import torch

BLOCK = 1 << 26  # bytes of pinned memory: so large that a copy takes a millisecond


class Waiting:
    """A tensor that a backward needs: `here` on the device, or in `blocks` on the host, or on its way, on a
    stream of `copies`, None on a CPU.
    """

    def __init__(self, here: torch.Tensor, copies: torch.cuda.Stream | None) -> None:
        self.here: torch.Tensor | None = here
        self.copies = copies
        self.blocks: list[torch.Tensor] = []
        self.copied: torch.cuda.Event | None = None

    def send(self, part: torch.Tensor) -> None:
        """Start to copy to the host what is kept of it, a view [n]."""
        parts = _blocks_of(part)
        self.blocks = [host_buffer(own) for own in parts]
        self.copied = copy(self.blocks, parts, self.copies)

    def leave(self) -> None:
        """Let go of the device's memory of what was sent, behind the copy."""
        if self.blocks:
            _wait(self.copied)
            self.here = None

    def fetch(self) -> None:
        """Start to copy it back, unless it is here or on its way."""
        if self.here is None:
            size = sum(block.numel() for block in self.blocks)
            device = self.copies.device if self.copies is not None else None
            self.here = torch.empty(size, dtype=self.blocks[0].dtype, device=device)
            self.copied = copy(_blocks_of(self.here), self.blocks, self.copies)

    def arrive(self) -> torch.Tensor:
        """Hand it to what the current stream is given next. It is as it was, or [n] if it had left."""
        self.fetch()
        if self.blocks:
            _wait(self.copied)
        here, self.here, self.blocks = self.here, None, []
        assert here is not None
        return here


def host_buffer(like: torch.Tensor) -> torch.Tensor:
    """Memory of the host for a tensor of the device."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=like.is_cuda)


def copy(
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


def _blocks_of(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views [n] of a tensor [N], of a block each."""
    return tensor.split(BLOCK // tensor.element_size())


def _wait(copied: torch.cuda.Event | None) -> None:
    if copied is not None:
        torch.cuda.current_stream().wait_event(copied)

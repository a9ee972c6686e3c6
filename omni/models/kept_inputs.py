"""What layers that are computed anew keep: their inputs, whole or divided over tp ranks, here or on the host.

**Divided.** Where tp ranks run layers without dividing the tokens, as those of encoders, each of them takes
in the same. Each keeps a part, and in a layer's backward the ranks gather the whole (Megatron-LM's
`distribute_saved_activations`). Of layers that take in 48 MB on eight ranks, each keeps 6 MB a layer, and
for a moment the 48 MB of the one that goes back. The first layer of a block keeps its input whole, since
what is in front of it does too.

**On the host.** Of a block's layers those behind the first, as many as `offload` says, take in what goes to
pinned memory of the host while they run, of divided inputs this rank's part, and comes back while the layer
behind them goes back:

    forward of     layer 1    layer 2    layer 3        backward of    layer 3    layer 2    layer 1
    to the host   1's input  2's input                  to the device 2's input  1's input

How much is on the device beside the layers that run is bounded: what goes is gone when the next layer begins,
what comes has left no earlier than one layer ahead. What copies take longer than a layer is time of the step
(`ops/on_host.py`). A pass that fails lets go of it with the graph.

What this takes is stated by `offloading.py`, and of divided inputs by `stack.py`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from omni.models.anew import follow_inputs
from ops.on_host import Waiting
from parallel.megatron import TransformerBlock, checkpoint


@dataclass(frozen=True)
class Ways:
    """The ways that inputs take: on a stream of `copies` to the host and back, None on a CPU; in parts over
    the ranks of a `group`, each of which takes in the same numbers, as many as divide by its size, None if
    nobody else has them.
    """

    copies: torch.cuda.Stream | None = None
    group: dist.ProcessGroup | None = None

    def part(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of an input, a view [n]."""
        flat = hidden.view(-1)
        return flat if self.group is None else flat.chunk(self.group.size())[self.group.rank()]

    def whole(self, part: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """The input of which each rank has a part [n], as it was: of that `shape`."""
        if self.group is None:
            return part.view(shape)
        whole = torch.empty(shape, dtype=part.dtype, device=part.device)
        dist.all_gather_into_tensor(whole.view(-1), part, group=self.group)
        return whole


class _Input(Waiting):
    """What a layer took in. Whole while its forward runs; then what is kept of it, the part of this rank.
    `before` is the input of the layer in front of it, until this one is taken.
    """

    def __init__(self, hidden: torch.Tensor, before: "_Input | None", ways: Ways) -> None:
        super().__init__(hidden, ways.copies)
        self.shape = hidden.shape
        self.before = before
        self.ways = ways

    def keep(self) -> "_Input":
        """Let go of the parts of other ranks, unless it leaves altogether."""
        assert self.here is not None
        if self.ways.group is not None and not self.blocks:
            self.here = self.ways.part(self.here).clone()
        return self

    def take(self) -> torch.Tensor:
        """Return the whole to be used by what the current stream is given next, and fetch the one before it;
        all ranks of a group do so together.
        """
        self.fetch()
        if self.before is not None:
            self.before.fetch()
        self.before = None
        return self.ways.whole(self.arrive(), self.shape)


class _Keeping:
    """What the layers of a block keep: the inputs of `count` of them on the host, from the second on; that of
    the first goes its ways neither to the host nor over ranks.

    Invariant: outside of a pass forward nothing is kept, so neither is it when a layer is computed anew.
    """

    def __init__(self, count: int, ways: Ways) -> None:
        self.count = count
        self.ways = ways
        self.last: _Input | None = None
        self.passes = False

    def comes(self, number: int, hidden: torch.Tensor) -> None:
        """Hear that a pass comes to a layer, counted from the first here, which takes in `hidden`."""
        if not self.passes or not hidden.requires_grad:
            return  # computed anew, or nothing that it takes in goes back
        if self.last is not None:
            self.last.leave()
        self.last = _Input(hidden, self.last, self.ways if number else Ways())
        if 1 <= number <= self.count:
            self.last.send(self.last.ways.part(hidden))

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A forward that keeps inputs of layers runs inside the block."""
        self.passes = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield
            if self.last is not None:
                self.last.leave()
        finally:
            self.passes, self.last = False, None

    def _pack(self, saved: torch.Tensor) -> "_Input | torch.Tensor":
        return self.last.keep() if self.last is not None and saved is self.last.here else saved


def keep_inputs(block: TransformerBlock, count: int, ways: Ways) -> None:
    """Have the layers of a block that are computed anew keep their inputs in these ways, `count` of them on
    the host. To be called before other hooks change what layers take in.
    """
    keeping = _Keeping(count, ways)
    follow_inputs(block, keeping.comes, keeping.passing)


def computed_anew(
    run: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, ways: Ways
) -> torch.Tensor:
    """Run a function of `hidden`, which is kept for its backward in these ways, and nothing else."""
    kept = _Input(hidden, None, ways)

    def pack(saved: torch.Tensor) -> _Input | torch.Tensor:
        # The graph holds this function, and what it names.
        return kept.keep() if saved is kept.here else saved

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        found: torch.Tensor = checkpoint(run, False, hidden)
    return found


def _unpack(packed: "_Input | torch.Tensor") -> torch.Tensor:
    return packed.take() if isinstance(packed, _Input) else packed

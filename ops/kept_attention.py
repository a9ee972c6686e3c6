"""Attention that a layer computed anew finds again: what its kernels put out is kept from the first pass.

Of a layer that is computed anew for its backward, attention over long sequences is most of the time and
little of the memory: what it puts out is in most models as large as the layer's input, and one number more
for each row and head. Kept, it need not be computed a second time; queries, keys and values, which its
backward also takes, come out of linears that are (as selective checkpointing in torch keeps outputs of chosen
operators).

Where inputs of layers wait on the host, so do these (`on_host.py`): sent behind the kernel, gone when the
next layer begins to attend, and fetched while the layer behind is made anew.

Invariant: outputs and gradients are, to the bit, those of attention that is computed twice.
"""

from collections import deque
from collections.abc import Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from ops.on_host import Waiting

KERNELS = frozenset(
    (
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_varlen_forward",
    )
)
"""Operators whose outputs are all that their backward takes beside their inputs, also where they run without
a graph. Others are computed anew.
"""


class KeptAttention:
    """What kernels of one pass have put out, by layer, in the order of their calls. Of layers behind the
    first `count` have theirs on the host, over a stream of `copies`, None on a CPU. Of a layer to
    which no gradient `goes_back` nothing is kept.
    """

    def __init__(self, count: int = 0, copies: torch.cuda.Stream | None = None) -> None:
        self.count, self.copies = count, copies
        self.goes_back = True
        self._layers: dict[Hashable, _OfLayer] = {}
        self._last: _OfLayer | None = None

    def of(self, layer: Hashable) -> AbstractContextManager[object]:
        """What attention of `layer` is to run inside: without a graph it keeps what kernels put out, with one
        it hands that out in their place, and lets go of it.
        """
        if torch.is_grad_enabled():
            found = self._layers.get(layer)
            return nullcontext() if found is None else _KernelsFound(found)
        if not self.goes_back:
            return nullcontext()
        if layer not in self._layers:
            self.passed()
            sends = 1 <= len(self._layers) <= self.count
            self._layers[layer] = self._last = _OfLayer(self._last, sends, self.copies)
        return _KernelsKept(self._layers[layer])

    def passed(self) -> None:
        """The last layer that attended is done, and lets go of what it has sent."""
        if self._last is not None:
            self._last.leave()


class _Output(Waiting):
    """A tensor that a kernel has put out, and how its numbers lie."""

    def __init__(self, tensor: torch.Tensor, copies: torch.cuda.Stream | None) -> None:
        super().__init__(tensor, copies)
        self.lies = tensor.shape, tensor.stride()

    def leaves(self) -> None:
        """Start on its way to the host, unless there are gaps between its numbers."""
        assert self.here is not None
        reach = 1 + sum((size - 1) * step for size, step in zip(*self.lies, strict=True))
        if self.here.numel() == reach:
            self.send(self.here.as_strided((reach,), (1,)))

    def take(self) -> torch.Tensor:
        """Return it as it was, to be used by what the current stream is given next."""
        return self.arrive().as_strided(*self.lies)


class _OfLayer:
    """What the calls of a layer have put out, and the layer `before`, until this one is taken."""

    def __init__(self, before: "_OfLayer | None", sends: bool, copies: torch.cuda.Stream | None) -> None:
        self.before, self.sends, self.copies = before, sends, copies
        self.calls: deque[Any] = deque()

    def _outputs(self) -> list[_Output]:
        return [leaf for leaf in tree_leaves(list(self.calls)) if isinstance(leaf, _Output)]

    def keep(self, out: Any) -> None:
        """Keep what a call has put out: its tensors of numbers, and whatever else."""

        def kept(leaf: Any) -> Any:
            if not (isinstance(leaf, torch.Tensor) and leaf.is_floating_point()):
                return leaf
            output = _Output(leaf, self.copies)
            if self.sends:
                output.leaves()
            return output

        self.calls.append(tree_map(kept, out))

    def leave(self) -> None:
        """Let go of the device's memory of what was sent."""
        for output in self._outputs():
            output.leave()

    def fetch(self) -> None:
        """Start to copy back what is away."""
        for output in self._outputs():
            output.fetch()

    def take(self) -> Any:
        """Return what the next call has put out, and fetch what the layer before has."""
        self.fetch()
        if self.before is not None:
            self.before.fetch()
        self.before = None
        return tree_map(lambda leaf: leaf.take() if isinstance(leaf, _Output) else leaf, self.calls.popleft())


class _KernelsKept(TorchDispatchMode):
    def __init__(self, kept: _OfLayer) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in KERNELS:
            self.kept.keep(out)
        return out


class _KernelsFound(TorchDispatchMode):
    def __init__(self, kept: _OfLayer) -> None:
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in KERNELS:
            return self.kept.take()
        return func(*args, **(kwargs or {}))

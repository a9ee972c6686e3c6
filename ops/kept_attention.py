"""Attention that a layer computed anew finds again: what its kernels put out is kept from the first pass.

Of a layer that is computed anew for its backward, attention over long sequences is most of the time and
little of the memory: what it puts out is as large as the layer's input, and one number more for each row and
head. Kept, it need not be computed a second time; queries, keys and values, which its backward also takes,
come out of linears that are (as selective checkpointing in torch keeps outputs of chosen operators).

Invariant: outputs and gradients are, to the bit, those of attention that is computed twice.
"""

from collections import defaultdict, deque
from collections.abc import Hashable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

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

Calls = deque[Any]


class KeptAttention:
    """What kernels of one pass have put out, by layer, in the order of their calls."""

    def __init__(self) -> None:
        self._calls: dict[Hashable, Calls] = defaultdict(deque)

    def of(self, layer: Hashable) -> TorchDispatchMode:
        """What attention of `layer` is to run inside: without a graph it keeps what kernels put out, with one
        it hands that out in their place, and lets go of it.
        """
        return (_KernelsFound if torch.is_grad_enabled() else _KernelsKept)(self._calls[layer])


class _KernelsKept(TorchDispatchMode):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name in KERNELS:
            self.calls.append(out)
        return out


class _KernelsFound(TorchDispatchMode):
    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in KERNELS:
            return self.calls.popleft()
        return func(*args, **(kwargs or {}))

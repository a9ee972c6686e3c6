from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ops.attention import make_packing, packed_attention
from ops.kept_attention import KERNELS, KeptAttention


class Kernels(TorchDispatchMode):
    """Counts kernels of attention that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in KERNELS
        return func(*args, **(kwargs or {}))


def layers(kept: KeptAttention | None, lengths: tuple[int, ...]) -> tuple[int, list[torch.Tensor]]:
    """Two layers of attention, each computed anew: kernels that ran, and outputs with all gradients."""
    packing = make_packing(lengths, True, 64, torch.device("cpu"), torch.float32)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(lengths), 64, generator=generator, requires_grad=True)
    weights = [torch.randn(64, 192, generator=generator, requires_grad=True) for _ in range(2)]

    def layer(number: int, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ weights[number]).unflatten(1, (3, 4, 16)).unbind(1)
        with nullcontext() if kept is None else kept.of(number):
            return x + packed_attention(q, k, v, packing).flatten(1)

    with Kernels() as kernels:
        out = x
        for number in range(2):
            out = checkpoint(partial(layer, number), out, use_reentrant=True)
        (out * torch.arange(64)).sum().backward()
    return kernels.count, [out, x.grad, *(weight.grad for weight in weights)]


@pytest.mark.parametrize("lengths", [(300,), (120, 80, 9)])
def test_attention_that_is_kept_runs_once_and_is_the_same_to_the_bit(lengths: tuple[int, ...]) -> None:
    twice, expected = layers(None, lengths)
    once, found = layers(KeptAttention(), lengths)
    assert twice == 2 * once > 0
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))


def test_it_lets_go_of_what_it_handed_out() -> None:
    kept = KeptAttention()
    layers(kept, (40, 20))
    assert not any(kept._calls.values())

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from ops.attention import make_packing, packed_attention
from ops.kept_attention import KERNELS, KeptAttention
from ops.one_copy import brought


class Kernels(TorchDispatchMode):
    """Counts kernels of attention that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in KERNELS
        return func(*args, **(kwargs or {}))


def layers(
    kept: KeptAttention | None, lengths: tuple[int, ...], device: str = "cpu"
) -> tuple[int, list[torch.Tensor]]:
    """Three layers of attention, each computed anew: kernels that ran, and outputs with all gradients."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    packing = brought(make_packing(lengths, True, 64, torch.device(device), dtype), torch.device(device))
    torch.manual_seed(3)
    x = torch.randn(sum(lengths), 64, dtype=dtype, device=device, requires_grad=True)
    weights = [torch.randn(64, 192, dtype=dtype, device=device, requires_grad=True) for _ in range(3)]

    def layer(number: int, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ weights[number] / 8).unflatten(1, (3, 4, 16)).unbind(1)
        with nullcontext() if kept is None else kept.of(number):
            return x + packed_attention(q, k, v, packing).flatten(1)

    with Kernels() as kernels:
        out = x
        for number in range(3):
            out = checkpoint(partial(layer, number), out, use_reentrant=True)
        if kept is not None:
            kept.passed()
        (out * torch.arange(64, device=device)).sum().backward()
    return kernels.count, [out, x.grad, *(weight.grad for weight in weights)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("away", [0, 1, 2])
@pytest.mark.parametrize("lengths", [(300,), (120, 80, 9)])
def test_attention_that_is_kept_runs_once_and_is_the_same_to_the_bit(
    lengths: tuple[int, ...], away: int, device: str
) -> None:
    copies = torch.cuda.Stream() if device == "cuda" else None
    twice, expected = layers(None, lengths, device)
    once, found = layers(KeptAttention(away, copies), lengths, device)
    assert twice == 2 * once > 0
    for now, before in zip(found, expected, strict=True):
        # On a GPU gradients of queries are added up in any order.
        tolerance = 0.0 if copies is None else 2e-2
        torch.testing.assert_close(now, before, rtol=tolerance, atol=tolerance)


def test_it_lets_go_of_what_it_handed_out() -> None:
    kept = KeptAttention(1)
    layers(kept, (40, 20))
    assert not any(own.calls for own in kept._layers.values())

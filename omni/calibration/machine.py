"""What one rank can do: matrix products, attention, a layer, memory, and what starting a pass costs.

Times are medians of repetitions, of the wall's clock with the device synchronised.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median_low

import torch
import torch.nn.functional as F

from ops.attention import make_packing, packed_attention
from ops.one_copy import brought

_LEAST, _MOST = 5, 50  # repetitions
_ENOUGH_S = 0.3
_HEADS = 8
_FEW, _MANY = 4, 36  # layers of the passes whose start is timed
_EXPERTS, _TOPK = 64, 2


def timed(function: Callable[[], object], device: torch.device, repetitions: int | None = None) -> int:
    """Return the median nanoseconds of a call, after one that is not counted; of as many `repetitions`, or
    of what a third of a second allows.
    """

    def once() -> int:
        start = time.perf_counter_ns()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter_ns() - start

    once()
    times, end = [once() for _ in range(repetitions or _LEAST)], time.perf_counter() + _ENOUGH_S
    while not repetitions and len(times) < _MOST and time.perf_counter() < end:
        times.append(once())
    return max(1, median_low(times))


def _rate(amount: int, function: Callable[[], object], device: torch.device) -> int:
    """Amount of work in a second."""
    return amount * 10**9 // timed(function, device)


def product_rates(device: torch.device, dtype: torch.dtype) -> dict[int, int]:
    """FLOP/s of products of square matrices, by their size."""
    rates = {}
    for size in (1024, 4096, 8192) if device.type == "cuda" else (128, 512, 1024):
        a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
        rates[size] = _rate(2 * size**3, partial(torch.matmul, a, b), device)
    return rates


def attention_rates(device: torch.device, dtype: torch.dtype) -> dict[int, tuple[int, int]]:
    """FLOP/s of causal attention in a forward and in a backward, by tokens of the sequence; half of the pairs
    count, in a backward twice.
    """
    rates, head = {}, 128 if device.type == "cuda" else 64
    for tokens in (2048, 8192) if device.type == "cuda" else (256, 1024):
        q, k, v = (
            torch.randn(tokens, _HEADS, head, dtype=dtype, device=device, requires_grad=True)
            for _ in range(3)
        )
        packing = brought(make_packing((tokens,), True, _HEADS * head, device, dtype), device)
        work = 2 * tokens * tokens * _HEADS * head
        with torch.no_grad():
            forward = _rate(work, partial(packed_attention, q, k, v, packing), device)
        with torch.enable_grad():
            out = packed_attention(q, k, v, packing)
        back = partial(torch.autograd.grad, out, (q, k, v), torch.ones_like(out), retain_graph=True)
        rates[tokens] = forward, _rate(2 * work, back, device)
    return rates


def layer_rate(device: torch.device, dtype: torch.dtype, attention: int, memory: int) -> int:
    """FLOP/s that the products of a transformer layer reach in its forward: what its attention takes, at so
    many FLOP/s, and what it moves beside products, at so many bytes/s, is left out; it is half of all at
    most.
    """
    width, tokens = (4096, 4096) if device.type == "cuda" else (512, 512)
    layer = _Layer(width, tokens, device, dtype)
    x = torch.randn(tokens, width, dtype=dtype, device=device)
    taken = timed(partial(layer, x), device)
    beside = layer.attention_flops * 10**9 // attention + layer.moved_bytes * 10**9 // memory
    return layer.flops * 10**9 // max(taken - beside, taken // 2)


def starting_ns(device: torch.device, dtype: torch.dtype) -> tuple[int, int]:
    """Nanoseconds that starting a pass costs, and that starting the kernels of one of its layers does: passes
    of few and of many layers over one token, which are hardly any work.
    """
    layer = _Layer(_HEADS * 8, 1, device, dtype)
    token = torch.randn(1, _HEADS * 8, dtype=dtype, device=device)

    def forward(layers: int) -> None:
        x = token
        for _ in range(layers):
            x = layer(x)

    return parted(timed(partial(forward, _FEW), device), timed(partial(forward, _MANY), device))


def parted(few_ns: int, many_ns: int) -> tuple[int, int]:
    """Return what a pass takes apart from its layers, and what a layer takes, given passes of few and of many
    layers; a layer at most all that the few take, which a busy machine may hide.
    """
    layer_ns = min(max(0, many_ns - few_ns) // (_MANY - _FEW), few_ns // _FEW)
    return few_ns - _FEW * layer_ns, layer_ns


def dispatch_ns(device: torch.device, dtype: torch.dtype) -> int:
    """Nanoseconds of sorting a few tokens by their experts and back; the host waits for how many each has, as
    it does to send them. What is sent is not in it.
    """
    x = torch.randn(_EXPERTS, _HEADS * 8, dtype=dtype, device=device)
    scores = torch.randn(_EXPERTS, _EXPERTS, device=device)

    def dispatch() -> None:
        chosen = scores.topk(_TOPK).indices.flatten()
        tokens = chosen.argsort(stable=True) // _TOPK
        counts = torch.bincount(chosen, minlength=_EXPERTS).tolist()
        torch.zeros_like(x).index_add_(0, tokens, torch.cat(x[tokens].split(counts)))

    return timed(dispatch, device)


def memory_rate(device: torch.device) -> int:
    """Bytes that memory reads and writes in a second, of arrays that no cache holds."""
    count = 2**28 if device.type == "cuda" else 2**24
    source = torch.randn(count, device=device)
    target = torch.empty_like(source)
    return _rate(2 * 4 * count, partial(target.copy_, source), device)


def memory_bytes(device: torch.device) -> int | None:
    """Bytes that a device holds; None for a CPU, whose ranks share one memory."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


class _Layer:
    """A plain pre-norm layer over packed tokens [T, D]: four products and causal attention."""

    def __init__(self, width: int, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        shapes = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
        self.weights = [torch.randn(shape, dtype=dtype, device=device) * width**-0.5 for shape in shapes]
        self.packing = brought(make_packing((tokens,), True, width, device, dtype), device)
        self.width = width
        self.flops = 2 * tokens * sum(w.numel() for w in self.weights)
        self.attention_flops = 2 * tokens * tokens * width
        # Two norms, two sums of two, and an activation, read and written.
        self.moved_bytes = tokens * width * (4 + 6 + 2 * 4) * dtype.itemsize

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        qkv, out, up, down = self.weights
        q, k, v = F.linear(F.rms_norm(x, (self.width,)), qkv).view(len(x), 3, _HEADS, -1).unbind(1)
        x = x + F.linear(packed_attention(q, k, v, self.packing).reshape(len(x), self.width), out)
        return x + F.linear(F.silu(F.linear(F.rms_norm(x, (self.width,)), up)), down)

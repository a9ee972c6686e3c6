"""Sums over the logits of a row, and the gradient of the logits, of losses of tokens.

Shapes: T tokens, v columns of the vocabulary, ids `first` to `first + own`; columns behind pad it.
"""

import torch
import triton
import triton.language as tl

_BLOCK = 4096  # columns that a program has at once
_WARPS = 8
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _forward_sums(logits, labels, sums, tokens, width, first, own, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A row, block by block: what was summed up so far follows the largest logit that was seen."""
    row = tl.program_id(0).to(tl.int64)
    at = logits + row * width
    largest = _LOWEST
    total = 0.0
    for start in range(0, own, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(at + place, place < own, -float("inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(x - larger), 0)
        largest = larger
    label = tl.load(labels + row) - first
    target = tl.load(at + label, (label >= 0) & (label < own), 0.0).to(tl.float32)
    tl.store(sums + row, largest)
    tl.store(sums + tokens + row, total)
    tl.store(sums + 2 * tokens + row, target)


@triton.jit
def _backward_logits(grads, logits, labels, sums, out, tokens, width, first, own, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grads + row)
    label = tl.load(labels + row) - first
    largest = tl.load(sums + row)
    share = grad / tl.load(sums + tokens + row)
    x = tl.load(logits + row * width + place, place < own, -float("inf")).to(tl.float32)
    of_x = share * tl.exp(x - largest) - tl.where(place == label, grad, 0.0)
    of_x = tl.where(place < own, of_x, 0.0)
    tl.store(out + row * width + place, of_x.to(out.dtype.element_ty), place < width)


def logit_sums(logits: torch.Tensor, labels: torch.Tensor, first: int, own: int) -> torch.Tensor:
    """logits [T, v], contiguous, labels [T] → [3, T]. See `ops.loss`."""
    tokens, width = logits.shape
    sums = logits.new_empty(3, tokens, dtype=torch.float32)
    if tokens:
        _forward_sums[(tokens,)](logits, labels, sums, tokens, width, first, own, _BLOCK, num_warps=_WARPS)
    return sums


def logit_gradients(
    grads: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, sums: torch.Tensor, first: int, own: int
) -> torch.Tensor:
    """grads [T] of the losses, logits [T, v], labels [T] and sums [3, T] → the gradient of the logits."""
    tokens, width = logits.shape
    out = torch.empty_like(logits)
    if out.numel():
        grid = (tokens, triton.cdiv(width, _BLOCK))
        _backward_logits[grid](
            grads, logits, labels, sums, out, tokens, width, first, own, _BLOCK, num_warps=_WARPS
        )
    return out

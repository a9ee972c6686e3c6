"""AdamW of a shard of neighbouring parameters: see `ops.adamw`.

Shapes: n numbers, k parameters, of which one ends where the next begins.
"""

from math import log

import torch
import triton
import triton.language as tl

_BLOCK = 2048  # numbers that a program has
_WARPS = 8


@triton.jit
def _of_parameter(decays, counts, at, log_beta1, log_beta2, STEP1: tl.constexpr, STEP2: tl.constexpr):  # type: ignore[no-untyped-def]
    """What a parameter's update depends on: decay, corrections of both moments, thresholds of rounding."""
    count = tl.load(counts + at)
    # In double precision: in single, little would be left of 1 - beta ** 1.
    first = 1.0 - tl.exp(count.to(tl.float64) * log_beta1)
    second = 1.0 - tl.exp(count.to(tl.float64) * log_beta2)
    number = count.to(tl.uint32)
    return (
        tl.load(decays + at),
        first.to(tl.float32),
        tl.sqrt(second.to(tl.float32)),
        (number * STEP1) >> 16,
        (number * STEP2) >> 16,
    )


@triton.jit
def _put(moment, place, inside, numbers, threshold):  # type: ignore[no-untyped-def]
    if moment.dtype.element_ty == tl.bfloat16:
        bits = (numbers.to(tl.uint32, bitcast=True) + threshold) & 0xFFFF0000
        numbers = bits.to(tl.float32, bitcast=True)
    tl.store(moment + place, numbers.to(moment.dtype.element_ty), inside)


@triton.jit
def _update(  # type: ignore[no-untyped-def]
    main, grad, exp_avg, exp_avg_sq, model, ends, by, decays, counts, factor, sound,
    size, parameters, lr, less1, beta2, less2, eps, log_beta1, log_beta2,
    STEP1: tl.constexpr, STEP2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(sound) != 0.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        place = start + tl.arange(0, BLOCK)
        inside = place < size
        # The parameter that the first number is of; behind the last one there are zeros.
        at = tl.full([], 0, tl.int32)
        last = at + parameters - 1
        while at < last:
            middle = (at + last) // 2
            behind = tl.load(ends + middle * by) <= start
            at = tl.where(behind, middle + 1, at)
            last = tl.where(behind, last, middle)
        decay, first, second, low1, low2 = _of_parameter(
            decays, counts, at, log_beta1, log_beta2, STEP1, STEP2
        )
        zeros = tl.zeros([BLOCK], tl.float32)
        decay, first, second = zeros + decay, zeros + first, zeros + second
        low1, low2 = zeros.to(tl.uint32) + low1, zeros.to(tl.uint32) + low2
        end = tl.load(ends + at * by)
        while (end < start + BLOCK) & (at < parameters - 1):
            at += 1
            next_decay, next_first, next_second, next_low1, next_low2 = _of_parameter(
                decays, counts, at, log_beta1, log_beta2, STEP1, STEP2
            )
            behind = place >= end
            decay = tl.where(behind, next_decay, decay)
            first, second = tl.where(behind, next_first, first), tl.where(behind, next_second, second)
            low1, low2 = tl.where(behind, next_low1, low1), tl.where(behind, next_low2, low2)
            end = tl.load(ends + at * by)
        gradient = tl.load(grad + place, inside, 0.0) * tl.load(factor)
        weight = tl.load(main + place, inside, 0.0) * (1.0 - lr * decay)
        average = tl.load(exp_avg + place, inside, 0.0).to(tl.float32)
        average += less1 * (gradient - average)
        square = tl.load(exp_avg_sq + place, inside, 0.0).to(tl.float32)
        square = beta2 * square + less2 * gradient * gradient
        weight -= lr / first * average / (tl.sqrt(square) / second + eps)
        tl.store(main + place, weight, inside)
        _put(exp_avg, place, inside, average, low1)
        _put(exp_avg_sq, place, inside, square, low2)
        if model is not None:
            tl.store(model + place, weight.to(model.dtype.element_ty), inside)


def adamw(
    main: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    model: torch.Tensor | None,
    ends: torch.Tensor,
    decays: torch.Tensor,
    counts: torch.Tensor,
    factor: torch.Tensor,
    sound: torch.Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    steps: tuple[int, int],
) -> None:
    """Update a shard [n] of the parameters that end at `ends` [k]. See `ops.adamw`."""
    if not main.numel() or not ends.numel():
        return
    # log(0) is nothing that a correction of 1 could be made of.
    logs = [log(max(beta, 1e-30)) for beta in (beta1, beta2)]
    _update[(triton.cdiv(main.numel(), _BLOCK),)](
        main, grad, exp_avg, exp_avg_sq, model, ends, ends.stride(0), decays, counts, factor, sound,
        main.numel(), ends.numel(), lr, 1 - beta1, beta2, 1 - beta2, eps, *logs, *steps, _BLOCK,
        num_warps=_WARPS,
    )  # fmt: skip

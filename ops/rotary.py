"""Rotary position embedding of packed tokens with explicit positions (Su et al., RoFormer, section 3.4).

Positions are given for each token rather than counted from the start of a tensor, so a shard of a long
sequence, a packed document and a patch of an image (two coordinates) are the same case.

Shapes: T tokens, N heads, H head size, A position axes (1 for text, 2 for images).
"""

from typing import Any

import torch


def rotary_table(
    positions: torch.Tensor, head_dim: int, base: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, each [T, 1, H/2], for integer `positions` [T] or [T, A].

    The H/2 frequencies are divided evenly among the A axes; each axis starts at frequency 1. Angles are
    computed in fp32 (fp64 for fp64 models), because bf16 cannot tell neighbouring positions apart.
    """
    if positions.dim() == 1:
        positions = positions.unsqueeze(1)
    axes = positions.shape[1]
    assert head_dim % (2 * axes) == 0, f"head size {head_dim} does not divide into {axes} rotary axes"
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    half = head_dim // (2 * axes)
    exponent = torch.arange(half, device=positions.device, dtype=exact) / half
    angles = (positions.to(exact).unsqueeze(-1) * base**-exponent).flatten(1).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class _Rotate(torch.autograd.Function):
    """Rotate each pair (x[i], x[i + H/2]); the backward is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, -sin), None, None


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    low, high = x.chunk(2, dim=-1)
    out_low, out_high = out.chunk(2, dim=-1)
    torch.mul(low, cos, out=out_low).addcmul_(high, sin, value=-1)
    torch.mul(high, cos, out=out_high).addcmul_(low, sin)
    return out


def apply_rotary(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """[T, N, H] → [T, N, H], rotated by `table` from `rotary_table`."""
    return _Rotate.apply(x, *table)

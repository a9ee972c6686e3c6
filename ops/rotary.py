"""Rotary position embedding of packed tokens with explicit positions (Su et al., RoFormer, section 3.4).

Positions are given for each token rather than counted from the start of a tensor, so a shard of a long
sequence, a packed document and a patch of an image (two coordinates) are the same case.

Shapes: T tokens, N heads, H head size, A position axes (1 for text, 2 for images, 3 for both).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ops.kernels.choice import takes_kernel
from ops.operators import operator


@dataclass(frozen=True)
class Scaling:
    """How frequencies are scaled for sequences longer than a model was trained on and, with `sections`, which
    axis of positions each turns by: see `RotaryConfig`.

    `scaling` is none, linear, llama3 or yarn.
    """

    scaling: str = "none"
    factor: float = 1.0
    trained_tokens: int = 0
    slow: float = 1.0
    fast: float = 32.0
    truncate: bool = True
    attention_factor: float | None = None
    share: float = 1.0
    sections: tuple[int, ...] = ()
    interleaved: bool = False

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.scaling == "yarn" else 1.0

    def scaled(self, frequencies: torch.Tensor, base: float) -> torch.Tensor:
        """Frequencies [n] → [n]."""
        if self.scaling == "none":
            return frequencies
        if self.scaling == "linear":
            return frequencies / self.factor
        kept = self._kept(frequencies) if self.scaling == "llama3" else self._ramp(frequencies, base)
        return frequencies * (kept + (1 - kept) / self.factor)

    @property
    def axes(self) -> list[int]:
        """The axis of each frequency: as many as a section says, one axis after the other, or in turn as long
        as a section lasts, and then the first one (Qwen3-VL).
        """
        if not self.interleaved:
            return [axis for axis, count in enumerate(self.sections) for _ in range(count)]
        most = [len(self.sections) * count for count in self.sections]
        in_turn = (number % len(self.sections) for number in range(sum(self.sections)))
        return [axis if number < most[axis] else 0 for number, axis in enumerate(in_turn)]

    def _kept(self, frequencies: torch.Tensor) -> torch.Tensor:
        """Which share of each is left as it is, by the times it turns in the sequences trained on."""
        turns = frequencies * (self.trained_tokens / (2 * math.pi))
        return ((turns - self.slow) / (self.fast - self.slow)).clamp(0, 1)

    def _ramp(self, frequencies: torch.Tensor, base: float) -> torch.Tensor:
        """The same along the numbers of the frequencies: 1 up to the one that turns `fast` times, 0 from the
        one that turns `slow` times on.
        """
        count = len(frequencies)
        fast, slow = (
            count * math.log(self.trained_tokens / (turns * 2 * math.pi)) / math.log(base)
            for turns in (self.fast, self.slow)
        )
        if self.truncate:
            fast, slow = math.floor(fast), math.ceil(slow)
        first, last = max(fast, 0), min(slow, 2 * count - 1)
        numbers = torch.arange(count, device=frequencies.device, dtype=frequencies.dtype)
        return 1 - ((numbers - first) / (last - first or 0.001)).clamp(0, 1)


PLAIN = Scaling()


def rotary_table(
    positions: torch.Tensor,
    head_dim: int,
    base: float,
    dtype: torch.dtype,
    scaling: Scaling = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, each [T, 1, H/2], for integer `positions` [T] or [T, A]; of H only what is rotated.

    The H/2 frequencies are divided evenly among the A axes; each axis starts at frequency 1. With `sections`
    there are H/2 frequencies in all, each of which turns by one axis; positions [T] are those of all axes.
    Angles are computed in fp32 (fp64 for fp64 models), because bf16 cannot tell neighbouring positions apart.
    """
    if positions.dim() == 1:
        positions = positions.unsqueeze(1)
    axes = 1 if scaling.sections else positions.shape[1]
    head_dim = int(head_dim * scaling.share)
    assert head_dim % (2 * axes) == 0, f"head size {head_dim} does not divide into {axes} rotary axes"
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    half = head_dim // (2 * axes)
    exponent = torch.arange(half, device=positions.device, dtype=exact) / half
    frequencies = scaling.scaled(base**-exponent, base)
    if scaling.sections and positions.shape[1] > 1:
        columns = positions.unbind(1)
        turned = torch.stack([columns[axis] for axis in scaling.axes], 1).to(exact).mul_(frequencies)
    else:
        turned = (positions.to(exact).unsqueeze(-1) * frequencies).flatten(1)
    angles = turned.unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    if (amplitude := scaling.amplitude) != 1.0:
        cos, sin = cos * amplitude, sin * amplitude
    return cos.to(dtype), sin.to(dtype)


Table = tuple[torch.Tensor, torch.Tensor]


def rotated(query: torch.Tensor, key: torch.Tensor, table: Table) -> tuple[torch.Tensor, torch.Tensor]:
    """query [T, N, H] and key [T, K, H] → both rotated by `table` from `rotary_table`."""
    both: tuple[torch.Tensor, torch.Tensor] = _Rotated.apply(query, key, *table)
    return both


def rotated_heads(joined: torch.Tensor, table: Table) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """joined [T, K, G + 2, H], for each head of keys and values G of queries, the key and the value →
    queries [T, K · G, H] and keys [T, K, H], rotated by `table`, and values [T, K, H], which are a view.
    """
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _RotatedHeads.apply(joined, *table)
    return heads


class _Rotated(torch.autograd.Function):
    """The backward is the rotation by the opposite angle."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        both: tuple[torch.Tensor, torch.Tensor] = _ROTATE(query, key, cos, sin, 1)
        return both

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *_ROTATE(*grads, *ctx.saved_tensors, -1), None, None


class _RotatedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, joined: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(cos, sin)
        query, key, value = joined.split([joined.shape[2] - 2, 1, 1], dim=2)
        return *_ROTATE(query, key.squeeze(2), cos, sin, 1), value.squeeze(2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _ROTATE_JOINED(*grads, *ctx.saved_tensors, -1), None, None


def _rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate each pair (x[i], x[i + n/2]) of the first n of H in queries [T, N, H] or [T, K, G, H] and keys
    [T, K, H], by the opposite angle where the sign is -1. The rest of a head is copied.
    """
    query, key = _even(query), _even(key)
    if takes_kernel(key):
        from ops.kernels import rotation

        return rotation.rotate(query, key, cos, sin, sign)
    query, key = _rotations(query, key, cos, sin, sign)
    return query.flatten(1, -2), key


def _rotate_joined(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    sign: int,
) -> torch.Tensor:
    """Queries [T, N, H] and keys [T, K, H] rotated as `_rotate` does, and values [T, K, H], as one tensor
    [T, K, G + 2, H].
    """
    query, key, value = _even(query), _even(key), _even(value)
    if takes_kernel(key):
        from ops.kernels import rotation

        return rotation.rotate_joined(query, key, value, cos, sin, sign)
    joined = _joined(query, key, value)
    groups = joined.shape[2] - 2
    _turn(query.unflatten(1, (-1, groups)), joined[:, :, :groups], cos.unsqueeze(1), sin.unsqueeze(1), sign)
    _turn(key, joined[:, :, groups], cos, sin, sign)
    joined[:, :, groups + 1] = value
    return joined


def _even(x: torch.Tensor) -> torch.Tensor:
    """Numbers of a head lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _rotations(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int
) -> tuple[torch.Tensor, torch.Tensor]:
    turned = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    more = (cos.unsqueeze(1), sin.unsqueeze(1)) if query.dim() == 4 else (cos, sin)
    _turn(query, turned, *more, sign)
    turned_key = torch.empty(key.shape, dtype=key.dtype, device=key.device)
    _turn(key, turned_key, cos, sin, sign)
    return turned, turned_key


def _turn(x: torch.Tensor, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int) -> None:
    half = cos.shape[-1]
    sizes = [half, half, x.shape[-1] - 2 * half] if x.shape[-1] > 2 * half else half
    low, high, *rest = x.split(sizes, dim=-1)
    out_low, out_high, *out_rest = out.split(sizes, dim=-1)
    if rest:
        out_rest[0].copy_(rest[0])
    torch.mul(low, cos, out=out_low).addcmul_(high, sin, value=-sign)
    torch.mul(high, cos, out=out_high).addcmul_(low, sin, value=sign)


def _turned(query: torch.Tensor, key: torch.Tensor, *angles: Any) -> tuple[torch.Tensor, torch.Tensor]:
    heads = key.shape[1] * query.shape[2] if query.dim() == 4 else query.shape[1]
    return query.new_empty(query.shape[0], heads, query.shape[-1]), key.new_empty(key.shape)


def _joined(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *angles: Any) -> torch.Tensor:
    tokens, kv_heads, size = key.shape
    return key.new_empty(tokens, kv_heads, query.shape[1] // kv_heads + 2, size)


_ROTATE = operator(_rotate, _turned)
_ROTATE_JOINED = operator(_rotate_joined, _joined)

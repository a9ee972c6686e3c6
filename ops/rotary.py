"""Rotary position embedding of packed tokens with explicit positions (Su et al., RoFormer, section 3.4).

Positions are given for each token rather than counted from the start of a tensor, so a shard of a long
sequence, a packed document and a patch of an image (two coordinates) are the same case.

Shapes: T tokens, N heads, H head size, A position axes (1 for text, 2 for images, 3 for both).
"""

import math
from dataclasses import dataclass

import torch


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

"""The embedding of the audio encoder, its work and its module: two convolutions over time.

They are those of Whisper, with a stride of two together, so a token's values are the two frames of the
spectrogram that it stands on. Their three-frame kernels read one frame beyond a token. So that they never
read another recording, an empty token is put before each one; what is packed together then gives the same
rows as alone, with nothing padded to the longest. The frames are the tokens' values and nothing else: no
frame is stored or sent twice.

Positions are sinusoidal and, in attention, rotary.

Shapes: S recordings, T tokens, M mel bands, E width of the encoder.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from omni.models.pieces import linear_weights
from ops.linear import linear_flops
from parallel.work import INDEX, Grad, Load, Weight, Work

if TYPE_CHECKING:
    from parallel.packed import PackedTokens

FRAMES = 2  # of the spectrogram in a token: the stem's stride


@dataclass(frozen=True)
class ConvWork:
    """The work of two convolutions over time, of three frames each, from mel bands to the stream [T, E]."""

    mels: int
    hidden: int
    element: int

    def weights(self) -> tuple[Weight, ...]:
        """Kernels and biases."""
        first = linear_weights(3 * self.mels, self.hidden, self.hidden)
        return (*first, *linear_weights(3 * self.hidden, self.hidden, self.hidden))

    def forward(self, load: Load) -> Work:
        """With an empty token before each recording: frames, the mask of empty tokens, what the convolutions
        put out, the second one's input and where tokens stand are kept, unless they are frozen, and the
        stream.
        """
        flops = linear_flops(FRAMES * load.tokens, 3 * self.mels, self.hidden)
        spaced = load.tokens + load.sequences
        of_spaced = FRAMES * (self.mels + 1 + 2 * self.hidden) + self.hidden
        kept = spaced * of_spaced * self.element + load.tokens * INDEX
        return Work(
            flops=flops + linear_flops(load.tokens, 3 * self.hidden, self.hidden),
            kept=kept * (not load.frozen) + load.tokens * self.hidden * self.element,
        )

    def backward(self, load: Load, grad: Grad) -> Work:
        """Twice the forward, as if frames had gradients too; nothing where they are frozen. It needs
        most where gradients of the second convolution's input are made and masked.
        """
        if grad is Grad.WEIGHT or load.frozen:
            return Work()
        most = (load.tokens + load.sequences) * self.hidden * (1 + 2 * FRAMES) * self.element
        return Work(flops=2 * self.forward(load).flops, workspace=most)


class ConvStem(torch.nn.Module):
    """Two convolutions of three frames each, the second with a stride of `FRAMES`, plus sinusoids."""

    def __init__(self, mels: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.stem_in = torch.nn.Conv1d(mels, hidden, 3, padding=1, dtype=dtype)
        self.stem_out = torch.nn.Conv1d(hidden, hidden, 3, stride=FRAMES, padding=1, dtype=dtype)

    def forward(self, values: torch.Tensor, positions: torch.Tensor, packed: "PackedTokens") -> torch.Tensor:
        """values [T, 2·M], positions [T, 1] → [T, E]."""
        hidden = self.convolved(values, packed.packing.cu_seqlens)
        return hidden + sinusoids(positions[:, 0], hidden.shape[1]).to(hidden.dtype)

    def convolved(self, values: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        """[T, 2·M] of recordings with edges `cu_seqlens` [S+1] → [T, E], computed with an empty token before
        each recording.

        The first convolution's bias and its neighbours fill the empty tokens, so they are emptied again
        before the second: at each edge both read zeros, as their own padding would give them.
        """
        where = spaced(cu_seqlens, len(values))
        size = len(values) + len(cu_seqlens) - 1
        frames = values.new_zeros(size, values.shape[1]).index_copy(0, where, values)
        full = values.new_zeros(size).index_fill(0, where, 1.0).repeat_interleave(FRAMES)
        hidden = F.gelu(self.stem_in(frames.reshape(FRAMES * size, -1).T.unsqueeze(0))) * full
        return F.gelu(self.stem_out(hidden))[0].T.index_select(0, where)


def spaced(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Where each of `tokens` goes, int64 [T], when an empty token is put before each sequence.

    `cu_seqlens` [S+1] holds the edges of the sequences. All on their device: nothing waits for the host.
    """
    index = torch.arange(tokens, device=cu_seqlens.device)
    return index + torch.searchsorted(cu_seqlens.long(), index, right=True)


def sinusoids(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Sines, then cosines, float32 [T, width], of positions [T] (Vaswani et al., 2017, section 3.5)."""
    half = width // 2
    exponent = torch.arange(half, device=positions.device, dtype=torch.float32) / half
    angles = positions.float().unsqueeze(1) * torch.exp(-math.log(10000.0) * exponent)
    return torch.cat([angles.sin(), angles.cos()], dim=1)

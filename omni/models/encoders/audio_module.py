"""The module of the audio encoder: convolutional stem, transformer, merging over time, projector.

The stem (two convolutions over time, as in Whisper) has stride two, so a token's values are the two frames of
the spectrogram it stands on, and the stem runs in here, where its weights are. Its three-frame kernels read
one frame beyond a token. So that they never read another recording, an empty token is put before each one;
what is packed together then gives the same rows as alone, with nothing padded to the longest. The frames are
the tokens' values and nothing else: no frame is stored or sent twice.

Positions are sinusoidal and, in attention, rotary.

Shapes: S recordings, T tokens, M mel bands, E width of the encoder, R rows, D width of the LLM.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F

from omni.models.encoders.audio import FRAMES, AudioConfig
from omni.models.layers import encoder_config, layer_submodules
from ops.norm import Norm
from parallel.megatron import ProcessGroupCollection, TransformerBlock
from parallel.packed import PackedTokens


class AudioTransformer(torch.nn.Module):
    """Frames to rows: convolutional stem, transformer, merging over time, two-layer projector."""

    def __init__(
        self, config: AudioConfig, width: int, dtype: torch.dtype, groups: ProcessGroupCollection
    ) -> None:
        super().__init__()
        self.sizes = config
        self.width = width
        self.dtype = dtype
        self.config = encoder_config(config, dtype, groups.tp.size())
        merged = config.hidden * config.merge
        self.stem_in = torch.nn.Conv1d(config.mels, config.hidden, 3, padding=1, dtype=dtype)
        self.stem_out = torch.nn.Conv1d(
            config.hidden, config.hidden, 3, stride=FRAMES, padding=1, dtype=dtype
        )
        self.block = TransformerBlock(
            self.config,
            layer_submodules(config.layers, config.norm, causal=False),
            post_layer_norm=False,
            pg_collection=groups,
        )
        self.final_norm = Norm(self.config, config.hidden)
        self.projector_in = torch.nn.Linear(merged, merged, dtype=dtype)
        self.projector_out = torch.nn.Linear(merged, width, dtype=dtype)

    def forward(self, values: torch.Tensor, positions: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        """values [T, 2·M], positions [T, 1] of packed recordings → rows [R, D], recording by recording."""
        c = self.sizes
        hidden: Any = self._stem(values.to(self.dtype), packed)
        hidden = hidden + sinusoids(positions[:, 0], c.hidden).to(self.dtype)
        hidden = self.block(hidden.unsqueeze(1), None, packed_seq_params=packed).squeeze(1)
        merged = self.final_norm(hidden).reshape(-1, c.hidden * c.merge)
        rows: torch.Tensor = self.projector_out(F.gelu(self.projector_in(merged)))
        return rows

    def _stem(self, values: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        """[T, 2·M] → [T, E], computed with an empty token before each recording.

        The first convolution's bias and its neighbours fill the empty tokens, so they are emptied again
        before the second: at each edge both read zeros, as their own padding would give them.
        """
        where = spaced(packed.packing.cu_seqlens, len(values))
        size = len(values) + len(packed.packing.lengths)
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

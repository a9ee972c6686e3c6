"""Packed tokens: what encoders and LLM alike see of a microbatch.

Shapes: T tokens, S sequences, A position axes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ops.attention import Packing, make_packing
from ops.rotary import rotary_table
from parallel.megatron import PackedSeqParams


@dataclass
class PackedTokens(PackedSeqParams):
    """Sequences packed one after the other in one token dimension.

    It extends megatron's own descriptor because that is what megatron hands, untouched, from the model's
    input to the attention of each layer. `packing` says where sequences begin and end; `rotary` holds the
    cos and sin of every token's position, so attention never has to guess a position from an index.
    """

    packing: Packing | None = None
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def tokens(self) -> int:
        """Tokens T of the pack."""
        assert self.packing is not None
        return self.packing.tokens


def pack_tokens(
    lengths: Sequence[int],
    positions: torch.Tensor,
    *,
    heads: int,
    head_dim: int,
    rotary_base: float,
    causal: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> PackedTokens:
    """Describe sequences of `lengths` whose tokens stand at integer `positions`, [T] or [T, A]."""
    packing = make_packing(tuple(lengths), causal, heads * head_dim, device, dtype)
    longest = max(packing.lengths, default=0)
    return PackedTokens(
        qkv_format="thd",
        cu_seqlens_q=packing.cu_seqlens,
        cu_seqlens_kv=packing.cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        packing=packing,
        rotary=rotary_table(positions.to(device), head_dim, rotary_base, dtype),
    )

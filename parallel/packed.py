"""Packed tokens: what encoders and LLM alike see of a microbatch.

Shapes: T tokens of this rank, A position axes, H head size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ops.attention import Packing
from ops.delta_shape import DeltaHeads
from ops.kept_attention import KeptAttention
from ops.one_copy import later
from ops.rotary import PLAIN, Scaling, rotary_table
from parallel.megatron import PackedSeqParams
from parallel.memory import Recalled
from parallel.sequence import SequenceLayout
from parallel.sharded_attention import AttentionPlan, plan_attention
from parallel.sharded_delta import DeltaPlan, plan_delta
from parallel.tiles import Tile


@dataclass(frozen=True)
class Sharding:
    """Where the sequences of a pack live, and who attends to which part of those that several ranks share.

    The pack is that of cp rank `rank` of the pool: its shards in order, then `tail` padding tokens. `tp`
    ranks share its layers. `grids` are those of each item whose tokens are a sequence (frames, rows and
    columns of its LLM rows), () of one without: what an encoder computes of them, it computes on the host.
    """

    layout: SequenceLayout
    tiles: tuple[tuple[Tile, ...], ...]
    rank: int = 0
    tail: int = 0
    tp: int = 1
    grids: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def whole(cls, lengths: Sequence[int], tp: int = 1, grids: Sequence[tuple[int, ...]] = ()) -> "Sharding":
        """Sequences that nobody else has a part of."""
        layout = SequenceLayout.whole(lengths, [0] * len(lengths), 1)
        return cls(layout, ((),) * len(lengths), tp=tp, grids=tuple(grids))


@dataclass
class PackedTokens(PackedSeqParams):
    """Sequences, or shards of them, packed one after the other in one token dimension.

    It extends megatron's own descriptor because that is what megatron hands, untouched, from the model's
    input to the attention of each layer. `attention` says how sequences divide the tokens and what is
    exchanged for those that are shared; `rotary` holds the cos and sin of every token's position, so
    attention never has to guess a position from an index. `entering` holds, for one pass, what is added
    to the input of a layer: (tokens [R], rows [R, D]) by the layer's number in the model. `windowed` is
    what layers with a window see instead, where there are any, and `delta` what delta nets need to know.
    `recalled` says what layers kept of its sequences in passes before this one, of generation. All layers are
    computed `anew` for the backward if so, else what the model's configuration says; `kept` is then, for one
    pass, what attention puts out, which is not.
    """

    attention: AttentionPlan | None = None
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
    entering: Mapping[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    windowed: "PackedTokens | None" = None
    delta: DeltaPlan | None = None
    recalled: Recalled | None = None
    anew: bool = False
    kept: KeptAttention | None = None

    @property
    def tokens(self) -> int:
        """Tokens T of the pack."""
        assert self.attention is not None
        return self.attention.tokens

    @property
    def packing(self) -> Packing:
        """How whole sequences divide the tokens; not to be asked where sequences are shared."""
        assert self.attention is not None
        assert self.attention.tiles is None, "some of the sequences are shared among ranks"
        return self.attention.early


def pack_tokens(
    sharding: Sharding,
    positions: torch.Tensor,
    *,
    heads: int,
    head_dim: int,
    rotary_base: float,
    causal: bool,
    dtype: torch.dtype,
    device: torch.device,
    kv_heads: int | None = None,
    window: int | None = None,
    scaling: Scaling = PLAIN,
    delta: DeltaHeads | None = None,
    seen: Sequence[int] = (),
) -> PackedTokens:
    """Describe the tokens of a pack, which stand at integer `positions`, [T] or [T, A], of their sequences.

    `heads` and `kv_heads` (as many unless given) are those of the whole model. A token sees those at most
    `window` tokens away, None for all. `delta` are the heads of delta nets, of the whole model too.
    `seen` are the tokens of each sequence that passes before this one have left keys and values of.
    Tensors are on the host, to be brought to `device` (`ops.one_copy`).
    """
    attention = plan_attention(
        sharding.layout,
        sharding.tiles,
        sharding.rank,
        heads=heads // sharding.tp,
        kv_heads=(kv_heads or heads) // sharding.tp,
        head_dim=head_dim,
        causal=causal,
        window=window,
        tail=sharding.tail,
        seen=seen,
        device=device,
        dtype=dtype,
    )
    # megatron reads these only to see that tokens are packed.
    cu_seqlens = attention.early.cu_seqlens
    longest = max(attention.early.lengths, default=0)
    return PackedTokens(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        attention=attention,
        rotary=later(device, rotary_table, positions, head_dim, rotary_base, dtype, scaling),
        delta=_plan_delta(sharding, delta) if delta is not None else None,
    )


def _plan_delta(sharding: Sharding, heads: DeltaHeads) -> DeltaPlan:
    own = heads.over(sharding.tp)
    return plan_delta(sharding.layout, sharding.tiles, sharding.rank, own, sharding.tail)

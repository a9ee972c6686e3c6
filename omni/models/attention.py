"""Attention over packed tokens, between the linears around it.

Shapes: T tokens, N heads, K key/value heads, G = N / K, H head size.
"""

from functools import partial
from typing import Any

import torch

from ops.rotary import rotated, rotated_heads
from parallel.megatron import (
    IdentityOp,
    MegatronModule,
    ProcessGroupCollection,
    SelfAttention,
    TransformerConfig,
    checkpoint,
)
from parallel.packed import PackedTokens
from parallel.sharded_attention import sharded_attention


class PackedCoreAttention(MegatronModule):
    """Core attention over packed tokens: rotates queries and keys by their own positions, then attends.

    Rotation happens here and not in megatron, which would restart positions at 0 on every shard. Shards of
    shared sequences are exchanged over the pool of the process groups. A `windowed` layer sees the pack as
    `PackedTokens.windowed` says; one that is not `rotated` knows no positions. `sinks`
    [N] are learned, and divided over the tensor-parallel ranks as heads are.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        softmax_scale: float | None = None,
        windowed: bool = False,
        rotated: bool = True,
        sinks: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.windowed, self.rotated = windowed, rotated
        self.pool = getattr(pg_collection, "pool", None)
        self.sinks = None
        if sinks:
            own = config.num_attention_heads // config.tensor_model_parallel_size
            self.sinks = torch.nn.Parameter(torch.zeros(own, dtype=config.params_dtype))
            self.sinks.tensor_model_parallel = True  # type: ignore[attr-defined]
            self.sinks.partition_dim = 0  # type: ignore[attr-defined]

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedTokens | None = None,
    ) -> torch.Tensor:
        """query [T, N, H], key and value [T, K, H] → [T, N·H]. Masks come from the plan of the pack."""
        packed = self._pack(packed_seq_params)
        if packed.rotary is not None and self.rotated:
            query, key = rotated(query, key, packed.rotary)
        return self._attend(query, key, value, packed, packed_seq_params)

    def of_heads(self, heads: torch.Tensor, packed_seq_params: PackedTokens) -> torch.Tensor:
        """heads [T, K, G + 2, H], of each key/value head the queries, the key and the value → [T, N·H]."""
        packed = self._pack(packed_seq_params)
        if packed.rotary is not None and self.rotated:
            query, key, value = rotated_heads(heads, packed.rotary)
        else:
            query, key, value = heads.split([heads.shape[2] - 2, 1, 1], dim=2)
            query, key, value = query.flatten(1, 2), key.squeeze(2), value.squeeze(2)
        return self._attend(query, key, value, packed, packed_seq_params)

    def _pack(self, given: PackedTokens | None) -> PackedTokens:
        """The pack as this layer sees it."""
        assert isinstance(given, PackedTokens), "attention runs on packed tokens only"
        packed = given.windowed if self.windowed else given
        assert packed is not None
        return packed

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        packed: PackedTokens,
        given: PackedTokens | None,
    ) -> torch.Tensor:
        assert packed.attention is not None
        assert given is not None
        if (recalled := given.recalled) is not None:
            key, value = recalled.extend(self, key, value)
        return sharded_attention(
            query, key, value, packed.attention, self.pool, self.scale, self.sinks
        ).flatten(1)


class PackedSelfAttention(SelfAttention):
    """megatron-core's, which takes queries, keys and values to their attention in one tensor unless something
    is done to one of them first.
    """

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        packed_seq_params: PackedTokens,
        **unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[t, 1, D] → the same, and a bias that is still to be added."""
        if self.config.attention_output_gate or not isinstance(self.q_layernorm, IdentityOp):
            found: tuple[torch.Tensor, torch.Tensor | None] = super().forward(
                hidden_states, attention_mask, packed_seq_params=packed_seq_params
            )
            return found
        joined, _ = self.linear_qkv(hidden_states)
        size = self.hidden_size_per_attention_head
        heads = joined.view(len(joined), self.num_query_groups_per_partition, -1, size)
        attend = partial(self.core_attention.of_heads, packed_seq_params=packed_seq_params)
        again = self.checkpoint_core_attention and self.training
        attended = checkpoint(attend, False, heads) if again else attend(heads)
        out, bias = self.linear_proj(attended.unsqueeze(1))
        return out, bias

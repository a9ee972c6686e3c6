"""Attention over packed tokens, between the linears around it.

Shapes: T tokens, N heads, K key/value heads, G = N / K, H head size.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from omni.models.wide_norm import WideNorm
from ops.gates import let_through
from ops.heads import Table, made_heads, rotated, split_heads
from ops.norm import Norm
from parallel.megatron import (
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
        assert isinstance(packed_seq_params, PackedTokens), "attention runs on packed tokens only"
        if (table := self.table(packed_seq_params)) is not None:
            query, key = rotated(query, key, table)
        return self.attend(query, key, value, packed_seq_params)

    def table(self, given: PackedTokens) -> Table | None:
        """What this layer rotates queries and keys by, None if it does not."""
        return self._seen(given).rotary if self.rotated else None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, given: PackedTokens
    ) -> torch.Tensor:
        """As `forward`, of queries and keys that are rotated."""
        plan = self._seen(given).attention
        assert plan is not None
        if (recalled := given.recalled) is not None:
            key, value = recalled.extend(self, key, value)
        inside = nullcontext if given.kept is None else partial(given.kept.of, self)
        own = self.pool, self.scale, self.sinks
        return sharded_attention(query, key, value, plan, *own, inside).flatten(1)

    def _seen(self, given: PackedTokens) -> PackedTokens:
        """The pack as this layer sees it."""
        packed = given.windowed if self.windowed else given
        assert packed is not None
        return packed


class PackedSelfAttention(SelfAttention):
    """megatron-core's modules. What is between its linears takes queries, keys and values out of the tensor
    that the first makes, and is computed anew as a whole where attention is.
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
        joined, _ = self.linear_qkv(hidden_states)
        size = self.hidden_size_per_attention_head
        heads = joined.view(len(joined), self.num_query_groups_per_partition, -1, size)
        attend = partial(self._attend, packed=packed_seq_params)
        again = self.checkpoint_core_attention and self.training
        attended = checkpoint(attend, False, heads) if again else attend(heads)
        out, bias = self.linear_proj(attended.unsqueeze(1))
        return out, bias

    def _attend(self, heads: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        """heads [T, K, G + 2, H] or, with gates, [T, K, 2G + 2, H], as `ops.heads` says → [T, N·H]."""
        core, gated = self.core_attention, self.config.attention_output_gate
        table, norms = core.table(packed), (self.q_layernorm, self.k_layernorm)
        if isinstance(norms[0], WideNorm):
            query, key, value, gate = split_heads(heads, gated)
            query, key = norms[0](query).flatten(1, 2), norms[1](key)
            query, key = (query, key) if table is None else rotated(query, key, table)
        else:
            of_heads = norms if isinstance(norms[0], Norm) else None
            query, key, value, gate = made_heads(heads, table, of_heads, gated)
        attended = core.attend(query, key, value, packed)
        return attended if gate is None else let_through(attended, gate)

"""What a published vision tower of Qwen is, read off its configuration, and which of its tensors is which of
our parameters.
"""

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from math import isqrt, prod

from omni.models.layer_sizes import TransformerEncoderConfig, is_ascending
from omni.models.towers.folder import Tower
from omni.open_models.rules import Rule, Runs

_TABLE = ("Qwen3VLVisionModel", "Qwen3VLMoeVisionModel", "Qwen3_5VisionModel", "Qwen3_5MoeVisionModel")
_WINDOWS = ("Qwen2_5_VisionTransformerPretrainedModel",)
_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "silu": "silu", "quick_gelu": "quick_gelu"}


@dataclass(frozen=True)
class QwenTower:
    """A tower: `shape` are sizes of its layers, `merge` patches a side become a row of `out` numbers. A patch
    has values of `patch_shape` (channels, frames, rows, columns). The table of positions has `table_side` a
    side, 0 without. Layers in `windows` attend within `window_rows` by `window_rows` rows.
    """

    tower: Tower
    shape: TransformerEncoderConfig
    merge: int
    out: int
    patch_shape: tuple[int, int, int, int]
    patch_bias: bool
    table_side: int
    windows: frozenset[int]
    window_rows: int
    activation: str
    norm_eps: float = 1e-6

    @classmethod
    def of(cls, tower: Tower) -> "QwenTower":
        """Read the configuration of a tower.

        Raises:
            ConfigError: for another one than Qwen's, or one that our layers do not compute.
        """
        c, name = tower.config, tower.kind.__name__
        if name not in (*_TABLE, *_WINDOWS):
            raise tower.refused(f"our layers compute {', '.join((*_TABLE, *_WINDOWS))}; try name=grid_tower")
        table, gated = name in _TABLE, name in _WINDOWS
        if c.hidden_act not in _ACTIVATIONS:
            raise tower.refused(f"hidden_act={c.hidden_act} is none of {', '.join(_ACTIVATIONS)}")
        if not all(isinstance(own, int) for own in (c.patch_size, c.temporal_patch_size)):
            raise tower.refused(f"patch_size={c.patch_size}: its patches are no squares")
        taps = [layer + 1 for layer in getattr(c, "deepstack_visual_indexes", None) or ()] if table else []
        if not is_ascending(taps, range(1, c.depth)):
            raise tower.refused(
                f"deepstack_visual_indexes={c.deepstack_visual_indexes}: layers before the last, in order"
            )
        side = isqrt(c.num_position_embeddings) if table else 0
        if table and side**2 != c.num_position_embeddings:
            raise tower.refused(f"num_position_embeddings={c.num_position_embeddings} is no square")
        full = {*c.fullatt_block_indexes} if gated else {*range(c.depth)}
        shape = TransformerEncoderConfig(
            layers=c.depth,
            hidden=c.hidden_size,
            heads=c.num_heads,
            ffn=c.intermediate_size,
            rotary_base=float((c.rope_parameters or {}).get("rope_theta", 10000.0)),
            norm="RMSNorm" if gated else "LayerNorm",
            taps=taps,
            gated=gated,
        )
        return cls(
            tower=tower,
            shape=shape,
            merge=c.spatial_merge_size,
            out=c.out_hidden_size,
            patch_shape=(c.in_channels, c.temporal_patch_size, c.patch_size, c.patch_size),
            patch_bias=table,
            table_side=side,
            windows=frozenset(range(c.depth)) - full,
            window_rows=c.window_size // c.patch_size // c.spatial_merge_size if gated else 0,
            activation=_ACTIVATIONS[c.hidden_act],
        )

    @property
    def values(self) -> int:
        """Numbers of a patch."""
        return prod(self.patch_shape)

    def rules(self) -> tuple[Rule, ...]:
        """The rule of each of our parameters; tensors are named as in the tower alone."""
        return tuple(self._rules())

    def _rules(self) -> Iterator[Rule]:
        c, merged = self.shape, self.shape.hidden * self.merge**2
        yield Rule("patch_linear.weight", ("patch_embed.proj.weight",), (c.hidden,), self.patch_shape)
        if self.patch_bias:
            yield Rule("patch_linear.bias", ("patch_embed.proj.bias",), (c.hidden,))
        if self.table_side:
            rows = (self.table_side**2,)
            yield Rule("position_embedding.weight", ("pos_embed.weight",), rows, c.hidden)
        for layer in range(c.layers):
            yield from self._of_layer(layer)
        names = ("ln_q", "mlp.0", "mlp.2") if c.gated else ("norm", "linear_fc1", "linear_fc2")
        mergers = [("", ("final_norm", "projector_in", "projector_out"), "merger", c.hidden)]
        for tap in range(len(c.taps)):
            ours = ("norm", "linear_in", "linear_out")
            mergers.append((f"tap_projectors.{tap}.", ours, f"deepstack_merger_list.{tap}", merged))
        for under, own, theirs, normed in mergers:
            norm, first, last = zip(
                (under + name for name in own), (f"{theirs}.{n}" for n in names), strict=True
            )
            yield from self._norm(*norm, normed)
            yield from _linear(first[0], (first[1],), (merged,), merged)
            yield from _linear(last[0], (last[1],), (self.out,), merged)

    def _norm(self, ours: str, theirs: str, width: int) -> Iterator[Rule]:
        for part in ("weight", "bias") if self.shape.norm == "LayerNorm" else ("weight",):
            yield Rule(f"{ours}.{part}", (f"{theirs}.{part}",), (width,))

    def _of_layer(self, layer: int) -> Iterator[Rule]:
        c = self.shape
        # A module of layers ends at each tap.
        block = bisect(c.taps, layer)
        number = layer - [0, *c.taps][block]
        ours = f"block.layers.{number}." if not block else f"tapped.{block - 1}.layers.{number}."
        theirs = f"blocks.{layer}."
        yield from self._norm(f"{ours}input_layernorm", f"{theirs}norm1", c.hidden)
        yield from self._norm(f"{ours}pre_mlp_layernorm", f"{theirs}norm2", c.hidden)
        yield from _linear(
            f"{ours}self_attention.linear_qkv",
            (f"{theirs}attn.qkv",),
            (3 * c.hidden,),
            c.hidden,
            order=(_by_heads(c.heads, c.hidden // c.heads),),
        )
        proj = f"{ours}self_attention.linear_proj"
        yield from _linear(proj, (f"{theirs}attn.proj",), (c.hidden,), c.hidden)
        first = ("gate_proj", "up_proj") if c.gated else ("linear_fc1",)
        names = tuple(f"{theirs}mlp.{name}" for name in first)
        yield from _linear(f"{ours}mlp.linear_fc1", names, (c.ffn,) * len(first), c.hidden)
        last = f"{theirs}mlp.{'down_proj' if c.gated else 'linear_fc2'}"
        yield from _linear(f"{ours}mlp.linear_fc2", (last,), (c.hidden,), c.ffn)


def _linear(
    ours: str,
    theirs: tuple[str, ...],
    rows: tuple[int, ...],
    inputs: int,
    order: tuple[Runs, ...] | None = None,
) -> Iterator[Rule]:
    for part, columns in (("weight", inputs), ("bias", None)):
        names = tuple(f"{name}.{part}" for name in theirs)
        yield Rule(f"{ours}.{part}", names, rows, columns, order=order)


def _by_heads(heads: int, size: int) -> Runs:
    """All queries, then all keys, then all values, where ours are head by head."""
    return tuple(((head * 3 + part) * size, size) for part in range(3) for head in range(heads))

"""Transformer layers as one rank holds them: their linears, norms and adapters, and how large tensors are.

Shapes as in `stack.py`.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

from omni.models.adapters import Adapter
from omni.models.layer_sizes import LayerSizes
from omni.models.pieces import Linears, linear_weights, norm_weights, plain
from parallel.tiles import AttentionShape
from parallel.work import Weight

FIRST = ("linear_qkv", "linear_fc1")
"""Linears ahead of each half, whose outputs tensor-parallel ranks divide."""


@dataclass(frozen=True, kw_only=True)
class Layer(LayerSizes):
    """Layers of such sizes as each of `tp` ranks holds them, with `element` bytes a number.

    With `splits_tokens` the ranks divide the tokens between attention and feed-forward as well. Who runs the
    pass of a virtual stage holds what its last layer has put out (`held_output`). The layers are in so many
    `blocks`, whose first ones take in what others keep, too. What the last one puts out is kept as what
    others do if it is a `kept_output`: by what is computed anew behind it. Layers that are computed anew keep
    what kernels of attention put out, and do not run these again, if they have `kept_attention`.
    """

    tp: int
    splits_tokens: bool
    element: int
    held_output: bool = False
    blocks: int = 1
    kept_output: bool = False
    kept_attention: bool = False

    @property
    def divided_inputs(self) -> int:
        """How many of them, and of what is behind them, keep a part of their inputs on each rank
        (`kept_inputs.py`).
        """
        divided = self.divides_inputs(self.tp, self.splits_tokens)
        return max(0, self.layers - self.blocks) + self.kept_output if divided else 0

    @property
    def head_dim(self) -> int:
        """H."""
        return self.head_size or self.hidden // self.heads

    @cached_property
    def keeping(self) -> Self:
        """The same layers where nothing is recomputed."""
        return replace(self, recompute="none")

    @property
    def holds_gradient(self) -> bool:
        """Whether a backward holds the gradient of a layer's output to its end: who computes the layer anew
        does, and who runs the pass holds the output that it stands for.
        """
        return self.held_output or self.recompute == "full"

    @property
    def attends_once(self) -> bool:
        """Whether layers that are computed anew find what attention put out: delta nets have no kernel that
        is kept, and no module computes latent attention.
        """
        return self.kept_attention and self.delta is None and self.latent is None

    @property
    def shape(self) -> AttentionShape:
        """Heads of this rank."""
        return AttentionShape(self.heads // self.tp, self.kv_heads // self.tp, self.causal)

    @property
    def one_norm(self) -> tuple[Weight, ...]:
        """Parameters of one norm."""
        return norm_weights(self.hidden, self.norm, self.splits_tokens)

    def held(self, *weights: Weight) -> tuple[Weight, ...]:
        """Parameters that are no adapter's: where there are adapters, these alone learn."""
        return weights if self.lora is None else tuple(replace(weight, frozen=True) for weight in weights)

    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linears that take adapters, of all ranks together, by name."""
        names = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
        return dict(zip(names, self.attention_linears() + self.feed_forward_linears(self.ffn), strict=True))

    def adapters(self) -> dict[str, Adapter]:
        """Adapters of a layer by the name of their linear."""
        if self.lora is None:
            return {}
        shared = {"rank": self.lora.rank, "tp": self.tp, "element": self.element}
        return {
            name: Adapter(*sides, first=name in FIRST, splits_tokens=self.splits_tokens, **shared)
            for name, sides in self.linears().items()
            if name in self.lora.targets
        }

    def adapter_weights(self, name: str) -> tuple[Weight, ...]:
        """Parameters of the adapter of a linear, none if it has none."""
        own = self.adapters().get(name)
        return own.weights() if own is not None else ()

    def ahead_norm(self) -> tuple[Weight, ...]:
        """Parameters of the norm ahead of one half."""
        return self.one_norm if self.norms != "after" else ()

    def after_norms(self) -> tuple[Weight, ...]:
        """Parameters of the norms of what both halves put out."""
        return self.one_norm * (2 if self.norms != "before" else 0)

    def summed_linear(self, inputs: int, bias: int) -> tuple[Weight, ...]:
        """A linear whose sums are scattered, with a bias that is added to each rank's tokens."""
        biases = (Weight(bias, partial=self.splits_tokens),) if bias else ()
        return (*linear_weights(inputs, self.hidden, 0), *biases)

    def puts_off_gradient(self, later: bool) -> bool:
        """Whether the gradient of the layer's output waits, if those of weights are made `later`: not where
        ranks gather it, nor where a norm or experts alone take it.
        """
        return later and self.ffn > 0 and self.norms == "before" and not self.gathers

    @property
    def gathers(self) -> bool:
        """Whether ranks that divide the tokens gather them ahead of linears."""
        return self.splits_tokens and self.tp > 1

    @property
    def wide_norms(self) -> bool:
        """Whether all heads of queries are normed together, and all of keys."""
        return self.qk_norm_over == "all"

    def between(self, tokens: int) -> int:
        """Return t of T."""
        return tokens // self.tp if self.splits_tokens else tokens

    def stream(self, tokens: int) -> int:
        """Bytes of one tensor between attention and feed-forward."""
        return self.between(tokens) * self.hidden * self.element

    def attention_linears(self) -> Linears:
        """Linears around attention, of all ranks together."""
        if self.latent is not None:
            return self.latent.linears()
        if self.delta is not None:
            return self.delta.linears()
        qkv = self.head_dim * (self.heads * (2 if self.output_gate else 1) + 2 * self.kv_heads)
        return (self.hidden, qkv), (self.head_dim * self.heads, self.hidden)

    def feed_forward_linears(self, ffn: int) -> Linears:
        """Linears of a feed-forward of width `ffn`, of all ranks together."""
        return (self.hidden, ffn * (2 if self.gated else 1)), (ffn, self.hidden)

    def attention_weights(self) -> tuple[Weight, ...]:
        """Parameters of the first half of a layer, in the module's order."""
        if self.latent is not None:
            latent = self.latent.weights(self.tp, len(self.one_norm), self.splits_tokens)
            return (*self.one_norm, *latent)
        if self.delta is not None:
            return (*self.ahead_norm(), *self.delta.weights(self.tp))
        attended = self.heads * self.head_dim // self.tp
        qkv = attended * (2 if self.output_gate else 1) + 2 * self.kv_heads * self.head_dim // self.tp
        # Ranks norm different heads.
        of_heads = norm_weights(self.head_dim, self.norm, self.tp > 1) * (2 * self.qk_norm)
        if self.wide_norms:
            of_heads = plain(attended, self.kv_heads * self.head_dim // self.tp)
        sinks = plain(self.heads // self.tp) if self.sinks else ()
        output = self.summed_linear(attended, self.hidden * (self.bias or self.output_bias))
        return (
            *self.held(*self.ahead_norm(), *sinks, *output),
            *self.adapter_weights("linear_proj"),
            *self.held(*linear_weights(self.hidden, qkv, qkv * (self.bias or self.qkv_bias))),
            *self.adapter_weights("linear_qkv"),
            *self.held(*of_heads),
        )

    def layer_weights(self) -> tuple[Weight, ...]:
        """Parameters of a layer, in the module's order."""
        inner = self.ffn // self.tp
        first = inner * (2 if self.gated else 1)
        return (
            *self.attention_weights(),
            *self.held(*self.ahead_norm(), *linear_weights(self.hidden, first, first * self.bias)),
            *self.adapter_weights("linear_fc1"),
            *self.held(*self.summed_linear(inner, self.hidden * self.bias)),
            *self.adapter_weights("linear_fc2"),
            *self.held(*self.after_norms()),
        )

    def weights(self) -> tuple[Weight, ...]:
        """Parameters of all layers."""
        return self.layer_weights() * self.layers

"""Transformer layers as a block of work: what they weigh, compute, communicate and keep, in integers.

The counts follow the operations one by one: what a layer keeps is the list of tensors that some backward asks
for. They are checked against rehearsals (benchmarks/memory_model.py), so a change of a layer that changes
what it keeps shows there. The collectives follow from Megatron-LM's tensor and sequence parallelism
(Korthikanti et al., 2022, section 4.2.2): in front of a divided linear the tokens of all ranks are gathered,
behind it sums are scattered; the backward does the same the other way round, and gathers once more for the
gradient of the first weight. Where ranks do not divide the tokens, sums are all-reduced.

Shapes, all of one rank: T tokens that attention and feed-forward see, t those between them (T / tp where
ranks share them, else T), D width, F feed-forward, N and K heads of queries and of keys, H head size.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from omni.models.adapters import Adapter
from omni.models.layer_moments import most_in_backward
from omni.models.layer_sizes import LayerSizes
from omni.models.pieces import Linears, exchanges, linear_weights, linears_flops, norm_weights, plain
from ops.attention import attention_bytes, attention_flops
from ops.linear import linear_bytes
from parallel.tiles import AttentionShape
from parallel.work import (
    FP32,
    Attended,
    Collective,
    Grad,
    Load,
    Weight,
    Work,
    all_gather,
    all_reduce,
    merged,
    reduce_scatter,
)

BETWEEN = 10
"""Times that a layer reads or writes the stream between its halves: two norms, and two sums of two."""

FIRST = ("linear_qkv", "linear_fc1")
"""Linears ahead of each half, whose outputs tensor-parallel ranks divide."""


@dataclass(frozen=True, kw_only=True)
class Stack(LayerSizes):
    """Layers of such sizes as each of `tp` ranks holds them, with `element` bytes a number.

    With `splits_tokens` the ranks divide the tokens between attention and feed-forward as well.
    """

    tp: int
    splits_tokens: bool
    element: int

    @classmethod
    def of(cls, sizes: LayerSizes, element: int, tp: int = 1, splits_tokens: bool = False) -> "Stack":
        """Layers of these sizes on one of `tp` ranks."""
        return cls(**vars(sizes), element=element, tp=tp, splits_tokens=splits_tokens)

    @property
    def head_dim(self) -> int:
        """H."""
        return self.head_size or self.hidden // self.heads

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
        return (*plain(inputs * self.hidden), *biases)

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
        if self.qk_norm_over == "all":
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

    def forward(self, load: Load) -> Work:
        """The sum of a divided linear needs a tensor of all tokens before it is scattered."""
        linears = self.attention_linears() + self.feed_forward_linears(self.ffn)
        of_linears = self.layers * linears_flops(linears, load.tokens, self.tp)
        adapters = self.adapters().values()
        of_adapters = self.layers * sum(own.forward_flops(load.tokens) for own in adapters)
        moved = self._layer_bytes(linears, load.tokens) + sum(own.bytes(load.tokens) for own in adapters)
        return Work(
            flops=of_linears + of_adapters + self.attention_flops(load),
            frozen_flops=of_linears if self.lora is not None else 0,
            bytes=self.layers * moved,
            collectives=(
                *self.sums(load.tokens, Grad.BOTH, forward=True, halves=2 * self.layers),
                *self.of_norms(load),
                *self.exchanges(load, forward=True),
            ),
            kept=self.layers * kept_by_layer(self, load.seen, load.frozen),
            workspace=load.tokens * self.hidden * self.element,
            launches=self.layers,
        )

    def backward(self, load: Load, grad: Grad) -> Work:
        """Gradients of inputs take the linears once more and attention twice, as it has no weights; gradients
        of weights take the linears. Layers are recomputed for the former.
        """
        if self.lora is not None:
            return self._adapted_backward(load, grad)
        linears = self.attention_linears() + self.feed_forward_linears(self.ffn)
        of_linears = self.layers * linears_flops(linears, load.tokens, self.tp)
        again = self.recomputation(load, grad)
        once = self.layers * self._layer_bytes(linears, load.tokens)
        inputs, weights = grad is not Grad.WEIGHT, grad is not Grad.INPUT
        return Work(
            flops=again.flops
            + of_linears * (inputs + weights)
            + self.attention_times * self.attention_flops(load) * inputs,
            bytes=again.bytes + once * (inputs + weights),
            collectives=(
                *again.collectives,
                *self.sums(load.tokens, grad, forward=False, halves=2 * self.layers),
                *((*self.of_norms(load), *self.exchanges(load, forward=False)) if inputs else ()),
            ),
            kept=self._kept_for_weights(load) if grad is Grad.INPUT and not load.frozen else 0,
            workspace=layer_workspace(self, load, grad) if inputs else self._largest_weight(linears),
            launches=again.launches + self.layers * (inputs + weights),
        )

    def _adapted_backward(self, load: Load, grad: Grad) -> Work:
        """Gradients of inputs go through frozen linears; those of adapters are made with them."""
        if grad is Grad.WEIGHT:
            return Work()
        frozen = replace(self, lora=None).backward(replace(load, frozen=True), Grad.INPUT)
        adapters, learns = self.adapters().values(), not load.frozen
        sums = [one for own in adapters for one in own.sums(load.tokens, learns)]
        again = self.recompute == "full"
        flops = sum(
            own.backward_flops(load.tokens, learns) + own.forward_flops(load.tokens) * again
            for own in adapters
        )
        moved = sum(own.bytes(load.tokens) for own in adapters) * (1 + learns + again)
        return replace(
            frozen,
            flops=frozen.flops + self.layers * flops,
            bytes=frozen.bytes + self.layers * moved,
            collectives=(
                *frozen.collectives,
                *(replace(one, calls=self.layers) for one in sums),
            ),
            workspace=layer_workspace(self, load, grad),
        )

    def recomputation(self, load: Load, grad: Grad) -> Work:
        """What a backward computes anew before it begins: layers, or their attention."""
        if grad is Grad.WEIGHT or self.recompute == "none":
            return Work()
        if self.recompute == "full":
            return self.forward(load)
        if self.delta is not None:
            return Work()  # its rule is made anew whatever is kept of the rest
        return Work(flops=self.attention_flops(load), collectives=self.exchanges(load, forward=True))

    def of_norms(self, load: Load) -> tuple[Collective, ...]:
        """Sums of squares over all heads of queries and of keys, or of the gradients of these sums."""
        if self.qk_norm_over == "head":
            return ()
        return all_reduce("tp", load.tokens * FP32, self.tp, 2 * self.layers)

    def exchanges(self, load: Load, *, forward: bool) -> tuple[Collective, ...]:
        """Exchanges of shared sequences: layers with a window read less of them, delta nets other heads."""
        if self.delta is not None:
            into, out, into_back, out_back = load.seen.delta or ((),) * 4
            seen = replace(load.seen, into=into, out=out, into_back=into_back, out_back=out_back)
            return exchanges(seen, self.element, self.layers, forward=forward)
        within = load.windowed or load.seen
        full = exchanges(load.seen, self.element, self.layers - self.windowed, forward=forward)
        return (*full, *exchanges(within, self.element, self.windowed, forward=forward))

    @property
    def attention_times(self) -> int:
        """Forwards of attention that its backward is worth; with sinks, another forward and its backward. The
        rule of a delta net is computed anew first.
        """
        if self.delta is not None:
            return 3
        return 5 if self.sinks else 2

    def attention_flops(self, load: Load) -> int:
        """FLOPs of the attention of all layers. With a window, as in sequences that are longer than it: of
        each token so many pairs, however long the sequences are; so it is with a delta net.
        """
        if self.delta is not None:
            return self.layers * self.delta.flops(load.tokens, self.tp)
        shape = self.heads, self.head_dim, self.causal
        full = attention_flops(load.squares, *shape)
        if self.latent is not None:
            full = self.latent.pair_flops() * load.squares // 2
        seen = attention_flops(load.tokens * self.window, self.heads, self.head_dim, causal=False)
        return (self.layers - self.windowed) * (full // self.tp) + self.windowed * (seen // self.tp)

    def sums(self, tokens: int, grad: Grad, *, forward: bool, halves: int) -> tuple[Collective, ...]:
        """Collectives of tensor parallelism in so many halves of layers: attention of all, and feed-forward.

        Ahead of a half a forward gathers what a backward scatters; behind it, the other way round. Gradients
        of weights take what was gathered ahead once more.
        """
        shard = self.stream(tokens)
        if not self.splits_tokens:
            return all_reduce("tp", shard, self.tp, halves) if grad is not Grad.WEIGHT else ()
        compressed = 0 if self.latent is None else self.layers
        narrow = self.between(tokens) * self.element * (self.latent.gathered if self.latent else 0)
        ahead = ((narrow, compressed), (shard, halves - compressed))
        inputs, weights = grad is not Grad.WEIGHT, grad is not Grad.INPUT
        again = ahead if forward or weights else ()
        gathered = (*again, *(((shard, halves),) if inputs and not forward else ()))
        scattered = ((shard, halves),) if forward else ahead if inputs else ()
        return merged(
            (
                *(one for size, calls in gathered for one in all_gather("tp", size, self.tp, calls)),
                *(one for size, calls in scattered for one in reduce_scatter("tp", size, self.tp, calls)),
            )
        )

    def _layer_bytes(self, linears: Linears, tokens: int) -> int:
        between = tokens * (activation_bytes(linears, self) + pointwise_bytes(self, self.ffn)) // self.tp
        return (
            BETWEEN * self.stream(tokens)
            + between
            + sum(linear_bytes(0, i, o, self.element) for i, o in linears) // self.tp
        )

    def _kept_for_weights(self, load: Load) -> int:
        """What a backward for inputs leaves behind: inputs of linears and gradients of their outputs."""
        feed_forward = put_off(self, self.feed_forward_linears(self.ffn), load.tokens)
        return self.layers * (self.put_off_attention(load.tokens) + feed_forward)

    def put_off_attention(self, tokens: int) -> int:
        """Bytes that the linears around attention hold until gradients of their weights are made."""
        if self.latent is not None:
            return self.latent.put_off(tokens, self.between(tokens), self.tp, self.element)
        return put_off(self, self.attention_linears(), tokens)

    def _largest_weight(self, linears: Linears) -> int:
        return max(i * o for i, o in linears) // self.tp * self.element


def put_off(stack: Stack, half: Linears, tokens: int) -> int:
    """Bytes that the two linears of half a layer hold until gradients of their weights are made: the input of
    the first, as ranks divide it, that of the second, and the gradients of both outputs.
    """
    (_, first), (inner, last) = half
    divided = tokens * (first + inner) // stack.tp * stack.element
    return stack.stream(tokens) + divided + tokens * last * stack.element


def activation_bytes(linears: Linears, stack: Stack) -> int:
    """Bytes that a token moves in linears and attention, over all ranks."""
    once = sum((i + o) * stack.element for i, o in linears)
    if stack.latent is not None:
        return once + stack.latent.token_numbers() * stack.element
    if stack.delta is not None:
        return once + stack.delta.token_bytes(stack.element)
    return once + attention_bytes(1, stack.heads, stack.kv_heads, stack.head_dim, stack.element)


def pointwise_bytes(stack: Stack, ffn: int) -> int:
    """Bytes that a token moves, over all ranks, where queries and keys are rotated and a feed-forward of
    width `ffn` is activated: read and written once each.
    """
    rotated = 0 if stack.delta else 2 * (stack.heads + stack.kv_heads) * stack.head_dim
    gated = 3 * stack.heads * stack.head_dim * stack.output_gate
    return (rotated + gated + ffn * (3 if stack.gated else 2)) * stack.element


def kept_by_layer(stack: Stack, seen: Attended, frozen: bool = False) -> int:
    """Bytes that a layer keeps for its backward, its output included and its input not. If it is `frozen`,
    inputs of linears are not among them: what norms put out, what the second linear takes, and what attention
    puts out where it keeps none or its pieces. Where adapters learn, those of their linears are, and what
    they make of them.
    """
    if stack.recompute == "full":
        return stack.stream(seen.tokens)
    own = stack.adapters() if not frozen else {}
    unkept = unkept_inputs(stack, seen, own) if frozen or own else 0
    return (
        kept_between(stack, seen)
        + kept_by_attention(stack, seen)
        + kept_by_feed_forward(stack, seen.tokens)
        + sum(adapter.inner(seen.tokens) for adapter in own.values())
        - unkept
    )


def unkept_inputs(stack: Stack, seen: Attended, learn: Collection[str]) -> int:
    """Bytes of the inputs of frozen linears, by name all but those whose adapters `learn`."""
    attended = stack.heads * stack.head_dim if seen.into or stack.recompute == "selective" else 0
    inputs = {
        "linear_qkv": stack.stream(seen.tokens),
        "linear_proj": seen.tokens * attended // stack.tp * stack.element,
        "linear_fc1": stack.stream(seen.tokens),
        "linear_fc2": seen.tokens * stack.ffn // stack.tp * stack.element,
    }
    return sum(size for name, size in inputs.items() if name not in learn)


def kept_between(stack: Stack, seen: Attended) -> int:
    """Two norms and two sums, and of each norm what it divided by."""
    return 4 * stack.stream(seen.tokens) + 2 * stack.between(seen.tokens) * len(stack.one_norm) * FP32


def kept_by_feed_forward(stack: Stack, tokens: int) -> int:
    """Gated: both halves of the first linear's output, the gate, a copy of the other half, the product."""
    return tokens * stack.ffn // stack.tp * stack.element * (5 if stack.gated else 2)


def kept_by_attention(stack: Stack, seen: Attended) -> int:
    """Queries, keys and values, before and after rotation, outputs, and what softmax divided by."""
    if stack.latent is not None:
        between = stack.between(seen.tokens)
        return stack.latent.kept(seen.tokens, between, stack.tp, stack.element)
    if stack.delta is not None:
        return stack.delta.kept(seen.tokens, stack.tp, stack.element)
    heads, kv_heads, size = stack.heads // stack.tp, stack.kv_heads // stack.tp, stack.head_dim
    qkv = seen.tokens * (heads + 2 * kv_heads) * size
    output = seen.tokens * heads * size
    rotated = seen.tokens * (heads + kv_heads) * size
    # Queries of several groups lie apart from their keys and values, so they are copied together.
    copied = kv_heads > 1 and heads > kv_heads
    norms = seen.tokens * (heads + kv_heads) * FP32 * stack.qk_norm
    if stack.recompute == "selective":
        return (qkv + output + output * copied + rotated * stack.qk_norm) * stack.element + norms
    norms += output * stack.element * copied * stack.qk_norm
    if not seen.into:
        return (qkv + rotated + output) * stack.element + seen.tokens * heads * FP32 + norms
    tiles = 2 * (seen.rows + seen.context) * size * stack.element + seen.rows * FP32
    # Copies of what is attended here. Norms keep what they norm, and all that it is a view of.
    tiles += (seen.local * (heads + 2 * kv_heads) * size + qkv * stack.qk_norm) * stack.element
    local = seen.local * heads * (size * stack.element + FP32)
    return tiles + local + output * stack.element + norms


def layer_workspace(stack: Stack, load: Load, grad: Grad) -> int:
    """Bytes that the backward of a layer needs at most, beside what was kept: with full recomputation, what
    the layer would have kept too.
    """
    frozen = load.frozen or stack.lora is not None
    start = most_in_backward(stack, load.seen, now=grad is Grad.BOTH, frozen=frozen, learns=not load.frozen)
    if stack.delta is not None:
        start = max(start, stack.stream(load.tokens) + stack.delta.workspace(load, stack.tp))
    if stack.recompute != "full":
        return start
    if frozen:
        out, own = stack.stream(load.tokens), stack.adapters() if not load.frozen else {}
        # When the layer has been computed anew: the sum of all tokens, what it is made of, and its shard.
        # What adapters keep is counted there.
        made_of = 0 if "linear_fc2" in own else stack.ffn // stack.tp
        whole = load.tokens * (stack.hidden + made_of) * stack.element
        # Then, with a bias, its shard without and with it, and what the norm put out.
        after = ((3 if stack.bias else 2) + ("linear_fc1" not in own)) * out
        start = max(start, whole + 2 * out, after)
    return start + kept_by_layer(replace(stack, recompute="none"), load.seen, load.frozen)

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

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol, Self

from omni.models.forward_moments import LINEARS, OF_KERNELS, ForwardBytes, Tape, attention_half, layer_forward
from omni.models.layer import Layer
from omni.models.layer_moments import (
    Learning,
    WeightGradient,
    Weights,
    half_products,
    most_in_backward,
    most_of_products,
)
from omni.models.layer_sizes import LayerSizes
from omni.models.pieces import Linears, exchanges, linears_flops
from ops.attention import attention_bytes, attention_flops
from ops.linear import linear_bytes
from parallel.work import (
    FP32,
    Collective,
    Grad,
    Load,
    Work,
    all_gather,
    all_reduce,
    merged,
    reduce_scatter,
)

BETWEEN = 10
"""Times that a pass of a layer reads or writes the stream between its halves, at most: a forward nine times
(a norm, a sum with its norm, a sum), a backward eight, and for gradients of biases.
"""
BEHIND = 4
"""How often more where norms are behind the halves: a backward fourteen times, of four norms."""


@dataclass(frozen=True, kw_only=True)
class Stack(Layer):
    """Layers and what their passes take."""

    @classmethod
    def of(
        cls, sizes: LayerSizes, element: int, tp: int = 1, splits_tokens: bool = False, **more: Any
    ) -> "Stack":
        """Layers of these sizes on one of `tp` ranks."""
        return cls(**vars(sizes), element=element, tp=tp, splits_tokens=splits_tokens, **more)

    def forward(self, load: Load) -> Work:
        """The sum of a divided linear needs a tensor of all tokens before it is scattered."""
        linears = self.attention_linears() + self.feed_forward_linears(self.ffn)
        of_linears = self.layers * linears_flops(linears, load.tokens, self.tp)
        adapters = self.adapters().values()
        of_adapters = self.layers * sum(own.forward_flops(load.tokens) for own in adapters)
        moved = self._layer_bytes(linears, load.tokens) + sum(own.bytes(load.tokens) for own in adapters)
        alone = self._made(load, graph=False, lasting=())
        made = self.made(load)
        last = 0 if made.keeps_stream else self.stream(load.tokens)
        return Work(
            flops=of_linears + of_adapters + self.attention_flops(load),
            frozen_flops=of_linears if self.lora is not None else 0,
            bytes=self.layers * moved,
            collectives=(
                *self.sums(load.tokens, Grad.BOTH, forward=True, halves=2 * self.layers),
                *self.of_norms(load),
                *self.exchanges(load, forward=True),
            ),
            kept=self.layers * made.kept + last - self.divided_inputs * self.elsewhere(load),
            workspace=made.most - made.kept + self.made_whole(load),
            passing=self.stream(load.tokens) * (1 + (self.layers > 1)) + alone.most,
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
            kept=self.layers * put_off(self, load, grad),
            workspace=over_layers(self, load, grad) if inputs else most_of_products(self.products(load)),
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
            workspace=over_layers(self, load, grad),
        )

    def recomputation(self, load: Load, grad: Grad) -> Work:
        """What a backward computes anew before it begins: layers, or their attention."""
        if grad is Grad.WEIGHT or self.recompute == "none":
            return Work()
        if self.recompute == "full":
            again = self.without_kept(self.forward(load), load)
            shard = self.stream(load.tokens) - self.elsewhere(load)
            inputs = all_gather("tp", shard, self.tp, self.divided_inputs)
            return replace(again, collectives=merged((*again.collectives, *inputs)))
        if self.delta is not None:
            return Work()  # its rule is made anew whatever is kept of the rest
        collectives = (*self.of_norms(load), *self.exchanges(load, forward=True))
        return Work(flops=self.attention_flops(load), collectives=collectives)

    def without_kept(self, again: Work, load: Load) -> Work:
        """What is computed anew but for attention, where what that puts out is kept."""
        if not self.attends_once:
            return again
        moved = attention_bytes(load.tokens, self.heads, self.kv_heads, self.head_dim, self.element)
        return replace(
            again,
            flops=again.flops - self.attention_flops(load),
            bytes=again.bytes - self.layers * moved // self.tp,
        )

    def of_norms(self, load: Load) -> tuple[Collective, ...]:
        """Sums of squares over all heads of queries and of keys, or of the gradients of these sums."""
        if not self.wide_norms:
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
            self.between_bytes(tokens)
            + between
            + sum(linear_bytes(0, i, o, self.element) for i, o in linears) // self.tp
        )

    def between_bytes(self, tokens: int) -> int:
        """Bytes that a pass of a layer moves between its halves."""
        return (BETWEEN + BEHIND * (self.norms != "before")) * self.stream(tokens)

    def products(self, load: Load) -> list[WeightGradient]:
        """Gradients of a layer's weights that are put off, in the order in which they are made: none where
        adapters alone learn.
        """
        if self.lora is not None:
            return []
        feed_forward = half_products(self, self.feed_forward_linears(self.ffn), load.tokens)
        return [*feed_forward, *self.attention_products(load.tokens)]

    def attention_products(self, tokens: int) -> list[WeightGradient]:
        """Those of the linears around attention."""
        linears = self.attention_linears()
        if self.latent is None:
            return list(half_products(self, linears, tokens))
        largest = max(i * o for i, o in linears) // self.tp * self.element
        gone = self.latent.put_off(tokens, self.between(tokens), self.tp, self.element)
        return [WeightGradient(largest, gone)]

    def elsewhere(self, load: Load) -> int:
        """Bytes of a layer's input that other ranks keep, if it is divided."""
        stream = self.stream(load.tokens)
        return stream - stream // self.tp if self.divided_inputs else 0

    def attended(self, load: Load) -> int:
        """Bytes of what kernels of attention put out that a layer which is computed anew keeps."""
        attention_half(self, load.seen, tape := self.tape(load, graph=False))
        return tape.of(*tape.lasting)

    def made_whole(self, load: Load) -> int:
        """Bytes that a rank has of divided tensors beside its parts while the last layer runs: of its input
        and, in a forward, of its output, or else of the gradient in the place of that.
        """
        return self.elsewhere(load) * ((self.layers > self.blocks) + self.kept_output)

    def layer_kept(self, load: Load) -> int:
        """Bytes that a layer keeps for its backward, its output included and its input not."""
        return self.made(load).kept

    def made(self, load: Load) -> ForwardBytes:
        """What the forward of a layer makes, with a graph for its backward if it is not computed anew."""
        return self._made(load, graph=self.recompute != "full", lasting=self._lasting(load))

    def _made(self, load: Load, *, graph: bool, lasting: tuple[str, ...]) -> ForwardBytes:
        return layer_forward(self._alike, load.seen, graph, self._learn(load), lasting)

    @cached_property
    def _alike(self) -> Self:
        """One layer, wherever it is."""
        return replace(self, layers=1, blocks=1, held_output=False, kept_output=False)

    def keeps_stream(self, load: Load) -> bool:
        """Whether each layer keeps what it takes in."""
        return self.made(load).keeps_stream

    def tape(self, load: Load, *, graph: bool) -> Tape:
        """An empty tape of a layer's forward."""
        return Tape(graph, self._learn(load), self._lasting(load))

    def _learn(self, load: Load) -> tuple[str, ...]:
        """The linears whose inputs are kept: where adapters learn, theirs alone, where nothing does none."""
        return () if load.frozen else tuple(LINEARS if self.lora is None else self.adapters())

    def _lasting(self, load: Load) -> tuple[str, ...]:
        """What attention puts out that is kept in any case."""
        of_kernels = OF_KERNELS if load.seen.into else ("attended", "sums")
        return of_kernels if self.attends_once else ()

    def layer_workspace(self, load: Load, grad: Grad) -> int:
        """Bytes that a layer's backward needs at most, beside what was kept and the gradient of its output:
        with full recomputation, what the layer would have kept too.
        """
        frozen = load.frozen or self.lora is not None
        learning = Learning(Weights.of(grad, frozen), {} if load.frozen else self.adapters())
        start = most_in_backward(self, load.seen, learning)
        if self.delta is not None:
            start = max(start, self.delta.workspace(load, self.tp))
        if self.recompute != "full":
            return start
        again = self.keeping.made(load)
        output = 0 if again.keeps_stream else self.stream(load.tokens)
        return max(start + again.kept + output, again.most) + self.made_whole(load)


class Layers(Protocol):
    """Layers that are alike."""

    @property
    def layers(self) -> int:
        """How many."""
        ...

    def layer_kept(self, load: Load) -> int:
        """What a forward keeps in each."""
        ...

    def layer_workspace(self, load: Load, grad: Grad) -> int:
        """What a backward needs in each."""
        ...

    def products(self, load: Load) -> list[WeightGradient]:
        """What it puts off in each."""
        ...


def over_layers(layers: Layers, load: Load, grad: Grad) -> int:
    """Bytes that a backward needs at most in any of the layers, beside what all of them have kept: the first
    to run, or, where they put off more than they had kept, the last.
    """
    off = put_off(layers, load, grad)
    more = max(0, off - layers.layer_kept(load)) * (layers.layers - 1) if off else 0
    return layers.layer_workspace(load, grad) + more


def put_off(layers: Layers, load: Load, grad: Grad) -> int:
    """Bytes that a backward leaves in each layer for gradients of weights, until these are made."""
    if grad is not Grad.INPUT or load.frozen:
        return 0
    return sum(product.gone for product in layers.products(load))


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

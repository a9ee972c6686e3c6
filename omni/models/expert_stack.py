"""Transformer layers with experts as a block of work: megatron-core's MoELayer, under even routing.

Each expert gets the same number of a rank's tokens, the first ones one more where they do not divide; runs
whose routing is uneven send and keep more on the ranks of busy experts. Attention is that of `Stack`.

Shapes, all of one rank: T tokens that attention sees and t = T / tp of them between halves, E experts of
which each token takes k, P = t · k rows that it sends to experts and Q that its own experts get, D width, F
width of an expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from omni.models.expert_moments import (
    Routed,
    most_in_backward,
    most_in_forward,
    products,
)
from omni.models.forward_moments import Tape, attention_half, expert_half
from omni.models.layer_moments import WeightGradient, Weights, half_products, most_of_products
from omni.models.pieces import Linears
from omni.models.stack import (
    Stack,
    activation_bytes,
    over_layers,
    pointwise_bytes,
    put_off,
)
from ops.linear import linear_flops
from parallel.tiles import AttentionShape
from parallel.work import (
    FP32,
    INDEX,
    Collective,
    Grad,
    Load,
    Weight,
    Work,
    all_gather,
    all_to_all,
)

COUNT = 4  # bytes of how many rows an expert gets
_COPIES = 5  # times that a row is read or written on its way to an expert and back


@dataclass(frozen=True)
class ExpertStack:
    """Layers whose feed-forward is a router over `experts` of width `ffn`, of which a token takes `topk`, and
    a shared expert of width `dense.ffn`, 0 for none. `ep` ranks divide the experts. Scores are `sigmoid` of
    all experts, or softmax of the chosen ones.
    """

    dense: Stack
    experts: int
    topk: int
    ffn: int
    ep: int
    sigmoid: bool
    shared_gate: bool = False

    @property
    def layers(self) -> int:
        """Layers."""
        return self.dense.layers

    @property
    def hidden(self) -> int:
        """D."""
        return self.dense.hidden

    @property
    def shape(self) -> AttentionShape:
        """Heads of this rank."""
        return self.dense.shape

    @property
    def window(self) -> int:
        """Tokens that a token sees in `windowed` of the layers."""
        return self.dense.window

    @property
    def windowed(self) -> int:
        """Layers with a window."""
        return self.dense.windowed

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.dense.head_dim

    @property
    def element(self) -> int:
        """Bytes of a number."""
        return self.dense.element

    @property
    def tp(self) -> int:
        """Ranks that share attention and the shared expert."""
        return self.dense.tp

    @property
    def local(self) -> int:
        """Experts of this rank."""
        return self.experts // self.ep

    def stream(self, tokens: int) -> int:
        """Bytes of one tensor between attention and feed-forward."""
        return self.dense.stream(tokens)

    def layer_weights(self) -> tuple[Weight, ...]:
        """Parameters of a layer, in the module's order: attention, router, experts, shared expert."""
        dense = self.dense
        routed = (self.experts * dense.hidden, *((self.experts,) if dense.bias else ()))
        router = tuple(Weight(count, partial=dense.splits_tokens) for count in routed)
        experts = tuple(
            Weight(self.local * count, experts=self.local)
            for i, o in dense.feed_forward_linears(self.ffn)
            for count in (i * o, *((o,) if dense.bias else ()))
        )
        gate = (Weight(dense.hidden, partial=dense.splits_tokens),) if self.shared_gate else ()
        shared = (*gate, *(Weight(i * o // dense.tp, matrix=True) for i, o in self._shared()))
        ahead = (*dense.attention_weights(), *dense.ahead_norm())
        return (*ahead, *router, *experts, *shared, *dense.after_norms())

    def weights(self) -> tuple[Weight, ...]:
        """Parameters of all layers."""
        return self.layer_weights() * self.layers

    def forward(self, load: Load) -> Work:
        """The sums of divided linears need a tensor of all tokens, and so do rows on their way."""
        sums, out = load.tokens * self.dense.hidden * self.element, self.stream(load.tokens)
        recompute, kept = self.dense.recompute, self.layer_kept(load)
        on_their_way = self._on_their_way(load, graph=recompute != "full")
        made = self._made(load, recompute)
        alone = replace(self, dense=replace(self.dense, kept_attention=False))._made(load, "full")
        return Work(
            flops=self.layers * self._linears_flops(load.tokens) + self.dense.attention_flops(load),
            bytes=self.layers * self._layer_bytes(load.tokens),
            collectives=(
                *self.dense.sums(load.tokens, Grad.BOTH, forward=True, halves=self._halves),
                *self.dense.of_norms(load),
                *self.dense.exchanges(load, forward=True),
                *self._routed(load, forward=True),
            ),
            kept=self.layers * kept + out * (not self.dense.keeps_stream(load)),
            workspace=max(sums, on_their_way, made.most - kept),
            passing=out * (1 + (self.layers > 1))
            + max(alone.most, self._on_their_way(load, graph=False) + out),
            launches=self.layers,
            dispatches=self.layers,
        )

    def backward(self, load: Load, grad: Grad) -> Work:
        """As for dense layers; what is sent to experts and back goes the other way round."""
        router = linear_flops(load.tokens, self.dense.hidden, self.experts) // self.tp
        of_linears = self._linears_flops(load.tokens)
        of_weights = self.layers * (of_linears - router)
        of_attention = self.dense.attention_times * self.dense.attention_flops(load)
        both = 2 * self.layers * of_linears + of_attention
        halves = {Grad.BOTH: both, Grad.INPUT: both - of_weights, Grad.WEIGHT: of_weights}
        again = self.recomputation(load, grad)
        once = self.layers * self._layer_bytes(load.tokens)
        inputs, weights = grad is not Grad.WEIGHT, grad is not Grad.INPUT
        back = (*self.dense.of_norms(load), *self.dense.exchanges(load, forward=False))
        return Work(
            flops=again.flops + halves[grad],
            bytes=again.bytes + once * (inputs + weights),
            collectives=(
                *again.collectives,
                *self.dense.sums(load.tokens, grad, forward=False, halves=self._halves),
                *((*back, *self._routed(load, forward=False)) if inputs else ()),
            ),
            kept=self.layers * put_off(self, load, grad),
            workspace=over_layers(self, load, grad) if inputs else most_of_products(self.products(load)),
            launches=again.launches + self.layers * (inputs + weights),
            dispatches=again.dispatches + self.layers * (inputs + weights),
        )

    def recomputation(self, load: Load, grad: Grad) -> Work:
        """What a backward computes anew before it begins: layers, or their attention."""
        if self.dense.recompute == "full" and grad is not Grad.WEIGHT:
            return self.dense.without_kept(self.forward(load), load)
        return self.dense.recomputation(load, grad)

    # FLOPs and bytes.

    def _shared(self) -> Linears:
        return self.dense.feed_forward_linears(self.dense.ffn) if self.dense.ffn else ()

    def _active(self) -> Linears:
        """Linears that a token goes through: wherever experts are, with balanced ones a rank computes for
        others as much as others compute for it.
        """
        router: Linears = ((self.dense.hidden, self.experts),)
        chosen = self.dense.feed_forward_linears(self.ffn) * self.topk
        return (*self.dense.attention_linears(), *self._shared(), *router, *chosen)

    def _linears_flops(self, tokens: int) -> int:
        return sum(linear_flops(tokens, i, o) for i, o in self._active()) // self.tp

    def _layer_bytes(self, tokens: int) -> int:
        """A pass reads the weights of all experts that the rank holds. The rows of a token are copied into
        the order of experts, sent, and put together again.
        """
        dense = self.dense
        rows = self.topk * (_COPIES * dense.hidden + 3 * self.ffn) * self.element
        moved = activation_bytes(self._active(), dense) + pointwise_bytes(dense, dense.ffn) + rows
        divided = (*dense.attention_linears(), *self._shared())
        whole = ((dense.hidden, self.experts), *dense.feed_forward_linears(self.ffn) * self.local)
        weights = sum(i * o for i, o in divided) // self.tp + sum(i * o for i, o in whole)
        return dense.between_bytes(tokens) + tokens * moved // self.tp + weights * self.element

    # Tokens to experts and back.

    @property
    def _halves(self) -> int:
        """Halves of layers that are divided over tp: attention, and a shared expert."""
        return self.layers * (2 if self.dense.ffn else 1)

    def _senders(self, load: Load) -> Sequence[int]:
        """Tokens that each rank of the group routes; as many as this one unless the load says otherwise."""
        return load.routed or (self.dense.between(load.tokens),) * self.ep

    def _sent(self, tokens: int, to: int) -> int:
        """Rows that a rank with so many tokens sends to member `to`: a share for each of its experts."""
        share, rest = divmod(tokens * self.topk, self.experts)
        first = to * self.local
        return share * self.local + max(0, min(first + self.local, rest) - first)

    def _received(self, load: Load) -> int:
        """Q."""
        return sum(self._sent(tokens, load.router) for tokens in self._senders(load))

    def _routed(self, load: Load, *, forward: bool) -> tuple[Collective, ...]:
        """All-to-alls over ep: rows and their probabilities to experts, rows back; counts before that."""
        senders = self._senders(load)
        row = self.dense.hidden * self.element
        out = self._apart(load, [self._sent(senders[load.router], to) for to in range(self.ep)])
        back = self._apart(load, [self._sent(tokens, load.router) for tokens in senders])
        counts = all_gather("ep", self.experts * COUNT, self.ep, self.layers) if forward else ()
        weighed = out if forward else back  # the way of the probabilities, or of their gradients
        return (
            *counts,
            *all_to_all("ep", [rows * row for rows in out], self.layers),
            *all_to_all("ep", [rows * FP32 for rows in weighed], self.layers),
            *all_to_all("ep", [rows * row for rows in back], self.layers),
        )

    def _apart(self, load: Load, rows: Sequence[int]) -> list[int]:
        return [0 if to == load.router else count for to, count in enumerate(rows)]

    # Memory.

    def _kept(self, load: Load, recompute: str) -> int:
        """Bytes that a layer keeps for its backward, its output included and its input not."""
        if recompute == "full":
            return self.stream(load.tokens) + self.dense.attended(load)
        return self._made(load, recompute).now + self.kept_by_router_and_experts(load)

    def kept_by_router_and_experts(self, load: Load) -> int:
        """Frozen experts keep no inputs of linears; the router keeps its own."""
        inputs = self._received(load) * (self.dense.hidden + self.ffn) * self.element * load.frozen
        router = self._kept_by_router(self.dense.between(load.tokens))
        return router + self._kept_by_experts(self._received(load)) - inputs

    def _made(self, load: Load, recompute: str) -> Tape:
        """What the forward of a layer makes beside its router and its experts."""
        dense = replace(self.dense, recompute=recompute)
        tape = dense.tape(load, graph=recompute != "full")
        attention_half(dense, load.seen, tape)
        expert_half(dense, load.tokens, tape)
        return tape

    def _kept_by_router(self, tokens: int) -> int:
        """Scores and choices and, of several, their weights and what sigmoids are divided by; in front of the
        experts, the tokens of rows and their places.
        """
        scores = self.experts * FP32 if self.sigmoid or self.topk == 1 else 0
        chosen = self.topk * INDEX + (self.topk + self.sigmoid) * FP32 * (self.topk > 1)
        permuted = 2 * self.topk * INDEX
        return tokens * (scores + chosen + permuted)

    def _kept_by_experts(self, rows: int) -> int:
        """Rows, probabilities and, of each, what the first linear puts out, the product, and that weighed."""
        kept = 4 if self.dense.gated else 3
        return rows * (self.dense.hidden * self.element + FP32 + kept * self.ffn * self.element)

    def layer_kept(self, load: Load) -> int:
        """Bytes that a layer keeps for its backward, its output included and its input not."""
        return self._kept(load, self.dense.recompute)

    def layer_workspace(self, load: Load, grad: Grad) -> int:
        """Bytes that a layer's backward needs at most, beside what was kept and the gradient of its output:
        with full recomputation, what the layer would have kept too, while it is computed anew or after.
        """
        kept, weights = self.kept_by_router_and_experts(load), Weights.of(grad, load.frozen)
        most = most_in_backward(self.dense, load.seen, self.rows(load), kept, weights)
        if self.dense.delta is not None:
            most = max(most, self.dense.delta.workspace(load, self.tp))
        if self.dense.recompute != "full":
            return most
        again = max(most, self._on_their_way(load, graph=True)) + self._kept(load, "none")
        return max(again, self._made(load, "none").most)

    def products(self, load: Load) -> list[WeightGradient]:
        """Gradients of a layer's weights that are put off, in the order in which they are made."""
        dense, shared = self.dense, self._shared()
        of_shared = half_products(dense, shared, load.tokens) if shared else ()
        return [*products(dense, self.rows(load)), *of_shared, *dense.attention_products(load.tokens)]

    def _on_their_way(self, load: Load, *, graph: bool) -> int:
        return most_in_forward(self.dense, self.rows(load), graph=graph, inputs=graph and not load.frozen)

    def rows(self, load: Load) -> Routed:
        """Rows on their way through a layer."""
        own = self._senders(load)[load.router]
        sent = own * self.topk * (self.ep > 1)
        return Routed(own, self.experts, self.ffn, sent, self._received(load), self.local)

"""A part whose statement is plain numbers, for tests of what is read off statements."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from parallel.buckets import reduction
from parallel.tiles import AttentionShape
from parallel.work import FP32, Collective, Grad, Load, Weight, Work, all_gather, reduce_scatter


@dataclass(frozen=True)
class Stated:
    """FLOPs for each token and each unit of squared lengths, bytes for each token and once a pass; in front
    of it tokens of `token_bytes` are gathered over tp, behind it sums are scattered. If `all_anew`, passes
    may be computed anew in all.
    """

    token_flops: int
    square_flops: int
    moved: int = 0
    weight_bytes: int = 0
    recomputed: bool = False
    attention_again: bool = False
    all_anew: bool = False
    tp: int = 1
    token_bytes: int = 0
    ep: int = 0
    layers: int = 0
    by_layer: bool = False
    element: int = 4
    head_dim: int = 8
    window: None = None
    delta: None = None
    shape: AttentionShape = field(default_factory=lambda: AttentionShape(1, 1))

    def weights(self) -> tuple[Weight, ...]:
        return (Weight(1280), Weight(128, partial=True), Weight(256, tied=True), Weight(512, experts=1))

    def forward(self, load: Load) -> Work:
        flops = self.token_flops * load.tokens + self.square_flops * load.squares
        shard = load.tokens // self.tp * self.token_bytes
        sums = (*all_gather("tp", shard, self.tp), *reduce_scatter("tp", shard, self.tp))
        kept = load.tokens if load.anew and self.all_anew else 3 * load.tokens
        return Work(flops, self.moved * load.tokens + self.weight_bytes, sums, kept=kept)

    def backward(self, load: Load, grad: Grad) -> Work:
        forward, shard = self.forward(load), load.tokens // self.tp * self.token_bytes
        of_weights = self.token_flops * load.tokens
        if grad is Grad.WEIGHT:
            return Work(of_weights, collectives=all_gather("tp", shard, self.tp))
        times = 3 if self.recomputed or (load.anew and self.all_anew) else 2
        again = self.square_flops * load.squares * self.attention_again
        sums = forward.collectives * (times - 1)
        both = (*sums, *all_gather("tp", shard, self.tp))
        if grad is Grad.BOTH:
            return Work(times * forward.flops + again, collectives=both)
        return Work(times * forward.flops + again - of_weights, collectives=sums, kept=load.tokens)

    def input_bytes(self, load: Load) -> int:
        return 0

    def shared_bytes(self, load: Load) -> int:
        return 0

    def gathered_bytes(self, load: Load) -> int:
        return 0

    def reduction(self, ranks: Mapping[str, int], sent: int = FP32) -> tuple[Collective, ...]:
        return reduction(self.weights(), ranks, self.element, sent)

"""The parts of a model on one rank, in numbers: a stage of the LLM, an encoder, and how weights are laid out.

All sizes are bytes unless they are called elements.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from omni.config import LLMConfig
from omni.models.encoders.vit import ViTConfig
from omni.rehearsal.sizes import FP32, Attended, Stack, kept_by_layer, layer_workspace, linear_weights

INDEX = 8  # bytes


@dataclass(frozen=True)
class StagePart:
    """One stage of the LLM on one rank, with `vocabulary` ids in all."""

    stack: Stack
    vocabulary: int
    first: bool
    last: bool
    tied: bool
    loss_chunk: int

    @property
    def _ids(self) -> int:
        """Ids of this rank's share of the vocabulary."""
        return self.vocabulary // self.stack.tp

    def weights(self) -> tuple[int, ...]:
        """Elements of each parameter, in the module's order."""
        table = (self._ids * self.stack.hidden,)
        return (
            *(table if self.first else ()),
            *(self.stack.layer_weights() * self.stack.layers),
            *(self.stack.norm_weights + self.output() if self.last else ()),
        )

    def output(self) -> tuple[int, ...]:
        """Elements of the output layer; a single stage with a tied one has none."""
        return () if self.tied and self.first else (self._ids * self.stack.hidden,)

    def reduced_alone(self) -> int | None:
        """Which parameter's gradients are reduced by themselves: the embedding of a tied model, at both ends
        of the pipeline.
        """
        if not self.tied or not (self.first or self.last) or (self.first and self.last):
            return None
        return 0 if self.first else len(self.weights()) - 1

    def kept(self, seen: Attended, targets: int) -> int:
        """Bytes that a forward pass keeps, beside what it received; `targets` positions give losses."""
        stack, between = self.stack, self.stack.between(seen.tokens)
        kept = stack.layers * kept_by_layer(stack, seen)
        if self.first:
            kept += between * stack.hidden * stack.element
            kept += seen.tokens * (INDEX + 1) if stack.tp > 1 else 0  # ids of this rank's share, and which
        if self.last:
            kept += between * len(stack.norm_weights) * FP32 + self._kept_for_losses(targets)
        return kept

    def _kept_for_losses(self, targets: int) -> int:
        """Bytes that losses keep: gathered hidden states, and probabilities if they are not made anew."""
        hidden = targets * self.stack.hidden * self.stack.element
        return hidden + (self._probabilities(targets) + targets * (INDEX + 1)) * (targets <= self.loss_chunk)

    def forward_workspace(self, seen: Attended, targets: int) -> int:
        """Bytes that a forward pass needs at most beside what it keeps: for losses, or for a divided sum."""
        sums = seen.tokens * self.stack.hidden * self.stack.element
        kept = self._probabilities(targets) if targets <= self.loss_chunk else 0
        return max(self._losses(targets) - kept, sums) if self.last else sums

    def backward_workspace(self, seen: Attended, targets: int) -> int:
        """Bytes that a backward pass needs at most while everything is still kept."""
        needed = layer_workspace(self.stack, seen)
        if not self.last:
            return needed
        weight = self._ids * self.stack.hidden * self.stack.element
        if targets <= self.loss_chunk:
            # Two gradients in fp32 before the logits' own, and then that of the weight.
            losses = max(2 * self._probabilities(targets), self._logits(targets) + weight)
        else:
            # The last chunk is computed anew while the gradients of the others and of the weight wait.
            done = (targets - self.loss_chunk) * self.stack.hidden * self.stack.element
            losses = self._losses(targets) + weight + done
        return max(needed - self._kept_for_losses(targets), losses)

    def _logits(self, targets: int) -> int:
        return min(targets, self.loss_chunk) * self._ids * self.stack.element

    def _probabilities(self, targets: int) -> int:
        return min(targets, self.loss_chunk) * self._ids * FP32

    def _losses(self, targets: int) -> int:
        """The losses of a chunk: logits, the same in fp32, less the largest (where ranks share them),
        and probabilities.
        """
        copies = 2 + (self.stack.tp > 1)
        own = self._logits(targets) if self.stack.element < FP32 else 0
        return own + copies * self._probabilities(targets)

    def last_workspace(self, seen: Attended) -> int:
        """Bytes that the end of a backward pass needs, when all layers are done: the embedding's gradient."""
        if not self.first:
            return 0
        return (2 * seen.tokens + self._ids) * self.stack.hidden * self.stack.element

    def input_bytes(self, seen: Attended, targets: int) -> int:
        """Bytes of a microbatch's input tensors: rotation, ids, and what each target needs."""
        rotary = seen.tokens * self.stack.head_dim * self.stack.element
        ids = seen.tokens * INDEX * self.first
        return rotary + ids + (targets * (3 * INDEX + FP32) + targets // self.stack.tp * INDEX) * self.last


def stage_part(
    config: LLMConfig, vocabulary: int, layers: Sequence[int], stage: int, tp: int, element: int
) -> StagePart:
    """Describe stage number `stage` of a dense LLM whose stages have so many `layers` each."""
    return StagePart(
        Stack(
            layers=layers[stage],
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            ffn=config.ffn,
            gated=True,
            causal=True,
            bias=False,
            qkv_bias=config.qkv_bias,
            layer_norm=config.norm == "LayerNorm",
            recompute=config.recompute,
            tp=tp,
            splits_tokens=tp > 1,
            element=element,
        ),
        vocabulary=vocabulary,
        first=stage == 0,
        last=stage == len(layers) - 1,
        tied=config.tied,
        loss_chunk=config.loss_chunk,
    )


@dataclass(frozen=True)
class ViTPart:
    """The image encoder on one rank, in front of an LLM of `width`."""

    stack: Stack
    config: ViTConfig
    width: int

    def weights(self) -> tuple[int, ...]:
        """Elements of each parameter, in the module's order."""
        c = self.config
        merged = c.hidden * c.merge**2
        projector = (*linear_weights(merged, merged, merged), *linear_weights(merged, self.width, self.width))
        return (
            *linear_weights(c.patch**2 * c.channels, c.hidden, c.hidden),
            *(c.max_side * c.hidden,) * 2,
            *(self.stack.layer_weights() * c.layers),
            *(self.stack.norm_weights + projector) * (1 + len(c.taps)),
        )

    def kept(self, seen: Attended, rows: int) -> int:
        """Bytes that a chunk keeps until its backward; `rows` are what this rank passes on."""
        c, element = self.config, self.stack.element
        stream = seen.tokens * c.hidden * element
        values = seen.tokens * c.patch**2 * c.channels * element * (element != FP32)
        # What each projector normalises, its first linear puts out, and the activation.
        projectors = (1 + len(c.taps)) * (3 * stream + seen.tokens * len(self.stack.norm_weights) * FP32)
        layers = c.layers * kept_by_layer(self.stack, seen)
        return values + stream + layers + projectors + rows * self.width * element

    def backward_workspace(self, seen: Attended) -> int:
        """Bytes that the backward of a chunk needs at most."""
        merged = self.config.hidden * self.config.merge**2
        all_rows = seen.tokens // self.config.merge**2
        gradient = all_rows * (self.width + merged) + self.width * merged
        return max(gradient * self.stack.element, layer_workspace(self.stack, seen))

    def input_bytes(self, seen: Attended) -> int:
        """Bytes of a chunk's input tensors: patches in fp32, two coordinates, rotation."""
        c = self.config
        rotary = self.stack.head_dim * self.stack.element
        return seen.tokens * (c.patch**2 * c.channels * FP32 + 2 * INDEX + rotary)


def vit_part(config: ViTConfig, width: int, tp: int, element: int) -> ViTPart:
    """Describe the image encoder."""
    stack = Stack(
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.heads,
        ffn=config.ffn,
        gated=False,
        causal=False,
        bias=True,
        qkv_bias=True,
        layer_norm=config.norm == "LayerNorm",
        recompute=config.recompute,
        tp=tp,
        splits_tokens=False,
        element=element,
    )
    return ViTPart(stack, config, width)


@dataclass(frozen=True)
class Buckets:
    """How megatron-core lays parameters into buffers and divides these over data-parallel ranks.

    `sizes` are the buckets with their padding, `runs` where each parameter lies: (bucket, start, stop).
    """

    sizes: tuple[int, ...]
    runs: tuple[tuple[int, int, int], ...]

    @property
    def total(self) -> int:
        """Elements of all buckets."""
        return sum(self.sizes)

    def owned(self, rank: int, ranks: int) -> int:
        """Elements of parameters that rank number `rank` of `ranks` updates."""
        owned = 0
        for bucket, start, stop in self.runs:
            share = self.sizes[bucket] // ranks
            owned += max(0, min(stop, (rank + 1) * share) - max(start, rank * share))
        return owned


def buckets(weights: Sequence[int], alone: int | None, ranks: int) -> Buckets:
    """Lay parameters, last first, so that each begins at a multiple of 64 and buckets divide over `ranks`.

    Parameter number `alone` has a bucket of its own.
    """
    sizes: list[int] = []
    runs = []
    filled = 0

    def close() -> None:
        nonlocal filled
        unit = lcm(ranks, 128)
        sizes.append(-(-filled // unit) * unit)
        filled = 0

    for number in reversed(range(len(weights))):
        filled = -(-filled // 64) * 64
        if number == alone and filled:
            close()
        runs.append((len(sizes), filled, filled + weights[number]))
        filled += weights[number]
        if number == alone:
            close()
    if filled:
        close()
    return Buckets(tuple(sizes), tuple(runs))

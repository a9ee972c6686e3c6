"""The parts of the LLM as statements of work: embedding, layers, losses; one part on one rank.

All sizes are bytes unless they are called elements. Shapes: T tokens, D width, n targets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from omni.config import LLMConfig, MoEConfig
from omni.models.blocks import FinalNorm
from omni.models.expert_stack import ExpertStack
from omni.models.layer_sizes import llm_layers
from omni.models.stack import Stack
from ops.linear import linear_flops
from parallel.buckets import reduction
from parallel.layout import Layout
from parallel.tiles import AttentionShape
from parallel.work import (
    FP32,
    INDEX,
    Chain,
    Collective,
    Grad,
    Load,
    Weight,
    Work,
    all_gather,
    all_reduce,
    reduce_scatter,
)


@dataclass(frozen=True)
class WordEmbedding:
    """Word embeddings of `ids`, this rank's share of the vocabulary; `shared` with an output elsewhere."""

    ids: int
    hidden: int
    tp: int
    element: int
    shared: bool

    def weights(self) -> tuple[Weight, ...]:
        """The table."""
        return (Weight(self.ids * self.hidden, tied=self.shared),)

    def forward(self, load: Load) -> Work:
        """Each rank looks up its ids among all tokens, and their sums are scattered."""
        shard = load.tokens // self.tp * self.hidden * self.element
        looked_up = load.tokens * (INDEX + 1) if self.tp > 1 else 0  # ids of this rank's share, and which
        return Work(collectives=reduce_scatter("tp", shard, self.tp), kept=shard + looked_up)

    def backward(self, load: Load, grad: Grad) -> Work:
        """At the end of everything, gradients of all tokens and of the table."""
        if grad is Grad.WEIGHT:
            return Work()
        shard = load.tokens // self.tp * self.hidden * self.element
        last = (2 * load.tokens + self.ids) * self.hidden * self.element
        return Work(collectives=all_gather("tp", shard, self.tp), last=last)


@dataclass(frozen=True)
class Losses:
    """The output layer over `ids`, this rank's share of the vocabulary, and the losses, `chunk` targets at a
    time. It has a weight of its own unless that is the embedding of the same part; it may be `shared` with an
    embedding elsewhere.
    """

    ids: int
    hidden: int
    tp: int
    element: int
    chunk: int
    owned: bool
    shared: bool

    def weights(self) -> tuple[Weight, ...]:
        """The output layer."""
        return (Weight(self.ids * self.hidden, tied=self.shared),) if self.owned else ()

    def forward(self, load: Load) -> Work:
        """Hidden states of the targets are gathered; beyond a chunk, probabilities are made anew later."""
        return Work(
            flops=self._flops(load.targets),
            collectives=(*all_gather("tp", self._wanted(load), self.tp), *self._sums(load.targets)),
            kept=self._kept(load.targets),
            workspace=self._losses(load.targets)
            - (self._probabilities(load.targets) if load.targets <= self.chunk else 0),
        )

    def backward(self, load: Load, grad: Grad) -> Work:
        """Gradients of hidden states and of the weight; of several chunks each is computed anew."""
        if grad is Grad.WEIGHT:
            return Work()
        anew = load.targets > self.chunk
        return Work(
            flops=2 * self._flops(load.targets),
            collectives=(
                *reduce_scatter("tp", self._wanted(load), self.tp),
                *(self._sums(load.targets) if anew else ()),
            ),
            workspace=self._backward_workspace(load.targets),
        )

    def _flops(self, targets: int) -> int:
        return linear_flops(targets, self.hidden, self.ids * self.tp) // self.tp

    def _wanted(self, load: Load) -> int:
        return load.targets // self.tp * self.hidden * self.element

    def _sums(self, targets: int) -> tuple[Collective, ...]:
        """Of each chunk the largest logits; the sums of exponents and the targets' logits."""
        full, rest = divmod(targets, self.chunk)
        chunks = ((self.chunk, full), (rest, 1 if rest else 0))
        return tuple(
            one
            for rows, calls in chunks
            for size in (rows * FP32, 2 * rows * FP32)
            for one in all_reduce("tp", size, self.tp, calls)
        )

    def _kept(self, targets: int) -> int:
        """Bytes that losses keep: gathered hidden states, and probabilities if they are not made anew."""
        hidden = targets * self.hidden * self.element
        return hidden + (self._probabilities(targets) + targets * (INDEX + 1)) * (targets <= self.chunk)

    def _logits(self, targets: int) -> int:
        return min(targets, self.chunk) * self.ids * self.element

    def _probabilities(self, targets: int) -> int:
        return min(targets, self.chunk) * self.ids * FP32

    def _losses(self, targets: int) -> int:
        """The losses of a chunk: logits, the same in fp32, less the largest (where ranks share them),
        and probabilities.
        """
        copies = 2 + (self.tp > 1)
        own = self._logits(targets) if self.element < FP32 else 0
        return own + copies * self._probabilities(targets)

    def _backward_workspace(self, targets: int) -> int:
        weight = self.ids * self.hidden * self.element
        if targets <= self.chunk:
            # Two gradients in fp32 before the logits' own, and then that of the weight.
            return max(2 * self._probabilities(targets), self._logits(targets) + weight)
        # The last chunk is computed anew while the gradients of the others and of the weight wait.
        done = (targets - self.chunk) * self.hidden * self.element
        return self._losses(targets) + weight + done


@dataclass(frozen=True)
class LLMPart:
    """A part of the LLM on one rank: layers, after the embedding in the first, before losses in the last."""

    stacks: tuple[Stack | ExpertStack, ...]
    embedding: WordEmbedding | None = None
    norm: FinalNorm | None = None
    losses: Losses | None = None

    @property
    def ep(self) -> int:
        """Ranks that share its experts, 0 where it has none."""
        return max(stack.ep if isinstance(stack, ExpertStack) else 0 for stack in self.stacks)

    @property
    def shape(self) -> AttentionShape:
        """Heads of this rank."""
        return self.stacks[0].shape

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.stacks[0].head_dim

    @property
    def layers(self) -> int:
        """Layers that exchange shared sequences."""
        return sum(stack.layers for stack in self.stacks)

    @property
    def element(self) -> int:
        """Bytes of a number."""
        return self.stacks[0].element

    @property
    def tp(self) -> int:
        """Ranks that share its layers."""
        return self.stacks[0].tp

    @property
    def _chain(self) -> Chain:
        ends = (self.embedding, *self.stacks, self.norm, self.losses)
        return Chain(tuple(block for block in ends if block is not None))

    def weights(self) -> tuple[Weight, ...]:
        """Parameters, in the module's order."""
        return self._chain.weights()

    def forward(self, load: Load) -> Work:
        """Embedding, layers, losses."""
        return self._chain.forward(load)

    def backward(self, load: Load, grad: Grad) -> Work:
        """Losses, layers, embedding."""
        return self._chain.backward(load, grad)

    def input_bytes(self, load: Load) -> int:
        """Rotation, ids, and what each target needs."""
        rotary = load.tokens * self.head_dim * self.element
        ids = load.tokens * INDEX if self.embedding else 0
        targets = load.targets * (3 * INDEX + FP32) + load.targets // self.stacks[0].tp * INDEX
        return rotary + ids + (targets if self.losses else 0)

    def scratch_bytes(self, load: Load) -> int:
        """Gathered tokens, in a tensor that all layers use, and what dispatchers to experts hold."""
        gathered = load.tokens * self.stacks[0].hidden * self.element if self.tp > 1 else 0
        held = (stack.scratch_bytes(load) for stack in self.stacks if isinstance(stack, ExpertStack))
        return gathered + sum(held)

    def reduction(self, ranks: Mapping[str, int]) -> tuple[Collective, ...]:
        """Gradients and weights; the tokens of each expert are counted over all ranks of a stage."""
        routers = [stack for stack in self.stacks if isinstance(stack, ExpertStack)]
        counts = sum(stack.layers * stack.experts for stack in routers) * INDEX
        counted = all_reduce("tp_dp_cp", counts, ranks.get("tp_dp_cp", 1)) if counts else ()
        return (*reduction(self.weights(), ranks, self.element), *counted)

    def row_bytes(self, load: Load) -> int:
        """Bytes of what it passes on to the next part: the stream between layers."""
        return self.stacks[0].stream(load.tokens)


def llm_part(
    config: LLMConfig, vocabulary: int, layers: Sequence[int], number: int, layout: Layout, element: int
) -> LLMPart:
    """State part `number` of an LLM whose parts have so many `layers` each; `vocabulary` is padded."""
    tp, ids = layout.tp, vocabulary // layout.tp
    first, last = number == 0, number == len(layers) - 1
    apart = config.tied and not (first and last)
    losses = Losses(
        ids, config.hidden, tp, element, config.loss_chunk, owned=not config.tied or not first, shared=apart
    )
    return LLMPart(
        stacks=_stacks(config, layers, number, layout, element),
        embedding=WordEmbedding(ids, config.hidden, tp, element, apart) if first else None,
        norm=FinalNorm(config.hidden, config.norm, tp > 1, tp) if last else None,
        losses=losses if last else None,
    )


def _stacks(
    config: LLMConfig, layers: Sequence[int], number: int, layout: Layout, element: int
) -> tuple[Stack | ExpertStack, ...]:
    """The layers of a part: those without experts come first in a model."""
    first, count = sum(layers[:number]), layers[number]
    dense = count if config.mixture is None else min(count, max(0, config.mixture.dense_layers - first))
    stacks: list[Stack | ExpertStack] = []
    if dense:
        stacks.append(dense_stack(config, dense, layout, element))
    if config.mixture is not None and dense < count:
        stacks.append(expert_stack(config, config.mixture, count - dense, layout, element))
    return tuple(stacks)


def dense_stack(config: LLMConfig, layers: int, layout: Layout, element: int) -> Stack:
    """So many dense layers of the LLM."""
    return Stack.of(replace(llm_layers(config), layers=layers), element, layout.tp, layout.tp > 1)


def expert_stack(config: LLMConfig, moe: MoEConfig, layers: int, layout: Layout, element: int) -> ExpertStack:
    """So many layers with experts of the LLM."""
    return ExpertStack(
        dense=replace(dense_stack(config, layers, layout, element), ffn=moe.shared_ffn),
        experts=moe.experts,
        topk=moe.topk,
        ffn=moe.ffn,
        ep=layout.ep,
        sigmoid=moe.score == "sigmoid",
    )


def single_layers(config: LLMConfig) -> list[Stack | ExpertStack]:
    """Each layer by itself, whole on one rank, to compare what they cost."""
    return [_stacks(config, [1] * config.layers, number, Layout(), 1)[0] for number in range(config.layers)]

"""The virtual stages of the LLM as statements of work: embedding, layers, losses; each on one rank."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from omni.llm_config import LLMConfig
from omni.llm_sections import MoEConfig
from omni.models.adapters import Lora
from omni.models.blocks import FinalNorm, Frozen
from omni.models.delta import Delta, delta_heads
from omni.models.expert_stack import ExpertStack
from omni.models.further import Joined
from omni.models.layer_sizes import llm_layers, windowed
from omni.models.offloading import Offloaded, cut, of_layers
from omni.models.partitions import Partitioned
from omni.models.stack import Stack
from omni.models.vocabulary import Losses, WordEmbedding
from ops.delta_shape import DeltaHeads
from parallel.buckets import reduction
from parallel.layout import Layout
from parallel.tiles import AttentionShape
from parallel.work import (
    FP32,
    INDEX,
    Block,
    Chain,
    Collective,
    Grad,
    Load,
    Weight,
    Work,
    all_reduce,
    merged,
)


def _last_apart(stacks: Sequence[Stack | ExpertStack], held: bool) -> Iterator[Stack | ExpertStack]:
    """The same layers, the last one by itself: its output may be `held`, and outlive those of others."""
    *others, last = stacks
    yield from others
    if last.layers > 1:
        yield of_layers(last, last.layers - 1, min(last.windowed, last.layers - 1))
    yield of_layers(last, 1, max(0, last.windowed - last.layers + 1), held=held)


def _all_anew(layers: Stack | ExpertStack, kept_attention: bool) -> Stack | ExpertStack:
    """The same layers where each is computed anew, attention too if nothing of it is kept."""
    if isinstance(layers, ExpertStack):
        dense = replace(layers.dense, recompute="full", kept_attention=kept_attention)
        return replace(layers, dense=dense)
    return replace(layers, recompute="full", kept_attention=kept_attention)


def _dense(layers: Stack | ExpertStack) -> Stack:
    """The layers, or of those with experts what they are beside these."""
    return layers.dense if isinstance(layers, ExpertStack) else layers


@dataclass(frozen=True)
class VirtualStage:
    """A virtual stage of the LLM on one rank: layers, after the embedding in the first, before losses in the
    last and, after these, what predicts `further` tokens. Matrices of its layers are in `partitions`, by
    ZeRO's stage `zero`. Layers that are computed anew in long passes may have `kept_attention`.
    """

    stacks: tuple[Stack | ExpertStack, ...]
    embedding: WordEmbedding | None = None
    norm: FinalNorm | None = None
    losses: Losses | None = None
    further: tuple[Block, ...] = ()
    partitions: int = 1
    zero: int = 1
    offload: int = 0
    kept_attention: bool = False

    @cached_property
    def _anew(self) -> "VirtualStage":
        """The virtual stage in passes whose layers are all computed anew."""
        stacks = tuple(_all_anew(stack, self.kept_attention) for stack in self.stacks)
        embedding = self.embedding
        return replace(
            self, stacks=stacks, embedding=embedding and replace(embedding, into=_dense(stacks[0]))
        )

    @property
    def _stacks(self) -> tuple[Stack | ExpertStack, ...]:
        return (*self.stacks, *(one for one in self.further if isinstance(one, Stack | ExpertStack)))

    @property
    def ep(self) -> int:
        """Ranks that share its experts, 0 where it has none."""
        return max(stack.ep if isinstance(stack, ExpertStack) else 0 for stack in self._stacks)

    @property
    def shape(self) -> AttentionShape:
        """Heads of this rank."""
        return self.stacks[0].shape

    @property
    def window(self) -> int | None:
        """Tokens that a token sees in layers with a window, None if there are none."""
        return max(stack.window if stack.windowed else 0 for stack in self._stacks) or None

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.stacks[0].head_dim

    @property
    def delta(self) -> DeltaHeads | None:
        """Heads of the delta nets of this rank, None if it has none."""
        dense = (stack.dense if isinstance(stack, ExpertStack) else stack for stack in self._stacks)
        return next((of.delta.heads.over(of.tp) for of in dense if of.delta is not None), None)

    @property
    def layers(self) -> int:
        """Layers that exchange shared sequences."""
        return sum(stack.layers for stack in self._stacks)

    @property
    def element(self) -> int:
        """Bytes of a number."""
        return self.stacks[0].element

    @property
    def tp(self) -> int:
        """Ranks that share its layers."""
        return self.stacks[0].tp

    @property
    def lora(self) -> Lora | None:
        """Adapters of its layers, beside which nothing of it learns."""
        first = self.stacks[0]
        return (first.dense if isinstance(first, ExpertStack) else first).lora

    @cached_property
    def _chain(self) -> Chain:
        return self._chained(list(self._stated(self.stacks)))

    def _stated(self, stacks: Sequence[Stack | ExpertStack]) -> Iterator[Block]:
        """All layers, with inputs on the host and matrices in partitions, if they are."""
        first, total = 0, sum(stack.layers for stack in stacks)
        for stack in stacks:
            block: Block = Offloaded(stack, stack, first, self.offload, total) if self.offload else stack
            yield Partitioned(stack, block, self.partitions, self.zero) if self.partitions > 1 else block
            first += stack.layers

    @property
    def _whole(self) -> tuple[Partitioned, ...]:
        """Layers whose matrices ZeRO-2 makes whole once a step."""
        if self.partitions == 1 or self.zero != 2:
            return ()
        return tuple(Partitioned(stack, stack, self.partitions, self.zero) for stack in self.stacks)

    @property
    def whole_bytes(self) -> int:
        """Bytes of matrices that ZeRO-2 makes whole for a step, beside their partitions."""
        return sum(layers.whole_bytes() for layers in self._whole)

    @cached_property
    def _apart(self) -> tuple[Stack | ExpertStack, ...]:
        return tuple(_last_apart(self.stacks, held=self.losses is None))

    def _chained(self, stacks: Sequence[Block]) -> Chain:
        """All blocks, with these in the place of its layers."""
        ends = (self.norm, self.losses, *self.further)
        before, after = (
            tuple(block if self.lora is None else Frozen(block) for block in of if block is not None)
            for of in ((self.embedding,), ends)
        )
        return Chain((*before, *stacks, *after))

    def weights(self) -> tuple[Weight, ...]:
        """Parameters, in the module's order."""
        return self._chain.weights()

    def forward(self, load: Load) -> Work:
        """Embedding, layers, losses, and further ones."""
        return (self._anew if load.anew else self)._chain.forward(load)

    def backward(self, load: Load, grad: Grad) -> Work:
        """Further losses, losses, layers, embedding."""
        if load.anew:
            return self._anew.backward(replace(load, anew=False), grad)
        if grad is Grad.WEIGHT:
            return self._chain.backward(load, grad)
        learns = self.lora is None and not load.frozen
        # Who runs the pass of a virtual stage holds what it put out; losses are next to nothing.
        *others, last = self._apart
        # The gradient that came in a message may be put off: then what is put off stands for the output.
        dense = last.dense if isinstance(last, ExpertStack) else last
        stays = dense.held_output and not dense.puts_off_gradient(learns and grad is Grad.INPUT)
        blocks = list(self._stated((*others, last)))
        work = self._chained(blocks).backward(load, grad, self.row_bytes(load) * stays)
        first = blocks[0]
        if work.last and isinstance(first, Partitioned) and grad is not Grad.INPUT:
            return replace(work, last=work.last + first.left(load))
        return work

    def input_bytes(self, load: Load) -> int:
        """Rotation, ids, and what each target needs."""
        ids = load.tokens * INDEX if self.embedding else 0
        targets = load.targets * (3 * INDEX + FP32) + load.targets // self.stacks[0].tp * INDEX
        return self.shared_bytes(load) + ids + (targets if self.losses else 0)

    @property
    def by_layer(self) -> bool:
        """The stage follows passes through its layers."""
        return True

    def shared_bytes(self, load: Load) -> int:
        """The rotation, and what exchanges copy where."""
        return load.tokens * self.head_dim * self.element + load.list_bytes

    def gathered_bytes(self, load: Load) -> int:
        """Tokens of all ranks of tp."""
        return load.tokens * self.stacks[0].hidden * self.element * (self.tp > 1)

    def reduction(self, ranks: Mapping[str, int], sent: int = FP32) -> tuple[Collective, ...]:
        """Gradients and weights; the tokens of each expert are counted over all ranks of a stage."""
        routers = [stack for stack in self._stacks if isinstance(stack, ExpertStack)]
        counts = sum(stack.layers * stack.experts for stack in routers) * INDEX
        counted = all_reduce("tp_dp_cp", counts, ranks.get("tp_dp_cp", 1)) if counts else ()
        once = (one for layers in self._whole for one in layers.gathered())
        return (*reduction(self.weights(), ranks, self.element, sent), *merged(once), *counted)

    def row_bytes(self, load: Load) -> int:
        """Bytes of what it passes on to the next virtual stage: the stream between layers."""
        return self.stacks[0].stream(load.tokens)


def llm_virtual_stage(
    config: LLMConfig,
    vocabulary: int,
    layers: Sequence[int],
    number: int,
    layout: Layout,
    element: int,
    pool: int = 1,
) -> VirtualStage:
    """State virtual stage `number` of an LLM in which each has so many `layers`; `vocabulary` is padded. ZeRO
    divides matrices over a `pool` of so many cp ranks.
    """
    tp, ids = layout.tp, vocabulary // layout.tp
    first, last = number == 0, number == len(layers) - 1
    # The last one looks up what is further ahead, too. A rank that holds both ends has one embedding.
    apart = (config.tied or config.mtp > 0) and layout.pp > 1
    losses = Losses(
        ids,
        config.hidden,
        tp,
        element,
        config.loss_chunk,
        owned=not config.tied or layout.pp > 1,
        shared=config.tied and apart,
    )
    stacks = tuple(cut(_stacks(config, layers, number, layout, element), config.offload))
    embedding = WordEmbedding(ids, config.hidden, tp, element, apart, _dense(stacks[0]))
    return VirtualStage(
        stacks=stacks,
        embedding=embedding if first else None,
        norm=FinalNorm(config.hidden, config.norm, tp > 1, tp) if last else None,
        losses=losses if last else None,
        further=_further(config, losses, layout) if last else (),
        partitions=pool if layout.zero > 1 else 1,
        zero=layout.zero,
        offload=config.offload,
        kept_attention=config.keep_attention,
    )


def _further(config: LLMConfig, losses: Losses, layout: Layout) -> tuple[Block, ...]:
    """What predicts further tokens: of each the layer is one more of the last kind, and the output that of
    the model. A last virtual stage that has neither the embedding nor an output tied to it holds a copy.
    """
    element, total = losses.element, config.layers
    again = replace(losses, owned=False, shared=False)
    blocks: list[Block] = []
    for number in range(config.mtp):
        copied = losses.ids if number == 0 and not config.tied and layout.num_virtual_stages > 1 else 0
        joined = Joined(config.hidden, config.norm, losses.tp, element, copied)
        layer = _layers(config, range(total + number, total + number + 1), layout, element)
        blocks += [joined, *layer, FinalNorm(config.hidden, config.norm, losses.tp > 1, losses.tp), again]
    return tuple(blocks)


def _stacks(
    config: LLMConfig, layers: Sequence[int], number: int, layout: Layout, element: int
) -> tuple[Stack | ExpertStack, ...]:
    """The layers of a virtual stage."""
    first = sum(layers[:number])
    return _layers(config, range(first, first + layers[number]), layout, element)


def _layers(
    config: LLMConfig, layers: range, layout: Layout, element: int
) -> tuple[Stack | ExpertStack, ...]:
    """Layers by their numbers in the model, neighbours that are alike together: those without experts come
    first in it, and a delta net is unlike any attention.
    """

    def kind(layer: int) -> tuple[bool, bool]:
        routed = config.mixture is not None and layer >= config.mixture.dense_layers
        return routed, config.kind(layer) == "delta"

    stacks: list[Stack | ExpertStack] = []
    for (routed, _), of in groupby(layers, kind):
        numbers = list(of)
        own = range(numbers[0], numbers[-1] + 1)
        if routed and config.mixture is not None:
            stacks.append(expert_stack(config, config.mixture, own, layout, element))
        else:
            stacks.append(dense_stack(config, own, layout, element))
    return tuple(stacks)


def dense_stack(config: LLMConfig, layers: range, layout: Layout, element: int) -> Stack:
    """Dense layers of the LLM, by their numbers in it: all with delta nets, or none."""
    heads = delta_heads(config) if config.kind(layers.start) == "delta" else None
    sizes = replace(
        llm_layers(config),
        layers=len(layers),
        windowed=windowed(config, layers),
        delta=Delta(config.hidden, heads) if heads is not None else None,
    )
    kept = config.keep_attention and config.recompute == "full"
    return Stack.of(sizes, element, layout.tp, layout.tp > 1, kept_attention=kept)


def expert_stack(
    config: LLMConfig, moe: MoEConfig, layers: range, layout: Layout, element: int
) -> ExpertStack:
    """Layers with experts of the LLM, by their numbers in it."""
    return ExpertStack(
        dense=replace(dense_stack(config, layers, layout, element), ffn=moe.shared_ffn),
        experts=moe.experts,
        topk=moe.topk,
        ffn=moe.ffn,
        ep=layout.ep,
        sigmoid=moe.score == "sigmoid",
        shared_gate=moe.shared_gate,
    )


def single_layers(config: LLMConfig) -> list[Stack | ExpertStack]:
    """Each layer by itself, whole on one rank, to compare what they cost."""
    return [_stacks(config, [1] * config.layers, number, Layout(), 1)[0] for number in range(config.layers)]

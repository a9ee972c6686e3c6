"""Small blocks of work, and an encoder composed of blocks: what an encoder states itself with.

A block says what it weighs, computes and keeps; `EncoderPart` puts blocks together and adds what the platform
does around them. Shapes: T tokens, E width of the encoder, R rows, D width of the LLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import chain

from omni.models.offloading import OffloadedBlocks
from omni.models.pieces import linear_weights, norm_weights, plain
from omni.models.stack import Stack
from omni.models.towers.work import MeasuredLayers
from ops.linear import linear_flops
from parallel.buckets import reduction
from parallel.tiles import AttentionShape
from parallel.work import (
    FP32,
    INDEX,
    Attended,
    Block,
    Chain,
    Collective,
    Grad,
    Load,
    Weight,
    Work,
    all_gather,
    merged,
)


@dataclass(frozen=True)
class Embed:
    """A linear from values of each token, given in fp32, to the stream [T, E] that the first layer keeps."""

    values: int
    hidden: int
    element: int
    bias: bool = True

    def weights(self) -> tuple[Weight, ...]:
        """Weight and, unless it has none, bias."""
        return linear_weights(self.values, self.hidden, self.hidden * self.bias)

    def forward(self, load: Load) -> Work:
        """It keeps its input, a copy where that is of lower precision, and its output; frozen, this alone."""
        copied = load.tokens * self.values * self.element * (self.element != FP32 and not load.frozen)
        return Work(
            flops=linear_flops(load.tokens, self.values, self.hidden),
            kept=copied + load.tokens * self.hidden * self.element,
        )

    def backward(self, load: Load, grad: Grad) -> Work:
        """Twice the forward, as if values had gradients too; nothing where it is frozen."""
        return Work() if load.frozen else _of_linears(self.forward(load), grad)


@dataclass(frozen=True)
class Table:
    """Learned vectors [rows, E], of which each token adds one to the stream."""

    rows: int
    hidden: int

    def weights(self) -> tuple[Weight, ...]:
        """All vectors."""
        return plain(self.rows * self.hidden)

    def forward(self, load: Load) -> Work:
        """Nothing to speak of."""
        return Work()

    def backward(self, load: Load, grad: Grad) -> Work:
        """Nothing to speak of."""
        return Work()


@dataclass(frozen=True)
class FinalNorm:
    """A norm of the stream [T, E] whose output the next block keeps; `partial` as for `Weight`, where `tp`
    ranks divide the tokens.
    """

    hidden: int
    norm: str
    partial: bool = False
    tp: int = 1

    def weights(self) -> tuple[Weight, ...]:
        """Scale, and shift of a LayerNorm."""
        return norm_weights(self.hidden, self.norm, self.partial)

    def forward(self, load: Load) -> Work:
        """It keeps what it divided by."""
        tokens = load.tokens // self.tp if self.partial else load.tokens
        return Work(kept=tokens * len(self.weights()) * FP32)

    def backward(self, load: Load, grad: Grad) -> Work:
        """Nothing to speak of."""
        return Work()


@dataclass(frozen=True)
class Projector:
    """`merge` neighbours of the stream to one row: two linears with an activation between them. Of all rows,
    which each of `tp` ranks has, it passes on a share.
    """

    hidden: int
    merge: int
    width: int
    element: int
    tp: int = 1

    @property
    def merged(self) -> int:
        """Numbers of neighbours together."""
        return self.hidden * self.merge

    def weights(self) -> tuple[Weight, ...]:
        """Weights and biases of both linears."""
        first = linear_weights(self.merged, self.merged, self.merged)
        return (*first, *linear_weights(self.merged, self.width, self.width))

    def forward(self, load: Load) -> Work:
        """It keeps its input, what the first linear puts out, and the activation; of a frozen one the second
        alone, while the others pass. All rows are there when a rank takes its share. FLOPs are those of the
        first linear: the second is small beside the layers.
        """
        stream, rows = load.tokens * self.hidden, load.tokens // self.merge * self.width
        return Work(
            flops=linear_flops(load.tokens, self.merged, self.merged) // self.merge,
            kept=(1 if load.frozen else 3) * stream * self.element,
            workspace=(2 * stream * load.frozen + rows * (self.tp > 1)) * self.element,
            passing=(2 * stream + max(stream, rows)) * self.element,
        )

    def backward(self, load: Load, grad: Grad) -> Work:
        """It needs most at its start, gradients of the rows, of the second weight and of its input, or with
        the gradient of the first weight. A frozen one has gradients of rows and of the activation, on both
        sides of it.
        """
        if grad is Grad.WEIGHT:
            return Work()
        rows = load.tokens // self.merge
        all_rows = rows * self.width * (self.tp > 1)
        if load.frozen:
            most = all_rows + 2 * rows * self.merged
            return Work(flops=self.forward(load).flops, workspace=most * self.element)
        second = (rows + self.width) * self.merged + self.width
        # Or at the first linear, when gradients have taken the place of all that is kept.
        start = max(second + all_rows, (self.merged + 1) * self.merged) * self.element
        return replace(_of_linears(self.forward(load), grad), workspace=max(start, self.gathered(load)))

    def gathered(self, load: Load) -> int:
        """Bytes of gradients before a backward begins: those of the rows of all ranks, padded, as they came,
        and one after the other.
        """
        if self.tp == 1:
            return 0
        rows = load.most_rows * (1 + self.tp) + load.tokens // self.merge
        return rows * self.width * self.element

    def anew(self, load: Load) -> int:
        """Bytes of a backward whose forward was computed anew, beside what that keeps: the rows, and their
        gradients, are there to the end.
        """
        rows = load.tokens // self.merge
        ends = rows * self.width * (1 + (self.tp > 1))
        if load.frozen:
            return (ends + 2 * rows * self.merged) * self.element
        second = (rows + self.width) * self.merged + self.width
        return (ends + max(second, (self.merged + 1) * self.merged)) * self.element


@dataclass(frozen=True)
class ProjectedAnew:
    """A norm and a projector that are computed anew from what the norm takes in: the output of the layers in
    front of it, which is counted there, and of which each rank keeps a part if it is `divided`.
    """

    norm: Block
    projector: Projector
    divided: bool

    @property
    def _both(self) -> Chain:
        return Chain((self.norm, self.projector))

    def weights(self) -> tuple[Weight, ...]:
        """Those of both."""
        return self._both.weights()

    def forward(self, load: Load) -> Work:
        """It keeps nothing."""
        work = self._both.forward(load)
        return replace(work, kept=0, workspace=work.passing + self._elsewhere(load))

    def backward(self, load: Load, grad: Grad) -> Work:
        """A forward, and the backward of both."""
        if grad is Grad.WEIGHT:
            return Work()
        again, work = self._both.forward(load), self._both.backward(load, grad)
        most = again.kept + self.projector.anew(load) + self._elsewhere(load)
        return replace(
            work, flops=work.flops + again.flops, workspace=max(most, self.projector.gathered(load))
        )

    def _elsewhere(self, load: Load) -> int:
        """Bytes of its input that other ranks keep."""
        stream = load.tokens * self.projector.hidden * self.projector.element
        return stream - stream // self.projector.tp if self.divided else 0


def _of_linears(forward: Work, grad: Grad) -> Work:
    """Gradients of a linear's inputs and of its weights take as much each as its forward; torch's linears put
    nothing off.
    """
    return Work() if grad is Grad.WEIGHT else Work(flops=2 * forward.flops)


@dataclass(frozen=True)
class Merged:
    """A block behind what makes one of so many tokens."""

    block: Block
    tokens: int

    def weights(self) -> tuple[Weight, ...]:
        """Those of the block."""
        return self.block.weights()

    def forward(self, load: Load) -> Work:
        """Of the block, on what is left."""
        return self.block.forward(self._load(load))

    def backward(self, load: Load, grad: Grad) -> Work:
        """Of the block, on what is left."""
        return self.block.backward(self._load(load), grad)

    def _load(self, load: Load) -> Load:
        left = load.tokens // self.tokens
        return replace(load, seen=Attended(left, left))


@dataclass(frozen=True)
class Frozen:
    """A block of a component in which adapters learn, and nothing of this."""

    block: Block

    def weights(self) -> tuple[Weight, ...]:
        """Those of the block."""
        return tuple(replace(weight, frozen=True) for weight in self.block.weights())

    def forward(self, load: Load) -> Work:
        """As of the block in a component that is frozen."""
        work = self.block.forward(replace(load, frozen=True))
        return replace(work, frozen_flops=work.flops)

    def backward(self, load: Load, grad: Grad) -> Work:
        """Gradients of its inputs, in the backward that makes those."""
        if grad is Grad.WEIGHT:
            return Work()
        return self.block.backward(replace(load, frozen=True), Grad.INPUT)


@dataclass(frozen=True)
class EncoderPart:
    """An encoder on one rank, in front of an LLM of `width`: `stem`, then the layers of `stack`, described or
    measured, then `tail`, which ends in rows; and what makes rows between layers, of its `taps`.
    `token_bytes` are those of a token's input tensors, values and positions. Weights arrive and gradients are
    reduced `by_layer` where the module says what its layers are (`followed_layers`). Of each of the blocks of
    layers that begin with `starts`, the inputs of up to `offload` layers wait on the host.
    """

    stem: tuple[Block, ...]
    stack: Stack | MeasuredLayers
    tail: tuple[Block, ...]
    width: int
    token_bytes: int
    by_layer: bool = False
    taps: tuple[Block, ...] = ()
    starts: tuple[int, ...] = (0,)
    offload: int = 0

    @property
    def shape(self) -> AttentionShape:
        """Heads of this rank."""
        return self.stack.shape

    @property
    def delta(self) -> None:
        """None: no encoder has delta nets."""
        return None

    @property
    def window(self) -> None:
        """None: items are exchanged as if no layer had one."""
        return None

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        return self.stack.head_dim

    @property
    def layers(self) -> int:
        """Layers that exchange shared items."""
        return self.stack.layers

    @property
    def element(self) -> int:
        """Bytes of a number."""
        return self.stack.element

    @property
    def tp(self) -> int:
        """Ranks that share its layers."""
        return self.stack.tp

    @property
    def ep(self) -> int:
        """No encoder has experts."""
        return 0

    @property
    def _chain(self) -> Chain:
        """In the order of passes. What is between layers is still there when the last of them go back."""
        layers: Block = self.stack
        if self.offload:
            assert isinstance(self.stack, Stack), "layers that are computed anew"
            layers = OffloadedBlocks(self.stack, self.starts, self.offload)
        return Chain((*self._beside(self.stem, self.taps), layers, *self._beside(self.tail)))

    def _beside(self, *blocks: tuple[Block, ...]) -> tuple[Block, ...]:
        """Blocks beside the layers: where these have adapters, nothing else learns."""
        every = chain.from_iterable(blocks)
        return tuple(every) if self.stack.lora is None else tuple(map(Frozen, every))

    def weights(self) -> tuple[Weight, ...]:
        """Parameters, in the module's order."""
        ends = self._beside(self.tail, self.taps)
        return Chain((*self._beside(self.stem), self.stack, *ends)).weights()

    def forward(self, load: Load) -> Work:
        """The blocks, and the rows that this rank passes on."""
        work = self._chain.forward(load)
        return replace(work, kept=work.kept + load.rows * self.width * self.element)

    def backward(self, load: Load, grad: Grad) -> Work:
        """Ranks that share the layers first gather the gradients of each other's rows."""
        work = self._chain.backward(load, grad)
        if grad is Grad.WEIGHT:
            return work
        rows = all_gather("tp", load.most_rows * self.width * self.element, self.stack.tp)
        return replace(work, collectives=merged((*rows, *work.collectives)))

    def shared_bytes(self, load: Load) -> int:
        """None: an encoder is one part."""
        return 0

    def gathered_bytes(self, load: Load) -> int:
        """None: ranks do not divide the tokens."""
        return 0

    def reduction(self, ranks: Mapping[str, int], sent: int = FP32) -> tuple[Collective, ...]:
        """Gradients and weights."""
        return reduction(self.weights(), ranks, self.element, sent)

    def input_bytes(self, load: Load) -> int:
        """Values, positions and the rotation of each token, and what exchanges copy where."""
        return load.tokens * (self.token_bytes + self.head_dim * self.element) + load.list_bytes


def value_bytes(values: int, axes: int) -> int:
    """Bytes of a token's input: so many values in fp32, and its position on so many axes."""
    return values * FP32 + axes * INDEX

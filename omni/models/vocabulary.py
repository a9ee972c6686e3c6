"""What of the LLM knows the vocabulary, as statements of work: the embedding, and the output with its losses.

All sizes are bytes unless they are called elements. Shapes: T tokens, D width, n targets.
"""

from dataclasses import dataclass, replace

from omni.models.stack import Stack
from ops.linear import linear_bytes, linear_flops
from parallel.work import (
    FP32,
    INDEX,
    Grad,
    Load,
    Weight,
    Work,
    all_gather,
    all_reduce,
    reduce_scatter,
)

_SUMS = 3 * FP32  # of each target the largest logit, the sum of exponentials, and its own logit
_FOUND = 2 * FP32  # and its loss, with what that is the sum of


@dataclass(frozen=True)
class WordEmbedding:
    """Word embeddings of `ids`, this rank's share of the vocabulary; `shared` with an output elsewhere. What
    is looked up goes `into` layers, which need not keep it.
    """

    ids: int
    hidden: int
    tp: int
    element: int
    shared: bool
    into: Stack

    def weights(self) -> tuple[Weight, ...]:
        """The table."""
        return (Weight(self.ids * self.hidden, tied=self.shared),)

    def forward(self, load: Load) -> Work:
        """Each rank looks up its ids among all tokens, and their sums are scattered."""
        shard = load.tokens // self.tp * self.hidden * self.element
        looked_up = load.tokens * (INDEX + 1) if self.tp > 1 else 0  # ids of this rank's share, and which
        # Where adapters learn in the layers, the embedding alone is frozen.
        stays = self.into.keeps_stream(replace(load, frozen=load.frozen and self.into.lora is None))
        kept = shard * (stays or load.rowless) + looked_up * (not load.frozen)
        return Work(collectives=reduce_scatter("tp", shard, self.tp), kept=kept)

    def backward(self, load: Load, grad: Grad) -> Work:
        """At the end of everything gradients of all tokens, of those whose ids are of this rank's share, and
        of the table; nothing where it is frozen.
        """
        if grad is Grad.WEIGHT or load.frozen:
            return Work()
        width = self.hidden * self.element
        tokens, table, found = load.tokens * width, self.ids * width, load.tokens * (INDEX + 1)
        made = (
            max(2 * tokens + found, tokens + table + load.tokens * INDEX) if self.tp > 1 else tokens + table
        )
        return Work(collectives=all_gather("tp", tokens // self.tp, self.tp), last=made)


@dataclass(frozen=True)
class Losses:
    """The output layer over `ids`, this rank's share of the vocabulary, and the losses, `chunk` targets at a
    time. It has a weight of its own unless that is the embedding of the same virtual stage; it may be
    `shared` with an embedding elsewhere.
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
        """Hidden states of the targets are gathered, and kept for a gradient of the weight or for logits that
        are made anew; logits are kept if they are one chunk.
        """
        once = load.targets <= self.chunk
        hidden, logits = self._hidden(load.targets), self._logits(load.targets)
        unkept = hidden * (load.frozen and once) + logits * (not once)
        made = hidden + logits + load.targets * _SUMS
        return Work(
            flops=self._flops(load.targets),
            plain_flops=self._flops(load.targets),
            bytes=self._product(load.targets) + load.targets * self.ids * self.element,
            collectives=(
                *all_gather("tp", self._wanted(load), self.tp),
                *all_reduce("tp", load.targets * FP32, self.tp),
                *all_reduce("tp", 2 * load.targets * FP32, self.tp),
            ),
            kept=made - unkept,
            workspace=unkept + load.targets * _FOUND * once,
            # Where nothing is kept, beside the stream that the virtual stage began with.
            passing=made + load.tokens // self.tp * self.hidden * self.element + load.targets * _FOUND * once,
        )

    def backward(self, load: Load, grad: Grad) -> Work:
        """Gradients of hidden states and, unless it is frozen, of the weight; of several chunks each is
        computed anew.
        """
        if grad is Grad.WEIGHT:
            return Work()
        products = 1 if load.frozen else 2
        hidden, logits = self._hidden(load.targets), self._logits(load.targets)
        # The product itself adds it up, but on a CPU, where it does not add in another precision.
        weight = self.ids * self.hidden * self.element * (not load.frozen and self.element < FP32)
        if load.targets <= self.chunk:
            # The gradient of the logits is there when they go.
            most = max(logits, hidden + weight)
        else:
            # From the second chunk on gradients of hidden states are there, too.
            second = min(load.targets - self.chunk, self.chunk)
            most = max(
                2 * logits + self.chunk * _SUMS,
                hidden + 2 * self._logits(second) + second * _SUMS,
                hidden + logits + weight,
            )
        return Work(
            flops=products * self._flops(load.targets),
            plain_flops=products * self._flops(load.targets),
            bytes=products * self._product(load.targets) + 2 * load.targets * self.ids * self.element,
            collectives=reduce_scatter("tp", self._wanted(load), self.tp),
            workspace=load.targets * FP32 + most,
        )

    def _flops(self, targets: int) -> int:
        return linear_flops(targets, self.hidden, self.ids * self.tp) // self.tp

    def _product(self, targets: int) -> int:
        return linear_bytes(targets, self.hidden, self.ids, self.element)

    def _wanted(self, load: Load) -> int:
        return load.targets // self.tp * self.hidden * self.element

    def _hidden(self, targets: int) -> int:
        return targets * self.hidden * self.element

    def _logits(self, targets: int) -> int:
        """The logits of a chunk."""
        return min(targets, self.chunk) * self.ids * self.element

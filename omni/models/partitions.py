"""Layers whose matrices ZeRO-2 or 3 partitions, as a statement: weights, what is gathered, what is held.

The modules are `partition_modules.py`, what moves is `parallel/partitions.py`. Partitioned are the matrices
of linears that experts do not divide; embedding, output, norms, biases and routers are whole on every rank.
"""

from dataclasses import dataclass, replace

from omni.models.expert_stack import ExpertStack
from omni.models.stack import Stack
from parallel.work import (
    FP32,
    Block,
    Collective,
    Grad,
    Load,
    Weight,
    Work,
    all_gather,
    merged,
    reduce_scatter,
)

AHEAD = 2  # layers whose matrices are whole at once: the one that a pass is in, and the next


@dataclass(frozen=True)
class Partitioned:
    """Layers, as `block` states them, whose matrices `ranks` divide. `zero` is the stage of ZeRO."""

    layers: Stack | ExpertStack
    block: Block
    ranks: int
    zero: int

    def matrices(self) -> tuple[Weight, ...]:
        """The whole matrices of a layer that are partitioned."""
        return tuple(weight for weight in self.layers.layer_weights() if self._divides(weight))

    def _divides(self, weight: Weight) -> bool:
        return weight.matrix and weight.elements % self.ranks == 0

    def weights(self) -> tuple[Weight, ...]:
        """Parameters in the module's order, partitions in place of matrices."""
        return tuple(
            replace(weight, elements=weight.elements // self.ranks, partition=True)
            if self._divides(weight)
            else weight
            for weight in self.block.weights()
        )

    def whole_bytes(self) -> int:
        """Bytes of the whole matrices of all layers."""
        return self.layers.layers * sum(one.elements for one in self.matrices()) * self.layers.element

    def gathered(self) -> tuple[Collective, ...]:
        """What makes the matrices of all layers whole."""
        element, layers = self.layers.element, self.layers.layers
        shards = (one.elements // self.ranks * element for one in self.matrices())
        return merged(one for shard in shards for one in all_gather("partition", shard, self.ranks, layers))

    def _scattered(self, load: Load) -> tuple[Collective, ...]:
        """What sums the gradients of all layers."""
        if load.frozen:
            return ()
        shards = (one.elements // self.ranks * FP32 for one in self.matrices() if not one.frozen)
        layers = self.layers.layers
        return merged(
            one for shard in shards for one in reduce_scatter("partition", shard, self.ranks, layers)
        )

    def _held(self) -> int:
        """Bytes of whole matrices that a pass holds at most, beside those that stay."""
        if self.zero == 2:
            return 0
        return AHEAD * self.whole_bytes() // self.layers.layers

    def _leaving(self, load: Load) -> int:
        """Bytes of gradients in fp32 of which one is made while another is on its way, with what arrives."""
        sizes = sorted(one.elements for one in self.matrices() if not one.frozen and not load.frozen)[-2:]
        return FP32 * (sum(sizes) + sum(sizes[:1]) // self.ranks)

    def left(self, load: Load) -> int:
        """Bytes of the gradient that is still on its way when a backward has come through all layers: that of
        the first linear.
        """
        own = self.layers.dense if isinstance(self.layers, ExpertStack) else self.layers
        inputs, outputs = own.attention_linears()[0]
        elements = inputs * outputs // own.tp
        learns = not load.frozen and own.lora is None and elements % self.ranks == 0
        return (elements + elements // self.ranks) * FP32 * learns

    def forward(self, load: Load) -> Work:
        """Of the layers, with what is gathered."""
        work = self.block.forward(load)
        return replace(
            work,
            collectives=(*work.collectives, *(self.gathered() if self.zero > 2 else ())),
            workspace=work.workspace + self._held(),
            passing=work.passing + self._held(),
        )

    def backward(self, load: Load, grad: Grad) -> Work:
        """Of the layers, with what is gathered, for gradients of inputs, and scattered, of weights."""
        work = self.block.backward(load, grad)
        inputs, weights = grad is not Grad.WEIGHT, grad is not Grad.INPUT
        gathered = self.gathered() if inputs and self.zero > 2 else ()
        scattered = self._scattered(load) if weights else ()
        more = self._held() * inputs + self._leaving(load) * weights
        return replace(
            work, collectives=(*work.collectives, *gathered, *scattered), workspace=work.workspace + more
        )

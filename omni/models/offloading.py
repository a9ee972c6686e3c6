"""Layers whose inputs wait on the host, as a statement: what stays on the device, what is on its way.

The modules are `offload_modules.py`. Of a virtual stage of layers 0 to L - 1, layers 1 to n are *offloaded*:
their inputs, which the layers in front of them put out, are on the host from the end of their forward to the
backward of the layer behind them. In units of the stream between layers there are on the device, beside what
other layers keep and what the pass works with,

- in the forward of an offloaded layer its input, until the next layer begins;
- in the backward of an offloaded layer its input; of one behind it that of the one in front, which comes back
  meanwhile; and the gradient of an output that is away, which elsewhere takes that output's place.

What goes hides behind its layer, what comes behind the one that goes back before it: the input of a virtual
stage's last layer behind none.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from omni.models.expert_stack import ExpertStack
from omni.models.stack import Stack
from parallel.work import Block, Grad, Load, Weight, Work


@dataclass(frozen=True)
class Offloaded:
    """Layers from number `first` of a virtual stage on, as `block` states them: of its `total` layers `count`
    are offloaded. These layers have the same on the device, as `cut` makes them.
    """

    layers: Stack | ExpertStack
    block: Block
    first: int
    count: int
    total: int

    def _is_away(self, layer: int) -> int:
        """Whether a layer's input goes to the host."""
        return int(1 <= layer <= self.count)

    def weights(self) -> tuple[Weight, ...]:
        """Of the layers."""
        return self.block.weights()

    def forward(self, load: Load) -> Work:
        """Of the layers, without what goes to the host."""
        work, stream = self.block.forward(load), self.layers.stream(load.tokens)
        away = self._is_away(self.first + 1)
        return replace(
            work,
            kept=work.kept - away * self.layers.layers * stream,
            workspace=work.workspace + (away + self._is_away(self.first)) * stream,
            offloaded=self._copies * stream,
            copies=self._copies,
        )

    def backward(self, load: Load, grad: Grad) -> Work:
        """Of the layers, with what comes back."""
        work, stream = self.block.backward(load, grad), self.layers.stream(load.tokens)
        if grad is Grad.WEIGHT:
            return work
        away = self._is_away(self.first + 1)
        beside = (away + self._is_away(self.first) + self._is_away(self.first - 1)) * stream
        return replace(
            work,
            workspace=work.workspace + beside,
            offloaded=self._copies * stream,
            copies=self._copies,
            late=self._is_away(self.total - 1) * (self.first + self.layers.layers == self.total),
        )

    @property
    def _copies(self) -> int:
        """Inputs that go to the host in a forward, and come back in a backward."""
        return sum(map(self._is_away, range(self.first, self.first + self.layers.layers)))


def cut(stacks: Sequence[Stack | ExpertStack], count: int) -> Iterator[Stack | ExpertStack]:
    """Cut the layers of a virtual stage where what is on the device differs: `count` are offloaded."""
    alike = (1, 2, count, count + 1, count + 2) if count else ()
    first = 0
    for stack in stacks:
        last = first + stack.layers
        ends = sorted({first, last, *(at for at in alike if first < at < last)})
        left = stack.windowed
        for start, end in pairwise(ends):
            windowed = min(left, end - start)
            left -= windowed
            yield of_layers(stack, end - start, windowed)
        first = last


def of_layers(
    stack: Stack | ExpertStack, layers: int, windowed: int, *, held: bool = False
) -> Stack | ExpertStack:
    """So many layers of a stack, `windowed` of them with a window; their last output may be `held`."""
    dense = stack.dense if isinstance(stack, ExpertStack) else stack
    dense = replace(dense, layers=layers, windowed=windowed, held_output=held)
    return replace(stack, dense=dense) if isinstance(stack, ExpertStack) else dense

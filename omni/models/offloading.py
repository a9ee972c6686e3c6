"""Layers whose inputs wait on the host, as a statement: what stays on the device, what is on its way. What
attention puts out goes the same way where it is kept, and is counted with the input of its layer.

The modules are `kept_inputs.py`. Of a virtual stage of layers 0 to L - 1, layers 1 to n are *offloaded*:
their inputs, which the layers in front of them put out, are on the host from the end of their forward to the
backward of the layer behind them. In units of the stream between layers there are on the device, beside what
other layers keep and what the pass works with,

- in the forward of an offloaded layer its input, until the next layer begins;
- in the backward of an offloaded layer its input; of one behind it that of the one in front, which comes back
  meanwhile; and the gradient of an output that is away, which elsewhere takes that output's place.

What goes hides behind its layer, what comes behind the one that goes back before it: the input of a virtual
stage's last layer behind none.

Layers of an encoder are alike, and stand in one or several blocks, of each of which layers 1 to n are
offloaded. Of inputs that tp ranks divide, this rank's part is.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
        work, unit = self.block.forward(load), self._unit(load)
        away = self._is_away(self.first + 1)
        return replace(
            work,
            kept=work.kept - away * self.layers.layers * unit,
            workspace=work.workspace + (away + self._is_away(self.first)) * unit,
            offloaded=self._copies * unit,
            copies=self._copies,
        )

    def backward(self, load: Load, grad: Grad) -> Work:
        """Of the layers, with what comes back."""
        work, unit = self.block.backward(load, grad), self._unit(load)
        if grad is Grad.WEIGHT:
            return work
        away = self._is_away(self.first + 1)
        beside = (away + self._is_away(self.first) + self._is_away(self.first - 1)) * unit
        return replace(
            work,
            workspace=work.workspace + beside,
            offloaded=self._copies * unit,
            copies=self._copies,
            late=self._is_away(self.total - 1) * (self.first + self.layers.layers == self.total),
        )

    def _unit(self, load: Load) -> int:
        """Bytes of a layer that are away: its input, and what attention puts out of it."""
        dense = self.layers.dense if isinstance(self.layers, ExpertStack) else self.layers
        return dense.stream(load.tokens) + dense.attended(load)

    @property
    def _copies(self) -> int:
        """Inputs that go to the host in a forward, and come back in a backward."""
        return sum(map(self._is_away, range(self.first, self.first + self.layers.layers)))


@dataclass(frozen=True)
class OffloadedBlocks:
    """Layers of an encoder in blocks that begin with the layers `starts`, of each of which up to `count` are
    offloaded.
    """

    stack: Stack
    starts: tuple[int, ...]
    count: int

    def weights(self) -> tuple[Weight, ...]:
        """Of the layers."""
        return self.stack.weights()

    def forward(self, load: Load) -> Work:
        """Of the layers, without what goes to the host."""
        work, part = self.stack.forward(load), self._part(load)
        away = sum(self._away)
        return replace(
            work,
            kept=work.kept - away * part,
            workspace=work.workspace + self._more(load, [part * own for own in self._away]),
            offloaded=away * part,
            copies=away,
        )

    def backward(self, load: Load, grad: Grad) -> Work:
        """Of the layers, with what comes back: the input of a block's last layer behind no other."""
        work, part = self.stack.backward(load, grad), self._part(load)
        if grad is Grad.WEIGHT:
            return work
        ahead = [False, *self._away[:-1]]
        coming = [
            part * (own + (before and number not in self.starts))
            for number, (own, before) in enumerate(zip(self._away, ahead, strict=True))
        ]
        return replace(
            work,
            workspace=work.workspace + self._more(load, coming),
            offloaded=sum(self._away) * part,
            copies=sum(self._away),
            late=sum(self._away[stop - 1] for stop in (*self.starts[1:], self.stack.layers)),
        )

    @cached_property
    def _away(self) -> list[bool]:
        """Whether the input of each layer goes to the host."""
        ends = (*self.starts[1:], self.stack.layers)
        return [
            1 <= number <= self.count
            for start, stop in zip(self.starts, ends, strict=True)
            for number in range(stop - start)
        ]

    def _part(self, load: Load) -> int:
        """Bytes that a rank keeps of a layer behind a block's first: of its input, and of attention."""
        own = self.stack
        return own.stream(load.tokens) - own.elsewhere(load) + own.attended(load)

    def _more(self, load: Load, beside: Sequence[int]) -> int:
        """Bytes at the fullest moment of a pass, beside what all layers keep on the device and what the last
        of them works with: `beside` is on its way in each, when none behind it keeps anything.
        """
        whole, part = self.stack.stream(load.tokens) + self.stack.attended(load), self._part(load)
        here = [
            0 if away else whole if number in self.starts else part for number, away in enumerate(self._away)
        ]
        return max(own - sum(here[number + 1 :]) for number, own in enumerate(beside))


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

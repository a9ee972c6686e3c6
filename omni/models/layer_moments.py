"""The fullest moment of a layer's backward: what autograd makes and frees, step by step.

Each step makes bytes (positive) or frees them (negative), beside what the forward kept; the most of their
sums counts. The gradient of the layer's output is made first, so it is among them.

Shapes as in `stack.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Protocol

from omni.models.adapters import Adapter
from omni.models.pieces import Linears
from parallel.work import Attended


class Layer(Protocol):
    """What is needed of a `Stack`."""

    @property
    def hidden(self) -> int:
        """D."""
        ...

    @property
    def ffn(self) -> int:
        """F, of all ranks together."""
        ...

    @property
    def gated(self) -> bool:
        """Whether the feed-forward is a SwiGLU."""
        ...

    @property
    def tp(self) -> int:
        """Ranks that share the layer."""
        ...

    @property
    def splits_tokens(self) -> bool:
        """Whether they divide the tokens between halves."""
        ...

    @property
    def element(self) -> int:
        """Bytes of a number."""
        ...

    def stream(self, tokens: int) -> int:
        """Bytes of one tensor between halves."""
        ...

    def attention_linears(self) -> Linears:
        """Linears around attention, of all ranks together."""
        ...

    def adapters(self) -> Mapping[str, Adapter]:
        """Adapters of a layer by the name of their linear."""
        ...


class Weights(Enum):
    """When gradients of weights are made: what they need is freed at once, later, or was not kept."""

    NOW = 1
    LATER = 2
    FROZEN = 3


@dataclass(frozen=True)
class Learning:
    """What of a layer learns: its own weights, as `weights` says, and adapters by the name of the linear."""

    weights: Weights
    adapters: Mapping[str, Adapter]

    def frees(self, name: str) -> bool:
        """Whether the backward of a linear frees the input that was kept for it."""
        return self.weights is Weights.NOW or name in self.adapters


def most_in_backward(stack: Layer, seen: Attended, *, now: bool, frozen: bool, learns: bool) -> int:
    """Bytes that the backward of a layer holds at most beside what was kept, its output's gradient too.

    Gradients of its weights are made `now` or later, not at all if they are `frozen`; adapters may learn.
    """
    weights = Weights.FROZEN if frozen else Weights.NOW if now else Weights.LATER
    learning = Learning(weights, stack.adapters() if learns else {})
    return max(accumulate(_steps(stack, seen, learning)))


def _steps(stack: Layer, seen: Attended, learning: Learning) -> Iterator[int]:
    out = stack.stream(seen.tokens)
    yield out
    yield from _feed_forward(stack, seen.tokens, learning)
    # The norm, whose output is freed with the first linear, then the sum with what went around it.
    yield out - out * learning.frees("linear_fc1")
    yield out
    yield -2 * out - out
    yield from _attention(stack, seen.tokens, learning)


def _linear(stack: Layer, name: str, tokens: int, outputs: int, learning: Learning) -> Iterator[int]:
    """A linear whose input all ranks gathered: gradients of that, of own tokens, and of the weight."""
    weights, adapter = learning.weights, learning.adapters.get(name)
    whole = tokens * stack.hidden * stack.element
    gathers = stack.splits_tokens and stack.tp > 1
    if adapter is not None:
        yield from _adapted(adapter, tokens)
    yield whole
    if gathers:
        yield stack.stream(tokens)
        if weights is not Weights.NOW:
            yield -whole
    if weights is Weights.NOW:
        weight = stack.hidden * outputs // stack.tp * stack.element
        yield weight
        yield -(whole if gathers else 0)
        yield weight  # a copy, as the parameter's gradient
        yield -2 * weight
    if adapter is not None:
        yield from _done(adapter, tokens)


def _summed(stack: Layer, name: str, tokens: int, inputs: int, learning: Learning) -> Iterator[int]:
    """A linear whose outputs are summed over ranks: gathered gradients, those of its input and its weight."""
    weights, adapter = learning.weights, learning.adapters.get(name)
    gathered = tokens * stack.hidden * stack.element if stack.splits_tokens and stack.tp > 1 else 0
    taken = tokens * inputs // stack.tp * stack.element
    yield gathered
    if adapter is not None:
        yield from _adapted(adapter, tokens)
    yield taken
    if adapter is not None:
        yield from _done(adapter, tokens)
        yield -gathered - taken
    elif weights is Weights.FROZEN:
        yield -gathered
    if weights is Weights.NOW:
        weight = inputs * stack.hidden // stack.tp * stack.element
        yield weight
        yield -gathered - taken
        yield weight  # a copy, as the parameter's gradient
        yield -2 * weight


def _adapted(adapter: Adapter, tokens: int) -> Iterator[int]:
    """Ahead of the gradient of a linear's input: that of what A makes of it, and that of B."""
    inner = adapter.inner(tokens)
    yield inner
    if adapter.first and adapter.splits_tokens and adapter.tp > 1:
        yield inner // adapter.tp - inner
    yield adapter.weights()[1].elements * adapter.element


def _done(adapter: Adapter, tokens: int) -> Iterator[int]:
    """Behind it: the gradient of A. With those of both weights goes what was kept for them."""
    a, b = (weight.elements * adapter.element for weight in adapter.weights())
    inner = adapter.inner(tokens)
    divides = adapter.first and adapter.splits_tokens
    yield a
    yield -a - b - inner - (inner // adapter.tp if divides else inner)


def _feed_forward(stack: Layer, tokens: int, learning: Learning) -> Iterator[int]:
    inner = tokens * stack.ffn // stack.tp * stack.element
    yield from _summed(stack, "linear_fc2", tokens, stack.ffn, learning)
    if stack.gated:
        yield 2 * inner  # gradients of gate and other half, from that of the product; all three factors go
        yield -3 * inner
        yield inner  # through the gate; what it was made of goes
        yield -3 * inner
        yield 2 * inner  # both halves together
        yield -2 * inner
    else:
        yield inner
        yield -2 * inner
    first = inner * (2 if stack.gated else 1)
    yield from _linear(stack, "linear_fc1", tokens, stack.ffn * (2 if stack.gated else 1), learning)
    if learning.weights is not Weights.LATER:
        yield -first


def _attention(stack: Layer, tokens: int, learning: Learning) -> Iterator[int]:
    (_, first), (attended, _) = stack.attention_linears()[0], stack.attention_linears()[-1]
    qkv = tokens * first // stack.tp * stack.element
    output = tokens * attended // stack.tp * stack.element
    yield from _summed(stack, "linear_proj", tokens, attended, learning)
    yield qkv
    # What was put out may have been freed already.
    yield -2 * output + output * learning.frees("linear_proj")
    yield qkv
    yield -2 * qkv
    yield from _linear(stack, "linear_qkv", tokens, first, learning)

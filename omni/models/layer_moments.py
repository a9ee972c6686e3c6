"""The fullest moment of a layer's backward: what autograd makes and frees, step by step.

Each step makes bytes (positive) or frees them (negative), beside what the forward kept; the most of their
sums counts. The gradient of the layer's output is made first, so it is among them.

Shapes as in `stack.py`.
"""

from collections.abc import Iterator
from enum import Enum
from itertools import accumulate
from typing import Protocol

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


class Weights(Enum):
    """When gradients of weights are made: what they need is freed at once, later, or was not kept."""

    NOW = 1
    LATER = 2
    FROZEN = 3


def most_in_backward(stack: Layer, seen: Attended, *, now: bool, frozen: bool) -> int:
    """Bytes that the backward of a layer holds at most beside what was kept, its output's gradient too."""
    weights = Weights.FROZEN if frozen else Weights.NOW if now else Weights.LATER
    return max(accumulate(_steps(stack, seen, weights)))


def _steps(stack: Layer, seen: Attended, weights: Weights) -> Iterator[int]:
    out = stack.stream(seen.tokens)
    norm = out if weights is Weights.NOW else 0
    yield out
    yield from _feed_forward(stack, seen.tokens, weights)
    # The norm, whose output is freed with the first linear, then the sum with what went around it.
    yield out - norm
    yield out
    yield -2 * out - out
    yield from _attention(stack, seen.tokens, weights)


def _linear(stack: Layer, tokens: int, inputs: int, outputs: int, weights: Weights) -> Iterator[int]:
    """A linear whose input all ranks gathered: gradients of that, of own tokens, and of the weight."""
    whole = tokens * inputs * stack.element
    yield whole
    if stack.splits_tokens and stack.tp > 1:
        yield stack.stream(tokens)
        if weights is not Weights.NOW:
            yield -whole
    if weights is Weights.NOW:
        weight = inputs * outputs // stack.tp * stack.element
        yield weight
        yield -(whole if stack.splits_tokens and stack.tp > 1 else 0)
        yield weight  # a copy, as the parameter's gradient
        yield -2 * weight


def _summed(stack: Layer, tokens: int, inputs: int, weights: Weights) -> Iterator[int]:
    """A linear whose outputs are summed over ranks: gathered gradients, those of its input and its weight."""
    gathered = tokens * stack.hidden * stack.element if stack.splits_tokens and stack.tp > 1 else 0
    yield gathered
    yield tokens * inputs // stack.tp * stack.element
    if weights is Weights.FROZEN:
        yield -gathered
    if weights is Weights.NOW:
        weight = inputs * stack.hidden // stack.tp * stack.element
        taken = tokens * inputs // stack.tp * stack.element
        yield weight
        yield -gathered - taken
        yield weight  # a copy, as the parameter's gradient
        yield -2 * weight


def _feed_forward(stack: Layer, tokens: int, weights: Weights) -> Iterator[int]:
    inner = tokens * stack.ffn // stack.tp * stack.element
    yield from _summed(stack, tokens, stack.ffn, weights)
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
    yield from _linear(stack, tokens, stack.hidden, stack.ffn * (2 if stack.gated else 1), weights)
    if weights is not Weights.LATER:
        yield -first


def _attention(stack: Layer, tokens: int, weights: Weights) -> Iterator[int]:
    (hidden, first), (attended, _) = stack.attention_linears()[0], stack.attention_linears()[-1]
    qkv = tokens * first // stack.tp * stack.element
    output = tokens * attended // stack.tp * stack.element
    yield from _summed(stack, tokens, attended, weights)
    yield qkv
    yield -2 * output + (output if weights is Weights.NOW else 0)  # what was put out has been freed already
    yield qkv
    yield -2 * qkv
    yield from _linear(stack, tokens, hidden, first, weights)

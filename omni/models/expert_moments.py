"""The fullest moments of a layer with experts, as megatron-core's MoELayer passes through it.

Rows are what tokens are on their way: a token sends one to each expert that it takes. They are brought into
the order of experts, sent, brought into the order of this rank's experts, and back the same way. As in
`layer_moments.py` each step makes bytes (positive) or frees them (negative).

Shapes: t tokens between halves, E experts, D width, F width of an expert, R rows of this rank's experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from omni.models.layer import Layer
from omni.models.layer_moments import (
    Learning,
    WeightGradient,
    Weights,
    attention_steps,
    behind_steps,
    feed_forward_steps,
    normed_steps,
)
from parallel.work import FP32, Attended


@dataclass(frozen=True)
class Routed:
    """Rows of a pass: those that this rank has `sent`, none if it is alone, and those that it gets, R, for
    its `local` experts. `tokens` are t, `experts` E and `ffn` F.
    """

    tokens: int
    experts: int
    ffn: int
    sent: int
    rows: int
    local: int

    @property
    def reordered(self) -> bool:
        """Whether rows do not come in the order of experts: from several ranks, for several experts."""
        return 1 < self.local < self.experts


def most_in_forward(stack: Layer, rows: Routed, *, graph: bool, inputs: bool) -> int:
    """Bytes that a forward holds at most beside all that it keeps. Without a `graph` it keeps its output
    alone; else all but, unless told, the `inputs` of linears.
    """
    out = rows.tokens * stack.hidden * stack.element
    own, sent = (count * stack.hidden * stack.element for count in (rows.rows, rows.sent))
    # Who calls holds rows as they were sent, as they came and, until experts are done, in their order.
    held = sent + (own if rows.reordered or not inputs else 0)
    ordered = own if rows.reordered and not inputs else 0
    unit = rows.rows * rows.ffn * stack.element
    taken = 0 if inputs else unit  # by the second linear
    inside = taken if graph else unit * (3 if stack.gated else 2)
    back = sent or own
    shared = out if stack.ffn else 0
    moments = (
        ordered + inside,
        ordered + own + taken,  # what experts put out, and what their second linear took
        ordered + own * (2 if rows.reordered else 1),  # what they put out, and the same as it came
        own + sent,  # on the way back
        2 * back + out,  # by token, and their sums
        back + out + shared,  # and those with what the shared expert puts out
    )
    probs = rows.rows * FP32 * rows.reordered  # as they came. The output is not there yet.
    most = held + max(moments) + shared + probs - out
    return most if graph else most + 2 * out  # of the norm, and the stream after attention


def most_in_backward(stack: Layer, seen: Attended, rows: Routed, kept: int, weights: Weights) -> int:
    """Bytes that a backward holds at most beside what was kept and the gradient of its output."""
    return max(accumulate(expert_steps(stack, seen, rows, kept, weights)))


def products(stack: Layer, rows: Routed) -> Iterator[WeightGradient]:
    """Gradients of experts' weights that were put off: as in `layer_moments.half_products`."""
    first = rows.ffn * (2 if stack.gated else 1) * stack.element
    second, row = rows.ffn * stack.element, stack.hidden * stack.element
    yield WeightGradient(rows.local * second * stack.hidden, rows.rows * (second + row))
    yield WeightGradient(rows.local * first * stack.hidden, rows.rows * (first + row))


def expert_steps(stack: Layer, seen: Attended, rows: Routed, kept: int, weights: Weights) -> Iterator[int]:
    """A layer, from the gradient of its output to that of its input. Router and experts have `kept` bytes."""
    out, made, learning = stack.stream(seen.tokens), 0, Learning(weights, {})
    yield from behind_steps(stack, seen.tokens)
    for step in _routed_steps(stack, out, rows, weights):
        made += step
        yield step
    # All else that router and experts have kept is gone, and the gradient of their input is there.
    later = sum(product.gone for product in products(stack, rows)) * (weights is Weights.LATER)
    yield out - kept + later - made
    yield -out * _goes_first(stack)
    if stack.ffn:
        yield from feed_forward_steps(stack, seen.tokens, learning)
        yield out
        yield -2 * out
    # The router takes what the norm puts out, and so does the shared expert.
    frees = weights is not Weights.LATER or stack.ffn == 0
    waits = stack.puts_off_gradient(weights is Weights.LATER)
    yield from normed_steps(stack, seen.tokens, frees, waits or stack.holds_gradient)
    yield from behind_steps(stack, seen.tokens)
    yield from attention_steps(stack, seen, learning)
    waits = replace(stack, ffn=1).puts_off_gradient(weights is Weights.LATER)
    yield from normed_steps(stack, seen.tokens, learning.frees("linear_qkv"), waits)


def _goes_first(stack: Layer) -> bool:
    """Whether the gradient that a norm behind has made goes first: no shared expert takes it."""
    return stack.norms != "before" and not stack.ffn


def _routed_steps(stack: Layer, out: int, rows: Routed, weights: Weights) -> Iterator[int]:
    own, sent = (count * stack.hidden * stack.element for count in (rows.rows, rows.sent))
    yield sent or own
    yield -out * _goes_first(stack)
    if sent:
        yield own
        yield -sent
    if rows.reordered:
        yield own
        yield -own
    yield from _experts(stack, rows, own, weights)
    if rows.reordered:
        yield own
        yield -own
    if sent:
        yield sent
        yield -own
    # Tokens from rows, then the router, in single precision, and the sum of both.
    yield sent or own
    yield out
    yield -2 * (sent or own)
    single = rows.tokens * stack.hidden * FP32
    yield single
    yield out
    yield -single
    yield single
    yield -single
    yield out
    yield -2 * out


def _experts(stack: Layer, rows: Routed, own: int, weights: Weights) -> Iterator[int]:
    """Their feed-forwards. Gradients of what they put out, and rows, of `own` bytes, go with their linears,
    unless they wait.
    """
    unit = rows.rows * rows.ffn * stack.element
    yield unit
    yield from _weight(stack, rows, rows.ffn, unit, weights)
    yield -own * (weights is not Weights.LATER)
    # Gradients of what products are weighed by, in single precision, and of products.
    single = rows.rows * rows.ffn * FP32
    yield single
    yield -single
    yield unit
    yield -2 * unit
    first = 2 if stack.gated else 1
    yield first * unit
    yield -(1 + first) * unit
    yield own
    yield from _weight(stack, rows, first * rows.ffn, 0, weights)
    yield -own * (weights is Weights.NOW)
    yield -first * unit * (weights is not Weights.LATER)


def _weight(stack: Layer, rows: Routed, ffn: int, taken: int, weights: Weights) -> Iterator[int]:
    """The gradient of a weight of all experts, and what the linear took, which goes."""
    if weights is Weights.NOW:
        weight = rows.local * ffn * stack.hidden * stack.element
        yield weight
        yield -taken - weight

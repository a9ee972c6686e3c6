"""The fullest moments of a layer with experts, as megatron-core's MoELayer passes through it.

Rows are what tokens are on their way: a token sends one to each expert that it takes. They are brought into
the order of ranks, sent, brought into the order of this rank's experts, and back the same way. As in
`layer_moments.py` each step makes bytes (positive) or frees them (negative).

Shapes: t tokens between halves, E experts, D width, F width of an expert, r rows of one expert.
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
    feed_forward_steps,
    normed_steps,
)
from parallel.work import FP32, Attended


@dataclass(frozen=True)
class Routed:
    """Rows of a pass: those that this rank has `sent`, none if it is alone, and those that `each` of its
    experts gets. `tokens` are t, `experts` E and `ffn` F.
    """

    tokens: int
    experts: int
    ffn: int
    sent: int
    each: tuple[int, ...]

    @property
    def several(self) -> bool:
        """Whether rows are brought into the order of experts."""
        return len(self.each) > 1


def most_in_forward(stack: Layer, rows: Routed, *, graph: bool, inputs: bool) -> int:
    """Bytes that a forward holds at most beside all that it keeps. Without a `graph` it keeps its output
    alone; else all but, unless told, the `inputs` of linears.
    """
    row, out = (
        stack.hidden * stack.element,
        rows.tokens * stack.hidden * stack.element,
    )
    own, sent, last = sum(rows.each) * row, rows.sent * row, rows.each[-1]
    # Who calls holds rows as they were sent, as they came and, until experts are done, in their order.
    held = sent + (own if rows.several or not inputs else 0)
    ordered = own if rows.several and not inputs else 0
    unit = last * rows.ffn * stack.element
    input_ = 0 if inputs else unit  # of the second linear, in the precision of the run
    expert = last * rows.ffn * FP32 + input_  # a product is weighed in single precision
    if not graph:
        expert = max(expert, unit * (5 if stack.gated else 2))
    back = sent or own
    shared = out if stack.ffn else 0
    moments = (
        ordered + own - last * row + expert,  # what other experts put out, and the last one at work
        ordered + own + input_,  # what each puts out, and what the last one took
        ordered + own * (2 if rows.several else 1),  # what each puts out, and all of it together
        own + sent,  # on the way back
        back + out + shared,  # put together, and the sum with what the shared expert puts out
    )
    # The dispatcher has probabilities, the map, and probabilities as they came. The output is not there yet.
    router = rows.tokens * rows.experts * (FP32 + 1) + sum(rows.each) * FP32 * rows.several
    most = held + max(moments) + shared + router - out
    return most if graph else most + 2 * out  # of the norm, and the stream after attention


def most_in_backward(stack: Layer, seen: Attended, rows: Routed, kept: int, weights: Weights) -> int:
    """Bytes that a backward holds at most beside what was kept and the gradient of its output."""
    return max(accumulate(expert_steps(stack, seen, rows, kept, weights)))


def products(stack: Layer, rows: Routed) -> Iterator[WeightGradient]:
    """Gradients of experts' weights that were put off: as in `layer_moments.half_products`."""
    first = rows.ffn * (2 if stack.gated else 1) * stack.element
    last = len(rows.each) - 1
    for done, r in enumerate(reversed(rows.each)):
        # Gradients of what experts put out and rows are one tensor each, which goes with the last to need it.
        shared = sum(rows.each) * stack.hidden * stack.element * (done == last)
        second = rows.ffn * stack.element
        yield WeightGradient(second * stack.hidden, r * second + shared)
        yield WeightGradient(first * stack.hidden, r * first + shared)


def expert_steps(stack: Layer, seen: Attended, rows: Routed, kept: int, weights: Weights) -> Iterator[int]:
    """A layer, from the gradient of its output to that of its input. Router and experts have `kept` bytes."""
    out, made, learning = stack.stream(seen.tokens), 0, Learning(weights, {})
    for step in _routed_steps(stack, out, rows, weights):
        made += step
        yield step
    # All else that router and experts have kept is gone, and the gradient of their input is there.
    later = sum(product.gone for product in products(stack, rows)) * (weights is Weights.LATER)
    yield out - kept + later - made
    if stack.ffn:
        yield from feed_forward_steps(stack, seen.tokens, learning)
        yield out
        yield -2 * out
    # The router takes what the norm puts out, and so does the shared expert.
    frees = weights is not Weights.LATER or stack.ffn == 0
    waits = stack.puts_off_gradient(weights is Weights.LATER)
    yield from normed_steps(stack, seen.tokens, frees, waits or stack.holds_gradient)
    yield from attention_steps(stack, seen, learning)
    waits = replace(stack, ffn=1).puts_off_gradient(weights is Weights.LATER)
    yield from normed_steps(stack, seen.tokens, learning.frees("linear_qkv"), waits)


def _routed_steps(stack: Layer, out: int, rows: Routed, weights: Weights) -> Iterator[int]:
    row = stack.hidden * stack.element
    own, sent = sum(rows.each) * row, rows.sent * row
    yield sent or own
    if sent:
        yield own
        yield -sent
    if rows.several:
        yield own
        yield -own
    first, *others = rows.each
    for r in reversed(others):
        yield from _expert(stack, rows.ffn, r, weights, 0)
    yield from _expert(stack, rows.ffn, first, weights, own)  # the last to be asked for those of all
    if rows.several:
        yield own  # together, instead of each by itself
        yield -own
        yield own
        yield -own
    if sent:
        yield sent
        yield -own
    # Tokens from rows, then the router, in single precision, and the sum of both.
    yield out
    yield out
    yield -out - (sent or own)
    single = rows.tokens * stack.hidden * FP32
    yield single
    yield out
    yield -single
    yield single
    yield -single
    yield out
    yield -2 * out


def _expert(stack: Layer, ffn: int, rows: int, weights: Weights, shared: int) -> Iterator[int]:
    """An expert. Gradients of all that experts put out, and all that they took, are one tensor each, of
    `shared` bytes where this expert is the last to need them: they go with its linears, unless they wait.
    """
    unit, row = rows * ffn * stack.element, rows * stack.hidden * stack.element
    yield unit
    yield from _weight(stack, ffn, unit, weights)
    yield -shared * (weights is not Weights.LATER)
    # Products are weighed in single precision: gradients of the product and of its weight.
    single = rows * ffn * FP32
    halves = stack.element < FP32
    yield single * halves
    yield -unit * halves
    yield single
    yield single
    yield unit * halves
    yield -single * (3 if halves else 2) - unit
    if stack.gated:
        yield 2 * unit  # as in a feed-forward
        yield -3 * unit
        yield unit
        yield -3 * unit
        yield 2 * unit
        yield -2 * unit
    else:
        yield unit
        yield -2 * unit
    first = 2 if stack.gated else 1
    yield row
    yield from _weight(stack, first * ffn, 0, weights)
    yield -shared * (weights is Weights.NOW)
    yield -first * unit * (weights is not Weights.LATER)


def _weight(stack: Layer, ffn: int, taken: int, weights: Weights) -> Iterator[int]:
    """The gradient of a weight, and what the linear took, which goes."""
    if weights is Weights.NOW:
        weight = ffn * stack.hidden * stack.element
        yield weight
        yield -taken - weight

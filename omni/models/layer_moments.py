"""The fullest moment of a layer's backward: what autograd makes and frees, step by step.

Each step makes bytes (positive) or frees them (negative), beside what the forward kept; the most of their
sums counts. The gradient of the layer's output is there instead of the output itself, which what came after
the layer has let go of.

Shapes as in `stack.py`.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from omni.models.adapters import Adapter
from omni.models.forward_moments import KEPT_OF_SHARED, Tape, core_forward
from omni.models.layer import Layer
from omni.models.pieces import Linears
from parallel.work import FP32, INT32, Attended, Grad


class Weights(Enum):
    """When gradients of weights are made: what they need is freed at once, later, or was not kept."""

    NOW = 1
    LATER = 2
    FROZEN = 3

    @classmethod
    def of(cls, grad: Grad, frozen: bool) -> "Weights":
        """When a backward that makes `grad` makes them."""
        return cls.FROZEN if frozen else cls.NOW if grad is Grad.BOTH else cls.LATER


@dataclass(frozen=True)
class Learning:
    """What of a layer learns: its own weights, as `weights` says, and adapters by the name of the linear."""

    weights: Weights
    adapters: Mapping[str, Adapter]

    def frees(self, name: str) -> bool:
        """Whether the backward of a linear frees the input that was kept for it."""
        return self.weights is Weights.NOW or name in self.adapters


class WeightGradient(NamedTuple):
    """A gradient of a weight that was put off: its bytes, and those that are let go of when it was made."""

    weight: int
    gone: int


def most_in_backward(stack: Layer, seen: Attended, learning: Learning) -> int:
    """Bytes that a layer's backward holds at most beside what was kept and the gradient of its output."""
    return max(accumulate(backward_steps(stack, seen, learning)))


def most_of_products(products: Iterable[WeightGradient]) -> int:
    """Bytes that gradients of weights take at most, made one by one, beside all that is held for them."""
    most = gone = 0
    for product in products:
        most = max(most, product.weight - gone)
        gone += product.gone
    return most


def half_products(stack: Layer, half: Linears, tokens: int) -> Iterator[WeightGradient]:
    """Gradients of weights of the two linears of half a layer, last first, with their inputs, the first's as
    ranks divide it, and the gradients of their outputs.
    """
    (_, first), (inner, last) = half
    taken = tokens * inner // stack.tp * stack.element
    yield WeightGradient(inner * last // stack.tp * stack.element, taken + tokens * last * stack.element)
    put_out = tokens * first // stack.tp * stack.element
    yield WeightGradient(stack.hidden * first // stack.tp * stack.element, stack.stream(tokens) + put_out)


def backward_steps(stack: Layer, seen: Attended, learning: Learning) -> Iterator[int]:
    """A layer, from the gradient of its output to that of its input."""
    yield from behind_steps(stack, seen.tokens)
    yield from feed_forward_steps(stack, seen.tokens, learning)
    waits = stack.puts_off_gradient(learning.weights is Weights.LATER)
    yield from normed_steps(stack, seen.tokens, learning.frees("linear_fc1"), waits or stack.holds_gradient)
    yield from behind_steps(stack, seen.tokens)
    yield from attention_steps(stack, seen, learning)
    yield from normed_steps(stack, seen.tokens, learning.frees("linear_qkv"), waits)


def behind_steps(stack: Layer, tokens: int) -> Iterator[int]:
    """A norm behind a half, if there is one: the gradient of what the half put out, which is gone with it."""
    if stack.norms != "before":
        out = stack.stream(tokens)
        yield out
        yield -out - stack.between(tokens) * len(stack.one_norm) * FP32


def normed_steps(stack: Layer, tokens: int, frees: bool, stays: bool) -> Iterator[int]:
    """A norm, whose output goes with the linear behind it if that `frees` it, together with the sum with what
    went around both. The gradient from behind may stay, for the gradient of a weight. Without a norm, the
    linear takes in the stream.
    """
    out = stack.stream(tokens)
    if stack.norms == "after":
        yield out * stays
        yield -out - out * frees
        return
    yield out - out * frees
    yield -3 * out - stack.between(tokens) * len(stack.one_norm) * FP32 + out * stays


def _linear(stack: Layer, name: str, tokens: int, outputs: int, learning: Learning) -> Iterator[int]:
    """A linear whose input all ranks gathered: gradients of that, of own tokens, and of the weight."""
    weights, adapter = learning.weights, learning.adapters.get(name)
    whole = tokens * stack.hidden * stack.element
    gathers = stack.gathers
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
        yield -(whole if gathers else 0) - weight
    if adapter is not None:
        yield from _done(adapter, tokens)


def _summed(stack: Layer, name: str, tokens: int, inputs: int, learning: Learning) -> Iterator[int]:
    """A linear whose outputs are summed over ranks: gathered gradients, those of its input and its weight."""
    weights, adapter = learning.weights, learning.adapters.get(name)
    gathered = tokens * stack.hidden * stack.element if stack.gathers else 0
    taken = tokens * inputs // stack.tp * stack.element
    behind = stack.stream(tokens) * (stack.norms != "before")  # the gradient that a norm behind has made
    yield gathered
    yield -behind * stack.gathers
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
        yield -gathered - taken - weight
    if weights is not Weights.LATER:
        yield -behind * (not stack.gathers)


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


def feed_forward_steps(stack: Layer, tokens: int, learning: Learning) -> Iterator[int]:
    """A feed-forward, from the gradient of its output to that of its input."""
    inner = tokens * stack.ffn // stack.tp * stack.element
    yield from _summed(stack, "linear_fc2", tokens, stack.ffn, learning)
    first = inner * (2 if stack.gated else 1)
    yield first
    yield -inner - first  # of the product, and what it was made of
    yield from _linear(stack, "linear_fc1", tokens, stack.ffn * (2 if stack.gated else 1), learning)
    if learning.weights is not Weights.LATER:
        yield -first


def attention_steps(stack: Layer, seen: Attended, learning: Learning) -> Iterator[int]:
    """Attention and the linears around it, from the gradient of its output to that of its input."""
    (_, first), (attended, _) = stack.attention_linears()[0], stack.attention_linears()[-1]
    qkv = seen.tokens * first // stack.tp * stack.element
    output = seen.tokens * attended // stack.tp * stack.element
    yield from _summed(stack, "linear_proj", seen.tokens, attended, learning)
    if stack.latent is None and stack.delta is None:
        yield from _core_steps(stack, seen, output, learning)
    else:
        yield qkv
        yield -2 * output + output * learning.frees("linear_proj")
        yield qkv
        yield -2 * qkv
    yield from _linear(stack, "linear_qkv", seen.tokens, first, learning)
    if learning.weights is not Weights.LATER:
        yield -qkv


def _core_steps(stack: Layer, seen: Attended, output: int, learning: Learning) -> Iterator[int]:
    """From the gradient of what attention, or its gates, put out to that of queries, keys and values."""
    heads, kv_heads = stack.heads // stack.tp, stack.kv_heads // stack.tp
    qkv = seen.tokens * (heads + 2 * kv_heads) * stack.head_dim * stack.element
    gate = output * stack.output_gate
    anew, shared = stack.recompute == "selective", bool(seen.into)
    wide = stack.wide_norms  # these are done with the tensor of all heads before its gradient is made
    to_end = anew or (stack.qk_norm and not wide)
    inside = bool(gate) or not anew  # what attention puts out is not what is computed anew
    made = core_forward(stack.keeping, seen, Tape(True, ()), output)
    if anew:
        yield made.most
        yield made.now - made.most
    elif learning.frees("linear_proj") and not shared and not gate:
        yield output  # the linear behind has let go of it, attention has not
    if gate:
        yield 2 * gate
        yield -gate * (not anew) - gate * shared
        yield -(qkv + gate) * (shared and not to_end and not wide)
    gone = made.now - output - gate
    if shared:
        yield from _shared_steps(stack, seen, output, output * (not inside))
        gone -= made.of(*KEPT_OF_SHARED)
    else:
        yield from _kernel_steps(stack, qkv, seen.tokens * heads)
    # The gradient of what attention put out goes with this, but not what a linear needs later.
    waits = not gate and learning.weights is Weights.LATER
    yield -gone - output * (2 - waits) * (inside and not shared)
    if wide:
        yield from _wide_steps(output, (qkv - output) // 2, FP32 // stack.element)
    yield -(qkv + gate) * (not to_end and (wide or not shared))
    yield qkv + gate
    yield -(qkv + gate) * (1 + to_end) - 2 * output * anew


def _wide_steps(queries: int, keys: int, exact: int) -> Iterator[int]:
    """The backward of a rotation and, of keys and then of queries, that of a norm of all of them: three
    tensors in single precision, of `exact` times as many bytes.
    """
    yield queries + keys
    yield -queries - keys
    for own in (keys, queries):
        yield 3 * exact * own
        yield -3 * exact * own


def _kernel_steps(stack: Layer, made: int, rows: int) -> Iterator[int]:
    """The backward of a kernel that attends for so many rows of heads, and what it has made. The one for half
    precision is handed zeros beside, as the gradient of its rows' sums.
    """
    sums = rows * FP32 * (stack.element < FP32)
    yield made + sums
    yield -sums


def _shared_steps(stack: Layer, seen: Attended, output: int, held: int) -> Iterator[int]:
    """Attention of shared sequences: exchanges run the other way round, and tiles between them. Of the
    gradient of the output so many bytes are `held`, once it is divided, or sent where all tokens are shared.
    """
    heads, kv_heads, unit = (
        stack.heads // stack.tp,
        stack.kv_heads // stack.tp,
        stack.head_dim * stack.element,
    )
    sent, landed, returned = (sum(of) * stack.element for of in (seen.into, seen.into_back, seen.out_back))
    taken, rows, shared = (seen.rows + 2 * seen.context) * unit, seen.rows * unit, seen.tokens - seen.local
    early, late = (tokens * (heads + 2 * kv_heads) * unit for tokens in (seen.local - seen.late, seen.late))
    own = taken - landed if seen.own is None else seen.own * stack.element
    divided = output * (seen.local > 0)
    yield divided
    yield (held - output) * (seen.local > 0)
    yield returned + rows
    yield -shared * heads * unit + held * (not seen.local)
    yield from _kernel_steps(stack, late, seen.late * heads)
    yield -late - seen.late * heads * (2 * unit + FP32)
    yield rows - returned
    yield -rows
    for row, context in reversed(seen.groups or ((seen.rows, seen.context),)):
        yield from _kernel_steps(stack, (row + 2 * context) * unit, row)
        yield -(3 * row + 2 * context) * unit - row * FP32
    of_others, of_own, of_tensor = (numbers * INT32 for numbers in seen.adding)
    yield taken  # side by side
    yield landed + of_others
    yield sent + own - of_others
    yield of_own + own * (of_own > 0)
    yield -of_own - own * (of_own > 0)
    yield -2 * taken
    yield from _kernel_steps(stack, early, (seen.local - seen.late) * heads)
    yield -early - (seen.local - seen.late) * heads * (2 * unit + FP32)
    yield shared * heads * unit - landed
    for _ in ("keys", "values"):  # of which several tiles make gradients
        yield shared * kv_heads * unit + of_tensor
        yield -of_tensor
    yield -own - sent
    if seen.local:
        yield seen.tokens * (heads + 2 * kv_heads) * unit
        yield -early - late - shared * (heads + 2 * kv_heads) * unit

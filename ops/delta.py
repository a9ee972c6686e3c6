"""The gated delta rule over packed sequences: linear attention with a state that decays and corrects itself.

Each head carries a matrix S [P, V] from token to token (Yang, Kautz and Hatamizadeh, Gated Delta Networks,
2024, equation 10, transposed):

    S_t = exp(g_t) S_(t-1) + k_t ⊗ β_t (v_t − exp(g_t) S_(t-1)ᵀ k_t),    o_t = S_tᵀ q_t / √P

Queries, keys and values pass a causal convolution by channel and SiLU before; queries and keys then have
length 1; β = sigmoid(b) and g = −exp(A_log) softplus(a + dt_bias).

Tokens are computed CHUNK at a time: within a chunk the corrections of its tokens are the solution of a
triangular system (section 3.3 there), and states go from chunk to chunk. Chunks of all sequences that have an
n-th one go through the n-th step together, so the loop is as long as the longest sequence.

Invariant: every sequence begins with an empty state and an empty convolution, wherever it lies in the pack.
Memory: only the inputs are kept for the backward, which computes the rest anew. The state is fp32 at least.

Shapes: T tokens, G heads of queries and keys of P numbers, R heads of values a key head of V numbers each, J
taps of the convolution, M chunks of C tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ops.delta_shape import CHUNK, DeltaShape

LENGTH_EPS = 1e-6  # under the root of the squared length of a query or a key

DeltaState = tuple[torch.Tensor, ...]
"""What the rule needs of a sequence's tokens so far: the last inputs of the convolution [J - 1, G, channels],
of zeros where there were fewer, and S [G, R, P, V]."""


@dataclass(frozen=True)
class DeltaPacking:
    """How whole sequences of a pack divide into chunks: tables are tensors, sizes stay on the host.

    `steps` counts the chunks of each step of the loop over states: those of the first sequences, from the one
    with most chunks on, in which `order` the loop has all S. `chunked` [M · C] says which token stands at
    each place of the chunks, T at the ends of chunks that a sequence does not fill, and `places` [T] at which
    place each token does. `spaced` [T + S · (J - 1)] are the tokens with so many empty places T before each
    of S sequences that no tap reaches another one; the outputs of tokens are numbers `tapped` [T] of what the
    convolution puts out. `above` [C, C] is True above the diagonal.
    """

    lengths: tuple[int, ...]
    steps: tuple[int, ...]
    order: tuple[int, ...]
    chunked: torch.Tensor
    places: torch.Tensor
    spaced: torch.Tensor
    tapped: torch.Tensor
    above: torch.Tensor

    @property
    def tokens(self) -> int:
        """T."""
        return sum(self.lengths)


def make_delta_packing(lengths: Sequence[int], taps: int) -> DeltaPacking:
    """Prepare the rule over sequences of `lengths`; those without tokens are allowed and ignored. Tables are
    on the host until they are brought to a device (`ops.one_copy`).
    """
    lengths = tuple(length for length in lengths if length)
    tokens, starts = sum(lengths), list(accumulate(lengths, initial=0))
    longest_first = sorted(range(len(lengths)), key=lambda s: -lengths[s])
    chunks = [-(-lengths[s] // CHUNK) for s in longest_first]
    steps = [sum(count > step for count in chunks) for step in range(chunks[0] if chunks else 0)]
    pairs = [
        (starts[s] + step * CHUNK, starts[s + 1]) for step, n in enumerate(steps) for s in longest_first[:n]
    ]
    first, end = np.array(pairs, np.int64).reshape(-1, 2).T
    chunked = first[:, None] + np.arange(CHUNK)
    chunked = np.where(chunked < end[:, None], chunked, tokens).ravel()
    places = np.zeros(tokens + 1, np.int64)
    places[chunked] = np.arange(len(chunked))
    before = np.repeat(np.arange(len(lengths)), lengths) * (taps - 1)
    tapped = np.arange(tokens) + before
    spaced = np.full(tokens + len(lengths) * (taps - 1), tokens)
    spaced[tapped + taps - 1] = np.arange(tokens)
    above = np.triu(np.ones((CHUNK, CHUNK), bool), 1)
    tables = (chunked, places[:-1], spaced, tapped, above)
    return DeltaPacking(lengths, tuple(steps), tuple(longest_first), *map(torch.from_numpy, tables))


def packed_delta(
    x: torch.Tensor,
    conv: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    packing: DeltaPacking,
    shape: DeltaShape,
) -> torch.Tensor:
    """Apply the rule within each sequence: x [T, G, width] → [T, G, R · V].

    A head of `x` holds its query, its key, R values, R numbers b and R numbers a; `conv` [G, channels, J] has
    the last tap on a token itself; `a_log` and `dt_bias` are [G, R]. T may be zero.
    """
    assert x.shape[0] == packing.tokens, f"{x.shape[0]} tokens against {packing.lengths}"
    assert x.shape[2] == shape.width, f"{x.shape[2]} numbers of a head for {shape}"

    def rule(*tensors: torch.Tensor) -> torch.Tensor:
        return _delta(*tensors, packing=packing, shape=shape)

    out: torch.Tensor = _Anew.apply(rule, x, conv, a_log, dt_bias)
    return out


def continued_delta(
    x: torch.Tensor,
    conv: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    packing: DeltaPacking,
    shape: DeltaShape,
    before: Sequence[DeltaState | None],
) -> tuple[torch.Tensor, list[DeltaState]]:
    """`packed_delta` of tokens that go on from `before`, of each sequence of the packing what is kept of its
    tokens so far or None if there are none; also return what is kept of each now. Without gradients.
    """
    assert len(before) == len(packing.lengths), f"{len(before)} states for {packing.lengths}"
    dtype, earlier = x.dtype, conv.shape[-1] - 1
    x, conv, a_log, dt_bias = (of.to(_wide(of.dtype)) for of in (x, conv, a_log, dt_bias))
    mixed, b, a = x.split([shape.channels, shape.values, shape.values], -1)
    none = mixed.new_zeros(earlier, *mixed.shape[1:]), _empty(x, 1, shape)[0]
    inputs, states = zip(*(none if of is None else of for of in before), strict=True)
    joined = [torch.cat(of) for of in zip(inputs, mixed.split(packing.lengths), strict=True)]
    mixed = _tapped(torch.cat(joined), conv).index_select(0, packing.tapped)
    state, ended = torch.stack([states[s] for s in packing.order]), list[torch.Tensor]()
    out = _ruled(mixed, b, a, a_log, dt_bias, packing, shape, state, ended)
    after = dict(zip(packing.order, torch.cat(ended[::-1]), strict=True))
    return out.to(dtype), [(of[len(of) - earlier :], after[s]) for s, of in enumerate(joined)]


class _Anew(torch.autograd.Function):
    """A function of tensors that keeps its inputs and nothing else: the backward computes it anew."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        inputs = [x.detach().requires_grad_(n) for x, n in zip(ctx.saved_tensors, needs, strict=True)]
        with torch.enable_grad():
            out = ctx.function(*inputs)
        found = iter(torch.autograd.grad(out, [x for x in inputs if x.requires_grad], grads[0]))
        return None, *(next(found) if need else None for need in needs)


def _delta(
    x: torch.Tensor,
    conv: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    packing: DeltaPacking,
    shape: DeltaShape,
) -> torch.Tensor:
    dtype = x.dtype
    if x.shape[0] == 0:
        # A sum of all inputs keeps the graph connected for ranks without tokens.
        return x[..., : shape.out] + 0 * (conv.sum() + a_log.sum() + dt_bias.sum())
    x, conv, a_log, dt_bias = (of.to(_wide(of.dtype)) for of in (x, conv, a_log, dt_bias))
    mixed, b, a = x.split([shape.channels, shape.values, shape.values], -1)
    # Empty places before each sequence hold tokens of zeros, so no tap reaches another one.
    spaced = _padded(mixed).index_select(0, packing.spaced)
    mixed = _tapped(spaced, conv).index_select(0, packing.tapped)
    state = _empty(x, packing.steps[0], shape)
    return _ruled(mixed, b, a, a_log, dt_bias, packing, shape, state).to(dtype)


def _empty(x: torch.Tensor, sequences: int, shape: DeltaShape) -> torch.Tensor:
    """The states of sequences before their first tokens, [S, G, R, P, V]."""
    return x.new_zeros(sequences, x.shape[1], shape.values, shape.key_dim, shape.value_dim)


def _ruled(
    mixed: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    packing: DeltaPacking,
    shape: DeltaShape,
    state: torch.Tensor,
    ended: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """The rule, of what the convolution puts out [T, G, channels], from states [S, G, R, P, V] on: [T, G,
    R · V]. States come, and go to `ended`, in the order of the loop, there those of the shortest first.
    """
    heads, mixed = mixed.shape[1], F.silu(mixed)
    beta, decay = b.sigmoid(), -a_log.exp() * F.softplus(a + dt_bias)
    chunks = _padded(torch.cat([mixed, beta, decay], -1)).index_select(0, packing.chunked)
    chunks = chunks.view(-1, CHUNK, heads, shape.width).transpose(1, 2)  # [M, G, C, width]
    sizes = [shape.key_dim, shape.key_dim, shape.out, shape.values, shape.values]
    query, key, value, beta, decay = chunks.split(sizes, -1)
    value = value.unflatten(-1, (shape.values, shape.value_dim)).transpose(2, 3)  # [M, G, R, C, V]
    beta, decay = beta.transpose(2, 3), decay.transpose(2, 3)  # [M, G, R, C]
    query = _of_length_1(query) * shape.key_dim**-0.5
    out = _of_chunks(query, _of_length_1(key), value, beta, decay, packing, state, ended)
    out = out.permute(0, 3, 1, 2, 4).reshape(-1, heads, shape.out)
    return out.index_select(0, packing.places)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _padded(x: torch.Tensor) -> torch.Tensor:
    """One more token, of zeros, for the places of tables that stand for none."""
    return F.pad(x, (0, 0, 0, 0, 0, 1))


def _of_length_1(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + LENGTH_EPS).rsqrt()


def _tapped(spaced: torch.Tensor, conv: torch.Tensor) -> torch.Tensor:
    """[N, G, channels] → [N - J + 1, G, channels]: each channel by its own taps, over J tokens."""
    taps = conv.shape[-1]
    count = spaced.shape[0] - taps + 1
    out = spaced.narrow(0, 0, count) * conv[..., 0]
    for tap in range(1, taps):
        out = torch.addcmul(out, spaced.narrow(0, tap, count), conv[..., tap])
    return out


def _of_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    beta: torch.Tensor,
    decay: torch.Tensor,
    packing: DeltaPacking,
    state: torch.Tensor,
    ended: list[torch.Tensor] | None,
) -> torch.Tensor:
    """query and key [M, G, C, P], value [M, G, R, C, V], beta and decay [M, G, R, C] → [M, G, R, C, V];
    states as for `_ruled`.

    With a token's correction u_i = β_i (v_i − what its decayed state holds for k_i), D_ij the decay from j
    to i and S the state before the chunk, it obeys (I + lower(β K Kᵀ · D)) U = β V − β exp(c) K S.
    """
    query, key = query.unsqueeze(2), key.unsqueeze(2)
    total = decay.cumsum(-1)  # c: of each token since the chunk began
    # Summed up from each token j on: a difference of two of those totals would be mostly rounding.
    follows = decay.unsqueeze(-1) * packing.above.t()
    between = follows.cumsum(-2).masked_fill(packing.above, float("-inf")).exp()
    weighed = key * beta.unsqueeze(-1)
    system = weighed @ key.transpose(-1, -2) * between
    # Columns of both right sides at once; the diagonal is taken to be 1.
    sides = torch.cat([value * beta.unsqueeze(-1), weighed * total.exp().unsqueeze(-1)], -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    values, keys = solved.split([value.shape[-1], key.shape[-1]], -1)
    within = query @ key.transpose(-1, -2) * between
    reading = query * total.exp().unsqueeze(-1)
    writing = (key * between[..., -1, :].unsqueeze(-1)).transpose(-1, -2)
    kept = total[..., -1:].exp().unsqueeze(-1)
    each = (of.split(packing.steps) for of in (values, keys, within, reading, writing, kept))
    out = []
    for news, old, own, reads, writes, stays in zip(*each, strict=True):
        if ended is not None:
            ended.append(state[news.shape[0] :])
        state = state.narrow(0, 0, news.shape[0])
        corrections = news - old @ state
        out.append(reads @ state + own @ corrections)
        state = state * stays + writes @ corrections
    if ended is not None:
        ended.append(state)
    return torch.cat(out)

"""The gated delta rule in chunks against its plain recurrence in fp64, token by token."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from ops import delta
from ops.delta import continued_delta, make_delta_packing, packed_delta
from ops.delta_shape import DeltaShape

SHAPE = DeltaShape(key_dim=6, values=3, value_dim=5, taps=4)
HEADS = 2
RAGGED = (37, 1, 0, 130, 64, 5, 65, 2)


def recurrence(x, conv, a_log, dt_bias, shape: DeltaShape) -> torch.Tensor:
    """One sequence [T, G, width] as the equations say, without any code of ours."""
    p, r, v = shape.key_dim, shape.values, shape.value_dim
    out = []
    state = torch.zeros(x.shape[1], r, p, v, dtype=x.dtype)
    for t in range(len(x)):
        mixed = torch.zeros_like(x[t, :, : shape.channels])
        for back in range(min(t + 1, shape.taps)):
            mixed = mixed + x[t - back, :, : shape.channels] * conv[..., shape.taps - 1 - back]
        mixed = mixed * mixed.sigmoid()
        query, key, value = mixed.split([p, p, r * v], -1)
        query, key = (of / (of.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for of in (query, key))
        b, a = x[t, :, shape.channels :].split(r, -1)
        alpha = (-a_log.exp() * (1 + (a + dt_bias).exp()).log()).exp()[..., None, None]
        held = torch.einsum("grpv,gp->grv", alpha * state, key)
        correction = b.sigmoid()[..., None] * (value.view(-1, r, v) - held)
        state = alpha * state + torch.einsum("gp,grv->grpv", key, correction)
        out.append(torch.einsum("grpv,gp->grv", state, query).flatten(1) / math.sqrt(p))
    return torch.stack(out) if out else x[..., : shape.out]


def drawn(lengths, dtype=torch.float64, shape=SHAPE, heads=HEADS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    rates = normal(heads, shape.values), normal(heads, shape.values)
    made = [normal(sum(lengths), heads, shape.width), normal(heads, shape.channels, shape.taps), *rates]
    return [of.to(dtype).requires_grad_() for of in made]


def gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    wanted = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    return list(torch.autograd.grad((out * wanted.to(out.dtype)).sum(), inputs))


def plainly(lengths, inputs: list[torch.Tensor]) -> torch.Tensor:
    x, *weights = inputs
    return torch.cat([recurrence(of, *weights, SHAPE) for of in x.split(lengths)])


def away(found: torch.Tensor, plain: torch.Tensor) -> float:
    return float((found - plain).detach().abs().max() / plain.detach().abs().max())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_values_and_gradients_are_those_of_the_recurrence(dtype, tolerance):
    exact, inputs = drawn(RAGGED), drawn(RAGGED, dtype)
    plain = plainly(RAGGED, exact)
    found = packed_delta(*inputs, make_delta_packing(RAGGED, SHAPE.taps), SHAPE)
    assert found.dtype == dtype
    assert away(found, plain) < tolerance
    for own, theirs in zip(gradients(found, inputs), gradients(plain, exact), strict=True):
        assert away(own, theirs) < tolerance


def test_a_pack_is_its_sequences_alone():
    inputs = drawn(RAGGED)
    x, *weights = inputs
    packed = packed_delta(*inputs, make_delta_packing(RAGGED, SHAPE.taps), SHAPE)
    alone = torch.cat(
        [
            packed_delta(of, *weights, make_delta_packing((len(of),), SHAPE.taps), SHAPE)
            for of in x.split(RAGGED)
        ]
    )
    assert away(packed, alone) < 1e-13
    for own, theirs in zip(gradients(packed, inputs), gradients(alone, inputs), strict=True):
        assert away(own, theirs) < 1e-12


@pytest.mark.parametrize("cuts", [(0.0, 1.0), (0.3, 0.3), (0.0, 0.5)])
def test_passes_over_parts_are_one_pass_over_all(cuts):
    """A sequence may begin in the second pass, end in the first, and be shorter than the convolution."""
    lengths = [length for length in RAGGED if length]
    x, *weights = drawn(lengths)
    cut = [min(length, max(n % 2, round(length * cuts[n % 2]))) for n, length in enumerate(lengths)]
    halves = [(of[:at], of[at:]) for of, at in zip(x.split(lengths), cut, strict=True)]
    out, kept = [list[torch.Tensor]() for _ in lengths], dict[int, delta.DeltaState]()
    for half in (0, 1):
        there = [n for n, of in enumerate(halves) if len(of[half])]
        packing = make_delta_packing([len(halves[n][half]) for n in there], SHAPE.taps)
        news, before = torch.cat([halves[n][half] for n in there]), [kept.get(n) for n in there]
        with torch.no_grad():
            found, after = continued_delta(news, *weights, packing, SHAPE, before)
        kept |= zip(there, after, strict=True)
        for n, of in zip(there, found.split(packing.lengths), strict=True):
            out[n].append(of)
    plain = plainly(lengths, [x, *weights])
    assert away(torch.cat([torch.cat(of) for of in out]), plain) < 1e-12


def test_what_follows_is_not_seen_before_it_nor_in_another_sequence():
    lengths = (70, 3, 66)
    inputs = drawn(lengths)
    packing = make_delta_packing(lengths, SHAPE.taps)
    for token, seen in ((0, range(0, 70)), (69, range(69, 70)), (71, range(71, 73)), (75, range(75, 139))):
        changed = inputs[0].detach().clone()
        changed[token] += 1
        apart = packed_delta(*inputs, packing, SHAPE) != packed_delta(changed, *inputs[1:], packing, SHAPE)
        assert {int(t) for t in apart.flatten(1).any(1).nonzero()} == set(seen)


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_a_rank_without_tokens_belongs_to_the_graph(lengths):
    inputs = drawn(lengths)
    out = packed_delta(*inputs, make_delta_packing(lengths, SHAPE.taps), SHAPE)
    assert out.shape == (0, HEADS, SHAPE.out)
    assert all(not grad.any() for grad in torch.autograd.grad(out.sum(), inputs))


def test_strong_decay_and_weak_stay_finite():
    inputs = [of.detach() for of in drawn((200,), torch.float32)]
    for shift in (-60.0, 60.0):
        x = inputs[0].clone()
        x[..., -SHAPE.values :] += shift
        own = [x, *inputs[1:]]
        for of in own:
            of.requires_grad_()
        out = packed_delta(*own, make_delta_packing((200,), SHAPE.taps), SHAPE)
        assert all(of.isfinite().all() for of in (out, *gradients(out, own)))


def test_decays_learn_exactly_where_they_are_strong():
    found = []
    for dtype in (torch.float64, torch.float32):
        x, conv, a_log, dt_bias = (of.detach() for of in drawn((200,), dtype))
        inputs = [x, conv, a_log + 2, dt_bias]
        for of in inputs:
            of.requires_grad_()
        packing = make_delta_packing((200,), SHAPE.taps)
        found.append(gradients(packed_delta(*inputs, packing, SHAPE), inputs)[2])
    exact, single = found
    assert away(single, exact) < 1e-6


def test_only_inputs_are_kept_for_the_backward():
    kept: list[torch.Tensor] = []
    inputs = drawn((300,))

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        packed_delta(*inputs, make_delta_packing((300,), SHAPE.taps), SHAPE)
    assert {of.data_ptr() for of in kept} == {of.data_ptr() for of in inputs}


def test_chunks_shorter_than_a_sequence_give_what_a_longer_one_gives(monkeypatch):
    inputs = drawn((100, 7))
    whole = packed_delta(*inputs, make_delta_packing((100, 7), SHAPE.taps), SHAPE)
    monkeypatch.setattr(delta, "CHUNK", 8)
    assert away(packed_delta(*inputs, make_delta_packing((100, 7), SHAPE.taps), SHAPE), whole) < 1e-12


def test_gradients_are_finite_differences():
    shape = DeltaShape(2, 2, 2, 2)
    inputs, packing = drawn((3, 2), shape=shape, heads=1), make_delta_packing((3, 2), 2)
    assert gradcheck(lambda *of: packed_delta(*of, packing, shape), inputs)

"""Attention sinks against the softmax with one more score, in fp64: outputs and all gradients."""

import pytest
import torch

from ops.attention import make_packing, packed_attention

CPU, TOLERANCE = torch.device("cpu"), 1e-12
HEADS, KV_HEADS, SIZE = 6, 2, 8


def explicit(query, key, value, lengths, window, scale, sinks):
    """Scores of every pair, and of the sinks [T, N]."""
    own = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    at = torch.arange(len(own))
    seen = (own[:, None] == own) & (at <= at[:, None]) & (at >= at[:, None] - (window or len(at)))
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (key, value))
    scores = torch.einsum("tnh,cnh->tnc", query, keys) * scale
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    weights = torch.cat([scores, sinks.unsqueeze(-1)], -1).softmax(-1)[..., :-1]
    return torch.einsum("tnc,cnh->tnh", weights, values)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize(("lengths", "backend"), [((5, 1, 9, 3), "masked"), ((40, 40), "batched")])
@pytest.mark.parametrize("window", [None, 4])
def test_outputs_and_gradients_are_those_of_a_softmax_with_one_more_score(lengths, backend, window, by_row):
    torch.manual_seed(0)
    total = sum(lengths)
    shapes = ((total, HEADS, SIZE), (total, KV_HEADS, SIZE), (total, KV_HEADS, SIZE))
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    sinks = torch.randn((total, HEADS) if by_row else (HEADS,), dtype=torch.float64, requires_grad=True)
    packing = make_packing(lengths, True, HEADS * SIZE, CPU, torch.float64, window)
    assert packing.backend == backend
    ours = packed_attention(*tensors, packing, 0.3, sinks)
    theirs = explicit(*tensors, lengths, window, 0.3, sinks.expand(total, -1))
    weight = torch.randn_like(ours)
    found, expected = (
        (out.detach(), *torch.autograd.grad((out * weight).sum(), [*tensors, sinks]))
        for out in (ours, theirs)
    )
    for own, their in zip(found, expected, strict=True):
        assert float((own - their).abs().max()) < TOLERANCE * float(their.abs().max())


def test_a_rank_without_tokens_has_gradients_of_its_sinks() -> None:
    sinks = torch.zeros(HEADS, requires_grad=True)
    empty = [torch.zeros(0, heads, SIZE, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    packing = make_packing((), True, HEADS * SIZE, CPU, torch.float32)
    packed_attention(*empty, packing, None, sinks).sum().backward()
    assert sinks.grad is not None

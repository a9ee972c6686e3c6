import math

import pytest
import torch

from ops.attention import Packing, make_packing, packed_attention

CPU = torch.device("cpu")
LENGTHS = [(5,), (1,), (3, 3, 3), (4, 1, 7, 1, 2), (0, 3, 0), (2, 5, 5, 9)]
HEADS = [(4, 4), (4, 2), (3, 1)]


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packing: Packing) -> torch.Tensor:
    """Attention from its definition, sequence by sequence, in fp64."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    out, start = [], 0
    for n in packing.lengths:
        span = slice(start, start + n)
        scores = torch.einsum("qnh,knh->nqk", q[span], k[span]) / math.sqrt(q.shape[2])
        if packing.causal:
            scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
        out.append(torch.einsum("nqk,knh->qnh", scores.softmax(-1), v[span]))
        start += n
    return torch.cat(out)


def random_qkv(tokens: int, heads: int, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(tokens)
    shapes = ((tokens, heads, 8), (tokens, kv_heads, 8), (tokens, kv_heads, 8))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("backend", ["batched", "masked"])
def test_backends_equal_the_definition(
    lengths: tuple[int, ...], heads: tuple[int, int], causal: bool, backend: str
) -> None:
    chosen = make_packing(lengths, causal, 1, CPU, torch.float64)
    n = torch.tensor(chosen.lengths)
    sequence = torch.repeat_interleave(n)
    mask = sequence[:, None] == sequence[None]
    packing = Packing(chosen.lengths, causal, backend, chosen.cu_seqlens, mask.tril() if causal else mask)
    inputs = random_qkv(packing.tokens, *heads, torch.float64)
    expected = by_hand(*inputs, packing)
    actual = packed_attention(*inputs, packing)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad((actual * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_many_short_sequences_share_one_call_and_long_ones_do_not() -> None:
    assert make_packing((9,) * 3 + (8,) * 3 + (7,) * 3, True, 64, CPU, torch.float32).backend == "masked"
    assert make_packing((9,) * 3, True, 64, CPU, torch.float32).backend == "batched"
    assert make_packing((1000, 999), True, 4096, CPU, torch.float32).backend == "batched"


def test_no_tokens_keep_the_graph() -> None:
    packing = make_packing((), False, 32, CPU, torch.float32)
    inputs = random_qkv(0, 4, 2, torch.float32)
    out = packed_attention(*inputs, packing)
    assert out.shape == (0, 4, 8)
    out.sum().backward()
    assert all(x.grad is not None for x in inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_variable_length_kernel_equals_the_definition(heads: tuple[int, int], causal: bool) -> None:
    device = torch.device("cuda")
    packing = make_packing((64, 1, 200, 17), causal, 256, device, torch.bfloat16)
    assert packing.backend == "varlen"
    torch.manual_seed(0)
    shapes = [(packing.tokens, n, 64) for n in (heads[0], heads[1], heads[1])]
    inputs = [torch.randn(s, dtype=torch.bfloat16, device=device, requires_grad=True) for s in shapes]
    exact = [x.detach().double().cpu().requires_grad_() for x in inputs]
    expected, actual = by_hand(*exact, packing), packed_attention(*inputs, packing)
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=2e-2, atol=2e-2)
    weight = torch.randn_like(expected)
    actual_grads = torch.autograd.grad((actual * weight.to(actual)).sum(), inputs)
    expected_grads = torch.autograd.grad((expected * weight).sum(), exact)
    for a, b in zip(actual_grads, expected_grads, strict=True):
        assert (a.double().cpu() - b).norm() / b.norm() < 2e-2

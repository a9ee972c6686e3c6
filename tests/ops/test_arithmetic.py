import types

import pytest
import torch

from ops.attention import attention_bytes, attention_flops
from ops.gates import let_through
from ops.heads import Table, made_heads, rotated
from ops.linear import linear_bytes, linear_flops
from ops.norm import Norm, with_bias
from ops.rotary import Scaling, rotary_table
from ops.rows import gather_rows, scatter_rows


def turned(x: torch.Tensor, table: Table) -> torch.Tensor:
    """One of two alike."""
    query, key = rotated(x, x, table)
    assert query.equal(key)
    return query


def test_rotation_depends_on_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        qi = turned(q, rotary_table(torch.tensor([i]), 16, 100.0, torch.float64))
        kj = turned(k, rotary_table(torch.tensor([j]), 16, 100.0, torch.float64))
        return float((qi * kj).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-12)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-6)


def test_position_zero_is_not_rotated_and_lengths_are_kept() -> None:
    x = torch.randn(5, 2, 8)
    out = turned(x, rotary_table(torch.arange(5), 8, 10000.0, torch.float32))
    torch.testing.assert_close(out[0], x[0])
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))
    assert not torch.allclose(out[1], x[1])


def test_two_axes_rotate_halves_of_the_frequencies() -> None:
    positions = torch.tensor([[3, 0], [0, 3]])
    cos, _ = rotary_table(positions, 8, 10.0, torch.float64)
    torch.testing.assert_close(cos[0, 0, :2], cos[1, 0, 2:])
    torch.testing.assert_close(cos[0, 0, 2:], torch.ones(2, dtype=torch.float64))


def test_rotary_gradient() -> None:
    x = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    table = rotary_table(torch.tensor([[0, 1], [5, 2], [9, 9]]), 8, 10.0, torch.float64)
    assert torch.autograd.gradcheck(lambda y: rotated(y, y[:, :1], table), x)


def norm_of(kind: str, size: int, zero_centered: bool = False) -> Norm:
    config = types.SimpleNamespace(
        normalization=kind,
        layernorm_zero_centered_gamma=zero_centered,
        params_dtype=torch.float64,
        sequence_parallel=False,
    )
    norm = Norm(config, size)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    return norm


@pytest.mark.parametrize(("kv_heads", "groups"), [(1, 1), (2, 1), (1, 3), (2, 3)])
@pytest.mark.parametrize("kind", [None, "RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("share", [None, 0.75])
@pytest.mark.parametrize("gated", [False, True])
def test_heads_in_one_tensor_are_normed_and_rotated_as_they_are_apart(
    kv_heads: int, groups: int, kind: str | None, share: float | None, gated: bool
) -> None:
    torch.manual_seed(0)
    size = groups * (1 + gated) + 2
    heads = torch.randn(3, kv_heads, size, 8, dtype=torch.float64, requires_grad=True)
    table = share and rotary_table(torch.arange(3), 8, 100.0, torch.float64, Scaling(share=share))
    norms = kind and (norm_of(kind, 8, gated), norm_of(kind, 8, gated))
    query, key = heads[:, :, :groups].flatten(1, 2), heads[:, :, -2]
    if norms:
        query, key = norms[0](query), norms[1](key)
    if table:
        query, key = rotated(query, key, table)
    expected = [query, key, heads[:, :, -1], *([heads[:, :, groups:-2]] if gated else [])]

    def made(joined: torch.Tensor, *_: torch.Tensor) -> list[torch.Tensor]:
        return [of for of in made_heads(joined, table or None, norms or None, gated) if of is not None]

    torch.testing.assert_close(made(heads), expected)
    learn = [heads, *(parameter for of in norms or () for parameter in of.parameters())]
    if kv_heads == 2:
        assert torch.autograd.gradcheck(made, learn)


def test_gradients_of_norms_of_heads_are_added_to_those_that_there_are() -> None:
    of_queries, of_keys = norms = norm_of("RMSNorm", 8), norm_of("RMSNorm", 8)
    heads = torch.randn(5, 2, 5, 8, dtype=torch.float64, requires_grad=True)

    def total() -> torch.Tensor:
        query, key, value, _ = made_heads(heads, None, norms, False)
        return query.sum() + key.sum() + value.sum()

    of_heads, expected = torch.autograd.grad(total(), [heads, of_queries.weight])
    of_queries.weight.main_grad = torch.ones(8, dtype=torch.float64)  # type: ignore[assignment]
    of_keys.weight.requires_grad_(False)
    total().backward()
    torch.testing.assert_close(vars(of_queries.weight)["main_grad"], 1 + expected)
    torch.testing.assert_close(heads.grad, of_heads)
    assert of_queries.weight.grad is None
    assert of_keys.weight.grad is None


def test_attention_is_let_through_by_its_gates() -> None:
    joined = torch.randn(3, 2, 8, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 24, dtype=torch.float64, requires_grad=True)
    found = let_through(x, joined[:, :, 3:6])
    torch.testing.assert_close(found, x * torch.sigmoid(joined[:, :, 3:6].flatten(1)))
    assert torch.autograd.gradcheck(lambda x, joined: let_through(x, joined[:, :, 3:6]), (x, joined))


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
def test_a_sum_and_its_norm_are_as_they_are_apart(
    kind: str, zero_centered: bool, biased: bool, tokens: int
) -> None:
    torch.manual_seed(0)
    norm = norm_of(kind, 6, zero_centered)
    stream, out = (torch.randn(tokens, 1, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True) if biased else None
    total = stream + (out if bias is None else out + bias)
    torch.testing.assert_close(norm.enter_sum(stream, out, bias), (total, norm(total)))
    torch.testing.assert_close(norm.enter(stream), (stream, norm(stream)))
    torch.testing.assert_close(norm.leave(stream, out, bias), stream + norm(total - stream))
    torch.testing.assert_close(with_bias(stream, out, bias), total)
    learn = [stream, out, *((bias,) if bias is not None else ()), *norm.parameters()]
    for made in (norm.enter_sum(stream, out, bias), norm.enter(stream), [with_bias(stream, out, bias)]):
        found = torch.autograd.grad(made, learn, [torch.ones_like(x) for x in made], allow_unused=True)
        assert all(x is None or x.shape == of.shape for x, of in zip(found, learn, strict=True))
    if tokens:
        assert torch.autograd.gradcheck(lambda *_: norm.enter_sum(stream, out, bias), learn)
        assert torch.autograd.gradcheck(lambda *_: norm.leave(stream, out, bias), learn)
        assert torch.autograd.gradcheck(lambda *_: norm.enter(stream), [stream, *norm.parameters()])
        assert torch.autograd.gradcheck(lambda *_: with_bias(stream, out, bias), learn[: 2 + biased])


@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("sharded", [True, False])
def test_norms_normalise_and_carry_their_mark(kind: str, sharded: bool) -> None:
    config = types.SimpleNamespace(normalization=kind, params_dtype=torch.float64, sequence_parallel=sharded)
    norm = Norm(config, 6)
    x = torch.randn(4, 6, dtype=torch.float64) * 3 + 1
    centred = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x), expected)
    assert all(p.sequence_parallel is sharded for p in norm.parameters())


def test_an_unknown_norm_is_refused() -> None:
    config = types.SimpleNamespace(normalization="batch", params_dtype=torch.float32, sequence_parallel=False)
    with pytest.raises(ValueError, match="normalization='batch'"):
        Norm(config, 6)


def test_rows_gather_and_scatter_are_adjoint() -> None:
    base = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([4, 1])
    out = scatter_rows(base, index, rows)
    torch.testing.assert_close(gather_rows(out, index), rows)
    grad = torch.randn_like(out)
    out.backward(grad)
    torch.testing.assert_close(rows.grad, gather_rows(grad, index))
    assert (base.grad[index] == 0).all()


def test_flops_and_bytes_of_known_shapes() -> None:
    assert linear_flops(10, 4, 8) == 2 * 10 * 4 * 8
    assert linear_bytes(10, 4, 8, 2) == 2 * (32 + 40 + 80)
    # Two sequences of 3 and 4 tokens, 2 heads of size 8: QKᵀ and PV.
    assert attention_flops(9 + 16, 2, 8, causal=False) == 2 * 2 * 2 * 8 * 25
    assert attention_flops(9 + 16, 2, 8, causal=True) == 2 * 2 * 8 * 25
    assert attention_bytes(7, 4, 2, 8, 2) == 7 * 8 * (4 + 2 + 2 + 4) * 2

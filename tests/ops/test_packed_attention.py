import importlib.util
import math
import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ops.attention as attention
from ops.attention import Packing, make_packing, make_tile_packing, packed_attention
from ops.one_copy import brought
from ops.span import Span

CPU = torch.device("cpu")
LENGTHS = [(5,), (1,), (3, 3, 3), (4, 1, 7, 1, 2), (0, 3, 0), (2, 5, 5, 9)]
HEADS = [(4, 4), (4, 2), (3, 1)]


def by_hand(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spans: list[Span],
    causal: bool,
    window: int | None = None,
) -> torch.Tensor:
    """Attention from its definition, tile by tile and pair by pair, in fp64."""
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    out, row, key = [], 0, 0
    for span in spans:
        rows, keys = slice(row, row + span.rows), slice(key, key + span.context)
        scores = torch.einsum("qnh,knh->nqk", q[rows], k[keys]) / math.sqrt(q.shape[2])
        hidden = torch.zeros(span.rows, span.context, dtype=torch.bool)
        for i in range(span.rows):
            for j in range(span.context):
                behind = i + span.offset - j
                hidden[i, j] = (causal and behind < 0) or (window is not None and abs(behind) > window)
        scores = scores.masked_fill(hidden, -math.inf)
        out.append(torch.einsum("nqk,knh->qnh", scores.softmax(-1), v[keys]))
        row, key = row + span.rows, key + span.context
    return torch.cat(out)


def whole(lengths: tuple[int, ...]) -> list[Span]:
    return [Span(n, n, 0) for n in lengths if n]


def random_qkv(
    rows: int,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    context: int | None = None,
    size: int = 8,
) -> list[torch.Tensor]:
    torch.manual_seed(rows)
    context = rows if context is None else context
    shapes = ((rows, heads, size), (context, kv_heads, size), (context, kv_heads, size))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def assert_equals_the_definition(
    packing: Packing,
    spans: list[Span],
    heads: tuple[int, int],
    causal: bool,
    window: int | None,
    size: int = 8,
) -> None:
    context = sum(span.context for span in spans)
    inputs = random_qkv(packing.tokens, *heads, torch.float64, context, size)
    expected = by_hand(*inputs, spans, causal, window)
    actual = packed_attention(*inputs, packing)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    weight = torch.randn_like(expected)
    for a, b in zip(
        torch.autograd.grad((actual * weight).sum(), inputs),
        torch.autograd.grad((expected * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.fixture(params=["batched", "masked"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(attention, "_choose_backend", lambda *_: request.param)
    return request.param


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_backends_equal_the_definition(
    lengths: tuple[int, ...], heads: tuple[int, int], causal: bool, backend: str
) -> None:
    packing = make_packing(lengths, causal, 1, CPU, torch.float64)
    assert packing.backend == backend
    assert_equals_the_definition(packing, whole(lengths), heads, causal, None)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 3, 8, 100])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_windows_equal_the_definition(
    lengths: tuple[int, ...], window: int, causal: bool, backend: str
) -> None:
    packing = make_packing(lengths, causal, 1, CPU, torch.float64, window)
    assert_equals_the_definition(packing, whole(lengths), (4, 2), causal, window)


@st.composite
def tilings(draw) -> tuple[list[Span], bool, int | None]:
    """Tiles whose context reaches as far as their rows see, or further; some equal, some of one row."""
    causal = draw(st.booleans())
    window = draw(st.none() | st.integers(0, 6))
    size = st.integers(0, 5)
    tile = st.tuples(st.integers(1, 5), size, size)
    spans = []
    for rows, before, after in draw(st.lists(tile, min_size=1, max_size=4)):
        copies = draw(st.integers(1, 2))
        spans += [Span(rows, before + rows + after, before)] * copies
    return spans, causal, window


@settings(deadline=None, max_examples=150)
@given(tilings(), st.sampled_from(HEADS), st.sampled_from(["batched", "masked"]))
def test_tiles_equal_the_definition(tiling, heads, backend) -> None:
    spans, causal, window = tiling
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_choose_backend", lambda *_: backend)
        packing = make_tile_packing(spans, causal, 1, CPU, torch.float64, window)
    assert_equals_the_definition(packing, spans, heads, causal, window)


def test_equal_neighbours_share_a_call_and_a_plain_mask_is_the_kernels_own() -> None:
    spans = [Span(4, 4, 0), Span(4, 4, 0), Span(3, 9, 6), Span(3, 9, 6), Span(4, 4, 0)]
    calls = make_tile_packing(spans, True, 1 << 20, CPU, torch.float32).calls
    assert [(call.count, call.rows, call.context) for call in calls] == [(2, 8, 8), (2, 6, 18), (1, 4, 4)]
    assert [(call.causal, call.mask is None) for call in calls] == [
        (True, True),
        (False, False),
        (True, True),
    ]
    calls = make_tile_packing(spans, False, 1 << 20, CPU, torch.float32, window=8).calls
    assert all(call.mask is None and not call.causal for call in calls)


def test_a_wrong_offset_is_seen() -> None:
    wrong = make_tile_packing([Span(5, 9, 4)], True, 1, CPU, torch.float64)
    with pytest.raises(AssertionError, match="not close"):
        assert_equals_the_definition(wrong, [Span(5, 9, 3)], (4, 2), True, None)


@pytest.mark.parametrize("span", [Span(3, 2, 0), Span(3, 4, 2), Span(3, 4, -1), Span(0, 2, 0)])
def test_rows_outside_their_context_are_refused(span: Span) -> None:
    with pytest.raises(AssertionError, match="context"):
        make_tile_packing([span], True, 1, CPU, torch.float32)


@pytest.mark.parametrize(
    "span, causal, window, expected",
    [
        (Span(4, 4, 0), False, None, (-1, -1)),
        (Span(4, 9, 5), True, None, (-1, 0)),
        (Span(4, 9, 5), True, 2, (2, 0)),
        (Span(4, 9, 5), False, 2, (2, 2)),
        (Span(4, 9, 3), False, 2, (4, 0)),
        (Span(4, 9, 4), False, 2, (3, 1)),
    ],
)
def test_the_window_of_the_variable_length_kernel_is_counted_from_its_last_key(
    span: Span, causal: bool, window: int | None, expected: tuple[int, int]
) -> None:
    left, right = attention._kernel_window(span, causal, window)
    assert (left, right) == expected
    # The kernel lets row i see keys [i + d - left, i + d + right] where d = context - rows.
    diagonal = torch.arange(span.rows)[:, None] + span.context - span.rows
    keys = torch.arange(span.context)
    seen = (left < 0) | (keys >= diagonal - left)
    if right >= 0:
        seen = seen & (keys <= diagonal + right)
    mask = attention._mask([span], causal, window, CPU)
    assert torch.equal(seen.expand_as(mask), mask)


def flash_attn_as_documented(
    q, k, v, cu_q, cu_k, longest_q, longest_k, softmax_scale=None, causal=False, window_size=(-1, -1)
):
    """flash-attn's function from its documentation: windows are aligned with the last row on the last key."""
    assert (cu_q.dtype, cu_k.dtype) == (torch.int32, torch.int32)
    assert q.shape[-1] % 8 == k.shape[-1] % 8 == v.shape[-1] % 8 == 0
    left, right = window_size[0], 0 if causal else window_size[1]
    out = []
    for i in range(len(cu_q) - 1):
        rows, keys = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        num_rows, num_keys = rows.stop - rows.start, keys.stop - keys.start
        assert num_rows <= longest_q
        assert num_keys <= longest_k
        last = torch.arange(num_rows)[:, None] + num_keys - num_rows
        key = torch.arange(num_keys)
        seen = (key >= last - left) | (left < 0)
        seen = seen & ((key <= last + right) | (right < 0))
        parts = [x.transpose(0, 1).unsqueeze(0) for x in (q[rows], k[keys], v[keys])]
        scaled = torch.nn.functional.scaled_dot_product_attention(
            *parts, attn_mask=seen, scale=softmax_scale, enable_gqa=True
        )
        out.append(scaled.squeeze(0).transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("window", [None, 0, 2])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("size", [8, 20])
def test_flash_attn_is_called_as_it_documents(
    monkeypatch: pytest.MonkeyPatch, size: int, heads: tuple[int, int], causal: bool, window: int | None
) -> None:
    stub = types.ModuleType("flash_attn")
    stub.flash_attn_varlen_func = flash_attn_as_documented
    monkeypatch.setitem(sys.modules, "flash_attn", stub)
    monkeypatch.setattr(attention, "_choose_backend", lambda *_: "flash")
    after = 0 if causal or window == 0 else 1
    spans = [Span(4, 4, 0), Span(3, 8 + after, 5), Span(1, 1, 0), Span(5, 5 + after, 0)]
    packing = make_tile_packing(spans, causal, 32, CPU, torch.float64, window)
    assert_equals_the_definition(packing, spans, heads, causal, window, size)


def test_a_variable_length_kernel_is_chosen_by_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert attention._ragged_kernel() == "varlen"
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", None)  # an import of it fails
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert attention._ragged_kernel() == "flash"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert attention._ragged_kernel() is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert attention._ragged_kernel() is None


def test_tiles_without_rows_keep_the_graph() -> None:
    packing = make_tile_packing([], True, 32, CPU, torch.float32)
    inputs = random_qkv(0, 4, 2, torch.float32)
    packed_attention(*inputs, packing).sum().backward()
    assert all(x.grad is not None for x in inputs)


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
@pytest.mark.parametrize("window", [None, 0, 30])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("size", [64, 20])
def test_variable_length_kernel_equals_the_definition(
    size: int, heads: tuple[int, int], causal: bool, window: int | None, tiled: bool
) -> None:
    device = torch.device("cuda")
    spans = whole((64, 1, 200, 17))
    if tiled:
        after = [0, 0, 0] if causal else [0, 30, 11] if window == 30 else [0, 0, 0]
        rows, before = [64, 1, 100], [0, 30, 30]
        spans = [Span(n, b + n + a, b) for n, b, a in zip(rows, before, after, strict=True)]
    packing = brought(make_tile_packing(spans, causal, 256, device, torch.bfloat16, window), device)
    assert packing.backend in attention.RAGGED
    torch.manual_seed(0)
    context = sum(span.context for span in spans)
    shapes = [(packing.tokens, heads[0], size), (context, heads[1], size), (context, heads[1], size)]
    inputs = [torch.randn(s, dtype=torch.bfloat16, device=device, requires_grad=True) for s in shapes]
    exact = [x.detach().double().cpu().requires_grad_() for x in inputs]
    expected = by_hand(*exact, spans, causal, window)
    actual = packed_attention(*inputs, packing)
    torch.testing.assert_close(actual.double().cpu(), expected, rtol=2e-2, atol=2e-2)
    weight = torch.randn_like(expected)
    actual_grads = torch.autograd.grad((actual * weight.to(actual)).sum(), inputs)
    expected_grads = torch.autograd.grad((expected * weight).sum(), exact)
    largest = max(b.norm() for b in expected_grads)
    for a, b in zip(actual_grads, expected_grads, strict=True):
        assert (a.double().cpu() - b).norm() / max(b.norm(), 1e-3 * largest) < 2e-2

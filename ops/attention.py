"""Packed attention: many sequences of different lengths in one tensor, none padded.

One function, `packed_attention`, with backends chosen by capability:

- `varlen`: torch's variable-length flash attention, on CUDA in half precision;
- `flash`: that of the package flash-attn if it is installed, where torch's is too old for windows;
- `batched`: scaled_dot_product_attention, one call for each run of equal neighbours;
- `masked`: one scaled_dot_product_attention call with a block mask, where many short sequences would
  otherwise cost more in call overhead than in arithmetic.

The same function attends tiles: query rows against a context that holds more tokens than those rows, as when
a long sequence is shared among ranks. A `Span` says where the rows stand in their context; a sequence that
attends to itself is the span whose context is its rows. Masks follow from places, never from shapes: a row
sees itself, under `causal` nothing after it, under a `window` nothing further away than that many tokens.

Shapes: T query tokens, C context tokens, N query heads, K key/value heads, H head size.
"""

import importlib.util
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.nn.functional as F

from ops.one_copy import later
from ops.sinks import LogSumExp, scores_log_sum, with_sinks
from ops.span import Span

# What one call into attention costs, forward and backward, in FLOPs that would take as long on one core.
# Measured: about 0.15 ms a call against 25 GFLOP/s in masked attention.
_CALL_OVERHEAD_FLOPS = 4_000_000
_MASK_LIMIT = 2048
RAGGED = ("varlen", "flash")


@dataclass(frozen=True)
class Batch:
    """`count` equal neighbours for one scaled_dot_product_attention call over `rows` and `context` in all.

    `causal` is the kernel's own mask, which aligns first row with first key, so it fits square spans only;
    every other restriction is in `mask`, boolean, True where a row sees a key.
    """

    rows: int
    context: int
    count: int
    causal: bool
    mask: torch.Tensor | None


@dataclass(frozen=True)
class Ragged:
    """Neighbours for one variable-length call over `rows` and `context` in all.

    `window` counts the keys seen to the left and right of a row, -1 for all, with the last row of each span
    on its last key, as flash attention aligns them.
    """

    rows: int
    context: int
    cu_rows: torch.Tensor
    cu_context: torch.Tensor
    longest_rows: int
    longest_context: int
    window: tuple[int, int]


@dataclass(frozen=True)
class Packing:
    """How packed tensors divide into sequences or tiles, with what the chosen backend needs.

    `lengths` counts the query rows of each and is known on the host, so nothing synchronises with the device.
    `cu_seqlens` is int32 [S+1]. `calls` are what the backend runs, in order; masks are built once and shared
    by all layers. Tensors are on the host until they are brought to the device (`ops.one_copy`).
    """

    lengths: tuple[int, ...]
    causal: bool
    backend: str
    cu_seqlens: torch.Tensor
    calls: tuple[Batch | Ragged, ...]

    @property
    def tokens(self) -> int:
        """Query tokens T in all."""
        return sum(self.lengths)


def make_packing(
    lengths: tuple[int, ...],
    causal: bool,
    width: int,
    device: torch.device,
    dtype: torch.dtype,
    window: int | None = None,
) -> Packing:
    """Prepare attention on `device` within sequences of `lengths`; `width` is N·H, which decides between the
    backends.

    A token sees those at most `window` tokens away, on both sides or, if causal, before it. Zero-length
    sequences are allowed and ignored.
    """
    return make_tile_packing([Span(n, n, 0) for n in lengths], causal, width, device, dtype, window)


def make_tile_packing(
    spans: Sequence[Span],
    causal: bool,
    width: int,
    device: torch.device,
    dtype: torch.dtype,
    window: int | None = None,
) -> Packing:
    """Prepare attention of tiles that follow one another in the query rows and in the contexts.

    Each row must stand within its context. Zero-row spans must have no context and are ignored.
    """
    assert window is None or window >= 0, window
    for span in spans:
        assert 0 <= span.offset <= span.context - span.rows, f"{span}: rows outside their context"
        assert span.rows or not span.context, f"{span}: a context that nobody reads"
    spans = [span for span in spans if span.rows]
    lengths = tuple(span.rows for span in spans)
    backend = _choose_backend(spans, causal, width, device, dtype)
    if backend in RAGGED:
        calls: list[Batch | Ragged] = [*_ragged_calls(spans, causal, window)]
    elif backend == "masked":
        mask = _mask(spans, causal, window, device)
        calls = [Batch(sum(lengths), sum(span.context for span in spans), 1, False, mask)]
    else:
        calls = [_batch(span, len(list(same)), causal, window, device) for span, same in groupby(spans)]
    return Packing(lengths, causal, backend, _cumulative(lengths), tuple(calls))


def _choose_backend(
    spans: Sequence[Span], causal: bool, width: int, device: torch.device, dtype: torch.dtype
) -> str:
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        kernel = _ragged_kernel()
        if kernel is not None:
            return kernel
    rows, context = sum(span.rows for span in spans), sum(span.context for span in spans)
    calls = len(list(groupby(spans)))
    needed = sum(span.rows * span.context for span in spans) // (2 if causal else 1)
    wasted = 12 * width * (rows * context - needed)
    if calls > 1 and context <= _MASK_LIMIT and wasted < (calls - 1) * _CALL_OVERHEAD_FLOPS:
        return "masked"
    return "batched"


def _ragged_kernel() -> str | None:
    """The best variable-length kernel of this machine."""
    if torch.cuda.get_device_capability() < (8, 0):
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        pass
    else:
        if "window_size" in inspect.signature(varlen_attn).parameters:
            return "varlen"
    return "flash" if importlib.util.find_spec("flash_attn") else None


def _cumulative(lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def _batch(span: Span, count: int, causal: bool, window: int | None, device: torch.device) -> Batch:
    last = span.offset + span.rows - 1
    in_reach = window is None or window >= max(last, 0 if causal else span.context - 1 - span.offset)
    square = span.rows == span.context
    plain = in_reach and (square or not causal)
    mask = None if plain else _mask([span], causal, window, device)
    return Batch(span.rows * count, span.context * count, count, causal and plain, mask)


def _mask(spans: Sequence[Span], causal: bool, window: int | None, device: torch.device) -> torch.Tensor:
    """Boolean [T, C]: whether each row of `spans` sees each key of them."""
    row_span = torch.cat([torch.full((span.rows,), i) for i, span in enumerate(spans)])
    key_span = torch.cat([torch.full((span.context,), i) for i, span in enumerate(spans)])
    row = torch.cat([torch.arange(span.offset, span.offset + span.rows) for span in spans])
    key = torch.cat([torch.arange(span.context) for span in spans])
    return later(device, _seen, row_span, key_span, row, key, causal, window)


def _seen(
    row_span: torch.Tensor,
    key_span: torch.Tensor,
    row: torch.Tensor,
    key: torch.Tensor,
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    row = row.unsqueeze(1)
    mask = row_span.unsqueeze(1) == key_span
    if causal:
        mask &= key <= row
    if window is not None:
        mask &= key >= row - window
        mask &= key <= row + window
    return mask


def _ragged_calls(spans: Sequence[Span], causal: bool, window: int | None) -> list[Ragged]:
    calls = []
    for sides, run in groupby(spans, lambda span: _kernel_window(span, causal, window)):
        members = list(run)
        rows, context = [span.rows for span in members], [span.context for span in members]
        calls.append(
            Ragged(
                sum(rows),
                sum(context),
                _cumulative(rows),
                _cumulative(context),
                max(rows),
                max(context),
                sides,
            )
        )
    return calls


def _kernel_window(span: Span, causal: bool, window: int | None) -> tuple[int, int]:
    """Return the window as flash attention counts it, from the key on which the last row is aligned."""
    trailing = span.context - span.offset - span.rows
    if causal:
        assert not trailing, f"{span}: a causal context ends at its last row"
        return (-1 if window is None else window, 0)
    if window is None:
        return (-1, -1)
    assert trailing <= window, f"{span}: the context reaches further than the window of {window}"
    return (window + trailing, window - trailing)


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packing: Packing,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend within each sequence or tile: query [T, N, H], key and value [C, K, H] → [T, N, H]; K divides N.

    For sequences that attend to themselves C is T. T may be zero, and any sequence may have a single token.
    `sinks`, [N] or for each row [T, N], take part in the softmax (`ops.sinks`).
    """
    assert query.shape[0] == packing.tokens, f"{query.shape[0]} tokens against {packing.lengths}"
    if query.shape[0] == 0:
        # A view of the inputs keeps the graph connected for ranks without tokens.
        return query + 0 * (key.sum() + value.sum() + (0 if sinks is None else sinks.sum()))
    calls = packing.calls
    attend = partial(_attend, scale=scale, backend=packing.backend)
    if len(calls) == 1:
        return attend(query, key, value, calls[0], sinks)
    # split(), not slicing: the backward of a slice adds a zero tensor of full size for every sequence.
    rows, context = [call.rows for call in calls], [call.context for call in calls]
    own = sinks.split(rows) if sinks is not None and sinks.dim() == 2 else [sinks] * len(calls)
    parts = zip(query.split(rows), key.split(context), value.split(context), calls, own, strict=True)
    return torch.cat([attend(*part) for part in parts])


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Batch | Ragged,
    sinks: torch.Tensor | None,
    scale: float | None,
    backend: str,
) -> torch.Tensor:
    assert key.shape[0] == call.context, f"{key.shape[0]} keys for {call.context} of context"
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    if isinstance(call, Batch):
        out = _batched(query, key, value, call, scale)
        if sinks is None:
            return out
        q, k = (x.unflatten(0, (call.count, -1)).transpose(1, 2) for x in (query, key))
        known = scores_log_sum(q, k, scale, call.causal, call.mask).transpose(1, 2).flatten(0, 1)
    else:
        out, sums = _ragged(query, key, value, call, scale, backend, sums=sinks is not None)
        if sinks is None:
            return out
        known = sums.detach().transpose(0, 1)

    def again(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return _attend(q, k, v, call, None, scale, backend)

    return with_sinks(out, LogSumExp.apply(query, key, known, scale, again), sinks)


def _batched(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: Batch, scale: float
) -> torch.Tensor:
    q, k, v = (x.unflatten(0, (call.count, -1)).transpose(1, 2) for x in (query, key, value))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=call.mask, is_causal=call.causal, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2).flatten(0, 1)


def _ragged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: Ragged,
    scale: float,
    backend: str,
    sums: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One call of a variable-length kernel. Kernels take multiples of 8 as head size: zeros fill up.

    Returns its output and, with `sums`, the log-sum-exp [N, T] of its scores, which has no gradient.
    """
    size = query.shape[-1]
    if size % 8:
        query, key, value = (F.pad(x, (0, -size % 8)) for x in (query, key, value))
    places = call.cu_rows, call.cu_context, call.longest_rows, call.longest_context
    if backend == "varlen":
        from torch.nn.attention import varlen

        more: dict[str, Any] = {"return_aux": varlen.AuxRequest(lse=True)} if sums else {}
        if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:  # torch 2.11 never asks
            more["enable_gqa"] = query.shape[1] != key.shape[1]
        found: Any = varlen.varlen_attn(
            query, key, value, *places, scale=scale, window_size=call.window, **more
        )
    else:
        from flash_attn import flash_attn_varlen_func

        causal = call.window[1] == 0  # nothing to the right, whatever there is to the left
        more = {"return_attn_probs": True} if sums else {}
        found = flash_attn_varlen_func(
            query, key, value, *places, softmax_scale=scale, causal=causal, window_size=call.window, **more
        )
    out, log_sum = found[:2] if sums else (found, query)
    return out[..., :size], log_sum


def attention_flops(sum_squares: int, heads: int, head_dim: int, causal: bool) -> int:
    """Forward FLOPs of attention over sequences whose squared lengths sum to `sum_squares`: QKᵀ and PV."""
    return 4 * heads * head_dim * sum_squares // (2 if causal else 1)


def attention_bytes(tokens: int, heads: int, kv_heads: int, head_dim: int, element: int) -> int:
    """Bytes that attention must read and write: queries, keys, values and the output, once each."""
    return tokens * head_dim * (2 * heads + 2 * kv_heads) * element

"""Packed attention: many sequences of different lengths in one tensor, none padded.

One function, `packed_attention`, with backends chosen by capability:

- `varlen`: torch's variable-length flash attention, on CUDA in half precision;
- `batched`: scaled_dot_product_attention, one call for each run of equal-length neighbours;
- `masked`: one scaled_dot_product_attention call with a block mask, where many short sequences would
  otherwise cost more in call overhead than in arithmetic.

Shapes: T tokens, N query heads, K key/value heads, H head size.
"""

import inspect
from dataclasses import dataclass
from itertools import groupby

import torch
import torch.nn.functional as F

# What one call into attention costs, forward and backward, in FLOPs that would take as long on one core.
# Measured: about 0.15 ms a call against 25 GFLOP/s in masked attention.
_CALL_OVERHEAD_FLOPS = 4_000_000
_MASK_LIMIT = 2048


@dataclass(frozen=True)
class Packing:
    """How a packed tensor divides into sequences, with what the chosen backend needs.

    `lengths` is known on the host, so nothing synchronises with the device. `cu_seqlens` is int32 [S+1] on
    the device; `mask` is boolean [T, T], present only for the `masked` backend. Zero-length sequences are
    allowed and ignored.
    """

    lengths: tuple[int, ...]
    causal: bool
    backend: str
    cu_seqlens: torch.Tensor
    mask: torch.Tensor | None

    @property
    def tokens(self) -> int:
        """Total tokens T."""
        return sum(self.lengths)


def make_packing(
    lengths: tuple[int, ...], causal: bool, width: int, device: torch.device, dtype: torch.dtype
) -> Packing:
    """Prepare attention over sequences of `lengths`; `width` is N·H, which decides between the backends."""
    lengths = tuple(n for n in lengths if n)
    offsets = [0]
    for n in lengths:
        offsets.append(offsets[-1] + n)
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=device)
    backend = _choose_backend(lengths, causal, width, device, dtype)
    mask = _block_mask(lengths, causal, device) if backend == "masked" else None
    return Packing(lengths, causal, backend, cu_seqlens, mask)


def _choose_backend(
    lengths: tuple[int, ...], causal: bool, width: int, device: torch.device, dtype: torch.dtype
) -> str:
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16) and _has_varlen():
        return "varlen"
    total = sum(lengths)
    calls = len(list(groupby(lengths)))
    wasted = 12 * width * (total**2 - sum(n * n for n in lengths) // (2 if causal else 1))
    if calls > 1 and total <= _MASK_LIMIT and wasted < (calls - 1) * _CALL_OVERHEAD_FLOPS:
        return "masked"
    return "batched"


def _has_varlen() -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    known = inspect.signature(varlen_attn).parameters
    return {"window_size", "enable_gqa"} <= set(known) and torch.cuda.get_device_capability() >= (8, 0)


def _block_mask(lengths: tuple[int, ...], causal: bool, device: torch.device) -> torch.Tensor:
    sequence = torch.repeat_interleave(torch.tensor(lengths)).to(device)
    mask = sequence.unsqueeze(0) == sequence.unsqueeze(1)
    return mask.tril_() if causal else mask


def packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scale: float | None = None
) -> torch.Tensor:
    """Attend within each sequence: query [T, N, H], key and value [T, K, H] → [T, N, H]; K divides N.

    T may be zero, and any sequence may have a single token.
    """
    assert query.shape[0] == packing.tokens, f"{query.shape[0]} tokens against {packing.lengths}"
    if query.shape[0] == 0:
        # A view of the inputs keeps the graph connected for ranks without tokens.
        return query + 0 * (key.sum() + value.sum())
    if packing.backend == "varlen":
        return _varlen(query, key, value, packing, scale)
    if packing.backend == "masked":
        return _sdpa(query, key, value, 1, packing.mask, False, scale)
    return _batched(query, key, value, packing, scale)


def _batched(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scale: float | None
) -> torch.Tensor:
    runs = [(length, len(list(same))) for length, same in groupby(packing.lengths)]
    if len(runs) == 1:
        return _sdpa(query, key, value, runs[0][1], None, packing.causal, scale)
    # split(), not slicing: the backward of a slice adds a zero tensor of full size for every sequence.
    sizes = [length * count for length, count in runs]
    parts = zip(query.split(sizes), key.split(sizes), value.split(sizes), runs, strict=True)
    return torch.cat([_sdpa(q, k, v, count, None, packing.causal, scale) for q, k, v, (_, count) in parts])


def _sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    batch: int,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """`batch` equal sequences, one after the other in the token dimension."""
    q, k, v = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (query, key, value))
    grouped = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
    )
    return out.transpose(1, 2).flatten(0, 1)


def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing, scale: float | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    longest = max(packing.lengths)
    cu = packing.cu_seqlens
    window = (-1, 0) if packing.causal else (-1, -1)
    grouped = query.shape[1] != key.shape[1]
    out = varlen_attn(
        query, key, value, cu, cu, longest, longest, scale=scale, window_size=window, enable_gqa=grouped
    )
    assert isinstance(out, torch.Tensor)
    return out


def attention_flops(sum_squares: int, heads: int, head_dim: int, causal: bool) -> int:
    """Forward FLOPs of attention over sequences whose squared lengths sum to `sum_squares`: QKᵀ and PV."""
    return 4 * heads * head_dim * sum_squares // (2 if causal else 1)


def attention_bytes(tokens: int, heads: int, kv_heads: int, head_dim: int, element: int) -> int:
    """Bytes that attention must read and write: queries, keys, values and the output, once each."""
    return tokens * head_dim * (2 * heads + 2 * kv_heads) * element

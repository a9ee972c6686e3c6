"""How many kernels an operator of torch launches on a GPU.

By torch's sources, named beside each (aten/src/ATen/native/cuda of 2.13, unless it says otherwise), for a
Hopper GPU and CUDA 12. What a product or a convolution splits into is the library's choice: it counts as one,
and so does a collective. Copies and fills count, whether a kernel or the driver makes them. An operator that
is not listed here is unknown: whoever counts must say so.
"""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import torch
from torch.utils._pytree import tree_iter

# One launch: pointwise operators, sums and the like along dims, copies and fills, rows by index; and, last,
# kernels of our own (ops/kernels).
_NAMES = """
    abs add add_ addcmul addcmul_ bitwise_and bitwise_not bitwise_or clamp clamp_ clamp_min clone copy_ cos
    div div_ eq exp exp_ expm1 floor_divide ge gelu gelu_backward gt le log log_ logical_and logical_not lt
    maximum minimum
    mul mul_ ne neg neg_ pow reciprocal remainder rsqrt rsub sigmoid sigmoid_backward sign silu silu_backward
    sin softplus softplus_backward sqrt sub sub_ tanh tanh_backward where _to_copy
    amax amin any argmax max mean min prod sum
    arange scalar_tensor searchsorted fill_ full full_like new_full new_ones new_zeros ones ones_like
    zero_ zeros zeros_like embedding gather index index_add_ index_copy_ index_select masked_fill_
    scatter_ scatter_add_ tril triu _log_softmax _log_softmax_backward_data _softmax
    _softmax_backward_data nll_loss_forward native_layer_norm _fused_rms_norm addmm addmm_ baddbmm
    baddbmm_ bmm convolution mm
    gated gated_backward biased let_through let_through_backward norm add_norm norm_add with_bias heads
    logit_sums logit_gradients adamw
"""
_ONE = frozenset(_NAMES.split())
_BLOCKS, _CHUNK = 320, 65_536  # MultiTensorApply.cuh, with 4 KB for the arguments of a kernel
_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36}
_CAT = 128  # CAT_ARRAY_BATCH_SIZE, Shape.cu
_MULTIPROCESSORS = 132


def kernels_of(func: Any, args: tuple[Any, ...]) -> int | None:
    """How many kernels a call of `func` launches, None where nobody knows."""
    name = func._opname
    if func.namespace == "c10d" or name in _ONE:
        return 1
    more = _MORE.get(name)
    return None if more is None else more(args)


def _norm_backward(rows: int, columns: int, parameters: int) -> int:
    """layer_norm_kernel.cu: one for the input and one for all parameters; with many rows and few columns the
    latter leaves parts, which a sum for each parameter adds up.
    """
    parts = rows > 64 * 1024 and columns // 32 < _MULTIPROCESSORS // 2
    return 2 + parameters * parts


def _rms_norm_backward(args: tuple[Any, ...]) -> int:
    x = args[1]
    return _norm_backward(x.numel() // max(1, x.shape[-1]), x.shape[-1], 1)


def _layer_norm_backward(args: tuple[Any, ...]) -> int:
    x = args[1]
    return _norm_backward(x.numel() // max(1, x.shape[-1]), x.shape[-1], 2)


def _attention_backward(args: tuple[Any, ...]) -> int:
    """flash_bwd_launch_template.h: the rows' sums, the loop, the cast of dQ; flash_api.cpp: where queries
    share keys, the sums of dK and dV over them.
    """
    return 3 + 2 * (args[1].shape[1] != args[2].shape[1])


def _cat(args: tuple[Any, ...]) -> int:
    return max(1, ceil(sum(x.numel() > 0 for x in args[0]) / _CAT))


def _embedding_backward(args: tuple[Any, ...]) -> int:
    """Embedding.cu: few ids at once; else they are numbered and sorted (a histogram, its sums, a pass for 8
    bits of an id), and EmbeddingBackwardKernel.cu finds the segments of equal ids (8 launches) and adds them.
    """
    ids, rows = args[1].numel(), args[2]
    if ids <= 3072:
        return 2
    return 1 + 1 + 2 + ceil(max(1, int(rows).bit_length()) / 8) + 8 + 2


def _lists(tensors: Sequence[torch.Tensor], depth: int) -> int:
    """Launches over lists of tensors, of `depth` each time: a launch has no more tensors and blocks than its
    arguments hold.
    """
    launches = blocks = held = 0
    for tensor in tensors:
        chunks = ceil(tensor.numel() / _CHUNK)
        held += chunks > 0
        for chunk in range(chunks):
            blocks += 1
            if blocks == _BLOCKS or (held == _TENSORS[depth] and chunk == chunks - 1):
                launches, blocks, held = launches + 1, 0, int(chunk < chunks - 1)
    return launches + (blocks > 0)


def _foreach(depth: int) -> Callable[[tuple[Any, ...]], int]:
    return lambda args: _lists(args[0], depth)


def _sorted(args: tuple[Any, ...]) -> int:
    """Sort.cu and SortStable.cu: rows of up to 4,096 are numbered, copied and sorted; a longer one is
    numbered, and sorted by a histogram, its sums and a pass for 8 bits of a key.
    """
    x = next(x for x in tree_iter(args) if isinstance(x, torch.Tensor))
    return 3 if x.shape[-1] <= 4096 else 3 + x.element_size()


def _two(args: tuple[Any, ...]) -> int:
    return 2


_MORE: dict[str, Callable[[tuple[Any, ...]], int | None]] = {
    # torch/nn/attention/varlen.py: the kernel, and zeros for a state of random numbers.
    "_varlen_attn": _two,
    "_varlen_attn_backward": _attention_backward,
    "native_layer_norm_backward": _layer_norm_backward,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "cat": _cat,
    "stack": _cat,
    "embedding_dense_backward": _embedding_backward,
    "_embedding_bag_forward_only": lambda args: 1,  # EmbeddingBag.cu: a thread for each number of a bag
    # A copy of the whole, then what is changed of it.
    **dict.fromkeys(
        ("index_add", "index_copy", "index_fill", "index_put", "masked_fill", "scatter", "scatter_add"), _two
    ),
    **dict.fromkeys(
        ("nll_loss_backward", "slice_backward", "constant_pad_nd"), _two
    ),  # a fill, then the rest
    # GroupMM.cu: where each group's matrices begin and how large they are, then their products.
    "_grouped_mm": _two,
    "grouped_mm": _two,
    # ops/kernels: of rows, and the sums of what they leave for parameters.
    **dict.fromkeys(("norm_backward", "biased_backward"), _two),
    "heads_backward": lambda args: 1 + bool(args[7]),  # where there are parameters of norms
    "convolution_backward": lambda args: sum(args[-1]),  # of each gradient that is asked for
    "nonzero_static": lambda args: 4 + (args[0].dim() > 1),  # Nonzero.cu: sums, their sums, places, the rest
    "topk": _two,  # TensorTopK.cpp: found, then sorted
    "cumsum": _two,  # a scan of cub's, with its start
    "sort": _sorted,
    "index_put_": lambda args: None if any(args[3:4]) else 1,  # Indexing.cu sorts what it adds up
    "_foreach_add_": _foreach(1),
    "_foreach_mul_": _foreach(1),
    "_foreach_sub_": _foreach(2),
    "_foreach_copy_": _foreach(2),
    # ForeachReduceOp.cu: zeros for the parts, the parts, their sums.
    "_foreach_norm": lambda args: 2 + _lists(args[0], 1),
    "_fused_adamw_": _foreach(4),
}

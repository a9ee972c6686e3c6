"""Rows of a tp group: ranks that encode together all compute every row, and each passes on its share.

So no row is sent twice, and the ranks of a tp group share the work of sending. The gradients come back in the
same shares and are put together before the encoder's backward pass.

Shapes: R rows of the tp group, r of this rank, D width.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F


def own_rows(rows: torch.Tensor, counts: Sequence[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Return this rank's share [r, D] of `rows` [R, D], divided by `counts` over `group`.

    Every rank of the group calls it; in the backward pass each receives the gradients of all rows.
    """
    if group.size() == 1:
        return rows
    own: torch.Tensor = _OwnRows.apply(rows, tuple(counts), group)
    return own


class _OwnRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, counts: tuple[int, ...], group: dist.ProcessGroup
    ) -> torch.Tensor:
        assert sum(counts) == len(rows), f"{len(rows)} rows divided into {counts}"
        ctx.counts, ctx.group = counts, group
        rank = group.rank()
        return rows.narrow(0, sum(counts[:rank]), counts[rank]).clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        counts, group = ctx.counts, ctx.group
        largest, width = max(counts), grads[0].shape[1]
        padded = F.pad(grads[0], (0, 0, 0, largest - len(grads[0]))).contiguous()
        gathered = padded.new_empty(len(counts) * largest, width)
        dist.all_gather_into_tensor(gathered, padded, group=group)
        parts = zip(gathered.split(largest), counts, strict=True) if largest else ()
        whole = [part[:count] for part, count in parts]
        return (torch.cat(whole) if whole else grads[0]), None, None

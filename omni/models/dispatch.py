"""Tokens to the experts that they chose, and back: what megatron-core's MoELayer calls its token dispatcher.

Rows are sorted by expert, sent to the ranks that hold these, sorted again where several ranks send to several
experts, and go back the same way. Ranks tell each other how many rows they send to each expert; the host
learns that, once a layer and pass, only where there are other ranks, for the sizes of messages.

Shapes: t tokens of this rank, D width, R rows that it sends and Q that it gets, E experts, ep ranks with
E / ep of them each.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from ops.device import to_host
from ops.routing import RowOrder, rows_of, sums_of, weights_of
from parallel.megatron import all_to_all


class Dispatcher:
    """One pass at a time, step by step as MoELayer goes; the last step lets go of the pass."""

    def __init__(self, experts: int, group: dist.ProcessGroup) -> None:
        self.group = group
        self.local = experts // group.size()
        self.first = group.rank() * self.local
        self._forget()

    def _forget(self) -> None:
        self.shape: torch.Size | None = None
        self.order: RowOrder | None = None
        self.ends: torch.Tensor | None = None
        self.arrived: Callable[[], torch.Tensor] | None = None
        self.counts: np.ndarray | None = None

    def dispatch_preprocess(
        self, hidden: torch.Tensor, order: RowOrder, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [t, 1, D], the order of its rows, probabilities [t, k] → rows [R, D] and theirs [R]."""
        self.shape, self.order, self.ends = hidden.shape, order, order.ends
        if self.group.size() > 1:
            self._tell(order.ends)
        return rows_of(hidden.flatten(0, -2), order), weights_of(probs, order)

    def _tell(self, ends: torch.Tensor) -> None:
        """Tell all ranks how many rows go to each expert, and have the host learn it."""
        own = ends.diff(prepend=ends.new_zeros(1))
        every = own.new_empty(self.group.size() * len(own))
        dist.all_gather_into_tensor(every, own, group=self.group)
        counts = every.view(self.group.size(), len(own))
        self.arrived = to_host(counts)
        self.ends = counts.narrow(1, self.first, self.local).sum(0).cumsum(0, dtype=torch.int32)

    def host_counts(self) -> np.ndarray:
        """Rows that each rank sends to each expert, [ep, E], once they have arrived on the host."""
        assert self.arrived is not None
        return self.arrived().numpy()

    def token_dispatch(self, rows: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [R, D] and probabilities [R] → those that come here, [Q, D] and [Q], rank by rank."""
        if self.group.size() == 1:
            return rows, probs
        self.counts = self.host_counts()
        sent, got = self._sizes()
        return all_to_all(self.group, rows, got, sent), all_to_all(self.group, probs, got, sent)

    def _sizes(self) -> tuple[list[int], list[int]]:
        """Rows sent to each rank, and got from each."""
        assert self.counts is not None
        sent = self.counts[self.group.rank()].reshape(-1, self.local).sum(1)
        return sent.tolist(), self._here().sum(1).tolist()

    def _here(self) -> np.ndarray:
        """Rows by rank and expert of this one."""
        assert self.counts is not None
        return self.counts[:, self.first : self.first + self.local]

    def dispatch_postprocess(
        self, rows: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Rows and probabilities in the order of this rank's experts, and where each one's end: [E / ep]."""
        if self.counts is not None and self.local > 1:
            rows, probs = (_transposed(of, self._here()) for of in (rows, probs))
        return rows, self.ends, probs

    def combine_preprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows back in the order in which they came."""
        if self.counts is not None and self.local > 1:
            rows = _transposed(rows, self._here().T)
        return rows

    def token_combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [Q, D] → those that this rank sent, [R, D]."""
        if self.counts is None:
            return rows
        sent, got = self._sizes()
        return all_to_all(self.group, rows, sent, got)

    def combine_postprocess(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [R, D] → sums by token [t, 1, D]."""
        shape, order = self.shape, self.order
        assert shape is not None
        assert order is not None
        self._forget()
        return sums_of(rows, order, shape[0] * shape[1]).view(shape)


def _transposed(rows: torch.Tensor, counts: np.ndarray) -> torch.Tensor:
    """Rows in chunks of `counts` [a, b], b after b, → a after a."""
    a, b = counts.shape
    chunks = rows.split(counts.ravel().tolist())
    return torch.cat([chunks[i * b + j] for j in range(b) for i in range(a)])

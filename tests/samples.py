"""Costs of made-up samples, and the bins that they go to."""

from collections.abc import Sequence

import numpy as np

from dataloader.balance import Bins, SampleCosts


def samples_of(
    costs: Sequence[int | tuple[int, ...]], unsplit: Sequence[tuple[int, ...]] = ()
) -> SampleCosts:
    """Samples of so many nanoseconds: of the LLM, or of the LLM and each encoder. They may be split at will
    unless `unsplit` says otherwise.
    """
    rows = [(cost,) if isinstance(cost, int) else cost for cost in costs]
    width = len(rows[0]) if rows else 1
    ns = np.array(rows, np.int64).reshape(len(rows), width)
    least = np.array(unsplit, np.int64).reshape(len(rows), width) if unsplit else np.zeros_like(ns)
    tokens = ns[:, 0] // 100 + 1
    names = ("llm", "image", "audio")[:width]
    return SampleCosts(names, ns, least, tokens, 4 * tokens, 16 * tokens)


def bins_of(count: int, width: int = 1, components: int = 1) -> Bins:
    """Bins of `width` replicas that do all their work alone."""
    return Bins(count, width, (True,) * components)

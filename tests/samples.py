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


def sized(rows: Sequence[tuple[int, int, int]]) -> SampleCosts:
    """Samples, or packs, of so many tokens, nanoseconds of the LLM and of an encoder."""
    table = np.array(rows, np.int64).reshape(-1, 3)
    return SampleCosts(
        ("llm", "image"), table[:, 1:], 0 * table[:, 1:], table[:, 0], 4 * table[:, 0], 16 * table[:, 0]
    )


def bins_of(count: int, width: int = 1, components: int = 1) -> Bins:
    """Bins of `width` replicas that do all their work alone."""
    return Bins(count, width, (True,) * components)

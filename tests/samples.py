"""Costs of made-up samples, and the bins that they go to."""

from collections.abc import Sequence
from statistics import mean, pstdev

import numpy as np

from dataloader.balance import Bins, SampleCosts
from dataloader.balance.costs import bin_ns
from dataloader.tokens import length
from dataloader.trace import generate


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


def largest_of(costs: Sequence[int], n: int, chosen: Sequence[int]) -> int:
    """The largest sum of a bin."""
    return max(sum(cost for cost, b in zip(costs, chosen, strict=True) if b == k) for k in range(n))


def largest_sum(samples: SampleCosts, bins: Bins, chosen: Sequence[int]) -> int:
    """What the busiest bin takes of all components together."""
    return largest_of(samples.total_ns, bins.count, chosen)


def step_ns(samples: SampleCosts, bins: Bins, chosen: Sequence[int]) -> int:
    """The slowest bin's time of the LLM and of the encoders, one after the other."""
    taken = bin_ns(chosen, samples, bins)
    return int(taken[:, 0].max() + taken[:, 1:].sum(1).max())


def samples_of_trace(trace: str, seed: int, width: int) -> SampleCosts:
    """256 samples, as a ViT-H and an LLM of 8 B take them; `width` replicas share what is long."""
    rows, longest = [], []
    for meta in generate(trace, 512, seed)[:256]:
        tokens = length(meta)
        llm = 30 * tokens + tokens * tokens // 1_900
        items = [5 * item.tokens // 2 + item.tokens**2 // 3_000 for item in meta.items]
        rows.append((llm, sum(items)))
        longest.append((llm // width, max(items, default=0) // width))
    return samples_of(rows, unsplit=longest)


def chart_samples(seed: int, num: int) -> list[tuple[int, int, int]]:
    """Charts of 400 or 1,600 tokens and their tables, as uneven as Entrain's worst data set: the LLM's work
    grows with tokens and their square, the encoder's with those of the image.
    """
    random = np.random.default_rng(seed)
    images = np.where(random.random(num) < 0.5, 400, 1_600)
    tokens = images + np.minimum(random.lognormal(6, 1, num), 4_000).astype(int)
    llm = 1_000 * tokens + tokens * tokens // 50
    return list(zip(tokens.tolist(), llm.tolist(), (3_000 * images).tolist(), strict=True))


def variation(samples, bins, column):
    """Standard deviation by mean of the work of packs, for the pack of each sample."""
    sums = [0] * (1 + max(bins))
    for sample, number in zip(samples, bins, strict=True):
        sums[number] += sample[column]
    return pstdev(sums) / mean(sums)

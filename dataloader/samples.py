"""Where steps take their samples from: an order in which they come, and what is known of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from dataloader.global_batch import Lengths
from dataloader.stream import Order
from dataloader.tokens import SampleMeta, fit, length
from ops.ints import Ints

TRACE = "trace"

ItemTokens = Callable[[str, Ints], dict[str, tuple[Ints, Ints]]]
"""From a source's name and ids [n] to its items, by modality: the place of each item's sample among the ids
[k], and its encoder tokens [k]: `Index.item_tokens` of the source.
"""


@dataclass(frozen=True)
class Samples:
    """`stream` orders samples; `metas` reads the metadata of one by source and id, `lengths` of many; `items`
    gives the items of many.
    """

    stream: Order
    metas: Callable[[str, int], SampleMeta]
    lengths: Lengths
    items: ItemTokens


@dataclass(frozen=True)
class InOrder:
    """The samples 0 … cycle - 1 of the one source "trace", over and over."""

    cycle: int
    names: tuple[str, ...] = (TRACE,)

    def take(self, start: int, count: int) -> tuple[Ints, Ints]:
        """Source numbers and ids, int64 [count], at `count` positions from `start`."""
        ids = np.arange(start, start + count, dtype=np.int64) % self.cycle
        return np.zeros_like(ids), ids


def in_order(trace: Sequence[SampleMeta]) -> Samples:
    """Take the samples of a trace in their order, over and over."""

    @cache
    def whole() -> Ints:
        """Lengths [n] of whole samples; above any budget of one that has an item which is refused."""
        above = np.iinfo(np.int64).max
        whole = (above if any(item.refused for item in of.items) else length(of) for of in trace)
        return np.fromiter(whole, np.int64, len(trace))

    def lengths(source: str, ids: Ints, budget: int, policy: str) -> Ints:
        # A sample that would be refused has length 0, as with an index: who takes it says why.
        on_long = "drop" if policy == "error" else policy
        found = whole()[ids]
        for place in np.flatnonzero(found > budget).tolist():
            meta = fit(trace[ids[place]], budget, on_long)
            found[place] = 0 if meta is None else length(meta)
        return found

    @cache
    def items_of_all() -> dict[str, Ints]:
        """By modality the sample of each item, in order, and its tokens: [2, k]."""
        found: dict[str, list[tuple[int, int]]] = {}
        for number, meta in enumerate(trace):
            for item in meta.items:
                found.setdefault(item.modality, []).append((number, item.tokens))
        return {name: np.array(of, np.int64).T for name, of in found.items()}

    def items(source: str, ids: Ints) -> dict[str, tuple[Ints, Ints]]:
        found = {}
        for name, (sample, tokens) in items_of_all().items():
            first = np.searchsorted(sample, ids)
            count = np.searchsorted(sample, ids, "right") - first
            at = np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)
            found[name] = np.repeat(np.arange(len(ids)), count), tokens[at]
        return found

    return Samples(InOrder(len(trace)), lambda source, sample: trace[sample], lengths, items)

"""Which group of domains gets which samples of a step: the one decision about samples that all ranks make."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ops.ints import Ints
from parallel.policy import Policy


@dataclass(frozen=True)
class DealPolicy(Policy):
    """Which group of domains gets which samples of a step.

    `decide(work, sizes)` gives each sample of `work` [n, P] its group in 0 … len(sizes)-1; `sizes` are the
    domains of each group, equally many but for fewer in the last. The work is the sample's tokens in the LLM
    (P = 1). With `by_cost` it is what the sample takes a replica in both phases of a step (P = 2):
    nanoseconds of the LLM, and of all encoders.
    """

    group: ClassVar[str] = "omni.deal"
    decide: Callable[[Ints, Sequence[int]], Sequence[int]]
    by_cost: bool = False

    def __call__(self, work: Ints, sizes: Sequence[int]) -> list[int]:
        """Return the group of each sample."""
        with self.asked():
            groups = list(map(int, self.decide(work, sizes)))
        self.require(
            len(groups) == len(work)
            and min(groups, default=0) >= 0
            and max(groups, default=0) < max(1, len(sizes)),
            f"each of {len(work)} samples goes to one of {len(sizes)} groups",
        )
        return groups


def deal(lengths: Sequence[int], num_domains: int, group_size: int) -> list[int]:
    """Deal samples to groups of `group_size` neighbouring domains (the last may be smaller), by length.

    From the longest on, samples are dealt in rounds to one domain of each group, to the groups there and back
    (0, 1, …, G - 1, G - 1, …, 0, 0, …), and when all domains have had one, to the domains back again. A group
    gets what its domains are dealt. Two groups of as many domains, and any two domains, differ by at most the
    longest sample, in tokens, and by one in samples; a smaller group has one less in rounds that its domains
    have no part in. O(n log n) in numpy: at 8,192 samples about a millisecond.
    """
    domains = np.arange(num_domains)
    rounds, group_of = domains % group_size, domains // group_size
    # Dealt to domain after domain instead, the first group would get the longest samples of all.
    turns = group_of[np.lexsort((np.where(rounds % 2, -group_of, group_of), rounds))]
    turns = np.concatenate([turns, turns[::-1]])
    order = np.argsort(-np.asarray(lengths, np.int64), kind="stable")
    groups = np.empty(len(lengths), np.int64)
    groups[order] = turns[np.arange(len(lengths)) % (2 * num_domains)]
    out: list[int] = groups.tolist()
    return out


def deal_by_length(work: Ints, sizes: Sequence[int]) -> list[int]:
    """Deal samples in rounds, the longest first: `deal`."""
    return deal(work[:, 0].tolist(), sum(sizes), sizes[0])


def deal_by_cost(work: Ints, sizes: Sequence[int]) -> list[int]:
    """Even out both phases: samples that are more of the step's encoder work than of its LLM work go first,
    by encoder work, the others then by LLM work; from the costliest on, each to the group with the least so
    far for each of its domains.

    Between groups of as many domains, the encoder work dealt first differs by at most the largest of one
    sample; the LLM's work of all differs by at most that of one sample dealt second, or by what the first
    round left. O(n log G): at 8,192 samples about three milliseconds.
    """
    first = _rather_encoder(work)
    groups, llm = np.zeros(len(work), np.int64), np.zeros(len(sizes), np.int64)
    order = _costliest_first(work, first, 1)
    groups[order] = _to_the_emptiest(work[order, 1].tolist(), [0] * len(sizes), sizes)
    np.add.at(llm, groups[order], work[order, 0])
    order = _costliest_first(work, ~first, 0)
    groups[order] = _to_the_emptiest(work[order, 0].tolist(), llm.tolist(), sizes)
    out: list[int] = groups.tolist()
    return out


def _rather_encoder(work: Ints) -> npt.NDArray[np.bool_]:
    """Which samples are more of the encoder work of all than of their LLM work."""
    total = work.sum(0).tolist()
    # Shares are compared by products, which need not overflow: the totals then lose their last bits.
    bits = int(work.max(initial=0)).bit_length() + max(total).bit_length()
    llm, encoder = (of >> max(0, bits - 63) for of in total)
    chosen: npt.NDArray[np.bool_] = work[:, 1] * llm > work[:, 0] * encoder
    return chosen


def _costliest_first(work: Ints, chosen: npt.NDArray[np.bool_], phase: int) -> Ints:
    """The chosen samples by their work of a phase, ties by number."""
    rows = np.flatnonzero(chosen)
    return rows[np.argsort(-work[rows, phase], kind="stable")]


def _to_the_emptiest(costs: Sequence[int], loads: list[int], sizes: Sequence[int]) -> list[int]:
    """Each cost, in their order, to the group with the least load for each domain; ties to the smaller."""
    heap = [(load // size, number) for number, (load, size) in enumerate(zip(loads, sizes, strict=True))]
    heapify(heap)
    groups = []
    for cost in costs:
        number = heap[0][1]
        loads[number] += cost
        heapreplace(heap, (loads[number] // sizes[number], number))
        groups.append(number)
    return groups


BY_LENGTH = DealPolicy("by_length", deal_by_length)
BY_COST = DealPolicy("by_cost", deal_by_cost, by_cost=True)

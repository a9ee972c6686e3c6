"""The kind of policy that packs the samples of a replica, and says when their items are encoded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from dataloader.balance import SampleCosts
from ops.ints import Ints
from parallel.policy import Policy

Packs = tuple[tuple[int, ...], ...]
"""Samples by number, those of each pack, in the order in which packs are trained."""


@dataclass(frozen=True)
class PackingPolicy(Policy):
    """Which samples of a replica share a microbatch.

    `decide(samples, budget)` gives packs of sample numbers: each of `samples` in exactly one pack, no pack
    empty or of more than `budget` tokens. A sample that is longer has a pack of its own.

    encode   tells, from samples, packs and budget, with which pack the items of each sample are encoded:
             its own or one before it. None for always its own
    """

    group: ClassVar[str] = "omni.packing"
    decide: Callable[[SampleCosts, int], Sequence[Sequence[int]]]
    encode: Callable[[SampleCosts, Packs, int], Sequence[int]] | None = None

    def __call__(self, samples: SampleCosts, budget: int) -> Packs:
        """Return the packs in the order in which they are trained."""
        with self.asked():
            packs = tuple(tuple(map(int, members)) for members in self.decide(samples, budget))
        tokens = samples.tokens.tolist()
        self.require(
            sorted(i for members in packs for i in members) == list(range(len(samples))) and all(packs),
            f"each of {len(samples)} samples is in one pack, and no pack is empty",
        )
        self.require(
            all(len(members) == 1 or sum(tokens[i] for i in members) <= budget for members in packs),
            f"a pack of several samples has at most {budget} tokens",
        )
        return packs

    def encoded_with(self, samples: SampleCosts, packs: Packs, budget: int) -> tuple[int, ...]:
        """Return the pack with which the items of each sample are encoded."""
        own = pack_of(packs)
        if self.encode is None:
            return own
        with self.asked():
            chosen = tuple(map(int, self.encode(samples, packs, budget)))
        self.require(
            len(chosen) == len(own) and all(0 <= with_ <= at for with_, at in zip(chosen, own, strict=True)),
            "items are encoded with the pack of their sample or one before it",
        )
        return chosen


def costs_of(samples: SampleCosts, packs: Packs) -> SampleCosts:
    """Return the costs of packs: the sums of their samples', and the most that cannot be split."""
    number = np.array(pack_of(packs), np.int64)

    def summed(column: Ints) -> Ints:
        sums = np.zeros((len(packs), *column.shape[1:]), np.int64)
        np.add.at(sums, number, column)
        return sums

    unsplit_ns = np.zeros((len(packs), len(samples.components)), np.int64)
    np.maximum.at(unsplit_ns, number, samples.unsplit_ns)
    return SampleCosts(
        samples.components,
        summed(samples.ns),
        unsplit_ns,
        summed(samples.tokens),
        summed(samples.bytes),
        summed(samples.kept_bytes),
    )


def pack_of(packs: Packs) -> tuple[int, ...]:
    """Return the pack of each sample."""
    found = {sample: number for number, members in enumerate(packs) for sample in members}
    return tuple(found[sample] for sample in range(len(found)))

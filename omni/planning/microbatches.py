"""From the samples of a domain's replicas to its microbatches: packed, paired, and laid over the pool."""

from collections.abc import Sequence
from typing import NamedTuple

from dataloader.balance import SampleCosts
from dataloader.packing import PackingPolicy
from dataloader.packing.policy import Packs, costs_of, pack_of
from dataloader.pairing import Pairs
from omni.planning.sharing import Sharing, lay_out
from pipeline.domain_plan import Microbatch


class ReplicaPacks(NamedTuple):
    """The packs of a replica, which number its `samples` from 0, what each costs, and for each sample the
    pack with which its items are encoded.
    """

    samples: Sequence[int]
    packs: Packs
    costs: SampleCosts
    encoded_with: tuple[int, ...]


def packed(
    policy: PackingPolicy, members: Sequence[Sequence[int]], costs: SampleCosts, budget: int
) -> list[ReplicaPacks]:
    """Pack the samples of each replica, at most `budget` tokens of several samples."""
    found = []
    for samples in members:
        own = costs.take(samples)
        packs = policy(own, budget)
        encoded_with = policy.encoded_with(own, packs, budget)
        found.append(ReplicaPacks(samples, packs, costs_of(own, packs), encoded_with))
    return found


def encoded_with(replicas: Sequence[ReplicaPacks], pairs: Pairs) -> dict[int, int]:
    """Return for each sample the microbatch with which its items are encoded, of packs that pass together."""
    encoded: dict[int, int] = {}
    for replica, own in enumerate(replicas):
        place = {chosen[replica]: m for m, chosen in enumerate(pairs)}
        for sample, at, with_ in zip(own.samples, pack_of(own.packs), own.encoded_with, strict=True):
            encoded[sample] = min(place[at], place[with_])
    return encoded


def microbatch_of(
    replicas: Sequence[ReplicaPacks], lengths: Sequence[int], sharing: Sharing, chosen: Sequence[int | None]
) -> Microbatch:
    """Lay the `chosen` pack of each replica over the pool; `lengths` are those of all samples, in tokens."""
    packs = [
        [] if at is None else [own.samples[i] for i in own.packs[at]]
        for own, at in zip(replicas, chosen, strict=True)
    ]
    return lay_out(packs, lengths, sharing)

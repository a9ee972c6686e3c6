"""The kind of policy that makes microbatches of a domain from the packs of its replicas."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dataloader.balance import SampleCosts
from parallel.policy import Policy

Pairs = tuple[tuple[int | None, ...], ...]
"""Microbatches in their order: for each replica the number of its pack, None if it has no part in it."""


Decide = Callable[[Sequence[SampleCosts], int, int], Sequence[Sequence[int | None]]]


@dataclass(frozen=True)
class PairingPolicy(Policy):
    """Which packs of a domain's replicas pass together, as one microbatch of the domain.

    `decide(packs, room, stages)`, with the summed costs `packs[r]` of the packs of replica r, gives the
    microbatches in the order in which they pass the `stages` of the pipeline. Every pack is in exactly one,
    and a microbatch of several packs has at most `room` tokens. Packs that are no single long sample find
    room together, one a replica.

    in_order  the packs of a replica pass in their order, as packing wants it that has items encoded with
              earlier packs than their sample's
    filled    the same decision for schedules that fill the pipeline's gaps with encoder work, if other
              orders suit them better: these are planned with the first one, and the quickest of them that
              fits with each
    """

    group: ClassVar[str] = "omni.pairing"
    decide: Decide
    in_order: bool = False
    filled: tuple[Decide, ...] = ()

    def __call__(self, packs: Sequence[SampleCosts], room: int, stages: int) -> Pairs:
        """Return the pack of each replica in each microbatch."""
        return self._checked(self.decide, packs, room, stages)

    def orders(self, packs: Sequence[SampleCosts], room: int, stages: int) -> tuple[Pairs, ...]:
        """Return the same for schedules that fill gaps, in each order that may suit them."""
        decisions = self.filled or (self.decide,)
        found = (self._checked(decide, packs, room, stages) for decide in decisions)
        return tuple(dict.fromkeys(found))

    def _checked(self, decide: Decide, packs: Sequence[SampleCosts], room: int, stages: int) -> Pairs:
        with self.asked():
            together = tuple(map(tuple, decide(packs, room, stages)))
        self.require(
            all(len(chosen) == len(packs) and set(chosen) != {None} for chosen in together),
            f"a microbatch has a pack or None for each of {len(packs)} replicas, and not None alone",
        )
        for replica, own in enumerate(packs):
            passed = [at for chosen in together if (at := chosen[replica]) is not None]
            self.require(
                (passed if self.in_order else sorted(passed)) == list(range(len(own))),
                f"each of the {len(own)} packs of replica {replica} passes once"
                + ", in their order" * self.in_order,
            )
        for chosen in together:
            sizes = [int(own.tokens[at]) for own, at in zip(packs, chosen, strict=True) if at is not None]
            self.require(
                len(sizes) == 1 or sum(sizes) <= room,
                f"a microbatch of several packs has at most {room} tokens",
            )
        return together

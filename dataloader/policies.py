"""How the samples of a replica are divided into microbatches, and which of these pass together.

None of it changes what is trained on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from dataloader.packing import pack
from parallel.policy import Policy


@dataclass(frozen=True)
class PackingPolicy(Policy):
    """Which samples of a replica share a microbatch.

    `decide(lengths, budget)` gives packs of sample numbers: each sample of `lengths` tokens in exactly one
    pack, no pack empty or of more than `budget` tokens. A sample that is longer has a pack of its own.
    """

    group: ClassVar[str] = "omni.packing"
    decide: Callable[[Sequence[int], int], tuple[tuple[int, ...], ...]]

    def __call__(self, lengths: Sequence[int], budget: int) -> tuple[tuple[int, ...], ...]:
        """Return the packs in the order in which they are trained."""
        packs = tuple(map(tuple, self.decide(lengths, budget)))
        self.require(
            sorted(i for members in packs for i in members) == list(range(len(lengths))) and all(packs),
            f"each of {len(lengths)} samples is in one pack, and no pack is empty",
        )
        self.require(
            all(len(members) == 1 or sum(lengths[i] for i in members) <= budget for members in packs),
            f"a pack of several samples has at most {budget} tokens",
        )
        return packs


@dataclass(frozen=True)
class PairingPolicy(Policy):
    """Which packs of a domain's replicas pass together, as one microbatch of the domain.

    `decide(costs, tokens, room)`, with the nanoseconds `costs[r][p]` and the `tokens[r][p]` of pack p of
    replica r, gives the microbatches in their order: for each replica the number of its pack, or None if it
    has no part in the microbatch. Every pack is in exactly one microbatch, and a microbatch of several packs
    has at most `room` tokens. Packs that are not a single long sample find room together, one a replica.
    """

    group: ClassVar[str] = "omni.pairing"
    decide: Callable[
        [Sequence[Sequence[int]], Sequence[Sequence[int]], int], tuple[tuple[int | None, ...], ...]
    ]

    def __call__(
        self, costs: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], room: int
    ) -> tuple[tuple[int | None, ...], ...]:
        """Return the pack of each replica in each microbatch."""
        together = tuple(map(tuple, self.decide(costs, tokens, room)))
        self.require(
            all(len(packs) == len(costs) and set(packs) != {None} for packs in together),
            f"a microbatch has a pack or None for each of {len(costs)} replicas, and not None alone",
        )
        for replica, own in enumerate(costs):
            taken = sorted(packs[replica] for packs in together if packs[replica] is not None)  # type: ignore[type-var]
            self.require(
                taken == list(range(len(own))),
                f"each of the {len(own)} packs of replica {replica} passes once",
            )
        for packs in together:
            sizes = [of[pack] for of, pack in zip(tokens, packs, strict=True) if pack is not None]
            self.require(
                len(sizes) == 1 or sum(sizes) <= room,
                f"a microbatch of several packs has at most {room} tokens",
            )
        return together


def pair_in_order(
    costs: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], room: int
) -> tuple[tuple[int | None, ...], ...]:
    """The first packs of all replicas together, then the next ones, while any replica has one. A pack for
    which there is no room left waits, and those of its replica behind it.
    """
    return fill_in_order([range(len(own)) for own in costs], tokens, room)


def pair_alike(
    costs: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], room: int
) -> tuple[tuple[int | None, ...], ...]:
    """The costliest packs of all replicas together, then the next ones. Where a replica waits for the slowest
    at each microbatch and all find room, none takes less time in all.
    """
    orders = [sorted(range(len(own)), key=lambda pack: -own[pack]) for own in costs]
    return fill_in_order(orders, tokens, room)


def fill_in_order(
    orders: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]], room: int
) -> tuple[tuple[int | None, ...], ...]:
    """Microbatches of the next pack of every replica, in its order, for which there is room: at least one."""
    passed = [0] * len(orders)
    together = []
    while any(at < len(order) for at, order in zip(passed, orders, strict=True)):
        chosen: list[int | None] = [None] * len(orders)
        taken = 0
        for replica, order in enumerate(orders):
            if passed[replica] == len(order):
                continue
            pack = order[passed[replica]]
            if not taken or taken + tokens[replica][pack] <= room:
                chosen[replica] = pack
                taken += tokens[replica][pack]
                passed[replica] += 1
        together.append(tuple(chosen))
    return tuple(together)


FIRST_FIT_DECREASING = PackingPolicy("first_fit_decreasing", pack)
IN_ORDER = PairingPolicy("in_order", pair_in_order)
ALIKE = PairingPolicy("alike", pair_alike)

"""Policies of pairing that take the next pack of each replica, in one order or another."""

from collections.abc import Sequence

from dataloader.balance import SampleCosts
from dataloader.pairing.policy import PairingPolicy, Pairs


def pair_in_order(packs: Sequence[SampleCosts], room: int, stages: int) -> Pairs:
    """The first packs of all replicas together, then the next ones, while any replica has one. A pack for
    which there is no room left waits, and those of its replica behind it.
    """
    return fill_in_order([range(len(own)) for own in packs], packs, room)


def pair_alike(packs: Sequence[SampleCosts], room: int, stages: int) -> Pairs:
    """The costliest packs of all replicas together, then the next ones. Where a replica waits for the slowest
    at each microbatch and all find room, none takes less time in all.

    The microbatch with the least work of the LLM comes first, the next one last, and so on inwards. Under
    1F1B a stage runs the forward of one microbatch between the backwards of others, at most as many before it
    as there are stages, and has no time to spare: it waits for the slowest of them, least where neighbours
    take about the same. And the pipeline fills and empties soonest with small ones.
    """
    orders = [sorted(range(len(own)), key=lambda at: -own.total_ns[at]) for own in packs]
    together = fill_in_order(orders, packs, room)
    work = [
        sum(int(own.ns[at, 0]) for own, at in zip(packs, chosen, strict=True) if at is not None)
        for chosen in together
    ]
    rising = sorted(range(len(together)), key=lambda m: work[m])
    return tuple(together[m] for m in (*rising[::2], *reversed(rising[1::2])))


def fill_in_order(orders: Sequence[Sequence[int]], packs: Sequence[SampleCosts], room: int) -> Pairs:
    """Microbatches of the next pack of every replica, in its order, for which there is room: at least one."""
    tokens = [own.tokens.tolist() for own in packs]
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


IN_ORDER = PairingPolicy("in_order", pair_in_order, in_order=True)
ALIKE = PairingPolicy("alike", pair_alike)

"""DistTrain's order of microbatches (Zhang et al., 2025, SIGCOMM; its inter-microbatch reordering): encoders
ahead of the pipeline fill the intervals that the LLM leaves them.
"""

from collections.abc import Sequence

from dataloader.balance import SampleCosts
from dataloader.pairing.policy import PairingPolicy, Pairs
from dataloader.pairing.simple import pair_alike

_BACKWARD = 2  # times a forward


def pair_disttrain(packs: Sequence[SampleCosts], room: int, stages: int) -> Pairs:
    """Packs paired as `alike` does, in an order for encoders that stand before the pipeline as its first
    stage, beside `stages` of the LLM.

    The microbatch of the least work of encoders comes first, so that the pipeline is full early, and the
    `stages` next least come last, where nothing hides them. In between, encoders have until the LLM is done
    with a microbatch to go back through one and forward through the next: each interval takes the microbatch
    whose encoders fill it best. Of the first interval, which the pipeline's filling makes longer, DistTrain
    takes several at once; here each microbatch has an interval of its own. O(microbatches²).
    """
    together = pair_alike(packs, room, stages)
    work = [_work(packs, chosen) for chosen in together]
    left = sorted(range(len(work)), key=lambda m: work[m])
    order, last = left[:1], left[1 : 1 + stages]
    left = left[1 + stages :]
    while left:
        at = len(order)
        done = order[max(0, at - stages)]
        gone_back = order[max(0, at - stages - 1)] if at > stages else None
        interval = (1 + _BACKWARD) * work[done][1]
        if gone_back is not None:
            interval -= _BACKWARD * work[gone_back][0]
        chosen = min(left, key=lambda m: abs(work[m][0] - interval))
        left.remove(chosen)
        order.append(chosen)
    return tuple(together[m] for m in (*order, *reversed(last)))


def _work(packs: Sequence[SampleCosts], chosen: Sequence[int | None]) -> tuple[int, int]:
    """Nanoseconds of a microbatch's encoders and of the LLM, over all replicas."""
    rows = [own.ns[at] for own, at in zip(packs, chosen, strict=True) if at is not None]
    llm, *encoders = sum(rows).tolist()
    return sum(encoders), llm


DISTTRAIN = PairingPolicy("disttrain", pair_disttrain)

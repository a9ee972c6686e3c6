"""How much encoder work each crew takes, and which encoder batches: decided before anything is ordered.

Encoder backwards become possible once gradients have come back through the whole pipeline, so most of them
run at the end of a step. A crew's share is therefore limited twice: by what it idles after the first
gradients are back, and by its work in all. The least time T of a step in which all the work fits gives the
shares (water-filling), and encoder batches go to tp groups in proportion to them, each microbatch's evenly.
Where encoder batches stay apart from passes, a crew's gaps between its passes count as work (`alone.py`).
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

_ROUNDS = 4
_NumberedCost = tuple[int, int]
"""What an encoder batch costs, and its number."""


@dataclass(frozen=True)
class Room:
    """What a unit does without the encoder batches to be shared: `work_ns` in all, and `idle_ns` that it has
    after the first gradients of rows are back.
    """

    work_ns: int
    idle_ns: int


def share_out(rooms: Sequence[Room], makespan_ns: int, forward_ns: int, backward_ns: int) -> list[int]:
    """Return the nanoseconds of encoder work, forward and backward, that each unit should take.

    Without encoder batches the step takes `makespan_ns`; they take `forward_ns` and `backward_ns` in all.
    """
    total = forward_ns + backward_ns

    def at(step_ns: int) -> list[int]:
        later = step_ns - makespan_ns
        return [
            max(0, min(step_ns - room.work_ns, total * (room.idle_ns + later) // max(1, backward_ns)))
            for room in rooms
        ]

    low, high = 0, makespan_ns + total
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (low, middle) if sum(at(middle)) >= total else (middle, high)
    return at(high)


def deal_out(costs: Sequence[int], shares: Sequence[int]) -> list[int]:
    """Deal encoder batches of `costs`, in order, to tp groups by their `shares`.

    What costs more than twice the mean goes first, the longest to where most of a share is left. Each of the
    others goes to the tp group that would be least ahead of its share with one more (weighted fair queueing,
    Demers, Keshav and Shenker, 1989), so a tp group with long encoder batches takes others late. TP groups
    without a share take none, unless none has any. Ties go to the tp group of the highest number: late stages
    wait longest for their first pass. In the end tp groups exchange encoder batches (`even_out`).
    """
    everyone = dict.fromkeys(range(len(shares)), 1)
    wanted = {tp_group: share for tp_group, share in enumerate(shares) if share > 0} or everyone
    scale, usual = sum(wanted.values()), sum(costs) // max(1, len(costs))
    dealt = [-1] * len(costs)
    long = sorted((n for n, cost in enumerate(costs) if cost > 2 * usual), key=lambda n: (-costs[n], n))
    most = [(-share, -tp_group) for tp_group, share in wanted.items()]
    heapify(most)
    taken = dict.fromkeys(wanted, usual)
    for number in long:
        left, tp_group = -most[0][0] - costs[number], -most[0][1]
        heapreplace(most, (-left, -tp_group))
        dealt[number] = tp_group
        taken[tp_group] += costs[number]
    queue = [(taken[tp_group] * scale // share, -tp_group) for tp_group, share in wanted.items()]
    heapify(queue)
    for number, cost in enumerate(costs):
        if dealt[number] < 0:
            dealt[number] = tp_group = -queue[0][1]
            taken[tp_group] += cost
            heapreplace(queue, (taken[tp_group] * scale // wanted[tp_group], -tp_group))
    return even_out(costs, shares, dealt)


def within(
    dealt: Sequence[int], sizes: Sequence[int], waves: Sequence[int], num_tp_groups: int, most: int
) -> list[int]:
    """Move encoder batches between tp groups until none holds more than `most` bytes of one microbatch, as
    far as moving helps. Encoder batches keep `sizes` bytes each until they have gone back, and those of a
    microbatch, which `waves` tell, are all held when it passes.

    Of `most` 10, encoder batches of 6, 5 and 3 on one of two tp groups become 5 and 3 there and 6 on the
    other: a tp group that holds too much gives its largest encoder batch for which there is room to the tp
    group that holds least.
    """
    dealt = list(dealt)
    of_wave: dict[int, list[int]] = defaultdict(list)
    for number, wave in enumerate(waves):
        of_wave[wave].append(number)
    for own in of_wave.values():
        held = [0] * num_tp_groups
        for number in own:
            held[dealt[number]] += sizes[number]
        for number in sorted(own, key=lambda n: (-sizes[n], n)):
            tp_group, least = dealt[number], min(range(num_tp_groups), key=lambda of: (held[of], of))
            if held[tp_group] > most >= held[least] + sizes[number]:
                dealt[number] = least
                held[tp_group] -= sizes[number]
                held[least] += sizes[number]
    return dealt


def even_out(costs: Sequence[int], shares: Sequence[int], dealt: Sequence[int]) -> list[int]:
    """Let tp groups exchange encoder batches, where few of very different costs leave some far above their
    shares.

    In each round the tp group that is furthest above its share gives one to the tp group that is furthest
    below, or changes it for a smaller one: what leaves the higher of both lowest. It ends where nothing does,
    or after as many rounds as there are encoder batches, four for each tp group at most. TP groups without a
    share take no part. O(rounds · n / groups · log n).
    """
    dealt = list(dealt)
    wanted = {tp_group: share for tp_group, share in enumerate(shares) if share > 0}
    scale, total = sum(wanted.values()), sum(costs)
    beyond = {tp_group: -(total * share // scale) for tp_group, share in wanted.items()}
    mine: dict[int, list[_NumberedCost]] = {tp_group: [] for tp_group in beyond}
    for number, tp_group in enumerate(dealt):
        if tp_group in beyond:
            beyond[tp_group] += costs[number]
            mine[tp_group].append((costs[number], number))
    for _ in range(min(len(costs), _ROUNDS * len(beyond))):
        high, low = max(beyond, key=beyond.__getitem__), min(beyond, key=beyond.__getitem__)
        given, taken = _best_exchange(mine[high], sorted(mine[low]), beyond[high] - beyond[low])
        if given is None:
            break
        for moved, before, after in ((given, high, low), (taken, low, high)):
            if moved is None:
                continue
            mine[before].remove((costs[moved], moved))
            mine[after].append((costs[moved], moved))
            beyond[before] -= costs[moved]
            beyond[after] += costs[moved]
            dealt[moved] = after
    return dealt


def _best_exchange(
    high: Sequence[_NumberedCost], low: Sequence[_NumberedCost], gap: int
) -> tuple[int | None, int | None]:
    """The encoder batch to give and the one to take for it, if any, that leave least of a `gap` between two
    tp groups; encoder batches of the `low` one ascend.
    """
    best: tuple[int | None, int | None] = (None, None)
    least = gap
    for cost, given in high:
        # What is best to take leaves the difference at half of the gap.
        at = bisect(low, (cost - gap // 2, 0))
        taking: list[tuple[int, int | None]] = [(0, None), *low[max(0, at - 1) : at + 1]]
        for other, taken in taking:
            left = abs(gap - 2 * (cost - other))
            if left < least:
                best, least = (given, taken), left
    return best

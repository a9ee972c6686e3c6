"""The definition of the sample stream, one position at a time in plain integers: what `Stream` computes.

A change to what comes out here, or to the stream alone, changes what resumed runs train on.
"""

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise
from math import gcd

from dataloader.stream import SourceSpec

MASK = (1 << 64) - 1
ROUNDS = 6


class PlainStream:
    def __init__(self, sources: Mapping[str, SourceSpec], seed: int, window_groups: int = 64) -> None:
        self.sources = dict(sorted(sources.items()))
        self.seed = seed
        self.window_groups = window_groups
        divisor = gcd(*(spec.weight for spec in sources.values()))
        self.weights = [spec.weight // divisor for spec in self.sources.values()]

    def at(self, position: int) -> tuple[str, int, int]:
        """(source, sample id within the source, epoch of the source) at a position ≥ 0 of the run."""
        period, slot = divmod(position, sum(self.weights))
        names = [name for name, w in zip(self.sources, self.weights, strict=True) for _ in range(w)]
        key = fold(self.seed, 0, period)
        order = sorted(range(len(names)), key=lambda place: splitmix64(key ^ splitmix64(place)))
        drawn = [names[place] for place in order]
        name = drawn[slot]
        count = period * drawn.count(name) + drawn[:slot].count(name)
        spec = self.sources[name]
        epoch, rank = divmod(count, spec.size)
        key = fold(self.seed, 1, name_key(name))
        return name, shuffled(rank, epoch, spec, key, self.window_groups), epoch


def plain_phases(
    sources: Mapping[str, SourceSpec],
    phases: list[tuple[int, Mapping[str, int]]],
    seed: int,
    window_groups: int,
    stop: int,
) -> list[tuple[str, int]]:
    """(source, sample) at positions 0 … stop - 1 of phases (start, weights): draws are counted one by one."""
    drawn, found = dict.fromkeys(sources, 0), []
    for (start, weights), (end, _) in pairwise([*phases, (stop, {})]):
        own = {name: replace(spec, weight=weights[name]) for name, spec in sources.items()}
        order = PlainStream(own, seed, window_groups)
        for position in range(start, end):
            name = order.at(position - start)[0]
            key = fold(seed, 1, name_key(name))
            epoch, rank = divmod(drawn[name], own[name].size)
            found.append((name, shuffled(rank, epoch, own[name], key, window_groups)))
            drawn[name] += 1
    return found


def name_key(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")


def shuffled(rank: int, epoch: int, spec: SourceSpec, key: int, window_groups: int) -> int:
    """The sample at place `rank` of an epoch: row groups in a permuted order, shuffled within windows."""
    rows = spec.rows_per_group
    groups = -(-spec.size // rows)
    window_rows = window_groups * rows
    for window in range(-(-groups // window_groups)):
        slots = range(window * window_groups, min(groups, (window + 1) * window_groups))
        members = []
        if rank < window_rows:  # else not in this window, whichever group is partial
            for slot in slots:
                group = permute(slot, groups, fold(key, epoch, 0))
                members += range(group * rows, min(spec.size, (group + 1) * rows))
            size = len(members)
        else:
            holds_partial = groups - 1 in (permute(slot, groups, fold(key, epoch, 0)) for slot in slots)
            size = len(slots) * rows - (groups * rows - spec.size if holds_partial else 0)
        if rank < size:
            return members[permute(rank, size, fold(key, epoch, 1 + window))]
        rank -= size
    raise AssertionError("the rank is beyond the epoch")


def permute(x: int, n: int, key: int) -> int:
    """A Feistel network on the next power of two, walked until the value is below n."""
    bits = max(2, (n - 1).bit_length())
    low, high = bits // 2, bits - bits // 2
    while True:
        a, b = x >> low, x & ((1 << low) - 1)
        for r in range(ROUNDS):
            if r % 2:
                b ^= splitmix64(key ^ (r << 56) ^ a) & ((1 << low) - 1)
            else:
                a ^= splitmix64(key ^ (r << 56) ^ b) & ((1 << high) - 1)
        x = a << low | b
        if x < n:
            return x


def splitmix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def fold(*parts: int) -> int:
    key = 0
    for part in parts:
        key = splitmix64(key ^ (part & MASK))
    return key

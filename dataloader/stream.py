"""The global sample stream: position of the run → sample, a pure function of seed and data.

Nothing here knows ranks, groups or world size, and nothing is stored per sample: any position can be asked
for at any time, so the state of a run is one integer. Only integer arithmetic is used, so the order is the
same on every machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import gcd

import numpy as np

_MASK = (1 << 64) - 1
_ROUNDS = 6
_MAX_PERIOD = 1 << 16


@dataclass(frozen=True)
class SourceSpec:
    """One source of the mixture: its samples, samples per row group and integer weight (0 leaves it out)."""

    size: int
    rows_per_group: int
    weight: int


class Stream:
    """An endless mixture of sources, each shuffled anew every epoch.

    Every period of sum(weights) / gcd(weights) positions holds each source in exact proportion, in an order
    shuffled per period. Within a source, row groups are permuted per epoch and the samples of
    `window_groups` consecutive permuted groups are shuffled together: reads stay within a few row groups,
    and every sample comes exactly once per epoch. Sources count by name: their order does not matter.
    """

    def __init__(self, sources: Mapping[str, SourceSpec], seed: int, window_groups: int = 64) -> None:
        for name, spec in sources.items():
            if spec.size < 1 or spec.rows_per_group < 1 or spec.weight < 0:
                raise ValueError(
                    f"source {name!r}: size {spec.size} and rows_per_group {spec.rows_per_group} must be "
                    f"positive, weight {spec.weight} must not be negative"
                )
        divisor = gcd(*(spec.weight for spec in sources.values()))
        if divisor == 0:
            raise ValueError(f"the sources {sorted(sources)} have no positive weight: give one a weight")
        if window_groups < 1:
            raise ValueError(f"window_groups is {window_groups}: it must be at least 1")
        self.sources = dict(sorted(sources.items()))
        self.seed = seed
        self.window_groups = window_groups
        self._names = tuple(self.sources)
        self._weights = tuple(spec.weight // divisor for spec in self.sources.values())
        self.period = sum(self._weights)
        if self.period > _MAX_PERIOD:
            raise ValueError(
                f"the source weights add up to {self.period} (after dividing by their common divisor), more "
                f"than {_MAX_PERIOD}: round them to smaller integers"
            )

    @property
    def cycle(self) -> int:
        """Positions within which every sample of every source comes at least once."""
        used = zip(self.sources.values(), self._weights, strict=True)
        return self.period * max(-(-spec.size // weight) for spec, weight in used if weight)

    def at(self, position: int) -> tuple[str, int, int]:
        """(source, sample id within the source, epoch of the source) at a position ≥ 0 of the run."""
        if position < 0:
            raise ValueError(f"position {position} is before the start of the stream")
        period, slot = divmod(int(position), self.period)
        order, occurrence = _mixture(_key(self.seed, 0, period), self._weights)
        source = int(order[slot])
        name = self._names[source]
        count = period * self._weights[source] + int(occurrence[slot])
        spec = self.sources[name]
        epoch, rank = divmod(count, spec.size)
        return (
            name,
            _shuffled(rank, epoch, spec, _key(self.seed, 1, _name_key(name)), self.window_groups),
            epoch,
        )


def _shuffled(rank: int, epoch: int, spec: SourceSpec, key: int, window_groups: int) -> int:
    """The sample at place `rank` of an epoch: a bijection of range(spec.size).

    Groups are laid out in permuted slots. One slot may hold the partial last group, which lacks `missing`
    rows: places after it shift by that much, within its window and beyond.
    """
    rows = spec.rows_per_group
    groups = -(-spec.size // rows)
    group_key = _key(key, epoch, 0)
    missing = groups * rows - spec.size
    partial_slot = _unpermute(groups - 1, groups, group_key) if missing else groups
    partial_window, partial_in_window = divmod(partial_slot, window_groups)

    window_rows = window_groups * rows
    partial_end = (partial_window + 1) * window_rows - missing  # where the window of the partial group ends
    window = (rank if rank < partial_end else rank + missing) // window_rows
    start = window * window_rows - (missing if window > partial_window else 0)
    size = min(window_rows, groups * rows - window * window_rows)
    if missing and window == partial_window:
        size -= missing
    place = permute(rank - start, size, _key(key, epoch, 1 + window))
    if missing and window == partial_window and place >= (partial_in_window + 1) * rows - missing:
        place += missing
    slot, row = divmod(place, rows)
    return permute(window * window_groups + slot, groups, group_key) * rows + row


@lru_cache(maxsize=4)
def _mixture(key: int, weights: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Source at each slot of a period, and how many slots of the same source precede it in the period."""
    slots = np.repeat(np.arange(len(weights)), weights)
    # Sorting by distinct pseudo-random keys: numpy's own shuffles may change between its versions.
    keys = [splitmix64(key ^ splitmix64(slot)) for slot in range(len(slots))]
    order = slots[np.argsort(np.array(keys, dtype=np.uint64), kind="stable")]
    occurrence = np.empty(len(order), dtype=np.int64)
    for source, weight in enumerate(weights):
        occurrence[order == source] = np.arange(weight)
    return order, occurrence


def splitmix64(x: int) -> int:
    """A fixed pseudo-random bijection of 64-bit integers (the finaliser of the splitmix64 generator)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def permute(x: int, n: int, key: int) -> int:
    """A pseudo-random bijection of range(n) chosen by `key`, without a table.

    A Feistel network permutes the next power of two; walking its cycle until the value is below n makes
    that a permutation of range(n). Less than two walks are expected.
    """
    assert 0 <= x < n
    low, high = _halves(n)
    while True:
        a, b = x >> low, x & ((1 << low) - 1)
        for r in range(_ROUNDS):
            if r % 2:
                b ^= splitmix64(key ^ (r << 56) ^ a) & ((1 << low) - 1)
            else:
                a ^= splitmix64(key ^ (r << 56) ^ b) & ((1 << high) - 1)
        x = a << low | b
        if x < n:
            return x


@lru_cache(maxsize=256)
def _unpermute(y: int, n: int, key: int) -> int:
    """The x with permute(x, n, key) == y."""
    low, high = _halves(n)
    while True:
        a, b = y >> low, y & ((1 << low) - 1)
        for r in reversed(range(_ROUNDS)):
            if r % 2:
                b ^= splitmix64(key ^ (r << 56) ^ a) & ((1 << low) - 1)
            else:
                a ^= splitmix64(key ^ (r << 56) ^ b) & ((1 << high) - 1)
        y = a << low | b
        if y < n:
            return y


def _halves(n: int) -> tuple[int, int]:
    bits = max(2, (n - 1).bit_length())
    return bits // 2, bits - bits // 2


def _key(*parts: int) -> int:
    key = 0
    for part in parts:
        key = splitmix64(key ^ (part & _MASK))
    return key


@lru_cache(maxsize=256)
def _name_key(name: str) -> int:
    # Python's hash() of a string differs between processes.
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")

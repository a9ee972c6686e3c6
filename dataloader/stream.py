"""The global sample stream: position of the run → sample, a pure function of seed and data.

Nothing here knows ranks, groups or world size, and nothing is stored per sample: any position can be asked
for at any time, so the state of a run is one integer. Only integer arithmetic is used, so the order is the
same on every machine.

Many positions are computed at once: a step of a large run takes thousands of samples, and every rank has to
know them all. 64-bit keys are uint64 arrays, whose arithmetic wraps around; everything else is int64.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import gcd
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ops.ints import Ints

Keys = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_ROUNDS = 6
_MAX_PERIOD = 1 << 16
_BLOCK = 1 << 12  # positions whose order in the mixture is made together, if the period is not longer
_POWERS = np.uint64(1) << np.arange(64, dtype=np.uint64)


@dataclass(frozen=True)
class SourceSpec:
    """One source of the mixture: its samples, samples per row group and integer weight (0 leaves it out)."""

    size: int
    rows_per_group: int
    weight: int


class Order(Protocol):
    """An endless order of samples: `names` of its sources, of which a source's number is its place; every
    sample comes within `cycle` positions.
    """

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sources."""

    @property
    def cycle(self) -> int:
        """Positions, from any on, within which every sample comes at least once."""

    def take(self, start: int, count: int) -> tuple[Ints, Ints]:
        """Source numbers and sample ids within them, int64 [count], at `count` positions from `start`."""


class Stream:
    """An endless mixture of sources, each shuffled anew every epoch.

    Every period of sum(weights) / gcd(weights) positions holds each source in exact proportion, in an order
    shuffled per period. Within a source, row groups are permuted per epoch and the samples of
    `window_groups` consecutive permuted groups are shuffled together: reads stay within a few row groups,
    and every sample comes exactly once per epoch. Sources count by name: their order does not matter.
    `names` are their names in order; a source's number is its place there.

    A stream may begin at another position than 0, `start`, where each source had been `drawn` so often: it
    goes on with the sample that comes next in its own order, so that a change of weights loses and repeats
    none.
    """

    def __init__(
        self,
        sources: Mapping[str, SourceSpec],
        seed: int,
        window_groups: int = 64,
        start: int = 0,
        drawn: Mapping[str, int] | None = None,
    ) -> None:
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
        self.start = start
        self.names = tuple(self.sources)
        self._drawn = np.array([(drawn or {}).get(name, 0) for name in self.names], dtype=np.int64)
        self._weights = tuple(spec.weight // divisor for spec in self.sources.values())
        self.period = sum(self._weights)
        if self.period > _MAX_PERIOD:
            raise ValueError(
                f"data.sources.<name>.weight: they add up to {self.period} (after dividing by their common "
                f"divisor), more than {_MAX_PERIOD}: round them to smaller integers"
            )

        specs = self.sources.values()
        self._sizes = np.array([spec.size for spec in specs], dtype=np.int64)
        self._rows = np.array([spec.rows_per_group for spec in specs], dtype=np.int64)
        self._groups = -(-self._sizes // self._rows)
        self._windows = np.array([min(window_groups, groups) for groups in self._groups.tolist()])
        self._keys = _key(_key(seed, 1, np.array([_name_key(name) for name in self.names], dtype=np.uint64)))

    @property
    def cycle(self) -> int:
        """Positions, from any on, within which every sample of every source comes at least once."""
        # Any 2·size - 1 draws of a source hold a whole epoch, and all periods but one are whole.
        used = zip(self.sources.values(), self._weights, strict=True)
        return self.period * max(1 - (1 - 2 * spec.size) // weight for spec, weight in used if weight)

    def at(self, position: int) -> tuple[str, int, int]:
        """(source, sample id within the source, epoch of the source) at a position ≥ `start` of the run."""
        sources, ids, epochs = self.draw(position, 1)
        return self.names[sources[0]], int(ids[0]), int(epochs[0])

    def take(self, start: int, count: int) -> tuple[Ints, Ints]:
        """Source numbers and sample ids within them, int64 [count], at `count` positions from `start`."""
        sources, ids, _ = self.draw(start, count)
        return sources, ids

    def drawn(self, position: int) -> dict[str, int]:
        """How often each source is drawn before a position ≥ `start`, from the run's beginning on."""
        whole, rest = divmod(position - self.start, self.period)
        counts = self._drawn + whole * np.array(self._weights)
        if rest:
            sources, _ = _mixture(self.seed, whole, 1, self._weights)
            counts += np.bincount(sources[:rest], minlength=len(counts))
        return dict(zip(self.names, counts.tolist(), strict=True))

    def draw(self, start: int, count: int) -> tuple[Ints, Ints, Ints]:
        """Source numbers, sample ids and epochs of the sources, int64 [count], from position `start` on."""
        if start < self.start:
            raise ValueError(f"position {start} is before the start of the stream, {self.start}")
        if count < 1:
            raise ValueError(f"{count} positions were asked for: ask for at least 1")
        start -= self.start
        periods = max(1, _BLOCK // self.period)
        size = periods * self.period
        sources, draws = [], []
        for block in range(start // size, (start + count - 1) // size + 1):
            of, number = _mixture(self.seed, block * periods, periods, self._weights)
            part = slice(max(0, start - block * size), start + count - block * size)
            sources.append(of[part])
            draws.append(number[part])
        source = np.concatenate(sources)
        epoch, rank = np.divmod(np.concatenate(draws) + self._drawn[source], self._sizes[source])
        return source, self._shuffled(source, epoch, rank), epoch

    def _shuffled(self, source: Ints, epoch: Ints, rank: Ints) -> Ints:
        """The sample at place `rank` of an epoch of a source, all [n]: a bijection of range(size).

        Groups are laid out in permuted slots. One slot may hold the partial last group, which lacks `missing`
        rows: places after it shift by that much, within its window and beyond.
        """
        epochs, which = self._epochs(source, epoch)
        rows, groups, missing = epochs.rows[which], epochs.groups[which], epochs.missing[which]
        window_rows, partial_window = epochs.window_rows[which], epochs.partial_window[which]

        partial_end = (partial_window + 1) * window_rows - missing  # where the partial group's window ends
        window = np.where(rank < partial_end, rank, rank + missing) // window_rows
        start = window * window_rows - np.where(window > partial_window, missing, 0)
        missing_here = np.where(window == partial_window, missing, 0)
        size = np.minimum(window_rows, groups * rows - window * window_rows) - missing_here
        place = permute(rank - start, size, splitmix64(epochs.key[which] ^ (window + 1).astype(np.uint64)))
        place += np.where(place >= epochs.partial_row[which] - missing_here, missing_here, 0)
        slot, row = np.divmod(window * window_rows + place, rows)
        # The samples of a window come from few groups: look up each once.
        most = int(groups.max())
        slots, of = np.unique(which * most + slot, return_inverse=True)
        which, slots = np.divmod(slots, most)
        return permute(slots, epochs.groups[which], epochs.group_key[which])[of] * rows + row

    def _epochs(self, source: Ints, epoch: Ints) -> tuple["_Epochs", Ints]:
        """The distinct epochs of sources among [n], and the place among them of each [n]."""
        names = len(self.names)
        both, which = np.unique(epoch * names + source, return_inverse=True)
        epoch, source = np.divmod(both, names)
        key = _key(epoch, start=self._keys[source])
        group_key = _key(0, start=key)
        rows, groups, window_groups = self._rows[source], self._groups[source], self._windows[source]
        missing = groups * rows - self._sizes[source]
        partial_slot = np.where(missing > 0, unpermute(groups - 1, groups, group_key), groups)
        partial_window, partial_in_window = np.divmod(partial_slot, window_groups)
        partial_row = (partial_in_window + 1) * rows
        window_rows = window_groups * rows
        epochs = _Epochs(key, group_key, rows, groups, missing, window_rows, partial_window, partial_row)
        return epochs, which


class _Epochs(NamedTuple):
    """Epochs of sources [e].

    `missing` is how many rows the last group is short of; `partial_window` the window of that group, none if
    it is whole, and `partial_row` the row of the window before which the group ends.
    """

    key: Keys
    group_key: Keys
    rows: Ints
    groups: Ints
    missing: Ints
    window_rows: Ints
    partial_window: Ints
    partial_row: Ints


@lru_cache(maxsize=4)
def _mixture(seed: int, first: int, periods: int, weights: tuple[int, ...]) -> tuple[Ints, Ints]:
    """Source at each position of `periods` periods from period `first`, and how often it was drawn before."""
    slots = np.repeat(np.arange(len(weights)), weights)
    period = np.arange(first, first + periods)
    # Sorting by distinct pseudo-random keys: numpy's own shuffles may change between its versions.
    keys = splitmix64(_key(seed, 0, period)[:, None] ^ splitmix64(np.arange(len(slots), dtype=np.uint64)))
    order = slots[np.argsort(keys, axis=1, kind="stable")]
    # The places of each source within the period, in order; numpy sorts 16-bit numbers in linear time.
    places = np.argsort(order.astype(np.uint16), axis=1, kind="stable")
    drawn = np.concatenate([np.arange(weight) for weight in weights])
    draws = np.empty_like(order)
    np.put_along_axis(draws, places, period[:, None] * np.array(weights)[slots] + drawn, axis=1)
    return order.reshape(-1), draws.reshape(-1)


def splitmix64(x: Keys) -> Keys:
    """A fixed pseudo-random bijection of 64-bit integers (the finaliser of the splitmix64 generator)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def permute(x: Ints, n: Ints, key: Keys) -> Ints:
    """A pseudo-random bijection of range(n) chosen by `key`, without a table: 0 ≤ x < n, all [k].

    A Feistel network permutes the next power of two; walking its cycle until the value is below n makes
    that a permutation of range(n). Less than two walks are expected.
    """
    return _walk(x, n, key, range(_ROUNDS))


def unpermute(y: Ints, n: Ints, key: Keys) -> Ints:
    """The x with permute(x, n, key) == y."""
    return _walk(y, n, key, range(_ROUNDS - 1, -1, -1))


def _walk(x: Ints, n: Ints, key: Keys, rounds: range) -> Ints:
    """Apply the rounds of the network, in this order, to each value until it is below its n."""
    assert ((x >= 0) & (x < n)).all()  # others may never come below n
    out = np.empty(len(x), dtype=np.int64)
    todo = np.arange(len(x))
    bits = np.maximum(2, np.searchsorted(_POWERS, (n - 1).astype(np.uint64), side="right")).astype(np.uint64)
    value, limit = x.astype(np.uint64), n.astype(np.uint64)
    while len(todo):
        value = _network(value, bits, key, rounds)
        out[todo] = value  # the last one counts
        on = value >= limit
        todo, value, limit, bits, key = todo[on], value[on], limit[on], bits[on], key[on]
    return out


def _network(x: Keys, bits: Keys, key: Keys, rounds: range) -> Keys:
    """A Feistel network of numbers of `bits` bits, whose halves are xored with a hash of each other."""
    low = bits >> np.uint64(1)
    low_mask = (np.uint64(1) << low) - np.uint64(1)
    high_mask = (np.uint64(1) << (bits - low)) - np.uint64(1)
    a, b = x >> low, x & low_mask
    for r in rounds:
        round_key = key ^ np.uint64(r << 56)
        if r % 2:
            b ^= splitmix64(round_key ^ a) & low_mask
        else:
            a ^= splitmix64(round_key ^ b) & high_mask
    return a << low | b


def _key(*parts: "int | Ints | Keys", start: Keys | None = None) -> Keys:
    """Fold integers, or arrays of them, into keys [n], going on from the keys `start`."""
    key = np.zeros(1, dtype=np.uint64) if start is None else start
    for part in parts:
        value = np.uint64(part & _MASK) if isinstance(part, int) else part.astype(np.uint64)
        key = splitmix64(key ^ value)
    return key


def _name_key(name: str) -> int:
    # Python's hash() of a string differs between processes.
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")

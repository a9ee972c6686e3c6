"""What encoder work is placed by: passes of the LLM that wait for each other, encoder batches, and the way of
rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.ops import Op

Times = list[int]
"""By microbatch, when something of it is done, -1 while that is unknown."""


def most(of: Callable[[int, Op], int], ranks: Sequence[int], op: Op) -> int:
    """Return the most that an op takes, or keeps, on any of `ranks`."""
    return of(ranks[0], op) if len(ranks) == 1 else max(of(rank, op) for rank in ranks)


@dataclass(slots=True, eq=False)
class PassKind:
    """What the passes of a kind through a virtual stage of a `crew` have in common. One may begin once each
    of `after` has been done for so many nanoseconds, both by microbatch; its end is noted in `done`, and
    units of the crews `wakes` may wait for it.
    """

    crew: int
    after: tuple[tuple[Times, Times], ...]
    done: Times
    wakes: tuple[int, ...]

    def begins(self, m: int) -> int:
        """When the pass of microbatch `m` may begin, -1 while that is unknown."""
        begins = 0
        for times, delays in self.after:
            done = times[m]
            if done < 0:
                return -1
            begins = max(begins, done + delays[m])
        return begins


@dataclass(slots=True, eq=False)
class Pass:
    """A pass and what it takes. It `goes_back` if its gradients go on to another virtual stage; it has
    `begun` once its crew gathers for it. Without encoders it may begin at the `latest` so that the last pass
    ends in time.
    """

    op: Op
    ns: int
    step: PassKind
    goes_back: bool
    begun: bool = False
    latest: int = 0


@dataclass(slots=True, eq=False)
class TimedEncoderBatch:
    """An encoder batch of `microbatches` on its `units`, none before it is placed: what runs and what that
    takes. If it `learns`, it keeps `kept` bytes until its backward; one that `is_long` fits no gap between
    passes.
    """

    encode: Op
    back: Op
    microbatches: tuple[int, ...]
    encode_ns: int
    back_ns: int
    kept: int
    learns: bool
    is_long: bool
    units: range = range(0)


@dataclass(frozen=True)
class Boundary:
    """The way of rows and back: what sending those of each microbatch takes, -1 for those without rows; when
    they are `shipped`; and the crews whose passes they enter.
    """

    ship_ns: Sequence[int]
    shipped: Times
    entered: tuple[int, ...]

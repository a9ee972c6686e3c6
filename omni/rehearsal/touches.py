"""What is remembered of memory on a GPU: who touched it last, and what became of it."""

import weakref
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from omni.rehearsal.call_sites import CallSite


class GroupStream(NamedTuple):
    """The stream of a communicator: of a group, or of it and a peer."""

    group: str
    peer: int | None


class Launch(NamedTuple):
    """An operator that was launched: on which stream, as its how-manieth, and from where."""

    stream: Hashable
    number: int
    op: str
    phase: str
    thread: str
    place: CallSite


class Touch(NamedTuple):
    """A launch reads or writes bytes [start, stop) of a storage."""

    by: Launch
    start: int
    stop: int
    writes: bool


class Freed(NamedTuple):
    """Memory that went back to a stream, and what other streams did with it last."""

    size: int
    touches: Sequence[Touch]


@dataclass
class Allocation:
    """A live storage: whose stream's it is, its last touches and their streams, the works that hold it, the
    streams that keep it from being used again, and freed memory that it may lie in.
    """

    stream: Hashable
    size: int
    watch: weakref.ref[Any]
    pinned: bool = False
    touches: dict[Hashable, Touch] = field(default_factory=dict)
    streams: set[Hashable] = field(default_factory=set)
    works: set[int] = field(default_factory=set)
    kept: set[Hashable] = field(default_factory=set)
    over: list[Freed] = field(default_factory=list)


def is_over(touch: Touch, clock: Mapping[Hashable, int]) -> bool:
    """Whether what has this clock comes behind a touch."""
    return clock.get(touch.by.stream, 0) >= touch.by.number

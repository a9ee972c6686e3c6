"""Reductions that begin while a backward goes on, layer by layer."""

from collections.abc import Callable, Sequence
from typing import Protocol


class Reduction(Protocol):
    """The reduction of the gradients of one part, in buckets that all its replicas start in one order."""

    @property
    def elements(self) -> int:
        """Elements of all its buckets."""
        ...

    def begin(self) -> Callable[[], None]:
        """Start what has not begun. Returns what waits for the whole."""
        ...

    def begin_behind(self, layer: int) -> None:
        """Start the buckets of the layers behind one: a backward of the part has left these."""
        ...

    def begin_first(self, elements: int) -> None:
        """Start the buckets that begin within the first so many elements: all gradients are complete."""
        ...


class Behind:
    """Reductions that begin behind a backward, in their order. All gradients of them are complete before, but
    for those of the last one if it is that of the backward's own part and `last_grows`.

    They are spread evenly over the layers, so that none of these has to wait for long. Invariant: nothing of
    a reduction begins before all of those in front of it has: on other ranks, they may stand in one queue.
    """

    def __init__(self, reductions: Sequence[Reduction], *, last_grows: bool) -> None:
        self.complete = reductions[: len(reductions) - last_grows]
        self.growing = reductions[-1] if last_grows else None
        self.elements = sum(reduction.elements for reduction in reductions)

    def left(self, layer: int, layers: int) -> None:
        """A backward through so many `layers` has left those behind one, counted from the first."""
        begins = self.elements * (layers - layer) // layers
        for reduction in self.complete:
            reduction.begin_first(begins)
            begins -= reduction.elements
            if begins < 0:
                return
        if self.growing is not None:
            self.growing.begin_behind(layer)

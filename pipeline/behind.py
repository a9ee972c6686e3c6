"""What begins while a pass goes on, layer by layer: reductions behind a backward, messages within a pass."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pipeline.ops import Kind, Op, parts_done


class Listener(Protocol):
    """Hears how far a pass has come through so many `layers`, which it counts from the first."""

    def came(self, layer: int, layers: int) -> None:
        """A forward has come to a layer, or a backward that computes it anew."""
        ...

    def left(self, layer: int, layers: int) -> None:
        """A backward has left the layers behind one."""
        ...


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

    def came(self, layer: int, layers: int) -> None:
        """Nothing is reduced behind forwards."""

    def left(self, layer: int, layers: int) -> None:
        """Start what may begin once a backward has left the layers behind one."""
        begins = self.elements * (layers - layer) // layers
        for reduction in self.complete:
            reduction.begin_first(begins)
            begins -= reduction.elements
            if begins < 0:
                return
        if self.growing is not None:
            self.growing.begin_behind(layer)


class Within:
    """Messages that go within a pass, in their order: `issue` is called with each."""

    def __init__(self, op: Op, messages: Iterable[Op], issue: Callable[[Op], None]) -> None:
        self.forward = op.kind is Kind.FORWARD
        self.messages = deque(messages)
        self.issue = issue

    def came(self, layer: int, layers: int) -> None:
        """Issue what is to go before a forward comes to a layer."""
        if self.forward:
            self._issue(parts_done(layer, layers))

    def left(self, layer: int, layers: int) -> None:
        """Issue what is to go before a backward comes to a layer."""
        self._issue(parts_done(layers - 1 - layer, layers))

    def passed(self) -> None:
        """Issue the rest when the pass is done: it has fewer layers than parts, or nobody follows it."""
        while self.messages:
            self.issue(self.messages.popleft())

    def _issue(self, done: int) -> None:
        while self.messages and self.messages[0].within <= done:
            self.issue(self.messages.popleft())

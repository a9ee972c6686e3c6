"""The reduction of a part's gradients on one rank, as the engine begins and ends it."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from omni.rank.optimizer import ComponentOptimizer
from parallel.groups import Groups
from parallel.waiting import waiting


@dataclass(frozen=True)
class PartReduction:
    """See `pipeline.behind.Reduction`. What a peer fails in names the component."""

    component: ComponentOptimizer
    part: int
    groups: Groups

    @property
    def elements(self) -> int:
        """Elements of all buckets of the part."""
        return self.component.buckets[self.part].elements

    def begin(self) -> Callable[[], None]:
        """Start what has not begun, and return what waits for the whole."""
        with self._waiting():
            finish = self.component.reduce(self.part)

        def end() -> None:
            with self._waiting():
                finish()

        return end

    def begin_behind(self, layer: int) -> None:
        """Start the buckets of the layers behind one."""
        with self._waiting():
            self.component.buckets[self.part].reduce_behind(layer)

    def begin_first(self, elements: int) -> None:
        """Start the buckets that begin within the first so many elements."""
        with self._waiting():
            self.component.buckets[self.part].reduce_first(elements)

    def _waiting(self) -> AbstractContextManager[None]:
        return waiting(f"the gradients of {self.component.name}", self.groups.world)

"""A rank's garbage is found while it trains, however much was built before."""

import gc
import weakref

from ranks import RankPool

from omni.training.worker import freeze

BUILT = 800_000
SOON = 150_000  # objects: tens of thousands between two looks at the oldest, and a quarter of BUILT is more


class Node:
    own: "Node"


def left_behind() -> None:
    """Fails unless garbage of the oldest generation is found soon, whatever was built."""
    built = [[] for _ in range(BUILT)]
    freeze()
    node = Node()
    node.own = node
    left = weakref.ref(node)
    gc.collect(1)
    del node  # garbage of the oldest generation now
    kept = list[list[int]]()
    while left() is not None and len(kept) < SOON:
        kept.append([])
    assert left() is None
    assert len(built) == BUILT


def test_what_steps_leave_is_found_soon_after_ranks_are_built(ranks: RankPool) -> None:
    ranks.apart(left_behind)

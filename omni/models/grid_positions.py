"""Positions of an LLM's tokens in time, height and width, where rows of an item are a grid (Wang et al.,
Qwen2-VL, 2024, section 2.1).

Tokens of text count on in all three alike, as without a grid. Rows of an item with a grid [t, h, w] come row
after row and frame after frame, and stand at their place in the grid, counted from behind the token before
them. The token after them goes on one beyond the largest of their positions. Where literal tokens stand
between frames, each frame is a grid of its own, as in Qwen3-VL; rows of other runs count on as text does.

Invariant: positions of a sample are a function of its own items, whatever its pack, its shards or its ranks.
"""

from collections.abc import Iterable, Iterator
from itertools import accumulate
from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from omni.models.item_layout import Grid
from pipeline.domain_plan import DomainPlan, Microbatch, PlannedItem

AXES = 3


class GridRows(NamedTuple):
    """Rows of an item in its sample: the number of the first token, and their grid."""

    start: int
    grid: Grid


def grid_positions(length: int, items: Iterable[GridRows]) -> npt.NDArray[np.int64]:
    """Positions [length, 3] of a sample's tokens, of which `items`, in order, are rows with a grid."""
    found = np.empty((length, AXES), np.int64)
    done = at = 0
    for start, grid in items:
        count = prod(grid)
        assert done <= start <= start + count <= length, f"rows [{start}, {start + count}) of {length} tokens"
        found[done:start] = np.arange(at, at + start - done)[:, None]
        at += start - done
        found[start : start + count] = at + np.indices(grid).reshape(AXES, count).T
        at += max(grid)
        done = start + count
    found[done:] = np.arange(at, at + length - done)[:, None]
    return found


def rows_of_grids(domain: DomainPlan, batch: Microbatch) -> dict[int, list[GridRows]]:
    """The rows with a grid of a microbatch's samples, by the sample's number in the domain."""
    starts = dict(zip(batch.samples, accumulate(batch.layout.lengths, initial=0), strict=False))
    found: dict[int, list[GridRows]] = {}
    for item in domain.items:
        if item.grid and item.sample in starts:
            own = [GridRows(of.start - starts[item.sample], of.grid) for of in grids_in(item)]
            found.setdefault(item.sample, []).extend(own)
    return found


def grids_in(item: PlannedItem) -> Iterator[GridRows]:
    """The grids of an item, from where they start in its pack."""
    if not item.grid:
        return
    frames, *frame = item.grid
    runs = list(item.places(0, item.rows))
    if len(runs) == 1:
        yield GridRows(runs[0][0], item.grid)
    elif [rows for _, rows in runs] == [prod(frame)] * frames:
        yield from (GridRows(start, (1, *frame)) for start, _ in runs)


def next_positions(domain: DomainPlan, in_grids: bool) -> list[int]:
    """The position that follows each sample of a domain, whose rows may stand `in_grids`."""
    after = [sample.length for sample in domain.samples]
    for item in domain.items:
        for _, grid in grids_in(item) if in_grids else ():
            after[item.sample] += max(grid) - prod(grid)
    return after

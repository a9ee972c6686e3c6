"""How an item's rows stand among the LLM's tokens: next to each other, or in runs with literals between.

A picture of 2 x 3 rows, with the token 12 between its lines, takes seven of the LLM's tokens:

    r r r 12 r r r        runs ((3, (12,)), (3, ()))

A run is a number of rows, and the ids of the tokens that follow them; a run of no rows begins an item with
tokens. Literal tokens have the LLM's own embeddings and carry no loss, as rows carry none.

Invariant: an item takes as many of the LLM's tokens as its encoder puts out rows and its runs name literals.
"""

from collections.abc import Callable
from typing import NamedTuple

from dataloader.tokens import ItemMeta
from pipeline.domain_plan import RowRuns

Grid = tuple[int, ...]


class ItemLayout(NamedTuple):
    """Rows that an encoder puts out of an item; their `grid` (frames, rows, columns), () where they count on
    as text does; and their `runs`, () where they are neighbours.
    """

    rows: int
    grid: Grid = ()
    runs: RowRuns = ()


LayoutOf = Callable[[ItemMeta], ItemLayout]


def plain_layout(item: ItemMeta) -> ItemLayout:
    """All of an item's tokens are rows, next to each other."""
    return ItemLayout(item.rows)


def num_literals(runs: RowRuns) -> int:
    """Literal tokens among the rows of an item."""
    return sum(len(after) for _, after in runs)


def lines(grid: Grid, token: int) -> RowRuns:
    """Lines of a grid with a token between neighbours, as Pixtral's [IMG_BREAK] (Agrawal et al., Pixtral 12B,
    2024, section 2.2).
    """
    frames, high, wide = grid
    return ((wide, (token,)),) * (frames * high - 1) + ((wide, ()),)

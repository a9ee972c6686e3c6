"""How one component is split over ranks: named axes, pure arithmetic, no process groups.

Rank order, fastest to slowest: tp, cp, dp, pp. The axes that talk most lie closest together, so tensor and
context parallelism stay inside a node and pipeline stages are what crosses between nodes.
"""

from dataclasses import dataclass
from itertools import product

AXES = ("tp", "cp", "dp", "pp")


class LayoutError(ValueError):
    """A layout that cannot be: the message names the key, the value and the remedy."""


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes of one component, over `world` consecutive ranks starting at 0."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise LayoutError(f"layout.{axis}={getattr(self, axis)}: an axis has at least one rank")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def replica_size(self) -> int:
        """Number of ranks that hold one copy: tp·cp·pp."""
        return self.tp * self.cp * self.pp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of `rank` on each axis."""
        assert 0 <= rank < self.world, f"rank {rank} outside a world of {self.world}"
        out = {}
        for axis in AXES:
            rank, out[axis] = divmod(rank, getattr(self, axis))
        return out

    def rank(self, **coordinates: int) -> int:
        """Return the rank at `coordinates`; axes left out are at 0."""
        rank = 0
        for axis in reversed(AXES):
            size, at = getattr(self, axis), coordinates.get(axis, 0)
            assert 0 <= at < size, f"{axis}={at} outside an axis of {size}"
            rank = rank * size + at
        return rank

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only on `axes`, in rank order."""
        at = self.coordinates(rank)
        choices = [range(getattr(self, axis)) if axis in axes else (at[axis],) for axis in AXES]
        return tuple(sorted(self.rank(**dict(zip(AXES, c, strict=True))) for c in product(*choices)))

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """Return every group of the product of `axes`, ordered by first rank; together they are the world."""
        free = [range(1) if axis in axes else range(getattr(self, axis)) for axis in AXES]
        leaders = sorted(self.rank(**dict(zip(AXES, at, strict=True))) for at in product(*free))
        return tuple(self.group(rank, *axes) for rank in leaders)

    def replica(self, rank: int) -> int:
        """Return which copy of the component `rank` belongs to."""
        return self.coordinates(rank)["dp"]

    def replica_ranks(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of a copy, in rank order: stage by stage."""
        return self.group(self.rank(dp=replica), "tp", "cp", "pp")

    def describe(self) -> str:
        """Return the layout in one word, such as "dp2·pp2"."""
        return "·".join(f"{a}{getattr(self, a)}" for a in AXES if getattr(self, a) > 1) or "single"


def stage_layers(num_layers: int, stages: int) -> tuple[int, ...]:
    """Split layers over stages as evenly as can be; the first stages, which wait least, take the rest."""
    if num_layers < stages:
        raise LayoutError(
            f"layout.llm.pp={stages} leaves a stage without a layer: model.llm.layers={num_layers}; "
            f"choose pp at most {num_layers}"
        )
    share, rest = divmod(num_layers, stages)
    return tuple(share + (s < rest) for s in range(stages))

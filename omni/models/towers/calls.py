"""How towers are called, each kind in its way, with what is known of a pass before it begins.

Shapes: T tokens, V values of a token, E width of what a tower puts out, R rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from omni.models.grid_positions import Grid
from ops.attention import Packing


@dataclass
class Given:
    """What a pass is given beside values: `packings` by the argument that says their boundaries, further
    `arguments` by name, the `grids` of its items (frames, rows, columns), and `places`, index tensors by what
    they are for.
    """

    packings: Mapping[str, Packing] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    grids: tuple[Grid, ...] = ()
    places: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Calls(Protocol):
    """A way to call a tower."""

    def tokens(self, tower: Any, values: torch.Tensor, given: Given) -> torch.Tensor:
        """values [T, V] → tokens [T, E] or, where a tower merges neighbours itself, rows [R, E], and as many
        again for each further attach point.
        """
        ...


class GridCalls:
    """Patches in one row with `grid_thw`, of which all that depends on it is among the arguments."""

    def tokens(self, tower: Any, values: torch.Tensor, given: Given) -> torch.Tensor:
        """Rows of its merger, then those for layers of the LLM (DeepStack)."""
        ends = {name: own.cu_seqlens for name, own in given.packings.items()}
        out = tower(values, grid_thw=given.grids, **given.arguments, **ends)
        rows: torch.Tensor = out.pooler_output
        return torch.cat([rows, *deep]) if (deep := getattr(out, "deepstack_features", None)) else rows


class PaddedCalls:
    """Patches padded to a batch, with `spatial_shapes` (rows, columns). Padding attends to padding alone, and
    goes no further.
    """

    def tokens(self, tower: Any, values: torch.Tensor, given: Given) -> torch.Tensor:
        """Tokens of patches, without those of padding."""
        shapes = np.array([grid[1:] for grid in given.grids])
        items, longest = len(shapes), int(shapes.prod(1).max())
        place = given.places["padded"]
        padded = values.new_zeros(items * longest, values.shape[1]).index_copy(0, place, values)
        batch = padded.unflatten(0, (items, longest))
        out = tower(batch, pixel_attention_mask=None, spatial_shapes=shapes)
        found: torch.Tensor = out.last_hidden_state.flatten(0, 1)[place]
        return found


@dataclass(frozen=True)
class BatchCalls:
    """Items of one shape in a batch that the tower calls `name`; of what comes out of each, the first `ahead`
    tokens stand for no patch and are left out. Values of an item are its own in order, however they are
    divided into tokens.
    """

    name: str
    shape: tuple[int, ...]
    ahead: int = 0

    def tokens(self, tower: Any, values: torch.Tensor, given: Given) -> torch.Tensor:
        """Tokens of patches, or of stretches of time."""
        batch = values.reshape(-1, *self.shape).to(tower.dtype)
        found: torch.Tensor = tower(**{self.name: batch}).last_hidden_state[:, self.ahead :].flatten(0, 1)
        return found


@dataclass(frozen=True)
class ConnectedCalls(BatchCalls):
    """As before, of a tower with its model's connector: of each item come rows for the LLM."""

    def tokens(self, tower: Any, values: torch.Tensor, given: Given) -> torch.Tensor:
        """Rows."""
        batch = values.reshape(-1, *self.shape).to(tower.dtype)
        rows: torch.Tensor = tower.get_image_features(**{self.name: batch}, return_dict=True).pooler_output
        return rows.flatten(0, 1)

"""The module of a published tower: the class of transformers, and a projector where it makes no rows itself.

Shapes: T tokens, V values of a token, E width of what the tower puts out, R rows, D width of the LLM.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from omni.models.layers import bare_config
from omni.models.towers.attention import PackedTowerAttention, attend_by, prepare
from omni.models.towers.calls import Calls, Given
from omni.models.towers.folder import Tower
from parallel.packed import PackedTokens


@dataclass
class TowerPacked(PackedTokens):
    """Packed items of a tower; all that it needs to know of them is `given`, None where there are none."""

    given: Given | None = None


class TowerModule(torch.nn.Module):
    """A tower and, unless `merge` is 0, a projector: a norm of E, then `merge` neighbours through two linears
    to a row. Without one, what the tower puts out are rows.
    """

    def __init__(
        self,
        tower: Tower,
        calls: Calls,
        *,
        merge: int,
        out: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.of, self.calls, self.merge, self.width = tower, calls, merge, width
        self.config = bare_config(tower.layers, tower.hidden, tower.heads, dtype)
        self.tower: Any = tower.build(dtype, draw=False)
        prepare(self.tower)
        if merge:
            self.projector_norm = torch.nn.LayerNorm(out, dtype=dtype)
            self.projector_in = torch.nn.Linear(out * merge, out * merge, dtype=dtype)
            self.projector_out = torch.nn.Linear(out * merge, width, dtype=dtype)

    def forward(self, values: torch.Tensor, positions: torch.Tensor, packed: TowerPacked) -> torch.Tensor:
        """values [T, V] of packed items → rows [R, D], item by item, and as many again for each further
        attach point. Where tokens stand is in `packed`.
        """
        if (given := packed.given) is None:
            return self._nothing(values)
        hidden = self.tokens(values, given)
        if not self.merge:
            return hidden
        normed = self.projector_norm(hidden)
        if "neighbours" in given.places:
            normed = normed[given.places["neighbours"]]
        merged = normed.unflatten(0, (-1, self.merge)).flatten(1)
        rows: torch.Tensor = self.projector_out(F.gelu(self.projector_in(merged)))
        return rows

    def _nothing(self, values: torch.Tensor) -> torch.Tensor:
        """A row of zeros, with a way back to weights that learn: other ranks of a pass have items."""
        own = [parameter.view(-1)[0] for parameter in self.parameters() if parameter.requires_grad]
        return values.new_zeros(1, self.width, dtype=self.tower.dtype) + 0 * torch.stack(own).sum()

    def tokens(self, values: torch.Tensor, given: Given) -> torch.Tensor:
        """What the tower puts out of values [T, V]."""
        attend_by(self.tower, PackedTowerAttention(given.packings))
        return self.calls.tokens(self.tower, values, given)

    @torch.no_grad()
    def draw(self, seed: int) -> frozenset[str]:
        """Draw the tower's weights as transformers does, in fp32 on the CPU, so that they depend on the seed
        and the tower alone, and return their names. Its own rules know vectors that scale layers, tables of
        sines and norms of any name.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            drawn = self.of.build(torch.float32, draw=True)
        for own, new in zip(self.tower.parameters(), drawn.parameters(), strict=True):
            own.copy_(new)
        return self.drawn()

    def drawn(self) -> frozenset[str]:
        """Names of what `draw` draws."""
        return frozenset(f"tower.{name}" for name, _ in self.tower.named_parameters())

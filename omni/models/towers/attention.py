"""The platform's packed attention inside of towers, by the registry that transformers has for that.

A tower asks its configuration for the name of its attention, and calls what is registered by it. Ours asks
the same configuration object, which every tower has of its own, what the pass attends to.

Shapes: B items of a batch, S tokens of each, N heads, K key/value heads, H head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ops.attention import Packing, packed_attention

# "flash" is in it, or towers that compute from a grid cut the tokens by numbers on the device.
NAME = "omni_flash_attention"
_ATTENDS = "omni_attends"
WHOLE = ""
"""Names the packing of a pass in which no tower says boundaries of sequences."""


class TowerAttention(Protocol):
    """What takes the place of attention in a tower."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, batch: int, ends: Any
    ) -> torch.Tensor:
        """q [B·S, N, H], k and v [B·S, K, H] of a `batch` of B → [B·S, N, H]; `ends` are boundaries of
        sequences as the tower got them, or None.
        """
        ...


@dataclass(frozen=True)
class PackedTowerAttention:
    """Attends within sequences, by the packing whose `cu_seqlens` a tower names, or the only one there is."""

    packings: Mapping[str, Packing]

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, batch: int, ends: Any
    ) -> torch.Tensor:
        """As `TowerAttention` says."""
        if ends is None:
            packing = self.packings[WHOLE]
        else:
            packing = next(own for own in self.packings.values() if own.cu_seqlens is ends)
        return packed_attention(q, k, v, packing, scale)


def prepare(tower: torch.nn.Module) -> None:
    """Have a tower that is built attend by our attention. Before, transformers would look for a package."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attend)
    for config in _configs(tower):
        config._attn_implementation_internal = NAME


def attend_by(tower: torch.nn.Module, attends: TowerAttention) -> None:
    """Say by what a tower attends from here on."""
    for config in _configs(tower):
        vars(config)[_ATTENDS] = attends


def _configs(tower: torch.nn.Module) -> list[Any]:
    """The configurations that a tower's attention may ask: its own and, where it stands in a whole model,
    those of the model's parts.
    """
    return [part.config for part in (tower, *tower.children()) if hasattr(part, "config")]


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """[B, N, S, H] each → [B, S, N, H], as transformers calls it. Which tokens see which the packing says."""
    assert attention_mask is None, "a tower with a mask of its own"
    batch = query.shape[0]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    attends: TowerAttention = vars(module.config)[_ATTENDS]
    return attends(q, k, v, scaling, batch, cu_seq_lens_q).unflatten(0, (batch, -1)), None

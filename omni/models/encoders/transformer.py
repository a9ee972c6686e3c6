"""A base for encoders that are transformers: embedding, layers, merging of neighbours, projector.

A new encoder is its sizes, its preprocessing (`count`, `decode`, `blank`, `preprocess`) and, where a linear
is not enough, its embedding (`stem`, with `stem_work` to state it). The rest of the contract follows.

Shapes: T tokens, V values of a token, A axes of positions, E width of the encoder, D width of the LLM.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np
import torch

from dataloader.format import Item
from omni.models.adapters import check_adapters
from omni.models.blocks import Embed, EncoderPart, FinalNorm, ProjectedAnew, Projector, value_bytes
from omni.models.layer_sizes import (
    LayerSizes,
    TransformerEncoderConfig,
    check_divisible,
    check_heads,
    check_offload,
    transformer_layers,
)
from omni.models.registry import Attention, ItemArrays
from omni.models.stack import Stack
from parallel.work import Block

if TYPE_CHECKING:
    from omni.models.encoders.transformer_module import TransformerModule
    from parallel.megatron import ProcessGroupCollection
    from parallel.packed import PackedTokens, Sharding


class TransformerEncoder(ABC):
    """The description of an encoder that every policy reads; `build` makes its module.

    A token has `values` numbers and a position on `axes` axes, by each of which an even share of every head
    is rotated. `row_tokens` neighbours become one row. Items are split between rows; set `unit` to None if
    the embedding sees beyond a row.
    """

    Config: type = TransformerEncoderConfig
    modality: str
    config: TransformerEncoderConfig
    unit: int | None

    def __init__(
        self, config: TransformerEncoderConfig, *, values: int, row_tokens: int = 1, axes: int = 1
    ) -> None:
        check_heads("encoder", config, rotary_axes=axes)
        check_offload("encoder", config)
        self.config = config
        check_adapters("encoder", config.lora, Stack.of(self.layers(), 1).linears())
        self.values = values
        self.row_tokens = row_tokens
        self.axes = axes
        self.unit = row_tokens
        self.attach = ("llm.embed", *(f"llm.layers.{number}" for number in range(1, len(config.taps) + 1)))

    @abstractmethod
    def count(self, size: tuple[int, ...]) -> tuple[int, int]:
        """Return (tokens, rows) of an item of this size: `row_tokens` tokens a row. As for `Encoder`."""

    @abstractmethod
    def decode(self, item: Item) -> np.ndarray:
        """Turn an item's encoded bytes into an array. As for `Encoder`."""

    @abstractmethod
    def blank(self) -> np.ndarray:
        """Return the smallest decoded item there can be."""

    @abstractmethod
    def preprocess(self, array: np.ndarray) -> ItemArrays:
        """Turn a decoded item into values [T, V] and positions [T, A]; tokens of a row are neighbours."""

    def layers(self) -> LayerSizes:
        """Sizes of the layers, for their module and the statement of their work."""
        return transformer_layers(self.config)

    def stem(self, dtype: torch.dtype) -> torch.nn.Module:
        """Make the embedding: called with (values [T, V], positions [T, A], packed), it returns [T, E].

        Its values come in `dtype`. A linear, unless you say otherwise; then say `stem_work` as well.
        """
        return LinearStem(self.values, self.config.hidden, dtype)

    def stem_work(self, element: int) -> tuple[Block, ...]:
        """State the work of the embedding, with `element` bytes a number; weights in the module's order."""
        return (Embed(self.values, self.config.hidden, element),)

    def tap_norm(self) -> Block:
        """State the norm of what a tap takes in."""
        return FinalNorm(self.config.hidden, self.config.norm)

    def work(self, width: int, element: int, tp: int = 1) -> EncoderPart:
        """Embedding, layers, and a projector at their end and after each tap."""
        c, sizes = self.config, self.layers()
        anew = sizes.recompute == "full"
        project = Projector(c.hidden, self.row_tokens, width, element, tp)
        tail, tap = (
            (ProjectedAnew(norm, project, divided),) if anew else (norm, project)
            for norm, divided in (
                (FinalNorm(c.hidden, c.norm), sizes.divides_inputs(tp)),
                (self.tap_norm(), False),
            )
        )
        return EncoderPart(
            stem=self.stem_work(element),
            stack=Stack.of(
                sizes,
                element,
                tp,
                blocks=1 + len(c.taps),
                kept_output=anew,
                kept_attention=bool(c.keep_attention),
            ),
            tail=tail,
            taps=tap * len(c.taps),
            width=width,
            token_bytes=value_bytes(self.values, self.axes),
            by_layer=not c.taps,
            starts=(0, *c.taps),
            offload=c.offload or 0,
        )

    def attention(self) -> Attention:
        """Every token sees all of its item."""
        c = self.config
        return Attention(c.layers, c.heads, c.heads, c.hidden // c.heads, causal=False)

    def check_tp(self, key: str, tp: int) -> None:
        """Heads and feed-forward are what tensor parallelism divides."""
        check_divisible("encoder", self.config, key, tp, "heads", "ffn")

    def pack(
        self, sharding: "Sharding", positions: torch.Tensor, dtype: torch.dtype, device: torch.device
    ) -> "PackedTokens":
        """Each item attends to itself alone."""
        from parallel.packed import pack_tokens

        c = self.config
        return pack_tokens(
            sharding,
            positions,
            heads=c.heads,
            head_dim=c.hidden // c.heads,
            rotary_base=c.rotary_base,
            causal=False,
            dtype=dtype,
            device=device,
        )

    def build(
        self, width: int, dtype: torch.dtype, device: torch.device, groups: "ProcessGroupCollection"
    ) -> "TransformerModule":
        """Build the module on `device`."""
        from omni.models.encoders.transformer_module import TransformerModule

        stem = self.stem(dtype)
        module = TransformerModule(
            self.config, stem, self.row_tokens, width, dtype, groups, sizes=self.layers(), device=device
        )
        return module.to(device)


class LinearStem(torch.nn.Module):
    """A linear from values of a token to the stream."""

    def __init__(self, values: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(values, hidden, dtype=dtype)

    def forward(self, values: torch.Tensor, positions: torch.Tensor, packed: "PackedTokens") -> torch.Tensor:
        """values [T, V] → [T, E]. Attention alone sees where tokens stand."""
        hidden: torch.Tensor = self.linear(values)
        return hidden

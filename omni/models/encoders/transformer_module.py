"""The module of a transformer encoder: embedding, layers, merging of neighbours, projector.

Shapes: T tokens, V values of a token, A axes, E width of the encoder, R rows, D width of the LLM.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from omni.models.adapter_modules import adapt
from omni.models.adapters import Lora
from omni.models.attention import PackedCoreAttention
from omni.models.kept_inputs import Ways, computed_anew, keep_inputs
from omni.models.layer_sizes import LayerSizes, TransformerEncoderConfig, transformer_layers
from omni.models.layers import layer_submodules, transformer_config
from ops.kept_attention import KeptAttention
from ops.norm import Norm
from parallel.megatron import ModuleSpec, ProcessGroupCollection, TransformerBlock
from parallel.packed import PackedTokens


class TransformerModule(torch.nn.Module):
    """Tokens to rows: `stem`, layers, `row_tokens` neighbours to a row, two-layer projector. After each tap,
    neighbours are projected too.

    The layers are of `sizes`, those of `config` unless given; the ones in `windowed`, counted from 0, attend
    as `PackedTokens.windowed` says. With `norms_rows` a tap norms neighbours together. On a `device` that
    is a GPU inputs go to the host and back on a stream of their own.
    """

    def __init__(
        self,
        config: TransformerEncoderConfig,
        stem: torch.nn.Module,
        row_tokens: int,
        width: int,
        dtype: torch.dtype,
        groups: ProcessGroupCollection,
        *,
        sizes: LayerSizes | None = None,
        windowed: Collection[int] = (),
        norms_rows: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        sizes = sizes or transformer_layers(config)
        self.config = transformer_config(sizes, dtype, tp=groups.tp.size())
        self.merged = config.hidden * row_tokens
        # Beside the other modules first, so that the stem's weights go by their own names.
        for name, module in stem.named_children():
            self.add_module(name, module)
        self.stem = stem
        blocks = [
            TransformerBlock(
                self.config,
                layer_submodules(
                    stop - start,
                    config.norm,
                    causal=False,
                    specs=partial(_layers, windows=[layer in windowed for layer in range(start, stop)]),
                ),
                post_layer_norm=False,
                pg_collection=groups,
            )
            for start, stop in pairwise([0, *config.taps, config.layers])
        ]
        self.offload, self.keep_attention = config.offload or 0, bool(config.keep_attention)
        self.ways = _ways(sizes, self.offload, groups, device)
        if self.ways.group is not None or self.offload:
            for block in blocks:
                keep_inputs(block, self.offload, self.ways)
        self.block, self.tapped = blocks[0], torch.nn.ModuleList(blocks[1:])
        normed = self.merged if norms_rows else config.hidden
        self.final_norm = Norm(self.config, config.hidden, sizes.norm_eps)
        self.projector_in = torch.nn.Linear(self.merged, self.merged, dtype=dtype)
        self.projector_out = torch.nn.Linear(self.merged, width, dtype=dtype)
        self.tap_projectors = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {
                    "norm": Norm(self.config, normed, sizes.norm_eps),
                    "linear_in": torch.nn.Linear(self.merged, self.merged, dtype=dtype),
                    "linear_out": torch.nn.Linear(self.merged, width, dtype=dtype),
                }
            )
            for _ in config.taps
        )
        adapt(self, Lora.of(config.lora))

    @property
    def followed_layers(self) -> torch.nn.ModuleList:
        """The layers. What is not in them stands in front of all or behind them, unless there are taps."""
        layers: torch.nn.ModuleList = self.block.layers
        return layers

    def forward(self, values: torch.Tensor, positions: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        """values [T, V], positions [T, A] of packed items → rows [R, D], item by item, and as many again for
        each tap.
        """
        hidden: Any = self.stem(values.to(self.dtype), positions, packed)
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # It is frozen, and layers that are computed anew find adapters only by a gradient of their input.
            hidden.requires_grad_()
        hidden = self._passed(self.block, hidden.unsqueeze(1), packed)
        tapped = []
        for projector, block in zip(self.tap_projectors, self.tapped, strict=True):
            assert isinstance(projector, torch.nn.ModuleDict)
            # The block behind it keeps the same whole.
            tapped.append(self._rows(hidden.squeeze(1), Ways(), *projector.values()))
            hidden = self._passed(block, hidden, packed)
        ends = self.final_norm, self.projector_in, self.projector_out
        rows = self._rows(hidden.squeeze(1), self.ways, *ends)
        return torch.cat([rows, *tapped]) if tapped else rows

    def _passed(self, block: torch.nn.Module, hidden: torch.Tensor, packed: PackedTokens) -> torch.Tensor:
        """Pass tokens [T, 1, E] through the layers of a block."""
        if not (self.keep_attention and torch.is_grad_enabled()):
            return block(hidden, None, packed_seq_params=packed)
        kept = KeptAttention(self.offload, self.ways.copies)
        out: torch.Tensor = block(hidden, None, packed_seq_params=replace(packed, kept=kept))
        kept.passed()
        return out

    def _rows(
        self, hidden: torch.Tensor, ways: Ways, norm: Any, linear_in: Any, linear_out: Any
    ) -> torch.Tensor:
        """Tokens [T, E] → rows [R, D]; computed anew where layers are."""
        run = partial(self._projected, norm, linear_in, linear_out)
        if self.config.recompute_granularity == "full" and torch.is_grad_enabled():
            return computed_anew(run, hidden, ways)
        return run(hidden)

    def _projected(self, norm: Any, linear_in: Any, linear_out: Any, hidden: torch.Tensor) -> torch.Tensor:
        neighbours = norm(hidden.view(-1, *norm.shape)).view(-1, self.merged)
        rows: torch.Tensor = linear_out(F.gelu(linear_in(neighbours)))
        return rows


def _ways(
    sizes: LayerSizes, offload: int, groups: ProcessGroupCollection, device: torch.device | None
) -> Ways:
    """The ways that inputs of layers take until these are computed anew."""
    on_gpu = device is not None and device.type == "cuda"
    copies = torch.cuda.Stream(device) if offload and on_gpu else None
    return Ways(copies, groups.tp if sizes.divides_inputs(groups.tp.size()) else None)


def _layers(plain: ModuleSpec, windows: Sequence[bool]) -> list[ModuleSpec]:
    """Specify layers that attend in windows, or as a `plain` one."""
    attention = plain.submodules.self_attention
    core = ModuleSpec(module=PackedCoreAttention, params={"windowed": True})
    inner = replace(attention, submodules=replace(attention.submodules, core_attention=core))
    windowed = replace(plain, submodules=replace(plain.submodules, self_attention=inner))
    return [windowed if window else plain for window in windows]

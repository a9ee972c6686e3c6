"""The LLM: megatron-core's GPTModel on packed tokens, cut into pipeline stages.

Shapes: T tokens, D width, V vocabulary.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from omni.config import ConfigError, LLMConfig, require
from omni.models.layers import (
    check_divisible,
    check_transformer,
    layer_submodules,
    layer_work,
    transformer_config,
)
from omni.models.moe import (
    check_moe,
    expert_biases,
    first_expert,
    layer_specs,
    load_expert_biases,
    moe_layer_work,
    moe_settings,
    update_expert_bias,
)
from omni.models.regions import Numbering, mark_parallel
from ops.linear import linear_flops
from parallel.costs import PartWork
from parallel.layout import Layout, stage_layers
from parallel.loss import linear_argmax, linear_losses
from parallel.megatron import GPTModel, ProcessGroupCollection, gather_from_sequence_parallel_region
from parallel.packed import PackedTokens
from pipeline.plan import EMBEDDING, Point

NAME = "llm"
_REFERENCE_TOKENS = 4096
_ATTACH = re.compile(r"llm\.layers\.(\d+)")


@dataclass(frozen=True)
class MicrobatchInputs:
    """Tensors of one microbatch on one rank of one stage, on its device. T tokens are those of its member of
    the pool, of which this rank holds T / tp between attention layers.

    `ids` [1, T] on the first stage. On the last stage `wanted` [c] are positions among this rank's tokens
    whose next token counts, padded to one number c on all tp ranks; tp · c = n of them are gathered. Targets
    have `labels` [n], `weights` [n] (0 for padding and tombstones), `sources` [n] (the index of each one's
    data source) and `sequences` [n] (its sequence in the microbatch, -1 for padding). To predict instead,
    `order` picks the real ones out of n, sequence by sequence. None elsewhere. `padding` [1, T / tp] marks
    the tail, which experts do not count; None if there is none.
    """

    packed: PackedTokens
    ids: torch.Tensor | None = None
    wanted: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    sources: torch.Tensor | None = None
    sequences: torch.Tensor | None = None
    order: torch.Tensor | None = None
    padding: torch.Tensor | None = None


def check_llm(config: LLMConfig) -> None:
    """Raise ConfigError for sizes that do not fit together."""
    check_transformer("model.llm", config, rotary_axes=1)
    require("model.llm", config, "kv_heads", "vocab_multiple", "loss_chunk", "rotary_base")
    require("model.llm", config, "norm_eps", least=1e-20)
    if config.heads % config.kv_heads:
        raise ConfigError(f"model.llm.kv_heads={config.kv_heads} must divide heads={config.heads}")


def padded_vocabulary(vocab_size: int, multiple: int) -> int:
    """Round the tokenizer's vocabulary up; the extra ids are never targets."""
    return -(-vocab_size // multiple) * multiple


class LLMStage:
    """This rank's stage of the LLM, as the engine drives it.

    `model` is the bare GPTModel; the wrapper that reduces its gradients shares its parameters. Rows may
    enter before any of `attach_layers`, counted from the start of the model.
    """

    def __init__(
        self,
        config: LLMConfig,
        *,
        vocab_size: int,
        num_sources: int,
        dtype: torch.dtype,
        device: torch.device,
        groups: ProcessGroupCollection,
        attach_layers: Sequence[int] = (),
    ) -> None:
        stage, stages = groups.pp.rank(), groups.pp.size()
        layers = llm_stages(config, vocab_size, stages)
        self.tp_group = groups.tp
        self.config = config
        self.width = config.hidden
        self.dtype = dtype
        self.device = device
        self.num_sources = num_sources
        self.first, self.last = stage == 0, stage == stages - 1
        self.transformer = transformer_config(
            layers=config.layers,
            hidden=config.hidden,
            heads=config.heads,
            kv_heads=config.kv_heads,
            ffn=config.ffn,
            norm=config.norm,
            norm_eps=config.norm_eps,
            gated=True,
            bias=False,
            qkv_bias=config.qkv_bias,
            recompute=config.recompute,
            dtype=dtype,
            tp=groups.tp.size(),
            sequence_parallel=True,
            stages=stages,
            more=moe_settings(config.mixture, groups.ep.size(), dtype, device) if config.mixture else None,
        )
        first = sum(layers[:stage])
        specs = partial(
            layer_specs, moe=config.mixture, layers=range(first, first + layers[stage]), device=device
        )
        self.groups = groups
        self.model = GPTModel(
            self.transformer,
            layer_submodules(layers[stage], config.norm, causal=True, specs=specs),
            vocab_size=padded_vocabulary(vocab_size, config.vocab_multiple),
            max_sequence_length=0,
            pre_process=self.first,
            post_process=self.last,
            position_embedding_type="none",
            share_embeddings_and_output_weights=config.tied,
            pg_collection=groups,
        ).to(device)
        for number, layer in enumerate(self.model.decoder.layers, start=first):
            if number in attach_layers:
                # A lasting hook, because recomputation passes the layer again, long after this pass.
                layer.register_forward_pre_hook(partial(_add_entering, number), with_kwargs=True)
        mark_parallel(self.model)
        self.numbering = Numbering(
            first_layer=first,
            first_expert=first_expert(config.mixture.experts, groups) if config.mixture else 0,
            tied=config.tied,
            tp_rank=groups.tp.rank(),
            tp_size=groups.tp.size(),
        )

    def embed(self, inputs: MicrobatchInputs) -> torch.Tensor:
        """Word embeddings [T / tp, D] of this rank's tokens of a microbatch."""
        return self.model.embedding(inputs.ids, None).squeeze(1)

    def enter(self, inputs: MicrobatchInputs, name: str, tokens: torch.Tensor, rows: torch.Tensor) -> None:
        """Add `rows` [R, D] at `tokens` [R] to the input of the layer that attach point `name` stands for."""
        inputs.packed.entering[attach_layer(name)] = (tokens, rows)

    def forward(self, inputs: MicrobatchInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden [T / tp, D] → the same; on the last stage losses [n], or the next token id of each sequence.

        The output layer runs on the wanted positions alone: rows of images have no next token.
        """
        hidden = hidden.unsqueeze(1)
        if not self.first:
            self.model.set_input_tensor(hidden)
        masked = {"padding_mask": inputs.padding} if self.config.mixture else {}
        out = self.model.decoder(hidden, None, packed_seq_params=inputs.packed, **masked)
        self.model.decoder.input_tensor = None  # it would pin the activation until the next microbatch
        if not self.last:
            return out.squeeze(1)
        assert inputs.wanted is not None
        wanted = out.squeeze(1).index_select(0, inputs.wanted)
        if self.tp_group.size() > 1:
            wanted = gather_from_sequence_parallel_region(wanted, group=self.tp_group)
        tied = self.config.tied
        weight = self.model.shared_embedding_or_output_weight() if tied else self.model.output_layer.weight
        if inputs.labels is None:
            assert inputs.order is not None
            return linear_argmax(wanted, weight, self.tp_group)[inputs.order]
        return linear_losses(wanted, weight, inputs.labels, self.tp_group, self.config.loss_chunk)

    def loss(self, inputs: MicrobatchInputs, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses [n] → their weighted sum, and [loss, targets] summed by source in fp64.

        All tp ranks compute the same losses, so the first of them reports for all.
        """
        assert inputs.weights is not None
        assert inputs.sources is not None
        weights = inputs.weights.double() * (self.tp_group.rank() == 0)
        sums = torch.zeros(2, self.num_sources, dtype=torch.float64, device=self.device)
        sums[0].index_add_(0, inputs.sources, output.detach().double() * weights)
        sums[1].index_add_(0, inputs.sources, weights)
        return (output * inputs.weights).sum(), sums.flatten()

    def balance_experts(self, learns: bool) -> torch.Tensor:
        """Move the experts' bias once a step, unless the step taught nothing; every rank of a stage calls it.

        Returns the tokens of the busiest expert over the mean, summed over this stage's layers and divided
        by the ranks that return it, [] on the device.
        """
        if self.config.mixture is None:
            return torch.zeros((), device=self.device)
        rate = self.config.mixture.bias_update_rate if learns else 0.0
        loads = update_expert_bias(self.model, self.groups, rate)
        return loads.sum() / self.groups.tp_dp_cp.size()

    def buffers(self) -> dict[str, torch.Tensor]:
        """State beside the weights, by canonical name, on the one rank of a stage that saves it."""
        if self.config.mixture is None or self.groups.tp_dp_cp.rank() > 0:
            return {}
        return expert_biases(self.model, self.numbering.first_layer)

    def load_buffers(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Load this stage's state from that of all stages."""
        load_expert_biases(self.model, self.numbering.first_layer, saved)


def _add_entering(number: int, layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    entering = kwargs["packed_seq_params"].entering.get(number)
    if entering is not None:
        tokens, rows = entering
        hidden = kwargs["hidden_states"].index_add(0, tokens, rows.unsqueeze(1))
        kwargs = {**kwargs, "hidden_states": hidden}
    return args, kwargs


def attach_layer(name: str) -> int:
    """Return the layer before which the rows of attach point "llm.layers.N" enter.

    Raises:
        ConfigError: if there is no such point.
    """
    match = _ATTACH.fullmatch(name)
    if match is None:
        raise ConfigError(f"attach point {name}: there are {EMBEDDING.name} and llm.layers.N")
    return int(match[1])


def attach_points(names: Sequence[str], stages: Sequence[int]) -> dict[str, Point]:
    """Place attach points in a model whose stages have so many layers each.

    Raises:
        ConfigError: if there is no such point.
    """
    layers = sorted({attach_layer(name) for name in names if name != EMBEDDING.name})
    if layers and layers[-1] >= sum(stages):
        raise ConfigError(f"attach point llm.layers.{layers[-1]}: the LLM has {sum(stages)} layers")
    points = {EMBEDDING.name: EMBEDDING}
    filled = [1] + [0] * (len(stages) - 1)
    for layer in layers:
        stage = next(s for s in range(len(stages)) if layer < sum(stages[: s + 1]))
        name = f"llm.layers.{layer}"
        points[name] = Point(name, stage, filled[stage])
        filled[stage] += 1
    return points


def check_llm_layout(config: LLMConfig, layout: Layout, vocab_size: int) -> None:
    """Refuse a layout that the LLM's sizes do not allow.

    Raises:
        ConfigError, LayoutError: naming the key, the value and the remedy.
    """
    check_divisible("model.llm", config, "layout.llm.tp", layout.tp, "heads", "kv_heads", "ffn")
    vocabulary = padded_vocabulary(vocab_size, config.vocab_multiple)
    if vocabulary % layout.tp:
        raise ConfigError(
            f"layout.llm.tp={layout.tp} does not divide the vocabulary of {vocabulary} "
            f"({vocab_size} padded to model.llm.vocab_multiple={config.vocab_multiple}): "
            f"set model.llm.vocab_multiple to a multiple of {layout.tp}"
        )
    llm_stages(config, vocab_size, layout.pp)
    if config.mixture is not None:
        check_moe("model.llm.moe", config.mixture, layers=config.layers, tp=layout.tp, ep=layout.ep)
    elif layout.ep > 1:
        raise ConfigError(
            f"layout.llm.ep={layout.ep}, but the model has no experts: set model.llm.moe, or ep=1"
        )


def output_flops(config: LLMConfig, vocab_size: int) -> int:
    """Forward FLOPs of the output layer, for each target token."""
    return linear_flops(1, config.hidden, padded_vocabulary(vocab_size, config.vocab_multiple))


def llm_stages(config: LLMConfig, vocab_size: int, stages: int) -> tuple[int, ...]:
    """Divide the layers over stages by cost: layers with experts and dense ones differ, and the last stage
    also computes the output. Costs are FLOPs of a token in a sequence of `_REFERENCE_TOKENS`.

    Raises:
        LayoutError: if a stage would have no layer.
    """
    works = _layer_works(config, Layout(), element=1)
    costs = [work.flops_per_token + work.flops_per_square * _REFERENCE_TOKENS for work in works]
    return stage_layers(costs, output_flops(config, vocab_size), stages)


def llm_work(config: LLMConfig, vocab_size: int, layout: Layout, element: int) -> tuple[PartWork, ...]:
    """Work of a rank of each stage. The output layer counts for every token, as if all were targets."""
    layers = iter(_layer_works(config, layout, element))
    output = output_flops(config, vocab_size) // layout.tp
    works = []
    for stage, size in enumerate(llm_stages(config, vocab_size, layout.pp)):
        own = [next(layers) for _ in range(size)]
        works.append(
            PartWork(
                flops_per_token=sum(w.flops_per_token for w in own)
                + (output if stage == layout.pp - 1 else 0),
                flops_per_square=sum(w.flops_per_square for w in own),
                bytes_per_token=sum(w.bytes_per_token for w in own),
                weight_bytes=sum(w.weight_bytes for w in own),
                recomputed=config.recompute == "full",
                exchanges=size,
            )
        )
    return tuple(works)


def _layer_works(config: LLMConfig, layout: Layout, element: int) -> list[PartWork]:
    """Work of a rank in every layer."""
    sizes: dict[str, Any] = {
        "hidden": config.hidden,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.hidden // config.heads,
        "gated": True,
        "causal": True,
        "element": element,
        "tp": layout.tp,
    }
    works = [layer_work(**sizes, ffn=config.ffn)] * config.layers
    if config.mixture is not None:
        experts = moe_layer_work(**sizes, moe=config.mixture, ep=layout.ep)
        works[config.mixture.dense_layers :] = [experts] * (config.layers - config.mixture.dense_layers)
    return works

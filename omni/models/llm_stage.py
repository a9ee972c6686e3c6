"""A stage of the LLM: its virtual stages, each megatron-core's GPTModel of some layers, on packed tokens.

Shapes: T tokens, D width.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from omni.llm_config import LLMConfig
from omni.models.adapter_modules import adapt
from omni.models.adapters import Lora
from omni.models.anew import heed_gradients
from omni.models.followed import Followed
from omni.models.kept_inputs import Ways, keep_inputs
from omni.models.layer_sizes import llm_layers
from omni.models.layers import layer_submodules, transformer_config
from omni.models.llm import attach_layer, padded_vocabulary, virtual_stage_layers
from omni.models.llm_specs import layer_specs
from omni.models.long_passes import heed_passes, keeping_inputs
from omni.models.moe import (
    expert_biases,
    first_expert,
    load_expert_biases,
    moe_settings,
    update_expert_bias,
)
from omni.models.partition_modules import partition_layers
from omni.models.regions import Numbering, mark_parallel
from omni.models.weight_gradients import Deferral, PendingProducts, put_off_in
from ops.kept_attention import KeptAttention
from parallel.layout import Layout
from parallel.loss import linear_argmax, linear_losses
from parallel.megatron import GPTModel, ProcessGroupCollection, gather_from_sequence_parallel_region
from parallel.packed import PackedTokens
from parallel.partitions import PartitionedPart
from pipeline.behind import Listener


@dataclass(frozen=True)
class MicrobatchInputs:
    """Tensors of one microbatch on one rank, for all virtual stages of the LLM that it holds, on its device.
    T tokens are those of its cp rank, of which this rank holds T / tp between attention layers.

    `ids` [1, T] for the first virtual stage. For the last one `wanted` [c] are positions among this rank's
    tokens whose next token counts, padded to one number c on all tp ranks; tp · c = n of them are gathered.
    Targets have `labels` [n], `weights` [n] (0 for padding and bad samples), `sources` [n] (the index of each
    one's data source) and `sequences` [n] (its sequence in the microbatch, -1 for padding). To predict
    instead, `order` picks the real ones out of n, sequence by sequence. None elsewhere. `padding` [1, T / tp]
    marks the tail, which experts do not count; None if there is none.
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


@dataclass(frozen=True)
class VirtualStageModule:
    """A virtual stage of the LLM: neighbouring layers, after the embedding in the first one, before the
    output in the last. `model` is bare; the wrapper that reduces its gradients shares its parameters.
    """

    model: GPTModel
    numbering: Numbering
    is_first: bool
    is_last: bool

    def layer(self, name: str) -> int:
        """Return which of these layers `name` stands for, counted from the start of the model."""
        layer, first = attach_layer(name), self.numbering.first_layer
        assert first <= layer < first + len(self.model.decoder.layers), f"{name} is not in this virtual stage"
        return layer


class LLMStage:
    """This rank's virtual stages of the LLM, by their numbers in it, as the engine drives them.

    Rows may enter before any of `attach_layers`, counted from the start of the model.

    Invariant: a rank that holds both ends of a model with a tied output has its embedding once: the output is
    computed with the first virtual stage's parameter. Two ranks that hold one end each have a copy each.
    """

    def __init__(
        self,
        config: LLMConfig,
        layout: Layout,
        *,
        vocab_size: int,
        num_sources: int,
        dtype: torch.dtype,
        device: torch.device,
        groups: ProcessGroupCollection,
        attach_layers: Sequence[int] = (),
    ) -> None:
        layers = virtual_stage_layers(config, vocab_size, layout)
        self.tp_group = groups.tp
        self.config = config
        self.width = config.hidden
        self.dtype = dtype
        self.device = device
        self.num_sources = num_sources
        self.transformer = transformer_config(
            llm_layers(config),
            dtype,
            tp=groups.tp.size(),
            sequence_parallel=True,
            stages=layout.pp,
            more=moe_settings(config.mixture, groups.ep.size(), dtype) if config.mixture else None,
        )
        self.groups = groups
        self.zero = layout.zero
        self.partitioned: list[PartitionedPart] = []
        self.followed = Followed()
        self.deferral = Deferral()
        self.expert_load = torch.zeros((), device=device)
        self.copies = torch.cuda.Stream(device) if config.offload and device.type == "cuda" else None
        self.vocabulary = padded_vocabulary(config, vocab_size)
        self.ids = config.vocab or self.vocabulary
        self.virtual_stages = {
            number: self._virtual_stage(number, layers) for number in layout.holds(groups.pp.rank())
        }
        self.models = torch.nn.ModuleList(own.model for own in self.virtual_stages.values())
        mark_parallel(self.models)
        self.output_weight = self._tie()
        for own in self.virtual_stages.values():
            for number, layer in enumerate(own.model.decoder.layers, start=own.numbering.first_layer):
                if number in attach_layers:
                    # A lasting hook, because recomputation passes the layer again, long after this pass.
                    layer.register_forward_pre_hook(partial(_add_entering, number), with_kwargs=True)

    def _virtual_stage(self, number: int, layers: Sequence[int]) -> VirtualStageModule:
        """Build virtual stage `number` of a model in which each has so many `layers`."""
        config, groups = self.config, self.groups
        first = sum(layers[:number])
        is_first, is_last = number == 0, number == len(layers) - 1
        specs = partial(
            layer_specs,
            config=config,
            layers=range(first, first + layers[number]),
            groups=groups,
        )
        # megatron numbers layers by pipeline stage. It uses the numbers in what we do not: names are ours.
        model = GPTModel(
            self.transformer,
            layer_submodules(layers[number], config.norm, True, config.qk_norm, specs),
            vocab_size=self.vocabulary,
            max_sequence_length=0,
            pre_process=is_first,
            post_process=is_last,
            position_embedding_type="none",
            share_embeddings_and_output_weights=config.tied,
            pg_collection=groups,
        )
        adapt(model, Lora.of(config.lora))
        if self.zero > 1:
            # Before anything is on the device, which might not hold it whole.
            mark_parallel(model)
            own = PartitionedPart(groups.partition, self.zero, recomputed=config.recompute == "full")
            partition_layers(model.decoder.layers, own)
            self.partitioned.append(own)
        model.to(self.device)
        put_off_in(model.decoder, self.deferral)
        if config.recompute_long:
            heed_passes(model.decoder)
        if config.keep_attention:
            heed_gradients(model.decoder)
        if config.offload:
            keep_inputs(model.decoder, config.offload, Ways(self.copies))
        numbering = Numbering(
            first_layer=first,
            first_expert=first_expert(config.mixture.experts, groups) if config.mixture else 0,
            tied=config.tied,
            tp_rank=groups.tp.rank(),
            tp_size=groups.tp.size(),
        )
        return VirtualStageModule(model, numbering, is_first, is_last)

    def _tie(self) -> torch.nn.Parameter | None:
        """Return the weight of the output, None where the last virtual stage is not. If it is tied to an
        embedding that this rank holds, drop megatron's copy.
        """
        own = list(self.virtual_stages.values())
        if not own[-1].is_last:
            return None
        output = own[-1].model.output_layer
        if self.config.tied and own[0].is_first:
            output.weight = None
            return own[0].model.embedding.word_embeddings.weight
        return output.weight

    def embed(self, inputs: MicrobatchInputs) -> torch.Tensor:
        """Word embeddings [T / tp, D] of this rank's tokens of a microbatch, for the first virtual stage."""
        embedded: torch.Tensor = self.virtual_stages[0].model.embedding(inputs.ids, None).squeeze(1)
        if self.config.embedding_scale == 1.0:
            return embedded
        # Rounded as the weights are: the factor is one of their numbers in published models.
        return embedded * torch.tensor(self.config.embedding_scale, dtype=self.dtype).item()

    def forward(
        self,
        virtual_stage: int,
        inputs: MicrobatchInputs,
        hidden: torch.Tensor,
        entering: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Hidden [T / tp, D] → the same; of the last virtual stage losses [n], or the next token id of each
        sequence. `entering` holds, by attach point, tokens [R] and the rows [R, D] that the layer's input
        gets there.

        The output layer runs on the wanted positions alone: rows of images have no next token.
        """
        own = self.virtual_stages[virtual_stage]
        model = own.model
        hidden = hidden.unsqueeze(1)
        # A descriptor of this pass alone: recomputation hands it to the layers again.
        anew = inputs.packed.anew or self.config.recompute == "full"
        keeps = self.config.keep_attention and anew and torch.is_grad_enabled()
        entering_layers = {own.layer(name): rows for name, rows in entering.items()}
        kept = KeptAttention(self.config.offload, self.copies) if keeps else None
        packed = replace(inputs.packed, entering=entering_layers, kept=kept)
        if not own.is_first:
            model.set_input_tensor(hidden)
        masked = {"padding_mask": inputs.padding} if self.config.mixture else {}
        with keeping_inputs(model.decoder, packed.anew):
            out = model.decoder(hidden, None, packed_seq_params=packed, **masked)
        if kept is not None:
            kept.passed()
        model.decoder.input_tensor = None  # it would pin the activation until the next microbatch
        if not own.is_last:
            return out.squeeze(1)
        assert inputs.wanted is not None
        wanted = out.squeeze(1).index_select(0, inputs.wanted)
        del out  # the most memory of a step is often that of its losses
        if self.tp_group.size() > 1:
            wanted = gather_from_sequence_parallel_region(wanted, group=self.tp_group)
        weight = self.output_weight
        assert weight is not None
        if inputs.labels is None:
            assert inputs.order is not None
            return linear_argmax(wanted, weight, self.tp_group, self.ids)[inputs.order]
        chunk = self.config.loss_chunk
        return linear_losses(wanted, weight, inputs.labels, self.tp_group, chunk, self.ids)

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

    def follow(self, came: Callable[[int, int], object]) -> None:
        """Have passes followed through the layers of all virtual stages: see `Followed`."""
        layers = {number: own.model.decoder.layers for number, own in self.virtual_stages.items()}
        self.followed.follow(layers, self.deferral, came)

    def following(self, virtual_stage: int, listener: Listener) -> AbstractContextManager[None]:
        """Have a listener hear of the pass through a virtual stage that runs inside the block."""
        return self.followed.following(virtual_stage, listener)

    def weights_later(self) -> AbstractContextManager[PendingProducts]:
        """Put weight gradients of the layers' linears off in the one backward pass that is run inside."""
        return self.deferral.weights_later()

    def settle(self) -> None:
        """Wait for the gradient of a partition that is on its way."""
        for own in self.partitioned:
            own.settle()

    def balance_experts(self, learns: torch.Tensor | bool) -> None:
        """Move the experts' bias once a step, unless it taught nothing, which `learns` says, here or as a
        number [] on the device; every rank of a stage calls it.

        Afterwards `expert_load` [], on the device, is the tokens of the busiest expert over the mean, summed
        over this stage's layers and divided by the ranks that have it.
        """
        if self.config.mixture is None:
            return
        rate = self.config.mixture.bias_update_rate * learns
        loads = update_expert_bias(self.models, self.groups, rate)
        self.expert_load = loads.sum() / self.groups.tp_dp_cp.size()

    def buffers(self) -> dict[str, torch.Tensor]:
        """State beside the weights, by canonical name, on the one rank of a stage that saves it."""
        return self.biases() if self.groups.tp_dp_cp.rank() == 0 else {}

    def biases(self) -> dict[str, torch.Tensor]:
        """Biases of experts by canonical name, which all ranks of a stage hold alike."""
        biases: dict[str, torch.Tensor] = {}
        for own in self.virtual_stages.values() if self.config.mixture is not None else ():
            biases |= expert_biases(own.model, own.numbering.first_layer)
        return biases

    def load_buffers(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Load this stage's state from what was saved, of other stages too."""
        for own in self.virtual_stages.values():
            load_expert_biases(own.model, own.numbering.first_layer, saved)


def _add_entering(number: int, layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    entering = kwargs["packed_seq_params"].entering.get(number)
    if entering is not None:
        tokens, rows = entering
        hidden = kwargs["hidden_states"].index_add(0, tokens, rows.unsqueeze(1))
        kwargs = {**kwargs, "hidden_states": hidden}
    return args, kwargs

"""The LLM: megatron-core's GPTModel on packed tokens, cut into pipeline stages.

Shapes: T tokens, D width, V vocabulary.
"""

from dataclasses import dataclass

import torch

from omni.config import ConfigError, LLMConfig, require
from omni.models.layers import check_transformer, layer_submodules, layer_work, transformer_config
from ops.linear import linear_flops
from ops.loss import token_losses
from parallel.costs import PartWork
from parallel.layout import stage_layers
from parallel.megatron import GPTModel, ProcessGroupCollection
from parallel.packed import PackedTokens

NAME = "llm"


@dataclass(frozen=True)
class MicrobatchInputs:
    """Tensors of one microbatch on one stage, on its device.

    `ids` [1, T] on the first stage. On the last stage `wanted` [n] are the positions whose next token counts:
    targets with their `labels` [n], `weights` [n] (0 for a tombstone) and `sources` [n] (the index of each
    one's data source), or, where labels are None, the positions to predict from. None elsewhere.
    """

    packed: PackedTokens
    ids: torch.Tensor | None = None
    wanted: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    sources: torch.Tensor | None = None


def check_llm(config: LLMConfig) -> None:
    """Raise ConfigError for sizes that do not fit together."""
    check_transformer("model.llm", config, rotary_axes=1)
    require("model.llm", config, "kv_heads", "vocab_multiple")
    if config.heads % config.kv_heads:
        raise ConfigError(f"model.llm.kv_heads={config.kv_heads} must divide heads={config.heads}")


def padded_vocabulary(vocab_size: int, multiple: int) -> int:
    """Round the tokenizer's vocabulary up; the extra ids are never targets."""
    return -(-vocab_size // multiple) * multiple


class LLMStage:
    """This rank's stage of the LLM, as the engine drives it.

    `model` is the bare GPTModel; the wrapper that reduces its gradients shares its parameters.
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
    ) -> None:
        stage, stages = groups.pp.rank(), groups.pp.size()
        layers = stage_layers(config.layers, stages)
        self.config = config
        self.width = config.hidden
        self.dtype = dtype
        self.device = device
        self.num_sources = num_sources
        self.first, self.last = stage == 0, stage == stages - 1
        self.first_layer = sum(layers[:stage])
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
            stages=stages,
        )
        self.model = GPTModel(
            self.transformer,
            layer_submodules(layers[stage], config.norm, causal=True),
            vocab_size=padded_vocabulary(vocab_size, config.vocab_multiple),
            max_sequence_length=0,
            pre_process=self.first,
            post_process=self.last,
            position_embedding_type="none",
            share_embeddings_and_output_weights=config.tied,
            pg_collection=groups,
        ).to(device)

    def embed(self, inputs: MicrobatchInputs) -> torch.Tensor:
        """Word embeddings [T, D] of a microbatch."""
        return self.model.embedding(inputs.ids, None).squeeze(1)

    def forward(self, inputs: MicrobatchInputs, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden [T, D] → [T, D]; on the last stage losses [n], or next token ids [n] without labels.

        The output layer runs on the wanted positions alone: rows of images have no next token.
        """
        hidden = hidden.unsqueeze(1)
        if not self.first:
            self.model.set_input_tensor(hidden)
        out = self.model.decoder(hidden, None, packed_seq_params=inputs.packed)
        self.model.decoder.input_tensor = None  # it would pin the activation until the next microbatch
        if not self.last:
            return out.squeeze(1)
        assert inputs.wanted is not None
        weight = self.model.shared_embedding_or_output_weight() if self.config.tied else None
        logits, _ = self.model.output_layer(out.index_select(0, inputs.wanted), weight=weight)
        if inputs.labels is None:
            return logits.squeeze(1).argmax(-1)
        return token_losses(logits.squeeze(1), inputs.labels)

    def loss(self, inputs: MicrobatchInputs, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Losses [n] → their weighted sum, and [loss, targets] summed by source in fp64."""
        assert inputs.weights is not None
        assert inputs.sources is not None
        weights = inputs.weights.double()
        sums = torch.zeros(2, self.num_sources, dtype=torch.float64, device=self.device)
        sums[0].index_add_(0, inputs.sources, output.detach().double() * weights)
        sums[1].index_add_(0, inputs.sources, weights)
        return (output * inputs.weights).sum(), sums.flatten()


def output_flops(config: LLMConfig, vocab_size: int) -> int:
    """Forward FLOPs of the output layer, for each target token."""
    return linear_flops(1, config.hidden, padded_vocabulary(vocab_size, config.vocab_multiple))


def llm_work(config: LLMConfig, vocab_size: int, stages: int, element: int) -> tuple[PartWork, ...]:
    """Work of each stage. The output layer counts for every token, as if all were targets."""
    layer = layer_work(
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.hidden // config.heads,
        ffn=config.ffn,
        gated=True,
        causal=True,
        element=element,
    )
    output = output_flops(config, vocab_size)
    layers = stage_layers(config.layers, stages)
    return tuple(
        PartWork(
            flops_per_token=n * layer.flops_per_token + (output if stage == stages - 1 else 0),
            flops_per_square=n * layer.flops_per_square,
            bytes_per_token=n * layer.bytes_per_token,
            weight_bytes=n * layer.weight_bytes,
            recomputed=config.recompute == "full",
        )
        for stage, n in enumerate(layers)
    )

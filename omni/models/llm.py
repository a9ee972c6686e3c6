"""The LLM: megatron-core's GPTModel on packed tokens, cut into pipeline stages.

Shapes: T tokens, D width, V vocabulary.
"""

from dataclasses import dataclass

import torch

from omni.config import ConfigError, LLMConfig
from omni.models.layers import layer_flops, layer_square_flops, layer_submodules, transformer_config
from ops.linear import linear_flops
from parallel.costs import PartFlops
from parallel.layout import stage_layers
from parallel.megatron import GPTModel, ProcessGroupCollection
from parallel.packed import PackedTokens

NAME = "llm"


@dataclass(frozen=True)
class MicrobatchInputs:
    """Tensors of one microbatch on one stage, on its device.

    `ids` [1, T] on the first stage; on the last stage `labels` [1, T], `mask` [T] (1.0 where a next token is
    a target) and `sources` [T] (the index of each token's data source), or `ends` [S], the last token of
    each sequence, where only the next tokens are wanted. None elsewhere.
    """

    packed: PackedTokens
    ids: torch.Tensor | None = None
    labels: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    sources: torch.Tensor | None = None
    ends: torch.Tensor | None = None


def check_llm(config: LLMConfig) -> None:
    """Raise ConfigError for sizes that do not fit together."""
    if config.hidden % config.heads or (config.hidden // config.heads) % 2:
        raise ConfigError(
            f"model.llm.heads={config.heads}: hidden={config.hidden} must divide into heads of even size"
        )
    if config.heads % config.kv_heads:
        raise ConfigError(f"model.llm.kv_heads={config.kv_heads} must divide heads={config.heads}")
    if config.norm not in ("RMSNorm", "LayerNorm"):
        raise ConfigError(f"model.llm.norm={config.norm}: choose RMSNorm or LayerNorm")


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
        """Hidden [T, D] → [T, D]; on the last stage losses [T], or next token ids [S] where asked for."""
        hidden = hidden.unsqueeze(1)
        if not self.first:
            self.model.set_input_tensor(hidden)
        out = self.model(
            inputs.ids,
            None,
            None,
            decoder_input=hidden if self.first else None,
            labels=inputs.labels,
            packed_seq_params=inputs.packed,
        )
        self.model.decoder.input_tensor = None  # it would pin the activation until the next microbatch
        if not self.last:
            return out.squeeze(1)
        if inputs.labels is None:
            assert inputs.ends is not None
            return out[0, inputs.ends].argmax(-1)
        return out.squeeze(0)

    def loss(self, inputs: MicrobatchInputs, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Token losses [T] → their masked sum, and [loss, targets] summed by source in fp64."""
        assert inputs.mask is not None
        masked = output.float() * inputs.mask
        return masked.sum(), self.sums(inputs, output)

    def sums(self, inputs: MicrobatchInputs, output: torch.Tensor) -> torch.Tensor:
        """Loss and target count of each source, [2 · sources] in fp64."""
        assert inputs.mask is not None
        assert inputs.sources is not None
        sums = torch.zeros(2, self.num_sources, dtype=torch.float64, device=self.device)
        mask = inputs.mask.double()
        sums[0].index_add_(0, inputs.sources, output.detach().double() * mask)
        sums[1].index_add_(0, inputs.sources, mask)
        return sums.flatten()


def llm_flops(config: LLMConfig, vocab_size: int, stages: int) -> tuple[PartFlops, ...]:
    """Forward FLOPs of each stage, for each token and each unit of the sum of squared lengths."""
    head_dim = config.hidden // config.heads
    per_layer = layer_flops(config.hidden, config.heads, config.kv_heads, head_dim, config.ffn, gated=True)
    per_square = layer_square_flops(config.heads, head_dim, causal=True)
    output = linear_flops(1, config.hidden, padded_vocabulary(vocab_size, config.vocab_multiple))
    layers = stage_layers(config.layers, stages)
    return tuple(
        PartFlops(
            per_token=n * per_layer + (output if stage == stages - 1 else 0),
            per_square=n * per_square,
            recomputed=config.recompute == "full",
        )
        for stage, n in enumerate(layers)
    )

"""Everything that a package with an encoder of its own imports: the contract, its types, and building blocks.

What stands here is kept stable; docs/encoders.md explains it.
"""

from dataloader.format import PLACEHOLDER, DataError, Item, Sample, SampleError
from dataloader.tokenizer import get_tokenizer
from dataloader.writer import DatasetWriter, is_intact
from omni.config import ConfigError, require
from omni.models.blocks import (
    Embed,
    EncoderPart,
    FinalNorm,
    Projector,
    Table,
    encoder_stack,
    value_bytes,
)
from omni.models.layer_sizes import check_divisible, check_transformer
from omni.models.layers import PackedCoreAttention, layer_submodules, transformer_config
from omni.models.registry import Attention, Encoder, ItemArrays
from omni.models.stack import Stack, linear_weights, norm_weights, plain
from ops.attention import attention_bytes, attention_flops
from ops.linear import linear_bytes, linear_flops
from ops.norm import Norm
from parallel.megatron import ProcessGroupCollection, TransformerBlock, TransformerConfig
from parallel.packed import PackedTokens, Sharding, pack_tokens
from parallel.work import Block, Collective, Grad, Load, Part, Weight, Work

__all__ = [
    "PLACEHOLDER",
    "Attention",
    "Block",
    "Collective",
    "ConfigError",
    "DataError",
    "DatasetWriter",
    "Embed",
    "Encoder",
    "EncoderPart",
    "FinalNorm",
    "Grad",
    "Item",
    "ItemArrays",
    "Load",
    "Norm",
    "PackedCoreAttention",
    "PackedTokens",
    "Part",
    "ProcessGroupCollection",
    "Projector",
    "Sample",
    "SampleError",
    "Sharding",
    "Stack",
    "Table",
    "TransformerBlock",
    "TransformerConfig",
    "Weight",
    "Work",
    "attention_bytes",
    "attention_flops",
    "check_divisible",
    "check_transformer",
    "encoder_stack",
    "get_tokenizer",
    "is_intact",
    "layer_submodules",
    "linear_bytes",
    "linear_flops",
    "linear_weights",
    "norm_weights",
    "pack_tokens",
    "plain",
    "require",
    "transformer_config",
    "value_bytes",
]

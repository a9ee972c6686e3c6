"""Everything that a package with an encoder of its own imports: the contract, its types, and building blocks.

What stands here is kept stable; docs/encoders.md explains it.
"""

from dataloader.format import PLACEHOLDER, DataError, Item, Sample, SampleError
from dataloader.tokenizer import get_tokenizer
from dataloader.writer import DatasetWriter, is_intact
from omni.config import ConfigError, require
from omni.models.blocks import EncoderPart, Embed, Projector, Table, encoder_stack, value_bytes
from omni.models.blocks import Norm as NormWork
from omni.models.layer_sizes import check_divisible, check_transformer
from omni.models.layers import PackedCoreAttention, layer_submodules, transformer_config
from omni.models.registry import Attention, Encoder, ItemArrays
from ops.attention import attention_bytes, attention_flops
from ops.linear import linear_bytes, linear_flops
from ops.norm import Norm
from parallel.megatron import ProcessGroupCollection, TransformerBlock, TransformerConfig
from parallel.packed import PackedTokens, Sharding, pack_tokens

__all__ = [
    "PLACEHOLDER",
    "Attention",
    "ConfigError",
    "DataError",
    "DatasetWriter",
    "Encoder",
    "Item",
    "ItemArrays",
    "Norm",
    "PackedCoreAttention",
    "PackedTokens",
    "ProcessGroupCollection",
    "Sample",
    "SampleError",
    "Sharding",
    "TransformerBlock",
    "TransformerConfig",
    "attention_bytes",
    "attention_flops",
    "check_divisible",
    "check_transformer",
    "get_tokenizer",
    "is_intact",
    "layer_submodules",
    "linear_bytes",
    "linear_flops",
    "pack_tokens",
    "require",
    "transformer_config",
]

"""Everything that a package with an encoder of its own imports: the contract, its types, and building blocks.

It does not import megatron-core: commands that only plan start without. What a module of your own is built
from is in `omni.encoder_modules`, for `build` to import. Both are kept stable; see docs/encoders.md.
"""

from dataloader.audio import decode_audio, resample, resampled_length
from dataloader.decode import decode_image, read_image_size
from dataloader.format import PLACEHOLDER, DataError, Item, Sample, SampleError
from dataloader.tokenizer import get_tokenizer
from dataloader.writer import DatasetWriter, is_intact
from omni.keys import ConfigError, Rule, Rules, at_least, check_keys, one_of
from omni.models.blocks import Embed, EncoderPart, FinalNorm, Projector, Table, value_bytes
from omni.models.encoders.transformer import TransformerEncoder
from omni.models.layer_sizes import (
    LayerSizes,
    TransformerEncoderConfig,
    check_divisible,
    check_heads,
    encoder_layers,
)
from omni.models.pieces import linear_weights, norm_weights, plain
from omni.models.registry import Attention, Encoder, ItemArrays
from omni.models.stack import Stack
from ops.attention import attention_bytes, attention_flops
from ops.linear import linear_bytes, linear_flops
from ops.one_copy import brought, later
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
    "LayerSizes",
    "Load",
    "Part",
    "Projector",
    "Rule",
    "Rules",
    "Sample",
    "SampleError",
    "Stack",
    "Table",
    "TransformerEncoder",
    "TransformerEncoderConfig",
    "Weight",
    "Work",
    "at_least",
    "attention_bytes",
    "attention_flops",
    "brought",
    "check_divisible",
    "check_heads",
    "check_keys",
    "decode_audio",
    "decode_image",
    "encoder_layers",
    "get_tokenizer",
    "is_intact",
    "later",
    "linear_bytes",
    "linear_flops",
    "linear_weights",
    "norm_weights",
    "one_of",
    "plain",
    "read_image_size",
    "resample",
    "resampled_length",
    "value_bytes",
]

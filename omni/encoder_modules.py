"""What the module of an encoder is built from: megatron-core's layers and packed tokens.

It imports megatron-core, which takes seconds, so import it in `build` and `pack` alone (or in a file that
only they import), and for annotations under `TYPE_CHECKING`. What stands here is kept stable.
"""

from omni.models.attention import PackedCoreAttention
from omni.models.encoders.transformer_module import TransformerModule
from omni.models.layers import layer_submodules, transformer_config
from ops.norm import Norm
from parallel.megatron import ProcessGroupCollection, TransformerBlock, TransformerConfig
from parallel.packed import PackedTokens, Sharding, pack_tokens

__all__ = [
    "Norm",
    "PackedCoreAttention",
    "PackedTokens",
    "ProcessGroupCollection",
    "Sharding",
    "TransformerBlock",
    "TransformerConfig",
    "TransformerModule",
    "layer_submodules",
    "pack_tokens",
    "transformer_config",
]

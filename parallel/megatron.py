"""The one door to megatron-core: everything the platform uses of it, on GPU and CPU alike.

Import megatron names from here only. The accelerator module must answer megatron's CUDA calls before the
first import and correct the imported modules after the last, and this file is where both ends meet.
There is no global parallel state: every object is given its process groups.
"""

# ruff: noqa: E402
import logging
import sys
import warnings
from typing import Any

from ops import accelerator

accelerator.install()
# Without Transformer Engine or apex, megatron warns of every fallback at import.
warnings.filterwarnings("ignore", module=r"megatron\..*")
# megatron calls collectives by names that newer torch releases only rename.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
logging.getLogger("megatron").setLevel(logging.ERROR)
# Its inference, which nothing here runs, imports wandb where it can: a tenth of a rank's start.
_modules: dict[str, Any] = sys.modules
_modules.setdefault("wandb", None)  # as if it were not installed

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import _set_global_memory_buffer, get_global_memory_buffer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
)
from megatron.core.tensor_parallel.random import (
    CudaRNGStatesTracker,
    checkpoint,
    model_parallel_cuda_manual_seed,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import RouterGatingLinearFunction, group_limited_topk
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

if _modules["wandb"] is None:
    del _modules["wandb"]
accelerator.patch()
# Sequence-parallel layers take scratch memory from one object that megatron's own set-up would make.
_set_global_memory_buffer()

__all__ = [
    "MLP",
    "AttnMaskType",
    "ColumnParallelLinear",
    "CudaRNGStatesTracker",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "DistributedOptimizer",
    "GPTModel",
    "IdentityOp",
    "MLPSubmodules",
    "MegatronModule",
    "MoELayer",
    "MoESubmodules",
    "ModuleSpec",
    "OptimizerConfig",
    "PackedSeqParams",
    "ProcessGroupCollection",
    "RouterGatingLinearFunction",
    "RowParallelLinear",
    "SelfAttention",
    "SharedExpertMLP",
    "TopKRouter",
    "TransformerBlock",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "TransformerLayer",
    "VocabParallelEmbedding",
    "all_to_all",
    "checkpoint",
    "finalize_model_grads",
    "gather_from_sequence_parallel_region",
    "get_global_memory_buffer",
    "get_gpt_layer_local_spec",
    "group_limited_topk",
    "model_parallel_cuda_manual_seed",
]

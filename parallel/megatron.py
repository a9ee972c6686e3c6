"""The one door to megatron-core: everything the platform uses of it, on GPU and CPU alike.

Import megatron names from here only. The accelerator module must answer megatron's CUDA calls before the
first import and correct the imported modules after the last, and this file is where both ends meet.
There is no global parallel state: every object is given its process groups.
"""

# ruff: noqa: E402
import logging
import warnings

from ops import accelerator

accelerator.install()
# Without Transformer Engine or apex, megatron warns of every fallback at import.
warnings.filterwarnings("ignore", module=r"megatron\..*")
# megatron calls collectives by names that newer torch releases only rename.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
logging.getLogger("megatron").setLevel(logging.ERROR)

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

accelerator.patch()

__all__ = [
    "AttnMaskType",
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GPTModel",
    "MegatronModule",
    "OptimizerConfig",
    "PackedSeqParams",
    "ProcessGroupCollection",
    "TransformerBlock",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "finalize_model_grads",
    "get_gpt_layer_local_spec",
    "get_megatron_optimizer",
    "model_parallel_cuda_manual_seed",
]

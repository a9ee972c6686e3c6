"""megatron's buffers and optimizers of some parameters: gradients are summed in the one, and the other divide
AdamW's state over the replicas.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import torch

from omni.config import ConfigError
from omni.optim_config import OptimConfig
from parallel.buckets import least_bucket
from parallel.megatron import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    OptimizerConfig,
    ProcessGroupCollection,
)


def sharded_adamw(
    name: str,
    modules: Mapping[int, torch.nn.Module],
    own: Sequence[torch.nn.Parameter],
    groups: ProcessGroupCollection,
    config: OptimConfig,
) -> tuple[dict[int, DistributedDataParallel], list[Any]]:
    """Give the parameters `own` of the parts of component `name`, which all learn, buffers that are reduced
    over `groups`, by part, and optimizers.
    """
    with _learning_alone(own, modules):
        wrapped = {part: _with_buffers(name, module, groups) for part, module in modules.items()}
        optimizers = _adamw(list(wrapped.values()), groups, config.weight_decay)
    has_experts = any(map(_is_of_experts, own))
    if groups.dp_cp.size() == 1 and not (has_experts and groups.expt_dp.size() > 1):
        # One rank would send its gradients and weights to itself.
        for ddp in wrapped.values():
            ddp.bucket_groups, ddp.expert_parallel_bucket_groups = [], []
    return wrapped, optimizers


@contextlib.contextmanager
def _learning_alone(
    own: Sequence[torch.nn.Parameter], modules: Mapping[int, torch.nn.Module]
) -> Iterator[None]:
    """Have megatron see these of the modules' parameters alone: it takes what learns."""
    ids = {id(parameter) for parameter in own}
    every = (parameter for module in modules.values() for parameter in module.parameters())
    others = [parameter for parameter in every if parameter.requires_grad and id(parameter) not in ids]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_()


def _with_buffers(
    name: str, module: torch.nn.Module, groups: ProcessGroupCollection
) -> DistributedDataParallel:
    """Give a module of component `name` the buffers that its gradients are summed and reduced in."""
    transformer_config: Any = module.config
    if not transformer_config.calculate_per_token_loss:
        raise ConfigError(
            f"component {name}: its module's config has calculate_per_token_loss=False, and megatron "
            "would average its gradients over ranks: make it with transformer_config, or set it"
        )
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,  # or it has one bucket
        bucket_size=least_bucket(groups.dp_cp.size()),
        grad_reduce_in_fp32=True,
    )
    own = copy(groups)
    own.pp = _First()
    ddp = DistributedDataParallel(transformer_config, settings, module, pg_collection=own)
    # A rank without items would not start its buckets, and its peers would wait: we start them.
    settings.overlap_grad_reduce = False
    return ddp


class _First:
    """Stands in for a group of stages: megatron has one bucket on all but the first of them."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 1


def _adamw(
    modules: list[DistributedDataParallel], groups: ProcessGroupCollection, weight_decay: float
) -> list[Any]:
    """Return megatron's optimizers of the modules, which divide their state over the replicas: one of what
    all ranks of a stage hold, and one of experts, each where something of it learns.

    `get_megatron_optimizer` would gather names of settings over the whole world, pickled, and so have ranks
    attend that hold nothing of the component.
    """
    bf16 = any(parameter.dtype is torch.bfloat16 for module in modules for parameter in module.parameters())
    settings = OptimizerConfig(
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=True,
    )
    optimizers: list[Any] = []
    for experts, buffers, replicas in (
        (False, "buffers", groups.dp_cp),
        (True, "expert_parallel_buffers", groups.expt_dp),
    ):
        by_decay = _by_decay(modules, experts, weight_decay)
        if not by_decay:
            continue
        optimizer: Any = DistributedOptimizer(
            torch.optim.AdamW(by_decay),  # holds weights and state: `BucketShares` updates them
            settings,
            grad_scaler=None,
            init_state_fn=None,
            model_chunks=modules,
            per_model_buffers={number: getattr(module, buffers) for number, module in enumerate(modules)},
            data_parallel_group=replicas,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=0,  # of checkpoints of megatron's
            distributed_optimizer_instance_id=0,
        )
        optimizer.tp_group = groups.tp  # whose copies count once in a norm
        optimizers.append(optimizer)
    return optimizers


def _by_decay(modules: Sequence[torch.nn.Module], experts: bool, weight_decay: float) -> list[dict[str, Any]]:
    """Return what learns of experts, or of all else, by its weight decay: norms and biases have none."""
    decayed, others = list[torch.nn.Parameter](), list[torch.nn.Parameter]()
    for name, parameter in (of for module in modules for of in module.named_parameters()):
        if parameter.requires_grad and _is_of_experts(parameter) is experts:
            exempt = parameter.dim() == 1 or name.endswith(".bias")
            (others if exempt else decayed).append(parameter)
    groups = (decayed, weight_decay), (others, 0.0)
    return [{"params": own, "weight_decay": decay} for own, decay in groups if own]


def _is_of_experts(parameter: torch.nn.Parameter) -> bool:
    """Whether a parameter is one of experts, which megatron marks so."""
    return not getattr(parameter, "allreduce", True)

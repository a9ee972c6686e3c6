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
from parallel import plain
from parallel.buckets import least_bucket
from parallel.megatron import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    OptimizerConfig,
    ProcessGroupCollection,
    get_megatron_optimizer,
)


def attend_optimizer_setup(optimizers: int) -> None:
    """Stand in for a ComponentOptimizer on a rank that the component does not live on, whose ranks make so
    many of megatron's: one more where its weights are partitioned.

    megatron-core gathers the settings of parameter groups over the whole world, once for weights that all
    ranks of a stage hold and once for experts, whatever groups it is given.
    """
    for _ in range(2 * optimizers):
        plain.gather_plain([])


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
        optimizers = _adamw(list(wrapped.values()), groups, config)
    has_experts = any(not getattr(parameter, "allreduce", True) for parameter in own)
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
    modules: list[DistributedDataParallel], groups: ProcessGroupCollection, config: OptimConfig
) -> list[Any]:
    """Return megatron's optimizers of the modules, which divide their state over the replicas."""
    bf16 = any(parameter.dtype is torch.bfloat16 for module in modules for parameter in module.parameters())
    settings = OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=0.0,
        bf16=bf16,
        params_dtype=torch.bfloat16 if bf16 else torch.float32,
        use_distributed_optimizer=True,
    )
    with plain.nothing_unpickled():  # of the settings of parameter groups that it gathers
        chained = get_megatron_optimizer(
            settings, modules, use_gloo_process_groups=False, pg_collection=groups
        )
    optimizers: list[Any] = [o for o in chained.chained_optimizers if not o.is_stub_optimizer]
    for optimizer in optimizers:
        inner = type(optimizer.optimizer)
        assert inner is torch.optim.AdamW, f"checkpoints know torch's AdamW, not {inner.__module__}"
        for group in optimizer.param_groups:
            # megatron leaves this to its training script: without it, norms and biases would decay.
            group["weight_decay"] = config.weight_decay * group["wd_mult"]
    return optimizers

"""Low-rank adapters on megatron's parallel linears: what `adapters.py` states, computed.

A linear gets two parameters, `lora_a` [rank, in] and `lora_b` [out, rank], and a product of its own in place
of megatron's. Everything else of its module is frozen before anything makes buffers for gradients, so the
base is held once, in the dtype that it computes in.

Where ranks share a linear, gradients are those of the whole: see `adapters.py` for what is summed when. What
ranks hold whole is marked as megatron marks norms, whose gradients it sums at the end of a step.

Shapes: T tokens that the linear sees, t those of this rank between halves of a layer (T where ranks do not
divide them), r the rank of the adapters.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from omni.models.adapters import A, B, Lora
from omni.models.weight_gradients import gathered, scattered
from parallel.megatron import ColumnParallelLinear, RowParallelLinear
from parallel.partitions import whole_of


def adapt(module: torch.nn.Module, lora: Lora | None) -> None:
    """Freeze `module`, and give the linears in it that `lora` targets an adapter each; nothing without."""
    if lora is None:
        return
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    for name, part in module.named_modules():
        if (
            isinstance(part, ColumnParallelLinear | RowParallelLinear)
            and name.rpartition(".")[2] in lora.targets
        ):
            _adapt(part, lora)


def _adapt(linear: Any, lora: Lora) -> None:
    weight, first = linear.weight, isinstance(linear, ColumnParallelLinear)
    made = {A: weight.new_zeros(lora.rank, weight.shape[1]), B: weight.new_zeros(weight.shape[0], lora.rank)}
    for name, tensor in made.items():
        linear.register_parameter(name, torch.nn.Parameter(tensor))
    whole = linear.lora_a if first else linear.lora_b
    whole.sequence_parallel = linear.config.sequence_parallel
    linear._forward_impl = partial(_adapted, linear, lora.scale, first)


def _adapted(
    linear: Any,
    scale: float,
    first: bool,
    *,
    input: torch.Tensor,
    weight: torch.nn.Parameter,
    **settings: Any,
) -> torch.Tensor:
    """Stand in for megatron's product: `input` [t, 1, in] → [T, 1, out]."""
    settings |= {"scale": scale, "first": first, "group": linear.tp_group}
    settings["divides_tokens"] = linear.config.sequence_parallel
    settings["weight"] = weight
    whole = whole_of(weight, back=False)
    output: torch.Tensor = _Adapted.apply(
        settings, input, whole, settings["bias"], linear.lora_a, linear.lora_b
    )
    return output


class _Adapted(torch.autograd.Function):
    """A frozen linear and its adapter."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: Mapping[str, Any],
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
    ) -> torch.Tensor:
        whole = gathered(input, settings["group"]) if settings["sequence_parallel"] else input
        inner = whole.matmul(a.t()).mul_(settings["scale"])
        output = whole.matmul(weight.t())
        if bias is not None:
            output.add_(bias)
        output.flatten(0, -2).addmm_(inner.flatten(0, -2), b.t())
        ctx.settings, ctx.learns = settings, ctx.needs_input_grad[4]
        ctx.save_for_backward(a, b, *((input, inner) if ctx.learns else ()))
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b, *kept = ctx.saved_tensors
        settings, grad = ctx.settings, grads[0].contiguous()
        group, first = settings["group"], settings["first"]
        gathers = settings["sequence_parallel"]  # of a first linear only
        rows = grad.flatten(0, -2)
        grad_inner, grad_a, grad_b = rows.matmul(b).mul_(settings["scale"]), None, None
        if first and group.size() > 1:
            grad_inner = scattered(grad_inner, group) if gathers else _summed(grad_inner, group)
        if ctx.learns:
            input, inner = kept
            inner = inner.flatten(0, -2)
            if not first and not settings["divides_tokens"] and group.size() > 1:
                inner = _summed(inner, group)
            grad_b = rows.t().matmul(inner)
        grad_input = grad.matmul(whole_of(settings["weight"], back=True))
        if gathers:
            grad_input = scattered(grad_input, group)
        elif settings["allreduce_dgrad"]:
            _summed(grad_input, group)
        grad_input.flatten(0, -2).addmm_(grad_inner, a)
        if ctx.learns:
            grad_a = grad_inner.t().matmul(input.flatten(0, -2))
        return None, grad_input, None, None, grad_a, grad_b


def _summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over ranks, in place."""
    dist.all_reduce(tensor, group=group)
    return tensor

"""Backward passes that leave the gradients of weights for later.

What other ranks wait for is the gradient of a pass's input. That of its weights only has to be there at the
end of the step, so it can fill time in which a rank would wait (Qi et al., Zero Bubble Pipeline Parallelism,
2023). While a pass puts them off, each linear computes the gradient of its input, with the communication that
this takes, and notes its input and the gradient of its output; `PendingProducts.run` makes the rest of them.
Then or at once, the product itself adds to `main_grad`, where megatron's DistributedDataParallel has given
the weight one.

Only megatron's parallel linears put off: attention, feed-forward, shared expert; and those of experts, by
themselves (`experts.py`). Everything else is computed in the input pass: norms, biases, the router (narrow),
embedding and output, plain torch linears of an encoder. Where nothing is put off, megatron's own code runs.
Frozen weights have nothing to put off. A weight that is a partition of a matrix is gathered for each pass and
not kept from one to the other; its gradient is scattered as it is made.

Memory: input and output gradient of each linear live until `PendingProducts.run` has used them; with
recomputation, that is when the recomputed inputs go. Under sequence parallelism the input is kept
divided, and gathered over the tensor-parallel ranks a second time: their ranks run the same pending gradients
in the same order.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist

from omni.models.adapters import A
from ops.linear import add_weight_gradient, weight_gradient
from parallel.megatron import (
    ColumnParallelLinear,
    LinearWithGradAccumulationAndAsyncCommunication,
    RowParallelLinear,
    get_global_memory_buffer,
)
from parallel.partitions import partition_of, whole_of

# Without what asks for autocast, which nothing here uses: a tenth of what a small layer costs the host.
_FORWARD = inspect.unwrap(LinearWithGradAccumulationAndAsyncCommunication.forward)
_BACKWARD = inspect.unwrap(LinearWithGradAccumulationAndAsyncCommunication.backward)


class PendingProduct(Protocol):
    """The gradient of a weight, not yet made."""

    @property
    def weight(self) -> torch.nn.Parameter:
        """The weight."""
        ...

    def add(self) -> None:
        """Make it, and add it to the weight's `main_grad`."""
        ...


@dataclass(frozen=True)
class _Product:
    """The gradient of `weight` [m, n], not yet made: of inputs [..., n] and gradients of outputs [..., m].

    The inputs are to be gathered along their first dimension over `group`, unless it is None.
    """

    weight: torch.nn.Parameter
    inputs: torch.Tensor
    grads: torch.Tensor
    group: dist.ProcessGroup | None

    def add(self) -> None:
        inputs = self.inputs if self.group is None else gathered(self.inputs, self.group)
        rows, columns = (x.contiguous().flatten(0, -2) for x in (self.grads, inputs))
        place = partition_of(self.weight)
        if place is None:
            add_weight_gradient(columns, rows, vars(self.weight)["main_grad"])
        else:
            place.part.scatter(self.weight, weight_gradient(columns, rows))


def gathered(inputs: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather shards [t, ...] of a group into the scratch memory that megatron's own passes take: the next
    product may overwrite it.
    """
    size = [inputs.shape[0] * group.size(), *inputs.shape[1:]]
    whole: torch.Tensor = get_global_memory_buffer().get_tensor(size, inputs.dtype, "mpu")
    dist.all_gather_into_tensor(whole, inputs.contiguous(), group=group)
    return whole


def scattered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the ranks of a group, of which each gets its share of the first dimension."""
    own = tensor.new_empty(tensor.shape[0] // group.size(), *tensor.shape[1:])
    dist.reduce_scatter_tensor(own, tensor, group=group)
    return own


class PendingProducts:
    """The gradients of weights that one backward pass has put off. `comes_to` is called with each weight
    before its gradient is made.
    """

    def __init__(self, comes_to: Callable[[torch.nn.Parameter], object] | None = None) -> None:
        self._products: deque[PendingProduct] = deque()
        self._comes_to = comes_to

    def __len__(self) -> int:
        return len(self._products)

    def put_off(self, product: PendingProduct) -> None:
        """Note one."""
        self._products.append(product)

    @torch.no_grad()
    def run(self) -> None:
        """Add all of them to `main_grad`, in the order of the pass, and let go of what they were made of.

        With sequence parallelism it communicates: all ranks of the tensor-parallel group run it.
        """
        while self._products:
            product = self._products.popleft()
            if self._comes_to is not None:
                self._comes_to(product.weight)
            product.add()


class Deferral:
    """Where the linears of a module learn whether the backward pass under way puts off.

    It belongs to the module, not to a thread: on GPUs, autograd runs backward passes on threads of its own.
    `comes_to` is called with each weight before a gradient of it is made that was put off.
    """

    def __init__(self) -> None:
        self.pending: PendingProducts | None = None
        self.comes_to: Callable[[torch.nn.Parameter], object] | None = None

    @contextmanager
    def weights_later(self) -> Iterator[PendingProducts]:
        """Put off in the backward passes of the `with` block, which are run in it to their end."""
        assert self.pending is None, "a backward pass inside another"
        self.pending = pending = PendingProducts(self.comes_to)
        try:
            yield pending
        finally:
            self.pending = None


class PutsOff(torch.nn.Module):
    """A module that asks its `deferral`, if it was given one, and puts off by itself."""

    deferral: Deferral | None = None


def put_off_in(module: torch.nn.Module, deferral: Deferral) -> None:
    """Let the linears of `module` put their weight gradients off when `deferral` says so, and have
    the product add them to `main_grad`. Those with adapters have products of their own.
    """
    for part in module.modules():
        if isinstance(part, ColumnParallelLinear | RowParallelLinear):
            if not hasattr(part, A):
                part._forward_impl = partial(_linear, part._forward_impl, deferral)
            _without_regions(part)
        elif isinstance(part, PutsOff):
            part.deferral = deferral


def _without_regions(linear: ColumnParallelLinear | RowParallelLinear) -> None:
    """Leave the regions around a linear out that one rank holds whole: they hand on what they are given, and
    start a function of Python each, forward and backward.
    """
    if linear.tp_group.size() > 1:
        return
    if isinstance(linear, ColumnParallelLinear):
        linear.disable_grad_reduce = True
    elif linear.skip_bias_add:
        linear.explicit_expert_comm = True


def _linear(
    megatron: Callable[..., torch.Tensor],
    deferral: Deferral,
    input: torch.Tensor,
    weight: torch.nn.Parameter,
    **settings: Any,
) -> torch.Tensor:
    is_partition = partition_of(weight) is not None
    if not weight.requires_grad and not is_partition:
        return megatron(input=input, weight=weight, **settings)
    output: torch.Tensor = _Linear.apply(
        deferral,
        whole_of(weight, back=False) if is_partition else None,
        input,
        weight,
        settings["bias"],
        hasattr(weight, "main_grad"),
        settings["allreduce_dgrad"],
        settings["sequence_parallel"],
        None,
        None,
        settings["tp_group"],
    )
    return output


class _Linear(torch.autograd.Function):
    """megatron's linear, whose backward pass may put the weight's gradient off. `whole` is the matrix of a
    weight that is a partition, else None: it is not kept, and gathered again on the way back.
    """

    @staticmethod
    def forward(ctx: Any, deferral: Deferral, whole: torch.Tensor | None, *inputs: Any) -> torch.Tensor:
        input, weight, *settings = inputs
        ctx.deferral = deferral
        # The parameter itself: hooks on saved tensors, which move them, bring back another object.
        ctx.weight, ctx.learns = weight, ctx.needs_input_grad[3]
        output: torch.Tensor = _FORWARD(ctx, input, weight if whole is None else whole, *settings)
        if whole is not None:
            ctx.save_for_backward(*(input,) * ctx.learns)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pending, weight = ctx.deferral.pending, ctx.weight
        if pending is None and partition_of(weight) is None:
            return (None, None, *_BACKWARD(ctx, *grads))
        (grad,) = grads
        group = ctx.tp_group if ctx.sequence_parallel else None
        grad_input = grad.matmul(whole_of(weight, back=True))
        if ctx.allreduce_dgrad:
            dist.all_reduce(grad_input, group=ctx.tp_group)
        elif group is not None:
            grad_input = scattered(grad_input, group)
        if ctx.learns:
            # Detached: what made the input holds the input and the gradient of a layer that was recomputed.
            product = _Product(weight, ctx.saved_tensors[0].detach(), grad, group)
            if pending is not None:
                pending.put_off(product)
            else:
                product.add()
        grad_bias = grad.contiguous().flatten(0, -2).sum(0) if ctx.use_bias else None
        return (None, None, grad_input, None, grad_bias, *[None] * 6)

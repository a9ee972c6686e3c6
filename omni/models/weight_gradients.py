"""Backward passes that leave the gradients of weights for later.

What other ranks wait for is the gradient of a pass's input. That of its weights only has to be there at the
end of the step, so it can fill time in which a rank would wait (Qi et al., Zero Bubble Pipeline Parallelism,
2023). While a pass puts them off, each linear computes the gradient of its input, with the communication that
this takes, and notes its input and the gradient of its output; `PendingProducts.run` makes the rest of them.
Then or at once, the product itself adds to `main_grad`, where megatron's DistributedDataParallel has given
the weight one.

Only megatron's parallel linears put off: attention, feed-forward, shared expert; and those of experts, by
themselves (`experts.py`). Everything else is computed in the input pass: norms, biases, the router (narrow),
embedding and output, plain torch linears of an encoder. Frozen weights have nothing to put off. A weight that
is a partition of a matrix is gathered for each pass and not kept from one to the other; its gradient is
scattered as it is made.

Memory: input and output gradient of each linear live until `PendingProducts.run` has used them; with
recomputation, that is when the recomputed inputs go. Under sequence parallelism the input is kept
divided, and gathered over the tensor-parallel ranks a second time: their ranks run the same pending gradients
in the same order.
"""

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
    RowParallelLinear,
    get_global_memory_buffer,
)
from parallel.partitions import partition_of, whole_of


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
    whole, gathering = _gathering(inputs, group)
    gathering.wait()
    return whole


def scattered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over the ranks of a group, of which each gets its share of the first dimension."""
    own, reducing = _scattering(tensor, group)
    reducing.wait()
    return own


def _gathering(inputs: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    size = [inputs.shape[0] * group.size(), *inputs.shape[1:]]
    whole: torch.Tensor = get_global_memory_buffer().get_tensor(size, inputs.dtype, "mpu")
    return whole, dist.all_gather_into_tensor(whole, inputs.contiguous(), group=group, async_op=True)


def _scattering(tensor: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Any]:
    own = tensor.new_empty(tensor.shape[0] // group.size(), *tensor.shape[1:])
    return own, dist.reduce_scatter_tensor(own, tensor, group=group, async_op=True)


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
                part._forward_impl = partial(_linear, deferral)
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
    deferral: Deferral,
    *,
    input: torch.Tensor,
    weight: torch.nn.Parameter,
    bias: torch.Tensor | None,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: dist.ProcessGroup | None,
    **unused: Any,
) -> torch.Tensor:
    """Stand in for megatron's product."""
    whole = whole_of(weight, back=False) if partition_of(weight) is not None else None
    output: torch.Tensor = _Linear.apply(
        deferral, whole, allreduce_dgrad, sequence_parallel, tp_group, input, weight, bias
    )
    return output


class _Linear(torch.autograd.Function):
    """A linear, whose backward pass may put the weight's gradient off. `whole` is the matrix of a weight that
    is a partition, else None: it is not kept, and gathered again on the way back.

    With `gathers` ranks of the `group` divide the tokens, and its backward scatters the sums of gradients
    that it all-reduces with `sums`. What it sends moves while the next product runs.
    """

    @staticmethod
    def forward(
        ctx: Any,
        deferral: Deferral,
        whole: torch.Tensor | None,
        sums: bool,
        gathers: bool,
        group: dist.ProcessGroup | None,
        input: torch.Tensor,
        weight: torch.nn.Parameter,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.deferral, ctx.sums, ctx.group = deferral, sums, group
        ctx.gathers = group if gathers else None
        # The parameter itself: hooks on saved tensors, which move them, bring back another object.
        ctx.weight, ctx.learns, ctx.biased = weight, ctx.needs_input_grad[6], bias is not None
        ctx.save_for_backward(*(input,) * ctx.learns)
        rows = input if ctx.gathers is None else gathered(input, ctx.gathers)
        matrix = (weight if whole is None else whole).t()
        if bias is None:
            return rows.matmul(matrix)
        return torch.addmm(bias, rows.flatten(0, -2), matrix).unflatten(0, rows.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), weight, pending = grads, ctx.weight, ctx.deferral.pending
        is_partition = partition_of(weight) is not None
        now = ctx.learns and pending is None and not is_partition
        # Detached: what made the input holds the input and the gradient of a layer that was recomputed.
        inputs = ctx.saved_tensors[0].detach() if ctx.learns else None
        gathering = reducing = grad_weight = None
        if inputs is not None and now and ctx.gathers is not None:
            inputs, gathering = _gathering(inputs, ctx.gathers)
        grad_input = whole = grad.matmul(whole_of(weight, back=True))
        if gathering is not None:
            gathering.wait()
        if ctx.sums:
            reducing = dist.all_reduce(grad_input, group=ctx.group, async_op=True)
        elif ctx.gathers is not None:
            grad_input, reducing = _scattering(whole, ctx.gathers)
        if reducing is not None and not now:
            reducing.wait()
            del whole
        if inputs is not None:
            product = _Product(weight, inputs, grad, None if now else ctx.gathers)
            if pending is not None:
                pending.put_off(product)
            elif is_partition or hasattr(weight, "main_grad"):
                product.add()
            else:
                grad_weight = grad.flatten(0, -2).t().matmul(inputs.flatten(0, -2))
        if reducing is not None:
            reducing.wait()
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.biased else None
        return None, None, None, None, None, grad_input, grad_weight, grad_bias

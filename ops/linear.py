"""What a linear layer costs, and how its weight's gradient is added up. The layer is megatron's or torch's.

Shapes: T tokens, n inputs, m outputs.
"""

import torch


def add_weight_gradient(inputs: torch.Tensor, grads: torch.Tensor, total: torch.Tensor) -> None:
    """Add to `total` [m, n] the gradient of a weight: of inputs [T, n] and gradients of outputs [T, m].

    The product adds up itself, so that nothing of the weight's size is written, read and rounded in between.
    A CPU cannot add in fp32 what it multiplies in half precision, and does one after the other there.
    """
    if total.dtype == grads.dtype:
        total.addmm_(grads.t(), inputs)
    elif total.is_cuda and total.dtype == torch.float32 and grads.dtype != torch.float64:
        torch.addmm(total, grads.t(), inputs, out_dtype=total.dtype, out=total)
    else:
        total.add_(grads.t().matmul(inputs))


def weight_gradient(inputs: torch.Tensor, grads: torch.Tensor) -> torch.Tensor:
    """The same gradient by itself, [m, n] in fp32 (fp64 of fp64)."""
    exact = torch.promote_types(grads.dtype, torch.float32)
    if grads.is_cuda and grads.dtype != exact:
        return torch.mm(grads.t(), inputs, out_dtype=exact)
    return grads.t().matmul(inputs).to(exact)


def linear_flops(tokens: int, inputs: int, outputs: int) -> int:
    """Forward FLOPs of a linear layer."""
    return 2 * tokens * inputs * outputs


def linear_bytes(tokens: int, inputs: int, outputs: int, element: int) -> int:
    """Bytes that a linear layer must read and write: its weight, its input and its output, once each."""
    return (inputs * outputs + tokens * (inputs + outputs)) * element

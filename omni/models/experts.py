"""The experts of one rank: their feed-forwards as two grouped products, whatever their number.

A weight is one parameter [E, m, n] of all experts of the rank; names, checkpoints and seeds know the matrix
of each (`regions.py`). Rows come in the order of experts, and where each expert's end is known on the device:
the host does not ask. A row's product is weighed by the probability with which its token chose the expert.

Invariant: a row gets what megatron-core's MLP of its expert alone would give it.

Shapes: R rows, E experts of this rank, D width, F width of an expert, n inputs and m outputs of a linear;
`ends` [E] as in `ops/grouped.py`.
"""

from dataclasses import dataclass
from typing import Any

import torch

from omni.models.feed_forward import activated
from omni.models.weight_gradients import Deferral, PutsOff
from ops.grouped import grouped_inputs, grouped_linear, grouped_weights
from ops.routing import weighed
from parallel.megatron import MegatronModule, ProcessGroupCollection, TransformerConfig

_COLUMNS = 8  # of ones, by which rows are summed: 16 bytes in half precision


class Experts(MegatronModule):
    """What megatron's MoELayer takes for the experts of this rank."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        hidden, ffn = config.hidden_size, config.moe_ffn_hidden_size
        both = ffn * (2 if config.gated_linear_unit else 1)
        self.linear_fc1 = ExpertLinear(num_local_experts, hidden, both, config)
        self.linear_fc2 = ExpertLinear(num_local_experts, ffn, hidden, config)

    def forward(
        self, rows: torch.Tensor, ends: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Rows [R, D] in the order of experts, their probabilities [R] → [R, D]; no bias is left to add."""
        inner = weighed(activated(self.linear_fc1(rows, ends), self.config), probs)
        return self.linear_fc2(inner, ends, probs.unsqueeze(1)), None


class ExpertLinear(PutsOff):
    """A linear of each expert: `weight` [E, m, n] and, where linears have one, `bias` [E, m]."""

    def __init__(self, experts: int, inputs: int, outputs: int, config: TransformerConfig) -> None:
        super().__init__()
        dtype = config.params_dtype
        self.weight = torch.nn.Parameter(torch.empty(experts, outputs, inputs, dtype=dtype))
        self.bias = None
        if config.add_bias_linear:
            self.bias = torch.nn.Parameter(torch.empty(experts, outputs, dtype=dtype))
        for parameter in self.parameters():
            _mark(parameter)

    def forward(
        self, rows: torch.Tensor, ends: torch.Tensor, scale: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows [R, n] → [R, m], with a bias that is multiplied by the `scale` [R, 1] of its row, if any."""
        out: torch.Tensor = _GroupedLinear.apply(self.deferral, rows, self.weight, ends)
        if self.bias is None:
            return out
        bias = _Biases.apply(self.bias, ends, len(rows))
        return out + (bias if scale is None else (bias * scale).to(out.dtype))


def _mark(parameter: torch.nn.Parameter) -> None:
    """Mark a weight as experts', so that it is reduced and counted over the ranks that see them.

    Without the first mark gradients would be summed over cp·dp alone, although experts see only a tp-th of
    the tokens. Without the second, which `mark_parallel` gives to linears it knows, their norm would be that
    of the first tp rank's alone.
    """
    parameter.allreduce = False  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _GroupedProduct:
    """The gradient of `weight` [E, m, n], not yet made: of rows [R, n] and gradients of outputs [R, m]."""

    weight: torch.nn.Parameter
    rows: torch.Tensor
    grads: torch.Tensor
    ends: torch.Tensor

    def add(self) -> None:
        vars(self.weight)["main_grad"].add_(grouped_weights(self.rows, self.grads, self.ends))


class _GroupedLinear(torch.autograd.Function):
    """Grouped products, whose backward may put the weights' gradient off, as `weight_gradients.py` does."""

    @staticmethod
    def forward(
        ctx: Any,
        deferral: Deferral | None,
        rows: torch.Tensor,
        weight: torch.nn.Parameter,
        ends: torch.Tensor,
    ) -> torch.Tensor:
        ctx.deferral = deferral
        # The parameter itself: hooks on saved tensors, which move them, bring back another object.
        ctx.weight, ctx.learns = weight, ctx.needs_input_grad[2]
        ctx.save_for_backward(ends, *(rows,) * ctx.learns)
        return grouped_linear(rows, weight, ends)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (ends, *rows), weight = grads, ctx.saved_tensors, ctx.weight
        grad = grad.contiguous()
        pending = ctx.deferral.pending if ctx.deferral is not None else None
        grad_rows = grouped_inputs(grad, weight, ends)
        if not ctx.learns:
            return None, grad_rows, None, None
        # Detached: what made the rows holds the input and the gradient of a layer that was recomputed.
        product = _GroupedProduct(weight, rows[0].detach(), grad, ends)
        if pending is not None:
            pending.put_off(product)
        elif hasattr(weight, "main_grad"):
            product.add()
        else:
            return None, grad_rows, grouped_weights(product.rows, grad, ends), None
        return None, grad_rows, None, None


class _Biases(torch.autograd.Function):
    """Biases [E, m] → that of each of R rows [R, m]. Gradients are summed by a product, in a fixed order."""

    @staticmethod
    def forward(ctx: Any, bias: torch.Tensor, ends: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.save_for_backward(ends)
        of = torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)
        return bias.index_select(0, of)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (ends,) = grads, ctx.saved_tensors
        ones = grad.new_ones(len(grad), _COLUMNS)
        return grouped_weights(ones, grad.contiguous(), ends)[..., 0], None, None

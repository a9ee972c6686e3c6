"""Where the operators of a backward add gradients of parameters."""

from collections.abc import Sequence

import torch


def totals_of(
    parameters: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Of each parameter that there is its `main_grad`, or zeros in single precision at least if it has
    none; and of all what autograd is to have of them: nothing where it is added to `main_grad`.
    """
    totals: list[torch.Tensor] = []
    handed: list[torch.Tensor | None] = []
    for parameter in parameters:
        if parameter is None:
            handed.append(None)
        elif parameter.requires_grad and hasattr(parameter, "main_grad"):
            totals.append(vars(parameter)["main_grad"])
            handed.append(None)
        else:
            exact = torch.promote_types(parameter.dtype, torch.float32)
            totals.append(torch.zeros_like(parameter, dtype=exact))
            handed.append(totals[-1])
    return totals, handed

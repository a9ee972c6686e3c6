"""Operators of torch that are ours: one call each, for whoever counts, rehearses or measures.

torch's own decorator for them, `custom_op`, says the same in fewer words and takes several times as much
Python a call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import library as operators


def operator(
    run: Callable[..., Any], fake: Callable[..., Any], changed: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Return `run` as an operator of its name under "omni", on CPUs and GPUs; `fake` makes its results
    without numbers.

    Both take the same arguments, which `run` has annotated. The operator changes those that are named,
    returns none of them, and has no derivative: who needs one calls it in a `torch.autograd.Function`.
    """
    name = run.__name__.strip("_")
    operators.define(f"omni::{name}", operators.infer_schema(run, mutates_args=changed))
    operators.impl(f"omni::{name}", ("cpu", "cuda"), run)
    operators.register_fake(f"omni::{name}", fake)
    made: Callable[..., Any] = getattr(torch.ops.omni, name).default
    return made

"""Faults that a CPU forgives and a GPU does not, and where each is planted. For the process on fake CUDA."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_steps import GPU, run_case
from parity_matrix import Case

from omni.rank.optimizer import JointOptimizer
from omni.rehearsal.findings import unexpected
from ops import attention
from ops.norm import Norm
from pipeline.engine import _RunningStep


@dataclass(frozen=True)
class Fault:
    """`do` runs before each call of `name` of `owner`, on the last of its arguments."""

    owner: Any
    name: str
    do: Callable[[Any], object]

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        original = getattr(self.owner, self.name)

        def faulty(*args: Any, **kwargs: Any) -> Any:
            self.do(args[-1])
            return original(*args, **kwargs)

        patch.setattr(self.owner, self.name, faulty)


def in_layer(do: Callable[[torch.Tensor], object]) -> Fault:
    """A fault in a layer's norm, on what it takes in: [T, 1, D]."""
    return Fault(Norm, "forward", do)


def _hook(x: torch.Tensor) -> None:
    def check(grad: torch.Tensor) -> None:
        assert not math.isnan(grad.sum().item())

    if x.requires_grad:
        x.register_hook(check)


FAULTS = {
    "CPU tensor in a product": in_layer(lambda x: x @ torch.ones(x.shape[-1], 2, dtype=x.dtype)),
    "CPU tensor in a sum": in_layer(lambda x: x + torch.ones(x.shape[-1], dtype=x.dtype)),
    "product of two dtypes": in_layer(lambda x: x.float() @ x.new_ones(x.shape[-1], 2)),
    "float64": in_layer(lambda x: x.double()),
    "item": in_layer(lambda x: x.sum().item()),
    "branch on a value": in_layer(lambda x: 1 if x.max() > 0 else 0),
    "tolist": in_layer(lambda x: x.sum((0, 1)).tolist()),
    "cpu": in_layer(lambda x: x.cpu()),
    "nonzero": in_layer(lambda x: x.nonzero()),
    "boolean index": in_layer(lambda x: x[x > 0]),
    "tensor from numbers": in_layer(lambda x: torch.tensor([1.0, 2.0], device=x.device)),
    "tensor made on the CPU": in_layer(lambda x: torch.ones(2).to(x.device)),
    "copy that is not pinned": in_layer(lambda x: torch.ones(2).to(x.device, non_blocking=True)),
    "pinned copy that blocks": in_layer(lambda x: torch.ones(2).pin_memory().to(x.device)),
    "hook on a gradient": in_layer(_hook),
    "copy in the engine": Fault(_RunningStep, "ship", lambda op: torch.ones(2).to(GPU)),
    "synchronize": Fault(_RunningStep, "backward", lambda op: torch.cuda.synchronize()),
    "event": Fault(_RunningStep, "hand_back", lambda rows: torch.cuda.Event().synchronize()),
    "stream": Fault(JointOptimizer, "update", lambda totals: torch.cuda.current_stream().synchronize()),
    "pageable index list": Fault(attention, "_cumulative", lambda lengths: torch.ones(2).to(GPU)),
}


def found(name: str, folder: Path) -> list[str]:
    """Plant a fault, run a step of a single rank, and return what the harness says of it."""
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[name].plant(patch)
        try:
            rehearsal = run_case(Case(), 0, folder, layers=1, samples=1)
            return [str(finding) for finding in unexpected(rehearsal.findings)]
        except Exception as error:
            return [f"{type(error).__name__}: {error}", *error.__notes__]

"""Which matrices of the LLM ZeRO partitions: those of linears of its layers that experts do not divide.

The statement of what this takes is `partitions.py`.
"""

from collections.abc import Iterable

import torch

from parallel.megatron import ColumnParallelLinear, RowParallelLinear
from parallel.partitions import PartitionedPart, partition_of


def partition_layers(layers: Iterable[torch.nn.Module], part: PartitionedPart) -> None:
    """Leave this rank its partitions of the matrices of `part`, in `layers` that `mark_parallel` has seen."""
    for layer in layers:
        linears = (of for of in layer.modules() if isinstance(of, ColumnParallelLinear | RowParallelLinear))
        part.divide(own for own in linears if getattr(own.weight, "allreduce", True))


def forget_whole(module: torch.nn.Module) -> None:
    """Let go of the matrices of a module that were gathered of partitions."""
    places = map(partition_of, module.parameters())
    for part in {place.part for place in places if place is not None}:
        part.forget()

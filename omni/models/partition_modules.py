"""Which matrices of the LLM ZeRO partitions: those of linears of its layers that experts do not divide.

The statement of what this takes is `partitions.py`.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist

from parallel.megatron import ColumnParallelLinear, RowParallelLinear
from parallel.partitions import PartitionedPart, partition_of


def partition_layers(
    layers: Iterable[torch.nn.Module], group: dist.ProcessGroup, recompute: str, *, stays: bool
) -> None:
    """Leave this rank its partitions of the matrices of a part's layers, which `mark_parallel` has seen."""
    part = PartitionedPart(group, stays=stays, recomputed=recompute == "full")
    for layer in layers:
        linears = (of for of in layer.modules() if isinstance(of, ColumnParallelLinear | RowParallelLinear))
        part.divide([(own, "weight") for own in linears if getattr(own.weight, "allreduce", True)])


def settle_partitions(module: torch.nn.Module) -> None:
    """Wait for the gradients of partitions of a module that are on their way."""
    for part in _parts(module):
        part.settle()


def forget_whole(module: torch.nn.Module) -> None:
    """Let go of the matrices of a module that were gathered of partitions."""
    for part in _parts(module):
        part.forget()


def _parts(module: torch.nn.Module) -> set[PartitionedPart]:
    places = map(partition_of, module.parameters())
    return {place.part for place in places if place is not None}

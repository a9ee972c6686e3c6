"""Matrices that the cp ranks of a pool divide among them: ZeRO (Rajbhandari et al., 2020, section 5), stages
2 and 3.

Each of the n cp ranks of a pool holds a *partition* of a matrix, an n-th of its elements in the order of
memory, with the gradient and the optimizer state of that alone. In ZeRO-3 a matrix is whole only while a pass
needs it: a forward gathers it, and so does a backward. In ZeRO-2 it stays whole from its first pass in a step
to the update. In both, gradients are scattered as each backward makes them.

Matrices are gathered layer by layer, one layer ahead of the pass, and a scatter is waited for when the next
begins, or the pass ends: both move while products run.

Invariant: all cp ranks run the same passes of a part in the same order, and each pass takes every partitioned
matrix of a layer once. Plans see to it: ranks that communicate inside layers share their passes' order.

Example: a matrix of 6 × 4 over 2 cp ranks. CP rank 0 holds elements 0 to 11 as a parameter [12, 1], cp rank 1
elements 12 to 23.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Partition:
    """What a parameter is a partition of: `shape` is the matrix's, `first` the number of its first element
    there. It is matrix `number` of a `layer` of a `part`.
    """

    shape: tuple[int, ...]
    first: int
    layer: int
    number: int
    part: "PartitionedPart"


def partition_of(parameter: torch.Tensor) -> Partition | None:
    """Return what `parameter` is a partition of, None if it is whole."""
    found: Partition | None = getattr(parameter, "partition", None)
    return found


class PartitionedPart:
    """The partitioned matrices of one part of a component on one cp rank of `group`.

    In ZeRO-2 matrices stay whole until `forget`. Where layers are `recomputed`, what a recomputation has
    gathered serves the backward that it was made for.
    """

    def __init__(self, group: dist.ProcessGroup, zero: int, *, recomputed: bool) -> None:
        self.group = group
        self.stays = zero == 2
        self.recomputed = recomputed
        # Modules rather than weights: to move a module may make parameters anew.
        self.layers: list[list[torch.nn.Module]] = []
        # By layer and number: the whole matrix, and what to wait for before it is used.
        self.whole: dict[int, dict[int, tuple[torch.Tensor, Any]]] = {}
        # A gradient on its way: what to wait for, what arrives, where it is added, and what leaves.
        self.leaving: tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    def divide(self, linears: Iterable[torch.nn.Module]) -> None:
        """Replace the weights of the next layer's `linears` by this cp rank's partitions. One that has no
        equal partitions stays whole.
        """
        own: list[torch.nn.Module] = []
        for module in linears:
            matrix = module.weight
            assert isinstance(matrix, torch.nn.Parameter)
            if matrix.numel() % self.group.size():
                continue
            size = matrix.numel() // self.group.size()
            first = self.group.rank() * size
            held = matrix.detach().reshape(-1)[first : first + size].clone().view(size, 1)
            parameter = torch.nn.Parameter(held, requires_grad=matrix.requires_grad)
            for key, value in vars(matrix).items():
                setattr(parameter, key, value)
            place = Partition(tuple(matrix.shape), first, len(self.layers), len(own), self)
            parameter.partition = place  # type: ignore[attr-defined]
            module.weight = parameter
            own.append(module)
        self.layers.append(own)

    def gather(self, weight: torch.nn.Parameter, *, back: bool) -> torch.Tensor:
        """Return the whole matrix of a partition, for a forward or on the way `back`.

        What follows is started here, too: the matrices of the layer that the pass comes to next.
        """
        place = partition_of(weight)
        assert place is not None
        again = not back and self.recomputed and torch.is_grad_enabled()
        self._start(place.layer)
        self._start(place.layer + (-1 if back or again else 1))
        own = self.whole[place.layer]
        matrix, work = own[place.number]
        if work is not None:
            work.wait()
        if self.stays or again:
            own[place.number] = matrix, None
        else:
            del own[place.number]
            if not own:
                del self.whole[place.layer]
        return matrix

    def _start(self, layer: int) -> None:
        """Start to gather the matrices of a layer, if there is one and they are not on their way."""
        if layer in self.whole or not 0 <= layer < len(self.layers) or not self.layers[layer]:
            return
        self.whole[layer] = own = {}
        for number, module in enumerate(self.layers[layer]):
            weight = module.weight
            assert isinstance(weight, torch.Tensor)
            place = partition_of(weight)
            assert place is not None
            matrix = weight.new_empty(place.shape, requires_grad=False)
            held = weight.detach().view(-1)
            work = dist.all_gather_into_tensor(matrix.view(-1), held, group=self.group, async_op=True)
            own[number] = matrix, work

    def scatter(self, weight: torch.nn.Parameter, gradient: torch.Tensor) -> None:
        """Sum the gradient [as the whole matrix], fp32, over the cp ranks and add this one's part to the
        `main_grad` of its partition. It is under way until the next one's turn, or `settle`.
        """
        self.settle()
        total = vars(weight)["main_grad"]
        own = gradient.new_empty(total.numel())
        work = dist.reduce_scatter_tensor(own, gradient.view(-1), group=self.group, async_op=True)
        self.leaving = work, own, total, gradient

    def settle(self) -> None:
        """Wait for the gradient that is on its way, if there is one."""
        if self.leaving is None:
            return
        work, own, total, _ = self.leaving
        work.wait()
        total.add_(own.view_as(total))
        self.leaving = None

    def forget(self) -> None:
        """Let go of whole matrices: their partitions are about to change, or have changed."""
        for own in self.whole.values():
            for _, work in own.values():
                if work is not None:
                    work.wait()
        self.whole.clear()


def whole_of(weight: torch.nn.Parameter, *, back: bool) -> torch.Tensor:
    """Return a matrix for a forward, or for the way `back`: gathered, if `weight` is a partition of it."""
    place = partition_of(weight)
    return weight if place is None else place.part.gather(weight, back=back)

"""Which part of a parameter a rank holds, by names that do not depend on the layout.

Every parameter has one full shape and one canonical name, whoever holds it: layers are counted from the start
of the model, experts from the first, and a tied output layer is the word embedding it copies. A rank holds a
region of it: all of it, or its tensor-parallel part along one dimension. Initialisation, checkpoints and
parity are written in these terms alone, so none of them knows a layout.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from omni.models.adapters import A, B
from omni.models.moe import expert_name
from parallel.megatron import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from parallel.partitions import partition_of

TIED = "embedding.word_embeddings.weight"
_LAYER = re.compile(r"(?<=layers\.)(\d+)")


@dataclass(frozen=True)
class Region:
    """The part of a tensor of full `shape` that lies in `runs` (start, length) along dimension `dim`."""

    shape: tuple[int, ...]
    dim: int
    runs: tuple[tuple[int, int], ...]

    @property
    def is_whole(self) -> bool:
        """Whether it is the full tensor."""
        return self.runs == ((0, self.shape[self.dim]),)

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Return the part out of the full tensor."""
        parts = [full.narrow(self.dim, start, length) for start, length in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def elements(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Say where elements [start, stop) of the flattened part lie in the flattened full tensor.

        Returns int64 arrays (offset from `start`, place in the full tensor, length) of contiguous runs, in
        order of both.
        """
        inner = prod(self.shape[self.dim + 1 :])
        outer = np.arange(prod(self.shape[: self.dim]), dtype=np.int64)[:, None]
        starts = np.array([s for s, _ in self.runs], np.int64)
        lengths = np.array([n for _, n in self.runs], np.int64)
        held = int(lengths.sum())
        local = (outer * held + np.cumsum(lengths) - lengths) * inner
        full = (outer * self.shape[self.dim] + starts) * inner
        size = np.broadcast_to(lengths * inner, local.shape)
        local, full, size = local.ravel(), full.ravel(), size.ravel()
        low = np.maximum(local, start)
        high = np.minimum(local + size, stop)
        kept = low < high
        return (low - start)[kept], (full + low - local)[kept], (high - low)[kept]


@dataclass(frozen=True)
class Numbering:
    """What canonical names need to know of a rank: its first layer and its first expert in a component whose
    tensor-parallel group has `tp_size` ranks, this one number `tp_rank`; and whether the output is tied.
    """

    first_layer: int = 0
    first_expert: int = 0
    tied: bool = False
    tp_rank: int = 0
    tp_size: int = 1


@dataclass(frozen=True)
class Named:
    """A parameter by its canonical name, and which part of it this rank holds: of the elements of its region
    those from `first`, all but for a partition.

    Ranks of a replica may hold the same: those of the first and the last virtual stage a tied embedding,
    tensor-parallel ranks what is not divided among them. `copy` is (0, 0) for the first of these, and tells
    the others apart. Experts are no such copies: their ranks are those of data parallelism. Experts of a rank
    have a parameter together, of which each `expert` has its own row, and a name; None for other parameters.
    """

    name: str
    parameter: torch.nn.Parameter
    region: Region
    first: int
    copy: tuple[int, int]
    expert: int | None = None

    @property
    def own(self) -> torch.Tensor:
        """What of the parameter is of this name, as a view."""
        return self.parameter if self.expert is None else self.parameter[self.expert]

    @property
    def elements(self) -> tuple[int, int]:
        """The first of its elements in the flattened parameter, and how many there are."""
        count = self.own.numel()
        return count * (self.expert or 0), count

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Return what this rank holds out of the full tensor."""
        own = self.own
        return self.region.cut(full).reshape(-1)[self.first :][: own.numel()].view(own.shape)

    @property
    def is_copy(self) -> bool:
        """Whether a rank before this one, of the same replica, holds the same."""
        return self.copy != (0, 0)


def mark_parallel(module: torch.nn.Module) -> None:
    """Note on each weight how tensor parallelism divides it.

    megatron-core does so only where it draws the weights itself; without the notes, gradients of divided
    weights would be taken for copies, and left out of the norm.
    """
    for part in module.modules():
        if isinstance(part, ColumnParallelLinear | VocabParallelEmbedding):
            dim = 0
        elif isinstance(part, RowParallelLinear):
            dim = 1
        else:
            continue
        for name, parameter in part.named_parameters(recurse=False):
            # A row-parallel bias is whole on every rank, and so is an adapter's side that none divides.
            divided = name in (("weight", "bias", B) if dim == 0 else ("weight", A))
            parameter.tensor_model_parallel = divided
            parameter.partition_dim = dim if divided else -1


def named_parameters(module: torch.nn.Module, numbering: Numbering) -> Iterator[Named]:
    """Yield all parameters of a module that `mark_parallel` has seen."""
    gated = bool(getattr(getattr(module, "config", None), "gated_linear_unit", False))
    for name, parameter in module.named_parameters():
        if not getattr(parameter, "allreduce", True):
            yield from _experts(name, parameter, numbering)
            continue
        canonical = canonical_name(name, numbering)
        place = partition_of(parameter)
        held, first = (parameter.shape, 0) if place is None else (place.shape, place.first)
        size, rank = numbering.tp_size, numbering.tp_rank
        if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
            region = _whole(tuple(held) or (1,))  # a scalar is an element like any other
        else:
            # Each rank holds its part of the gate, then its part of what the gate lets through.
            parts = 2 if gated and "linear_fc1" in name else 1
            dim = int(vars(parameter)["partition_dim"])
            each = held[dim] // parts
            full = list(held)
            full[dim] *= size
            runs = tuple((part * each * size + rank * each, each) for part in range(parts))
            region = Region(tuple(full), dim, runs)
        of_parts = numbering.first_layer if canonical == TIED else 0
        copy = (of_parts, rank if region.is_whole else 0)
        yield Named(canonical, parameter, region, first, copy)


def _experts(name: str, parameter: torch.nn.Parameter, numbering: Numbering) -> Iterator[Named]:
    """Each expert's own of a parameter of all experts of the rank."""
    canonical, region = canonical_name(name, numbering), _whole(tuple(parameter.shape[1:]))
    for expert in range(len(parameter)):
        own = expert_name(canonical, numbering.first_expert + expert)
        yield Named(own, parameter, region, 0, (0, 0), expert)


def _whole(shape: tuple[int, ...]) -> Region:
    return Region(shape, 0, ((0, shape[0]),))


def all_parameters(
    modules: Mapping[int, torch.nn.Module], numberings: Mapping[int, Numbering]
) -> Iterator[Named]:
    """Yield the parameters of all parts of a component, which have a module and a numbering each."""
    for part, module in modules.items():
        yield from named_parameters(module, numberings[part])


def canonical_name(name: str, numbering: Numbering) -> str:
    """Return the name of a parameter as if one rank held the whole component, that of experts without their
    numbers.
    """
    name = _LAYER.sub(lambda match: str(int(match[0]) + numbering.first_layer), name)
    if numbering.tied and name == "output_layer.weight":
        return TIED
    return name

"""Gradients of all components, from their reduction to one update, and weights on their way back from it.

Losses are sums and so are gradients: each component sums its own over its own groups, and all are divided
once, by the number of target tokens of the whole step. One norm over all components clips them. The number
of targets, the losses and the squared norms of all components travel in one reduction (`StepSums`). The
device divides, clips and skips by them itself: the host learns later what happened.

Each rank updates its shard of the weights, and gathers those of its peers behind the next step's first
passes: component by component, the LLM last, bucket by bucket (`part_buckets.py`). Invariant: a pass comes to
a layer when its weights have arrived, and whatever else reads weights calls `arrive` first.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from omni.models.llm import NAME as LLM
from omni.models.partition_modules import forget_whole
from omni.optim_config import OptimConfig
from omni.planning.optim_schedule import Stages, frozen_at, rate_at
from omni.rank.bucket_shares import BucketShares, main_weights_of
from omni.rank.part_buckets import PartBuckets, in_flight
from omni.rank.sharded_adamw import sharded_adamw
from omni.rank.totals import StepSums, StepTotals
from parallel.copies import Copy
from parallel.megatron import (
    DistributedDataParallel,
    ProcessGroupCollection,
    finalize_model_grads,
)
from parallel.partitions import partition_of


class ComponentOptimizer:
    """One component's gradients and AdamW state, sharded over its data-parallel ranks.

    `modules` are the parts of the component that this rank holds, by number. Gradients of each are reduced by
    themselves, all weights are updated at once. Weights that are partitions have replicas of their own, hence
    buffers and an optimizer of their own. `layers` are those of a part that say when a pass comes and leaves.
    Gradients travel in the type `sent`.
    """

    def __init__(
        self,
        name: str,
        modules: Mapping[int, torch.nn.Module],
        groups: ProcessGroupCollection,
        config: OptimConfig,
        layers: Mapping[int, Sequence[torch.nn.Module]] = MappingProxyType({}),
        sent: torch.dtype = torch.float32,
    ) -> None:
        self.name = name
        self.modules = dict(modules)
        self.groups = groups
        # Without the group that megatron would add up a tied embedding over: see `tie`.
        self.groups_of_parts = copy(groups)
        self.groups_of_parts.embd = None
        # All, but for a component with adapters.
        self.learning = [parameter for parameter in self.parameters if parameter.requires_grad]
        # One for what all ranks of a stage hold, one for experts: their gradients have other groups.
        whole = [parameter for parameter in self.learning if partition_of(parameter) is None]
        wrapped, self.optimizers = sharded_adamw(name, modules, whole, groups, config)
        divided: dict[int, DistributedDataParallel] = {}
        if groups.partition is not None:
            partitions = [parameter for parameter in self.learning if partition_of(parameter) is not None]
            divided, more = sharded_adamw(name, modules, partitions, _of_partitions(groups), config)
            self.optimizers += more
        self.shares = {own: BucketShares(own, config) for own in self.optimizers}
        self.buckets = {
            part: PartBuckets(ddp, divided.get(part), layers.get(part, ()), sent)
            for part, ddp in wrapped.items()
        }

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of all parts on this rank."""
        return [parameter for module in self.modules.values() for parameter in module.parameters()]

    def copies(self) -> Iterator[Copy]:
        """Yield the weights that ranks hold copies of: those of experts have other ranks than the rest."""
        of_kinds: dict[str, list[torch.nn.Parameter]] = defaultdict(list)
        for parameter in self.parameters:
            of_kinds[_kind(parameter)].append(parameter)
        for kind, own in of_kinds.items():
            yield Copy(f"{self.name}, {kind}" if kind else self.name, own, self._replicas(own[0]))

    def _buffers(self) -> Iterator[DistributedDataParallel]:
        """megatron's buffers of all parts."""
        return (ddp for buckets in self.buckets.values() for ddp in buckets.ddps)

    def clear(self) -> None:
        """Set all gradients to zero."""
        for ddp in self._buffers():
            ddp.zero_grad_buffer()

    def main_weights(self) -> dict[torch.nn.Parameter, tuple[Any, torch.nn.Parameter]]:
        """Return, for each parameter that this rank has a shard of, its optimizer and the shard's weights."""
        return {
            parameter: (optimizer, main)
            for optimizer in self.optimizers
            for parameter, main in main_weights_of(optimizer).items()
        }

    def state_of(self, main: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return AdamW's state of a shard of fp32 weights, made anew where there is none."""
        shares = next(
            self.shares[o] for o in self.optimizers if any(main is own for own in o.get_parameters())
        )
        shares.begin()
        return shares.state[main]

    def forget_state(self) -> None:
        """Let AdamW begin anew."""
        for shares in self.shares.values():
            shares.forget()

    def reduce(self, part: int) -> Callable[[], None]:
        """Start to sum the gradients of a part over the ranks that hold it. What is returned waits for that;
        afterwards each has its shard of the sum.

        They are all in one stage, so this waits for no other stage, and parts may be reduced in any order
        that these ranks agree on.
        """
        self.buckets[part].reduce()
        return partial(self._end_reduction, *self.buckets[part].ddps)

    def _end_reduction(self, ddp: DistributedDataParallel, *partitions: DistributedDataParallel) -> None:
        with in_flight(ddp):
            finalize_model_grads([ddp], pg_collection=self.groups_of_parts)
        for other in partitions:
            # What megatron finalises beside is done.
            with in_flight(other):
                other.finish_grad_sync()

    def tie(self) -> None:
        """Sum the gradients of an embedding that the first and the last stage hold a copy of each.

        Both call it after all reductions: in one of them, the last stage could wait for the first, and the
        first for a pass that the last has yet to run. Ranks that meet here have the same shard, because
        megatron gives such weights a bucket of their own.
        """
        group = self.groups.embd
        if group is None or group.size() == 1:
            return
        for parameter in self.learning:
            if getattr(parameter, "shared_embedding", False):
                dist.all_reduce(vars(parameter)["main_grad"], group=group)

    def gather_weights(self) -> None:
        """Start to gather the weights of all parts, one after the other, from the ranks that have updated or
        loaded a shard of them.
        """
        self._forget_whole()
        for part in sorted(self.modules):
            self.buckets[part].gather()

    def arrive(self) -> None:
        """Wait for all weights that are still being gathered."""
        for buckets in self.buckets.values():
            buckets.arrive(buckets.last)

    def _forget_whole(self) -> None:
        """Let go of matrices that were gathered of partitions: these change."""
        for module in self.modules.values():
            forget_whole(module)

    def base_shards(self) -> dict[torch.nn.Parameter, tuple[int, torch.Tensor]]:
        """Return what this rank loads and saves of each parameter that never learns, which all its replicas
        hold whole: the first of its elements, and a view of them.
        """
        found, learning = {}, set(self.learning)
        for parameter in self.parameters:
            if parameter not in learning:
                share, start = self._share(parameter)
                found[parameter] = start, parameter.data.view(-1)[start : start + share]
        return found

    def gather_base(self) -> None:
        """Gather the parameters that never learn from the ranks that have loaded a shard of them."""
        for parameter, (start, shard) in self.base_shards().items():
            group = self._replicas(parameter)
            if group.size() > 1:
                share, _ = self._share(parameter)
                padded = parameter.new_zeros(share * group.size())
                padded[start : start + len(shard)] = shard
                dist.all_gather_into_tensor(
                    padded, padded[group.rank() * share :][:share].clone(), group=group
                )
                parameter.data.view(-1).copy_(padded[: parameter.numel()])

    def _replicas(self, parameter: torch.nn.Parameter) -> dist.ProcessGroup:
        """The ranks that hold copies of a parameter."""
        of_kinds: dict[str, dist.ProcessGroup] = {
            "": self.groups.dp_cp,
            "experts": self.groups.expt_dp,
            "partitions": self.groups.domains,
        }
        return of_kinds[_kind(parameter)]

    def _share(self, parameter: torch.nn.Parameter) -> tuple[int, int]:
        """How many elements of a parameter each replica loads, and the first of this one's."""
        group = self._replicas(parameter)
        share = -(-parameter.numel() // group.size())
        return share, min(group.rank() * share, parameter.numel())

    def gradients(self) -> list[torch.Tensor]:
        """Return this rank's shards of the summed gradients, each element on one rank only."""
        grads: list[torch.Tensor] = []
        for optimizer in self.optimizers:
            optimizer.prepare_grads()
            grads += optimizer.get_main_grads_for_grad_norm()
        return grads

    def update(self, lr: float, factor: torch.Tensor, sound: torch.Tensor) -> None:
        """Take one AdamW step with the summed gradients times `factor`, or change nothing if `sound` is 0 and
        not 1, and start to gather the new weights. Both are fp32, [], on the device.
        """
        for shares in self.shares.values():
            shares.update(lr, factor, sound)
        self.gather_weights()

    def set_trainable(self, trainable: bool) -> None:
        """Freeze or thaw all weights that ever learn; a frozen component computes no weight gradients."""
        for parameter in self.learning:
            parameter.requires_grad_(trainable)


def _kind(parameter: torch.nn.Parameter) -> str:
    """Parameters of one kind have the same replicas: "" for those that all ranks of a stage hold."""
    if partition_of(parameter) is not None:
        return "partitions"
    return "" if getattr(parameter, "allreduce", True) else "experts"


def _of_partitions(groups: ProcessGroupCollection) -> ProcessGroupCollection:
    """The groups that partitions are reduced over: their replicas are the domains."""
    own = copy(groups)
    own.dp = own.dp_cp = groups.domains
    return own


class JointOptimizer:
    """All components under one norm, each with its own learning rate and frozen spans.

    `names` are all components of the run; `components` those of them that live on this rank.
    """

    def __init__(
        self,
        names: Sequence[str],
        components: Mapping[str, ComponentOptimizer],
        stages: Stages,
        device: torch.device,
    ) -> None:
        self.names = tuple(names)
        self.components = dict(components)
        self.stages = stages
        self.clip = stages[0].optim.clip  # the same in all
        self.device = device
        self.frozen: tuple[str, ...] = ()

    def begin(self, step: int) -> None:
        """Clear gradients and set which components train at `step`."""
        frozen = frozen_at(self.stages, step)
        for name, component in self.components.items():
            if (name in frozen) != (name in self.frozen):
                component.set_trainable(name not in frozen)
            component.clear()
        self.frozen = frozen

    def arrive(self) -> None:
        """Wait for all weights that are still being gathered."""
        for component in self.components.values():
            component.arrive()

    def tie(self) -> None:
        """Sum gradients of tied embeddings over the stages that share them, after a step's reductions."""
        for name in self.names:
            if name in self.components and name not in self.frozen:
                self.components[name].tie()

    def squares(self) -> torch.Tensor:
        """Squared norm of this rank's shards of each component's summed gradient, [components] in fp64."""
        squares = torch.zeros(len(self.names), dtype=torch.float64, device=self.device)
        for i, name in enumerate(self.names):
            trains = name in self.components and name not in self.frozen
            grads = self.components[name].gradients() if trains else []
            if grads:
                squares[i] = torch.stack(torch._foreach_norm(grads)).double().square().sum()
        return squares

    def norms(self, step: int, totals: StepTotals) -> dict[str, float]:
        """Gradient norm of the mean loss, for each component that trained at `step`."""
        scale, frozen = totals.num_targets or math.nan, frozen_at(self.stages, step)
        return {
            name: math.sqrt(square) / scale
            for name, square in zip(self.names, totals.squares, strict=True)
            if name not in frozen
        }

    def is_sound(self, step: int, totals: StepTotals) -> bool:
        """Whether `step` updated: its norm is finite."""
        return math.isfinite(math.sqrt(sum(n * n for n in self.norms(step, totals).values())))

    def update(self, step: int, sums: StepSums) -> torch.Tensor:
        """Divide, clip and step; nothing changes if the norm is not finite, as it is without targets. Returns
        whether it is: 1.0 or 0.0, [] on the device.
        """
        targets = sums.num_targets
        norm = (sums.squares.sqrt() / targets).square().sum().sqrt()  # squares of what is frozen are 0
        clip = torch.clamp(self.clip / (norm + 1e-6), max=1.0) if self.clip > 0 else torch.ones_like(norm)
        factor, sound = (clip / targets).float(), norm.isfinite().float()
        training = [name for name in self.components if name not in self.frozen]
        # The LLM last: its weights are gathered while encoders run.
        for name in sorted(training, key=lambda name: name == LLM):
            self.components[name].update(self.learning_rate(name, step), factor, sound)
        return sound

    def learning_rate(self, name: str, step: int) -> float:
        """Learning rate of a component at `step`, 0 while it is frozen."""
        return rate_at(self.stages, name, step)

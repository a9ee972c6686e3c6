"""The buckets of one part of a component, in the order in which they travel.

megatron lays gradients and weights in buckets of neighbouring parameters. A forward comes through them from
the first to the last, so updated weights are gathered in that order, and each layer waits for its own; a
backward comes through them from the last to the first, and each bucket is reduced once the layers that it has
parameters of are done. Those that are complete may also travel behind the layers of another component.

Invariant: all replicas start the same buckets in the same order, whatever a rank computes: those of a part
are in one order, and one that is not complete keeps back all that come after it.
"""

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from parallel.megatron import DistributedDataParallel
from parallel.rounded import RoundedSum, rounded_sum

FRONT = -1


class _Bucket(NamedTuple):
    """Where it begins, FRONT being what a pass needs before its first layer, and megatron's group of it."""

    layer: int
    ddp: DistributedDataParallel
    group: Any

    @property
    def elements(self) -> int:
        """Elements of its gradients, with padding."""
        return sum(each.grad_data.numel() for each in self.group.buckets)


class PartBuckets:
    """The buckets of a part: those of `whole`, and of `partitions`, if it has any, of matrices of its layers.

    `layers` are those that tell when a pass comes to them and when it has left them, none if no layer does;
    all weights are then needed from the first layer on, and gradients complete at the end. Gradients travel
    in the type `sent`, and are summed in fp32.
    """

    def __init__(
        self,
        whole: DistributedDataParallel,
        partitions: DistributedDataParallel | None,
        layers: Sequence[torch.nn.Module],
        sent: torch.dtype,
    ) -> None:
        self.sent = sent
        self.ddps = [whole] if partitions is None else [whole, partitions]
        places = _places(whole.module, layers)
        # Partitions are made whole before a pass comes to their layer, and their gradients settle last.
        found = [
            _Bucket(
                min(places[parameter] for parameter in group.params) if ddp is whole else FRONT, ddp, group
            )
            for ddp in self.ddps
            for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups)
        ]
        self.buckets = sorted(found, key=lambda bucket: bucket.layer)
        self.elements = sum(bucket.elements for bucket in self.buckets)
        self.last = len(layers) - 1
        self.coming: deque[_Bucket] = deque()
        self.left = list(self.buckets)

    def gather(self) -> None:
        """Start to gather the weights of all buckets."""
        assert not self.coming, "weights are still on their way"
        for bucket in self.buckets:
            with in_flight(bucket.ddp):
                bucket.group.start_param_sync()
        self.coming.extend(self.buckets)

    def arrive(self, layer: int) -> bool:
        """Wait for the weights that a pass needs up to a layer, with the last one for all. Returns whether
        any were on their way.
        """
        waited = False
        while self.coming and (self.coming[0].layer <= layer or layer >= self.last):
            group = self.coming.popleft().group
            group.param_gather_handle.wait()
            group.param_gather_handle = None
            waited = True
        return waited

    def reduce_behind(self, layer: int) -> None:
        """Start to reduce the buckets of which all parameters lie behind a layer, as far as they are not.

        Called when a backward has made the gradient of the layer's input: if the layer is recomputed, those
        of its own weights may be added later.
        """
        while self.left and self.left[-1].layer > layer:
            self._start(self.left.pop())

    def reduce_first(self, elements: int) -> None:
        """Start to reduce the buckets that begin within the first so many elements of all, as far as they are
        not. Gradients of all are complete.
        """
        begun = self.elements - sum(bucket.elements for bucket in self.left)
        while self.left and begun < elements:
            bucket = self.left.pop()
            begun += bucket.elements
            self._start(bucket)

    def _start(self, bucket: _Bucket) -> None:
        if self.sent is torch.float32:
            with in_flight(bucket.ddp):
                bucket.group.start_grad_sync()
        else:
            bucket.group.grad_reduce_handle = _rounded(bucket.group)

    def reduce(self) -> None:
        """Start to reduce what is left."""
        self.reduce_behind(FRONT - 1)
        self.left = list(self.buckets)


def _rounded(group: Any) -> RoundedSum:
    """Start to sum a bucket in bf16. megatron waits for what it finds as its handle."""
    (bucket,) = group.buckets
    assert bucket.gradient_scaling_factor == 1.0, "gradients are sums"
    return rounded_sum(bucket.grad_data, group.intra_distributed_optimizer_instance_group)


def _places(module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> dict[torch.nn.Parameter, int]:
    """The layer of each parameter: FRONT of those in front of all, one more than the last's behind them."""
    own = {parameter: number for number, layer in enumerate(layers) for parameter in layer.parameters()}
    places, at = {}, FRONT
    for parameter in module.parameters():
        at = own.get(parameter, at if at == FRONT else len(layers))
        places[parameter] = at
    return places


@contextlib.contextmanager
def in_flight(ddp: DistributedDataParallel) -> Iterator[None]:
    """Have megatron start a reduction or a gathering and wait for it apart: only inside, because during a
    backward its hooks would start reductions by themselves, and miss gradients of weights that are put off.
    """
    ddp.ddp_config.overlap_grad_reduce = ddp.ddp_config.overlap_param_gather = True
    try:
        yield
    finally:
        ddp.ddp_config.overlap_grad_reduce = ddp.ddp_config.overlap_param_gather = False

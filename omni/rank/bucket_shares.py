"""AdamW's state of one of megatron's optimizers, and its update: a rank's share of each bucket at once.

megatron gives a rank the same share of every bucket, and of each parameter in it a main weight of its own.
Here these are views of one tensor a bucket, as are its gradients and the model's weights already, so that
one operator updates a share (`ops/adamw.py`), however many parameters it has.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from omni.optim_config import OptimConfig
from ops.adamw import adamw
from ops.device import dtype_of

MOMENTS = ("exp_avg", "exp_avg_sq")


class _BucketShare(NamedTuple):
    """Of a bucket: fp32 weights, gradients, and the model's weights, None where these are fp32, [n] each; the
    main weights of its k parameters, and where each lies; on the device, that, [k, 2], and decays [k].
    """

    main: torch.Tensor
    grad: torch.Tensor
    model: torch.Tensor | None
    weights: Sequence[tuple[torch.nn.Parameter, slice]]
    runs: torch.Tensor
    decays: torch.Tensor


class BucketShares:
    """What `optimizer`, one of megatron's, has on this rank. Its state, by main weight, is what torch's AdamW
    has: `step`, `exp_avg` and `exp_avg_sq`, in the type that `config` says; none before the first update.
    """

    def __init__(self, optimizer: Any, config: OptimConfig) -> None:
        self.config = config
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = optimizer.optimizer.state
        self.shares = list(_shares(optimizer))
        self.moments: list[tuple[torch.Tensor, torch.Tensor]] = []
        # How many updates each parameter has had: a checkpoint may know of some and not of others.
        sizes = [len(share.weights) for share in self.shares]
        self.all_counts = torch.zeros(sum(sizes), device=optimizer.buffers[0].grad_data.device)
        self.counts = self.all_counts.split(sizes)

    def update(self, lr: float, factor: torch.Tensor, sound: torch.Tensor) -> None:
        """Take one step with the summed gradients times `factor`, fp32 [] on the device, where `sound`, as
        well, is 1; where it is 0, change nothing.
        """
        self.begin()
        self.all_counts.add_(sound)
        own = self.config
        for share, moments, counts in zip(self.shares, self.moments, self.counts, strict=True):
            adamw(
                *(share.main, share.grad, *moments, share.model, share.runs, share.decays, counts),
                *(factor, sound, lr, own.beta1, own.beta2, own.eps),
            )

    def begin(self) -> None:
        """Make room for moments, of zeros, if there is none."""
        if self.moments:
            return
        dtype = dtype_of(self.config.moments_dtype)
        for share, counts in zip(self.shares, self.counts, strict=True):
            first, second = (torch.zeros_like(share.main, dtype=dtype) for _ in MOMENTS)
            self.moments.append((first, second))
            for (weight, at), count in zip(share.weights, counts, strict=True):
                self.state[weight] = {"step": count, "exp_avg": first[at], "exp_avg_sq": second[at]}

    def forget(self) -> None:
        """Be as before the first update, but for the weights."""
        self.moments.clear()
        self.state.clear()
        self.all_counts.zero_()

    def tensors(self) -> list[torch.Tensor]:
        """All that is held of it, for whoever measures memory; fp32 weights are the model's."""
        tables = [table for share in self.shares for table in (share.main, share.runs, share.decays)]
        return [*tables, *chain(*self.moments), self.all_counts]

    def kept(self) -> list[torch.Tensor]:
        """What there is of moments, and of weights that are not the model's own."""
        mains = [share.main for share in self.shares if share.model is not None]
        return [*mains, *chain(*self.moments)]


def main_weights_of(optimizer: Any) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
    """Return the main weights of one of megatron's optimizers by the parameters of the model, of which this
    rank has a share.

    megatron's own numbering of them is that of its buffers, which differs from the optimizer's where a
    module has parameters of two dtypes.
    """
    models = chain(*optimizer.model_float16_groups, *optimizer.model_fp32_groups)
    mains = chain(*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups)
    return dict(zip(models, mains, strict=True))


def _shares(optimizer: Any) -> Iterator[_BucketShare]:
    """Lay the main weights of each bucket side by side, as its gradients are."""
    mains = main_weights_of(optimizer)
    decays = {main: group["weight_decay"] for group in optimizer.param_groups for main in group["params"]}
    for buffer, by_dtype in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        (ranges,) = by_dtype.values()
        group = buffer.data_parallel_group
        for bucket, held in zip(buffer.buckets, ranges, strict=True):
            size = bucket.grad_data.numel() // group.size()
            own = slice(group.rank() * size, (group.rank() + 1) * size)
            model = bucket.param_data[own]
            is_main = model.dtype is torch.float32
            main = model if is_main else torch.zeros_like(model, dtype=torch.float32)
            weights = [
                (mains[parameter], slice(at["gbuf_local"].start, at["gbuf_local"].end))
                for parameter, at in held["param_map"].items()
            ]
            weights.sort(key=lambda weight: weight[1].start)
            if not is_main:
                for weight, at in weights:
                    main[at] = weight.detach()
                    weight.data = main[at]
            yield _BucketShare(
                main,
                bucket.grad_data[own],
                None if is_main else model,
                weights,
                torch.tensor([(at.start, at.stop) for _, at in weights], device=main.device).reshape(-1, 2),
                torch.tensor([decays[weight] for weight, _ in weights], device=main.device),
            )

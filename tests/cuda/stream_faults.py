"""Faults of order between streams, and where each is planted. For the process on fake CUDA.

A GPU shows them now and then, as wrong numbers; a CPU never. Those with a citation were bugs of others: the
line beside it says what theirs was.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuda_steps import run_case
from parity_matrix import Case

from infra import shard_file
from omni.models import kept_inputs
from omni.rank import inputs, sharded_adamw, state, step, totals
from omni.rank.part_buckets import PartBuckets
from omni.rehearsal.findings import ORDER
from ops import kept_attention, on_host, one_copy
from ops.norm import Norm
from parallel import collectives, exchange, shipping
from parallel.lane import Lane
from parallel.partitions import PartitionedPart
from pipeline.engine import _RunningStep

DP, CP, PP = Case(dp=2), Case(cp=2), Case(pp=2)
ANEW = Case(recompute="full")
TWO_LEVEL = Case(cp=4, boundary="two_level")


@dataclass(frozen=True)
class Race:
    """`wrong` makes of the function `name` of `owner` a faulty one; a rank of `case` runs with it.

    `zero` is its stage of ZeRO, `offload` the layers of a part whose inputs are on the host.
    """

    owner: Any
    name: str
    wrong: Callable[[Callable[..., Any]], Callable[..., Any]]
    case: Case = DP
    zero: int = 1
    offload: int = 0

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(self.owner, self.name, self.wrong(getattr(self.owner, self.name)))


def before(do: Callable[..., object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`do` first, on the same arguments."""

    def wrong(original: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            do(*args, **kwargs)
            return original(*args, **kwargs)

        return faulty

    return wrong


def after(do: Callable[..., object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`do` last, on the same arguments."""

    def wrong(original: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            done = original(*args, **kwargs)
            do(*args, **kwargs)
            return done

        return faulty

    return wrong


def instead(do: Callable[..., object]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda original: do


def on_side_stream(original: Callable[..., Any]) -> Callable[..., Any]:
    """The whole function on a stream of its own, for which nobody waits."""

    def faulty(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.stream(behind_current()):
            return original(*args, **kwargs)

    return faulty


def _beside(original: Callable[..., Any]) -> Callable[..., Any]:
    """The whole function on a stream that waits for none."""

    def faulty(*args: Any, **kwargs: Any) -> Any:
        with torch.cuda.stream(torch.cuda.Stream()):
            return original(*args, **kwargs)

    return faulty


def behind_current() -> torch.cuda.Stream:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    return side


class NeverWaited:
    """A work whose `wait` waits for nothing."""

    def wait(self, *args: Any) -> None:
        pass


# In a layer, on what its norm takes in.


def _not_awaited(norm: Norm, x: torch.Tensor) -> None:
    y = x * 2
    with torch.cuda.stream(torch.cuda.Stream()):
        y.sum()


def _given_aside(norm: Norm, x: torch.Tensor) -> None:
    with torch.cuda.stream(behind_current()):
        y = x * 2
    dist.all_reduce(y, async_op=True).wait()


def _freed(norm: Norm, x: torch.Tensor) -> None:
    y = x * 2
    with torch.cuda.stream(behind_current()):
        y.sum()
    del y
    x * 3


def _let_go_by_wait(norm: Norm, x: torch.Tensor) -> None:
    y = x * 2
    with torch.cuda.stream(behind_current()):
        work = dist.all_reduce(y, async_op=True)
        work.wait()
    del y
    x * 3


def _flattened_aside(norm: Norm, x: torch.Tensor) -> None:
    side = behind_current()
    with torch.cuda.stream(side):
        y = x * 2
    torch.cuda.current_stream().wait_stream(side)
    y.sum()
    del y
    with torch.cuda.stream(side):
        x * 3


def _reloaded(norm: Norm, x: torch.Tensor) -> None:
    room = torch.empty(x.shape, dtype=x.dtype, device="cpu").pin_memory()
    with torch.cuda.stream(behind_current()):
        room.copy_(x, non_blocking=True)
    room.to(x.device, non_blocking=True)


def _overwritten(norm: Norm, x: torch.Tensor) -> None:
    y = x * 2
    with torch.cuda.stream(behind_current()):
        y.sum()
    y.zero_()


# In a step.


def _popped(buckets: PartBuckets, layer: int) -> bool:
    while buckets.coming:
        buckets.coming.popleft().group.param_gather_handle = None
    return False


def _scaled_aside(buckets: PartBuckets, layer: int) -> None:
    grad = vars(next(iter(buckets.buckets[0].group.params)))["main_grad"]
    with torch.cuda.stream(behind_current()):
        grad.mul_(2)


def _added_meanwhile(buckets: PartBuckets, layer: int) -> None:
    if not buckets.left:
        for parameter in buckets.buckets[0].group.params:
            vars(parameter)["main_grad"].add_(1)


def _asks_itself(lane: Lane, job: Callable[[], Any]) -> Any:
    assert lane._stream is not None
    with torch.cuda.stream(lane._stream):
        lane._stream.wait_stream(torch.cuda.current_stream())
        return job()


def _one_hop_ahead(
    incoming: torch.Tensor, outgoing: torch.Tensor, gets: Any, sends: Any, stop: Any, group: Any
) -> Any:
    held = outgoing.new_empty(len(stop.order), outgoing.shape[1])
    collectives.all_to_all(held, outgoing, stop.receive_counts, sends, group)
    return collectives.all_to_all(incoming, held.index_select(0, stop.order), gets, stop.send_counts, group)


def _taken_off(flight: Any, prepared: Any) -> None:
    flight.work = NeverWaited()


def _cleared(running: _RunningStep, op: Any) -> None:
    running.outbox[op.kind, op.index, op.virtual_stage].zero_()


def _gathered_unseen(part: PartitionedPart, layer: int) -> None:
    for number, (matrix, _) in part.whole.get(layer, {}).items():
        part.whole[layer][number] = matrix, None


def _read_early(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    return lambda: host


def _left_early(kept: on_host.Waiting) -> None:
    if kept.blocks:
        kept.here = None


def _fetched_unseen(kept: on_host.Waiting) -> None:
    if kept.blocks:
        kept.copied = None


def _copied_at_once(targets: Any, sources: Any, copies: torch.cuda.Stream) -> torch.cuda.Event:
    with torch.cuda.stream(copies):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        return copies.record_event()


def _reused(original: Callable[..., Any]) -> Callable[..., Any]:
    """The pinned buffer of a step is written to when its copy is under way."""

    def faulty(tensors: Iterable[torch.Tensor], ends: list[int], device: torch.device) -> torch.Tensor:
        host = torch.zeros(ends[-1], dtype=torch.uint8).pin_memory()
        there = host.to(device, non_blocking=True)
        host.zero_()
        return there

    return faulty


def _never_ready(shard: shard_file.Shard) -> Any:
    return shard.data.numpy()


FAULTS = {
    # NVIDIA/Megatron-LM#2044: DDP copied weights into its buffers on a stream that did not wait for the one
    # that had drawn them.
    "weights laid out on a stream of their own": Race(sharded_adamw, "_with_buffers", _beside),
    # NVIDIA/Megatron-LM#3670: hooks changed gradients on a stream that their reduction did not wait for.
    "gradients scaled on a side stream": Race(PartBuckets, "reduce_behind", before(_scaled_aside)),
    # NVIDIA/Megatron-LM#5222: the next layer's gradients went into a buffer that was still being reduced.
    "gradients added while they are reduced": Race(PartBuckets, "reduce_behind", after(_added_meanwhile)),
    # NVIDIA/Megatron-LM#6187: memory of one stream was let go of while the stream of reductions used it.
    "memory freed while a side stream reads it": Race(Norm, "forward", before(_freed)),
    # pytorch/pytorch#188655: a collective's wait on a third stream let its tensors go back to the first.
    "memory let go by a wait elsewhere": Race(Norm, "forward", before(_let_go_by_wait)),
    # pytorch/pytorch#18465: a tensor of a worker's stream went back to it while another one used it.
    "memory of a side stream read elsewhere": Race(Norm, "forward", before(_flattened_aside)),
    # pytorch/torchtitan#2581: inside the block of a stream the current stream is that one, which waited for
    # itself.
    "a lane that waits for itself": Race(Lane, "run_long", instead(_asks_itself), TWO_LEVEL),
    # pytorch/pytorch#37944: DDP ended its reduction on another stream than the one that went on.
    "totals on a side stream": Race(step, "sum_totals", on_side_stream),
    # pytorch/pytorch#185252: a copy to the host was read before anybody knew that it had come.
    "numbers read before they have come": Race(totals, "to_host", instead(_read_early)),
    # pytorch/pytorch#127612: pinned memory was changed before the copy out of it had run.
    "pinned memory used again": Race(one_copy, "_copied", _reused),
    # NVIDIA/Megatron-LM#7398: activations came back from pinned memory that they were still on their way to.
    "reload before the offload is done": Race(Norm, "forward", before(_reloaded)),
    # pytorch/pytorch#195281: a group of threads read on one stream what another was still writing.
    "input of a side stream that does not wait": Race(Norm, "forward", before(_given_aside)),
    "inputs read before they have come": Race(inputs, "arrival", instead(lambda tree, stream: lambda: None)),
    "memory read before it is written": Race(Norm, "forward", before(_not_awaited)),
    "memory overwritten while a side stream reads it": Race(Norm, "forward", before(_overwritten)),
    "weights used before they are gathered": Race(PartBuckets, "arrive", instead(_popped)),
    "second hop before the first": Race(shipping, "two_hops", instead(_one_hop_ahead), TWO_LEVEL),
    "rows of an exchange not waited for": Race(exchange, "_receive", before(_taken_off), CP),
    "activations not waited for": Race(_RunningStep, "wait_for", instead(lambda running, work, op: None), PP),
    "message changed while it is sent": Race(_RunningStep, "send", after(_cleared), PP),
    "matrices used before they are gathered": Race(
        PartitionedPart,
        "_start",
        after(_gathered_unseen),
        Case(dp=2, domain="dp"),
        zero=3,
    ),
    "memory of a layer's input let go before it is copied": Race(
        kept_inputs._Input, "leave", instead(_left_early), ANEW, offload=2
    ),
    "what attention put out let go before it is copied": Race(
        kept_attention._Output, "leave", instead(_left_early), ANEW, offload=2
    ),
    "attention found before it is back": Race(
        kept_attention._Output, "fetch", after(_fetched_unseen), ANEW, offload=2
    ),
    "a layer made anew before its input is back": Race(
        kept_inputs._Input, "fetch", after(_fetched_unseen), ANEW, offload=2
    ),
    "a layer's input copied before it is made": Race(
        on_host, "copy", instead(_copied_at_once), ANEW, offload=2
    ),
    "checkpoint written before it is copied": Race(shard_file.Shard, "read", instead(_never_ready)),
    "checkpoint copied on a side stream": Race(state, "pack", on_side_stream),
}


def found(name: str, folder: Path) -> list[str]:
    """Plant a fault, rehearse a rank, and return what is said of order."""
    fault = FAULTS[name]
    return _found_in_layers(folder) if fault.owner is Norm else said_of([fault], fault, folder)


@cache
def _found_in_layers(folder: Path) -> list[str]:
    """The same of all faults in layers at once: none of them hides another."""
    faults = [fault for fault in FAULTS.values() if fault.owner is Norm]
    return said_of(faults, faults[0], folder)


def said_of(faults: Sequence[Race], of: Race, folder: Path) -> list[str]:
    """Plant faults, and rehearse the rank of one of them."""
    with pytest.MonkeyPatch.context() as patch:
        for fault in faults:
            fault.plant(patch)
        layers = 1 + of.offload
        findings = run_case(
            of.case, 0, folder, layers=layers, samples=1, zero=of.zero, offload=of.offload
        ).findings
    return [str(finding) for finding in sorted(findings) if finding.kind == ORDER]

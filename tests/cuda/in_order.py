"""What is in order, though it uses several streams. For the process on fake CUDA."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from stream_faults import Race, behind_current, said_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from omni.rank import sharded_adamw
from omni.rehearsal.recorder import Recorder

GPU = torch.device("cuda", 0)


def buckets_of_a_buffer() -> None:
    buffer = torch.zeros(8, device=GPU)
    work = dist.all_reduce(buffer[:4], async_op=True)
    buffer[4:].add_(1)
    work.wait()
    buffer.add_(1)


def two_readers() -> None:
    x = torch.zeros(8, device=GPU)
    with torch.cuda.stream(behind_current()):
        y = x * 2
    x * 3
    y.record_stream(torch.cuda.current_stream())


def waits_for_who_waited() -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(first):
        x = torch.zeros(8, device=GPU)
    second.wait_stream(first)
    torch.cuda.current_stream().wait_event(second.record_event())
    x.add_(1)


def freed_when_recorded() -> None:
    x = torch.zeros(8, device=GPU)
    side = behind_current()
    with torch.cuda.stream(side):
        x.sum()
    x.record_stream(side)
    del x
    torch.zeros(8, device=GPU)


def held_by_its_work() -> None:
    work = dist.all_reduce(torch.zeros(8, device=GPU), async_op=True)
    torch.zeros(8, device=GPU)
    work.wait()
    torch.zeros(8, device=GPU)


def waited_for_by_two() -> None:
    x = torch.zeros(8, device=GPU)
    work = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        work.wait()
    work.wait()
    x.add_(1)


def messages_of_a_pair() -> None:
    x, y = torch.zeros(8, device=GPU), torch.zeros(8, device=GPU)
    works = [dist.isend(x, 1), dist.irecv(y, 1)]
    for work in works:
        work.wait()
    x.add_(y)


def pinned_memory_freed() -> None:
    pinned = torch.zeros(8).pin_memory()
    there = pinned.to(GPU, non_blocking=True)
    del pinned
    torch.zeros(8).pin_memory()
    there.add_(1)


def read_when_it_has_come() -> None:
    here = torch.zeros(8, device=GPU).to("cpu", non_blocking=True)
    torch.cuda.current_stream().synchronize()
    here.tolist()


def copied_twice_into_the_same() -> None:
    x, room = torch.zeros(8, device=GPU), torch.zeros(8).pin_memory()
    room.copy_(x, non_blocking=True)
    room.copy_(x)
    room.add_(1)


def used_again_when_read() -> None:
    pinned = torch.zeros(8).pin_memory()
    pinned.to(GPU, non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    event.synchronize()
    pinned.zero_()


def gradients_of_a_side_stream() -> None:
    x = torch.zeros(8, device=GPU, requires_grad=True)
    side = behind_current()
    with torch.cuda.stream(side):
        y = x * x
    torch.cuda.current_stream().wait_stream(side)
    (y * y).sum().backward()
    assert x.grad is not None
    x.grad.add_(1)


SNIPPETS: tuple[Callable[[], None], ...] = (
    buckets_of_a_buffer,
    two_readers,
    waits_for_who_waited,
    freed_when_recorded,
    held_by_its_work,
    waited_for_by_two,
    messages_of_a_pair,
    pinned_memory_freed,
    read_when_it_has_come,
    copied_twice_into_the_same,
    used_again_when_read,
    gradients_of_a_side_stream,
)


def said() -> dict[str, list[str]]:
    """What is said of the order of each."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        return {one.__name__: _said_of(one) for one in SNIPPETS}
    finally:
        dist.destroy_process_group()


def _said_of(snippet: Callable[[], None]) -> list[str]:
    recorder = Recorder()
    with FakeTensorMode(), recorder:
        snippet()
    return [str(finding) for finding in recorder.findings if finding.kind == "nothing orders"]


def of_hooks_made_aside(folder: Path) -> list[str]:
    """DDP is made on a stream that waits and is waited for; its hooks on gradients stay there."""

    def aside(original: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            side = behind_current()
            with torch.cuda.stream(side):
                wrapped = original(*args, **kwargs)
            torch.cuda.current_stream().wait_stream(side)
            return wrapped

        return made

    race = Race(sharded_adamw, "_with_buffers", aside)
    return said_of([race], race, folder)

"""Is all that touches memory on a GPU in order? What two streams do, in any order unless something orders it.

A `Recorder` tells an `Ordering` of every operator that ran, and stand-ins of torch.cuda tell it of events,
streams and works. What is wrong it says in sentences that name both sides.

The model:

- A launch runs on the current stream of its thread; it reads and writes bytes of storages, by its schema.
  Views of one storage are apart where their bytes are, such as buckets of a buffer; one with gaps counts as
  all from its first byte to its last.
- An asynchronous collective runs on a stream of its group, for a message of its group and pair, behind what
  the current stream has been given; `Work.wait()` has the current stream wait for it, not the host. One that
  is not asynchronous runs on the current stream.
- Memory is of the stream that was current when it was made. Freed, it goes back to that stream at once: what
  is made there next may lie in it, and runs behind that stream alone.
- ProcessGroupNCCL of torch 2.13 records no stream for its tensors: it keeps them on a shelf of the work. That
  of an asynchronous collective or a message is emptied when somebody waits, on whatever stream, and from then
  on that stream alone is behind their use; or by a watchdog, once the device is done. Collectives that are
  not asynchronous keep nothing: they run on the current stream, so nothing can come between.
- The host waits where it reads a number, where it copies without pinned memory, and where it is told to.
- Pinned memory is read and written by copies that the host does not wait for. The host may free it, because
  torch keeps it until they are over, but not write it before, nor read what they bring.

Invariant: of two touches of a byte, of which one writes, one is ordered before the other. Only the last ones
of a byte are kept: a touch that another one covers and comes behind stands for all that was before it.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from omni.rehearsal.accesses import accesses, is_on_device, issued, span, tensors_in
from omni.rehearsal.call_sites import CallSites, thread_name
from omni.rehearsal.clocks import Clock, Clocks
from omni.rehearsal.touches import Allocation, Freed, GroupStream, Launch, Touch, is_over


@dataclass
class _Underway:
    """A work that nobody has waited for, what waiting for it means, and memory that it alone still holds."""

    work: Any
    by: Launch
    clock: Clock
    holds: list[tuple[Allocation, Freed]] = field(default_factory=list)


class Ordering:
    """Follows all touches of memory. `phase` tells what the rank does, `say` hears what is not in order."""

    def __init__(self, phase: Callable[[], str], say: Callable[[str], object]) -> None:
        self.clocks = Clocks()
        self.labels: Mapping[str, str] = {}  # of groups, by torch's names
        self._phase, self._say = phase, say
        self._sites = CallSites()
        self._memory: dict[int, Allocation] = {}
        self._pinned = 0
        self._underway: dict[int, _Underway] = {}
        self._done: dict[int, tuple[weakref.ref[Any], Clock]] = {}  # works that were waited for, by their ids
        self._free: defaultdict[Hashable, list[Freed]] = defaultdict(list)

    # What the recorder tells.

    def made(self, out: Any) -> None:
        """Hear of memory that was made, and of nothing that ran."""
        for tensor in tensors_in(out):
            if is_on_device(tensor):
                self._of(tensor)

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any, *, waits: bool) -> None:
        """Hear of an operator that ran, on device or host; `waits` of a copy that the host waited for."""
        touched = list(accesses(func, args, kwargs, out))
        if not any(is_on_device(tensor) for tensor, _ in touched):
            if self._pinned:
                for tensor, writes in touched:
                    self.on_host(tensor, func._opname, writes)
            return
        if func.namespace == "c10d":
            self._issue(func, args, kwargs, out, touched)
            return
        copies = func._opname in ("copy_", "_to_copy")
        by = self._launch(torch.cuda.current_stream(), func._opname)
        for tensor, writes in touched:
            if is_on_device(tensor):
                self._touch(self._of(tensor), tensor, by, writes)
            elif copies and not waits:
                self._touch(self._of(tensor, pinned=True), tensor, by, writes)
        if waits:
            self.clocks.wait_on_host(self.clocks.of(by.stream))
            for tensor, writes in touched:
                self.on_host(tensor, func._opname, writes)

    def read(self, tensors: Sequence[torch.Tensor], op: str) -> None:
        """Hear that the host reads numbers of the device, and waits for them."""
        by = self._launch(torch.cuda.current_stream(), op)
        for tensor in tensors:
            if is_on_device(tensor):
                self._touch(self._of(tensor), tensor, by, writes=False)
        self.clocks.wait_on_host(self.clocks.of(by.stream))

    def on_host(self, tensor: torch.Tensor, op: str, writes: bool) -> bool:
        """Hear that the host reads or writes a tensor of its own. Returns whether that is pinned memory that
        copies use.
        """
        memory = self._memory.get(tensor.untyped_storage()._cdata)
        if memory is None or not memory.pinned:
            return False
        start, stop = span(tensor)
        left = {}
        for key, touch in memory.touches.items():
            if touch.stop <= start or stop <= touch.start:
                left[key] = touch
            elif not is_over(touch, self.clocks.host()) and (writes or touch.writes):
                what = "writes" if writes else "reads"
                self._clash(f"{op} on the host {what}", touch, start, stop)
        memory.touches = left
        return True

    # What streams and works tell.

    def waited(self, work: Any) -> None:
        """Hear that the current stream waits for a work. What it alone held goes back to its stream."""
        key, stream = id(work), torch.cuda.current_stream()
        underway = self._underway.pop(key, None)
        if underway is None:
            if key in self._done:  # it was waited for before
                self.clocks.wait(stream, self._done[key][1])
            return
        self.clocks.wait(stream, underway.clock)
        self._done[key] = weakref.ref(work, lambda _: self._done.pop(key, None)), underway.clock
        for memory, freed in underway.holds:
            memory.works.discard(key)
            if not memory.works:
                self._free[memory.stream].append(freed)

    def keep(self, storage: int, stream: Hashable) -> None:
        """Hear that a storage's memory is not to be used again before a stream is done with it."""
        if storage in self._memory:
            self._memory[storage].kept.add(stream)

    # Launches and touches.

    def _launch(self, stream: Hashable, op: str) -> Launch:
        number = self.clocks.launch(stream)
        return Launch(stream, number, op, self._phase(), thread_name(), self._sites.here())

    def _issue(
        self, func: Any, args: Any, kwargs: Any, out: Any, touched: Sequence[tuple[torch.Tensor, bool]]
    ) -> None:
        call, stream = issued(func, args, kwargs), torch.cuda.current_stream()
        if not call.is_async:
            by = self._launch(stream, func._opname)
            for tensor, writes in touched:
                self._touch(self._of(tensor), tensor, by, writes)
            return
        own = GroupStream(call.group, call.peer)
        self.clocks.wait(own, self.clocks.of(stream))
        by = self._launch(own, func._opname)
        work = dist.Work.unbox(out[-1] if isinstance(out, tuple) else out)
        self._underway[id(work)] = _Underway(work, by, self.clocks.mark(own))
        for tensor, writes in touched:
            memory = self._of(tensor)
            memory.works = {id(work), *(one for one in memory.works if one in self._underway)}
            self._touch(memory, tensor, by, writes)

    def _touch(self, memory: Allocation, tensor: torch.Tensor, by: Launch, writes: bool) -> None:
        start, stop = span(tensor)
        if start == stop:
            return
        clock = self.clocks.of(by.stream)
        if memory.over:
            self._check_reuse(memory, by, clock)
        own = (by.stream, start, stop, writes)
        memory.streams.add(by.stream)
        if len(memory.streams) == 1:  # most memory is one stream's alone, in order and in many views
            memory.touches[own] = Touch(by, start, stop, writes)
            return
        left = {}
        for key, touch in memory.touches.items():
            if touch.stop <= start or stop <= touch.start:
                left[key] = touch
            elif touch.by.stream != by.stream and not is_over(touch, clock):
                if writes or touch.writes:
                    what = "writes" if writes else "reads"
                    self._clash(f"{by.op} on {self._name(by.stream)} {what}", touch, start, stop)
                else:
                    left[key] = touch
            elif start > touch.start or touch.stop > stop or (touch.writes and not writes):
                left[key] = touch
        left[own] = Touch(by, start, stop, writes)
        memory.touches, memory.streams = left, {touch.by.stream for touch in left.values()}

    def _clash(self, what: str, touch: Touch, start: int, stop: int) -> None:
        size = min(stop, touch.stop) - max(start, touch.start)
        does = "writes" if touch.writes else "reads"
        self._say(f"{what} {size:,} bytes that {self._told(touch.by)} {does}")

    def _told(self, by: Launch) -> str:
        alone = any(one.by is by for one in self._underway.values())
        unseen = ", for which nobody has waited" if alone else ""
        return f"{by.op} on {self._name(by.stream)} ({by.phase} ({by.thread}), at {by.place}{unseen})"

    def _name(self, stream: Hashable) -> str:
        if not isinstance(stream, GroupStream):
            return str(stream)
        label = self.labels.get(stream.group, stream.group)
        to = "" if stream.peer is None else f" with its member {stream.peer}"
        return f"the stream of group {label}{to}"

    # Memory.

    def _of(self, tensor: torch.Tensor, *, pinned: bool = False) -> Allocation:
        """What is known of a tensor's storage. One that is new is of the current stream."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        memory = self._memory.get(key)
        if memory is None:
            stream = torch.cuda.current_stream()
            watch = weakref.ref(storage, lambda _: self._let_go(key))
            memory = self._memory[key] = Allocation(stream, storage.nbytes(), watch, pinned)
            self._pinned += pinned
            if not pinned and self._free[stream]:
                memory.over = self._free[stream] = self._still_used(stream)
        return memory

    def _still_used(self, stream: Hashable) -> list[Freed]:
        """Memory that went back to a stream, without that which the stream is behind all uses of."""
        clock = self.clocks.of(stream)
        return [of for of in self._free[stream] if not all(is_over(touch, clock) for touch in of.touches)]

    def _let_go(self, key: int) -> None:
        memory = self._memory.pop(key, None)
        if memory is None or memory.pinned:
            self._pinned -= memory is not None
            return
        safe = {memory.stream, *memory.kept}
        others = [touch for touch in memory.touches.values() if touch.by.stream not in safe]
        if not others:
            return
        freed = Freed(memory.size, others)
        memory.works = {work for work in memory.works if work in self._underway}
        for work in memory.works:
            self._underway[work].holds.append((memory, freed))
        if not memory.works:
            self._free[memory.stream].append(freed)

    def _check_reuse(self, memory: Allocation, by: Launch, clock: Clock) -> None:
        """Say if memory is touched that may lie where other streams are not done."""
        over, memory.over = memory.over, []
        for freed in over:
            found = [touch for touch in freed.touches if not is_over(touch, clock)]
            free = self._free[memory.stream]
            if found and any(of is freed for of in free):
                self._free[memory.stream] = [of for of in free if of is not freed]
                what = f"{by.op} on {self._name(by.stream)} may be given"
                self._say(f"{what} {freed.size:,} bytes that were freed and {self._told(found[0].by)} uses")

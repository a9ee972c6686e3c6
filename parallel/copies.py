"""Do ranks that hold copies of the same weights still hold the same bits?

Memory and arithmetic units fail in silence, and a data-parallel rank whose weights have changed spoils the
gradients of all. What is gathered after an update is the same to the bit on all ranks of a group, so each of
them sums up the bits of its weights in every step, and every so many steps the sums are compared.

A sum is of integers, modulo 2**64: exact, in any order, and a change of a single bit always changes it.
A rank's own state of the optimizer has no copy. What an update left of it is what the next one begins with,
so a rank sums it up after the one and before the other, and compares the sums with each other.

Changes of several bits of one tensor may cancel, such as one bit set and the same one cleared elsewhere;
those of several tensors do by chance alone, and what lasts for several steps is seen in the sum of each.
"""

import socket
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, chain

import torch
import torch.distributed as dist

from ops.device import to_device
from parallel.control import Control

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}  # by bytes
_SMALL = 1 << 16  # bytes of a tensor: what is summed together is copied for it
OnDevice = Callable[[tuple[int, ...]], torch.Tensor]
"""Numbers as a tensor [n] int64 on a device."""
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)  # of splitmix64 (Steele et al., 2014)
_STRIDE = 0x9E3779B97F4A7C15 - 2**64


class CorruptionError(RuntimeError):
    """Copies of weights differ; the message names the ranks that have changed, and since which step."""


@dataclass(frozen=True)
class Copy:
    """Tensors of which every rank of `group` holds the same, called `name` in messages."""

    name: str
    tensors: Sequence[torch.Tensor]
    group: dist.ProcessGroup


@dataclass(frozen=True)
class Noted:
    """What a rank summed up of copies that `ranks` hold: a sum for each step."""

    name: str
    ranks: tuple[int, ...]
    sums: Mapping[int, int]


@torch.no_grad()
def sum_of_bits(tensors: Sequence[torch.Tensor], on_device: OnDevice | None = None) -> torch.Tensor:
    """Sum up the bits of tensors, [] int64 on their device; nothing waits for it. Who asks for the same ones
    again and again gives an `on_device` that remembers.
    """
    on_device = on_device or partial(_on, device=tensors[0].device)
    whole = [_integers(tensor) for tensor in tensors]
    large = [number for number, integers in enumerate(whole) if integers.nbytes >= _SMALL]
    small: dict[torch.dtype, list[int]] = defaultdict(list)
    for number, integers in enumerate(whole):
        if integers.nbytes < _SMALL:
            small[integers.dtype].append(number)
    sums = [torch.stack([whole[number].sum(dtype=torch.int64) for number in large])] if large else []
    sums += [_sums([whole[number] for number in numbers], on_device) for numbers in small.values()]
    return _mixed(torch.cat(sums), on_device((*large, *chain(*small.values()))))


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as integers, the widest that it consists of: fewer to add, none to widen."""
    flat, size = tensor if tensor.dim() == 1 else tensor.view(-1), tensor.element_size()
    for width, integer in _INTEGERS.items():
        if all(of * size % width == 0 for of in (flat.numel(), flat.storage_offset())):
            return flat.view(integer)
    raise AssertionError(f"weights of {size} bytes an element")


def _sums(tensors: Sequence[torch.Tensor], on_device: OnDevice) -> torch.Tensor:
    """The sum of each of many small tensors, [n] int64, with few kernels: norms and biases are most of the
    tensors of a model, and each would take longer to start than to add.
    """
    running = torch.cat([tensors[0].new_zeros(1), *tensors]).cumsum(0, dtype=torch.int64)
    return running[on_device((0, *accumulate(map(len, tensors))))].diff()


def _on(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor(numbers), device)


def _mixed(sums: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Add up sums of tensors, each scrambled with its place. Different numbers stay different, so that no
    single change is lost; and changes that are alike do not cancel.
    """
    mixed = sums + places * _STRIDE
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return (mixed ^ _shifted(mixed, 31)).sum()


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """To the right, with zeros coming in: torch's own shift repeats the sign."""
    return (values >> by) & ((1 << (64 - by)) - 1)


class Copies:
    """Notes sums of this rank's `copies` and compares them with those of the ranks that hold the same.

    All ranks of the world note the same steps and compare after the same ones.
    """

    def __init__(
        self,
        copies: Sequence[Copy],
        device: torch.device,
        kept: Callable[[], Sequence[torch.Tensor]] = lambda: (),
    ) -> None:
        """`kept` gives what only an update may change: this rank's state of the optimizer."""
        self.copies = [copy for copy in copies if copy.group.size() > 1]
        self.device = device
        self.on_device = cache(partial(_on, device=device))  # each step asks for the same numbers
        self.kept = kept
        self.sealed: torch.Tensor | None = None
        self.broken: dict[int, torch.Tensor] = {}
        self.steps: list[int] = []
        self.sums: list[list[torch.Tensor]] = [[] for _ in self.copies]

    def note(self, step: int) -> None:
        """Sum up the bits that `step` computed with; called before its update, which covers traces up."""
        self.steps.append(step)
        if self.sealed is not None:
            self.broken[step] = sum_of_bits(self.kept(), self.on_device) != self.sealed
        for copy, sums in zip(self.copies, self.sums, strict=True):
            sums.append(sum_of_bits(copy.tensors, self.on_device))

    def seal(self) -> None:
        """Sum up the bits of what is kept, after an update; nothing waits for it."""
        kept = self.kept()
        self.sealed = sum_of_bits(kept, self.on_device) if kept else None

    def differing(self) -> torch.Tensor:
        """Compare what was noted, step by step. Returns, [] float64 on the device, of how many copies of this
        rank the sums are not those of all ranks of their groups, which each rank of a group learns alike; and
        in how many steps what this rank keeps was not what the update before had left.
        """
        found = torch.zeros((), dtype=torch.float64, device=self.device)
        for copy, sums in zip(self.copies, self.sums, strict=True):
            own = torch.stack(sums)
            halves = torch.stack([own >> 32, own & 0xFFFFFFFF])
            # Maxima of numbers and of their negatives cancel if all ranks have the same, and only then.
            both = torch.cat([halves, -halves])
            dist.all_reduce(both, op=dist.ReduceOp.MAX, group=copy.group)
            found += (both[:2] + both[2:]).any()
        for broken in self.broken.values():
            found += broken
        return found

    def forget(self) -> None:
        """Begin anew, after a comparison."""
        self.steps.clear()
        self.broken.clear()
        for sums in self.sums:
            sums.clear()

    def explain(self, control: Control) -> CorruptionError:
        """Return an error that says who differs. Every rank of the world calls it."""
        noted = [
            (copy.name, dist.get_process_group_ranks(copy.group), torch.stack(sums).tolist())
            for copy, sums in zip(self.copies, self.sums, strict=True)
        ]
        own = [step for step, broken in self.broken.items() if broken]
        found = control.gather("sums of bits", [socket.gethostname(), noted, own])
        lines = [
            f"the optimizer's state on rank {rank} on {host}: before the update of step {broken[0]} it was "
            f"not what the update before had left"
            for rank, (host, _, broken) in enumerate(found)
            if broken
        ]
        every = [
            [Noted(name, tuple(ranks), dict(zip(self.steps, sums, strict=True))) for name, ranks, sums in of]
            for _, of, _ in found
        ]
        lines += differences(every, [host for host, _, _ in found])
        return CorruptionError("\n  ".join(("bits have changed by themselves:", *lines)))


def differences(noted: Sequence[Sequence[Noted]], hosts: Sequence[str]) -> list[str]:
    """Say of all copies that differ which ranks have changed: those against a majority, else all of them.

    `noted` and `hosts` are by rank.
    """
    lines = []
    for rank, own in enumerate(noted):
        for place, copy in enumerate(own):
            if copy.ranks[0] != rank:
                continue  # the first rank of each group speaks for it
            sums = {peer: noted[peer][place].sums for peer in copy.ranks}
            if line := _difference(copy.name, sums, hosts):
                lines.append(line)
    return lines


def _difference(name: str, sums: Mapping[int, Mapping[int, int]], hosts: Sequence[str]) -> str | None:
    first = next(iter(sums.values()))
    for step in first:
        counts = Counter(of[step] for of in sums.values())
        (common, most), *others = counts.most_common()
        if not others:
            continue
        majority = 2 * most > len(sums)
        odd = [rank for rank, of in sums.items() if of[step] != common or not majority]
        who = ", ".join(f"rank {rank} on {hosts[rank]}" for rank in odd)
        than = (
            f"not those of the {most} others that agree" if majority else "no majority to say which is right"
        )
        return f"{name}: step {step} is the first that computed with other bits on {who}; {than}"
    return None

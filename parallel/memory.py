"""What layers keep of sequences from one pass to the next, so that a pass computes the newest tokens alone.

A layer keeps what it likes of a sequence: attention the keys and values of all its tokens, a recurrence its
last state. Who generates has one `Memory` a rank and continues the same sequences, by name, pass
after pass; what of a pass stands for which of them is a `Recalled`, which layers find in their descriptor.

Invariant: after passes over the tokens [0, n) and [n, m) of a sequence, a layer has put out what one pass
over [0, m) puts out. A sequence stays on the ranks that its first pass was on, and no two ranks share it.

Shapes: T new tokens of this rank, C tokens of its sequences in all.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

import torch

from ops.one_copy import ON_HOST

State = tuple[torch.Tensor, ...]


@dataclass
class Memory:
    """By layer, which is itself the key, and by name of the sequence: the layer's state of it."""

    states: dict[Hashable, dict[int, State]] = field(default_factory=lambda: defaultdict(dict))

    def forget(self, sequences: Iterable[int]) -> None:
        """Drop what all layers hold of sequences that have ended."""
        for name in sequences:
            for held in self.states.values():
                held.pop(name, None)


@dataclass(frozen=True)
class Recalled:
    """A pass that continues the sequences `names`, in the order of this rank's tokens, by `counts` new tokens
    each, after which come `tail` padding tokens, kept of nobody.
    """

    memory: Memory = field(metadata=ON_HOST)
    names: tuple[int, ...]
    counts: tuple[int, ...]
    tail: int

    def recall(self, layer: Hashable) -> list[State | None]:
        """What `layer` holds of each sequence, None of a new one; None of the tail, if there is one."""
        held = self.memory.states[layer]
        return [*map(held.get, self.names), *[None] * bool(self.tail)]

    def keep(self, layer: Hashable, states: Iterable[State]) -> None:
        """Keep new states in the place of those that `layer` holds, in that order."""
        self.memory.states[layer] |= zip(self.names, states, strict=False)

    def extend(self, layer: Hashable, *new: torch.Tensor) -> list[torch.Tensor]:
        """Keep new tokens [T, …] behind those that `layer` holds. Returns, sequence by sequence, all tokens
        of each and then the tail, [C + tail, …].
        """
        held = self.memory.states[layer]
        joined, kept = [], []
        for place, tensor in enumerate(new):
            pieces = tensor.split([*self.counts, self.tail])
            parts: list[torch.Tensor] = []
            sizes = []
            for name, piece in zip(self.names, pieces, strict=False):
                before = (held[name][place],) if name in held else ()
                parts += [*before, piece]
                sizes.append(sum(map(len, (*before, piece))))
            whole = torch.cat([*parts, pieces[-1]])
            joined.append(whole)
            kept.append(whole.split([*sizes, self.tail]))  # views: the context of a pass is held once
        for number, name in enumerate(self.names):
            held[name] = tuple(of[number] for of in kept)
        return joined


@dataclass(frozen=True)
class Continued:
    """Which sequences of a memory the samples of a plan are, by their number there: their `names`, and how
    many tokens of each passes before this one have `seen`. The first new one stands `at` a position, which is
    not that number where rows of items are a grid.
    """

    memory: Memory
    names: tuple[int, ...]
    seen: tuple[int, ...]
    at: tuple[int, ...]

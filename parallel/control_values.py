"""What ranks tell each other in one reduction: named integers, summed, the largest kept or united."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256

import numpy as np


class Op(Enum):
    """How integers of one name become one result."""

    SUM = "sum"  # modulo 2^64, place by place
    MAX = "max"  # place by place
    UNION = "union"  # each number once, in ascending order; for what is rare


Part = tuple[Op, Sequence[int]]


class LayoutError(ValueError):
    """Ranks offered other names, operations or lengths for the same reduction."""


@dataclass(frozen=True)
class Layout:
    """The names of a reduction in order, how each is reduced, and its length (0 for a union)."""

    parts: tuple[tuple[str, Op, int], ...]

    @classmethod
    def of(cls, parts: Mapping[str, Part]) -> "Layout":
        """The layout of what a rank offers."""
        names = sorted(parts.items())
        return cls(tuple((name, op, 0 if op is Op.UNION else len(ints)) for name, (op, ints) in names))

    @property
    def digest(self) -> bytes:
        """Eight bytes that stand before what is sent, and that all ranks must share."""
        return sha256(json.dumps([(name, op.value, n) for name, op, n in self.parts]).encode()).digest()[:8]

    def pack(self, parts: Mapping[str, Part]) -> bytes:
        """Return what is sent: the digest, and int64 numbers by name; unions behind their lengths."""
        numbers: list[int] = []
        for name, op, _ in self.parts:
            ints = list(parts[name][1])
            if op is Op.UNION:
                ints = sorted(set(ints))
                ints = [len(ints), *ints]
            numbers += ints
        return self.digest + np.array(numbers, dtype="<i8").tobytes()

    def unpack(self, sent: bytes) -> dict[str, tuple[int, ...]]:
        """Return the numbers by name.

        Raises:
            LayoutError: if they were packed by another layout.
        """
        if sent[:8] != self.digest:
            raise LayoutError(f"other numbers than {', '.join(name for name, _, _ in self.parts)}")
        numbers, found, at = np.frombuffer(sent[8:], "<i8").tolist(), {}, 0
        for name, op, length in self.parts:
            if op is Op.UNION:
                length, at = numbers[at], at + 1
            found[name] = tuple(numbers[at : at + length])
            at += length
        if at != len(numbers):
            raise LayoutError(f"{len(numbers)} numbers instead of {at}")
        return found

    def merge(self, sent: Sequence[bytes]) -> bytes:
        """Reduce what several ranks packed, in whatever order and whichever of them first.

        Raises:
            LayoutError: if one of them has another layout.
        """
        every = [self.unpack(one) for one in sent]
        merged: dict[str, Part] = {}
        for name, op, _ in self.parts:
            rows = [of[name] for of in every]
            if op is Op.UNION:
                merged[name] = op, sorted({number for row in rows for number in row})
            else:
                table = np.array(rows, dtype="<i8")
                merged[name] = op, (table.sum(axis=0) if op is Op.SUM else table.max(axis=0)).tolist()
        return self.pack(merged)

"""What a pass through a part takes, communication apart: a linear law for each direction.

Pure integers, so that all ranks and machines agree: coefficients in femtoseconds, results in nanoseconds.
"""

from dataclasses import dataclass

from parallel.work import Grad

FS_PER_NS = 1_000_000

Direction = Grad | None
"""A forward, None, or the backward that makes these gradients."""

DIRECTIONS: tuple[Direction, ...] = (None, Grad.BOTH, Grad.INPUT, Grad.WEIGHT)


@dataclass(frozen=True)
class Law:
    """Time of a pass over some tokens, in sequences whose squared lengths sum to some squares."""

    token_fs: int
    square_fs: int
    fixed_ns: int

    def ns(self, tokens: int, squares: int) -> int:
        """Nanoseconds of the pass."""
        return self.fixed_ns + (self.token_fs * tokens + self.square_fs * squares) // FS_PER_NS

    def terms_fs(self, tokens: int, squares: int) -> tuple[int, int, int]:
        """Femtoseconds that go to tokens, to squares, and to any pass."""
        return self.token_fs * tokens, self.square_fs * squares, self.fixed_ns * FS_PER_NS

    @property
    def coefficients(self) -> tuple[int, int, int]:
        """Of tokens, squares and any pass: in the order of `terms_fs`."""
        return self.token_fs, self.square_fs, self.fixed_ns

    def __add__(self, other: "Law") -> "Law":
        return Law(*(a + b for a, b in zip(self.coefficients, other.coefficients, strict=True)))


@dataclass(frozen=True)
class Laws:
    """The laws of a part: of a forward, and of the halves of a backward, which add up to a whole one."""

    forward: Law
    input: Law
    weight: Law

    def of(self, direction: Direction) -> Law:
        """Return the law of a direction."""
        if direction is None:
            return self.forward
        if direction is Grad.BOTH:
            return self.input + self.weight
        return self.input if direction is Grad.INPUT else self.weight

    def ns(self, tokens: int, squares: int, direction: Direction) -> int:
        """Nanoseconds of a pass. Those of the halves of a backward add up to those of the whole."""
        if direction is Grad.BOTH:
            return self.input.ns(tokens, squares) + self.weight.ns(tokens, squares)
        return self.of(direction).ns(tokens, squares)

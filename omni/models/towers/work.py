"""What a tower takes, as measured on its module: the statement of work of layers that nobody has described.

What stands outside attention is a line in the number of tokens, which two passes on tensors without storage
give (`probe.py`). Attention is counted from the lengths of what attends: in all of an item, which goes by
squared lengths, or in windows and squares of one size, which goes by tokens.
"""

from dataclasses import dataclass

from ops.attention import attention_flops
from parallel.tiles import AttentionShape
from parallel.work import Grad, Load, Weight, Work


@dataclass(frozen=True)
class Line:
    """A quantity that grows evenly: so much for any pass, and `per` for `tokens` tokens more."""

    constant: int
    per: int
    tokens: int

    @classmethod
    def through(cls, first: tuple[int, int], second: tuple[int, int]) -> "Line":
        """The line through two points (tokens, quantity)."""
        (few, low), (many, high) = first, second
        constant = low - (high - low) * few // (many - few)
        return cls(max(0, constant), high - low, many - few)

    def at(self, tokens: int) -> int:
        """The quantity of a pass over `tokens`."""
        return self.constant * (tokens > 0) + self.per * tokens // self.tokens


@dataclass(frozen=True)
class MeasuredLayers:
    """A tower on one rank. `parameters` are elements and whether they never learn, in the module's order; of
    a forward, `flops` are those outside attention, `moved` and `kept` bytes. Beside what is kept, `ahead` is
    what it needs at most, and `back` what its backward does; `passing` is a forward that keeps nothing. `out`
    are the bytes a token of what it puts out, 0 where nothing behind keeps that. In `whole` of `layers`
    layers a token sees all of its item, in the others `seen` tokens on average.
    """

    parameters: tuple[tuple[int, bool], ...]
    layers: int
    heads: int
    head_dim: int
    element: int
    flops: Line
    moved: Line
    kept: Line
    ahead: Line
    back: Line
    passing: Line
    out: int
    whole: int
    seen: int
    tp: int = 1
    lora: None = None

    @property
    def shape(self) -> AttentionShape:
        """Heads of its attention."""
        return AttentionShape(self.heads, self.heads)

    def weights(self) -> tuple[Weight, ...]:
        """Parameters, in the module's order."""
        return tuple(Weight(elements, frozen=frozen) for elements, frozen in self.parameters)

    def attention_flops(self, load: Load) -> int:
        """FLOPs of the attention of all layers."""
        windows = (self.layers - self.whole) * load.tokens * self.seen
        pairs = self.whole * load.squares + windows
        return attention_flops(pairs, self.heads, self.head_dim, causal=False)

    def forward(self, load: Load) -> Work:
        """As measured."""
        return Work(
            flops=self.flops.at(load.tokens) + self.attention_flops(load),
            bytes=self.moved.at(load.tokens),
            kept=self.kept.at(load.tokens) + load.tokens * self.out,
            workspace=self.ahead.at(load.tokens),
            passing=self.passing.at(load.tokens),
            launches=self.layers,
        )

    def backward(self, load: Load, grad: Grad) -> Work:
        """Twice the forward in FLOPs and bytes, all of it where gradients of inputs are made."""
        if grad is Grad.WEIGHT:
            return Work()
        forward = self.forward(load)
        return Work(
            flops=2 * forward.flops,
            bytes=2 * forward.bytes,
            workspace=self.back.at(load.tokens),
            launches=self.layers,
        )

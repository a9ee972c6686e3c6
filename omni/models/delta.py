"""The gated delta net as a statement: linears, weights, what it computes, keeps and exchanges.

Its module is `omni/models/delta_module.py`, its rule `ops/delta.py`; letters as there.
"""

from dataclasses import dataclass

from omni.llm_config import LLMConfig
from omni.models.pieces import Linears, linear_weights, plain
from ops.delta_shape import DeltaHeads, DeltaShape, delta_bytes, delta_flops, delta_workspace
from parallel.work import FP32, Load, Weight


def delta_heads(config: LLMConfig) -> DeltaHeads | None:
    """The heads of the LLM's delta nets, None if it has none."""
    sizes = config.delta
    if not sizes.key_heads:
        return None
    values = sizes.value_heads // sizes.key_heads
    return DeltaHeads(sizes.key_heads, DeltaShape(sizes.key_dim, values, sizes.value_dim, sizes.conv))


@dataclass(frozen=True)
class Delta:
    """A delta net of `heads`, of all ranks together, in front of a stream of width `hidden`."""

    hidden: int
    heads: DeltaHeads

    @property
    def inner(self) -> int:
        """Numbers of a token that the rule puts out, and that its gates have."""
        return self.heads.count * self.heads.shape.out

    @property
    def mixed(self) -> int:
        """Numbers of a token that the rule reads."""
        return self.heads.count * self.heads.shape.width

    def linears(self) -> Linears:
        """The linear ahead of the rule, and that behind it."""
        return (self.hidden, self.mixed + self.inner), (self.inner, self.hidden)

    def weights(self, tp: int) -> tuple[Weight, ...]:
        """Parameters on one of `tp` ranks, in the module's order: the convolution, decays and their biases,
        the first linear, the norm of heads, of which ranks have different ones, and the last linear.
        """
        (_, first), (inner, _) = self.linears()
        own, shape = self.heads.over(tp), self.heads.shape
        values = own.count * shape.values
        return (
            *plain(own.count * shape.channels * shape.taps, values, values),
            *linear_weights(self.hidden, first // tp, 0),
            Weight(shape.value_dim, partial=tp > 1),
            *linear_weights(inner // tp, self.hidden, 0),
        )

    def flops(self, tokens: int, tp: int) -> int:
        """Forward FLOPs of the rule on a rank: as many a token, however long its sequence is."""
        own = self.heads.over(tp)
        return delta_flops(tokens, own.count, own.shape)

    def token_bytes(self, element: int) -> int:
        """Bytes that a token moves in the rule, the norm and the gate, over all ranks."""
        return delta_bytes(1, self.heads.count, self.heads.shape, element) + 6 * self.inner * element

    def workspace(self, load: Load, tp: int) -> int:
        """Bytes that a backward of the rule needs at most, about: estimated, not counted tensor by tensor."""
        own = self.heads.over(tp)
        return delta_workspace(load.tokens, load.sequences, own.count, own.shape)

    def kept(self, tokens: int, tp: int, element: int) -> int:
        """Bytes that a rank keeps: what the first linear puts out, the rule's output, its norm, the gates'
        SiLU and the product of both, and what the norm divided by. The rule keeps its inputs alone.
        """
        values = self.heads.count * self.heads.shape.values
        return tokens // tp * ((self.mixed + 5 * self.inner) * element + values * FP32)

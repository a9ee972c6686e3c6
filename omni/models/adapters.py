"""Low-rank adapters as work: what they weigh, compute, communicate and keep, in integers; no torch here.

To a linear W [out, in] is added alpha / rank · B A, of A [rank, in] and B [out, rank] (Hu et al., LoRA, 2021,
section 4.1). Tensor-parallel ranks that divide the outputs of W divide B and hold A whole; those that divide
its inputs divide A and hold B whole. A forward exchanges nothing more: what A makes of a token is either
whole or a part of a sum, as what W puts out is, and is summed with it behind the linear. Where ranks have
parts of the outputs, a backward sums the gradient of it, and scatters the sum if they divide tokens. Those
of what ranks hold whole are then summed at the end of the step, as gradients of norms are; where they do not
divide tokens, a backward sums what was a part, and so the gradient of a whole B is the same on all.

Gradients of adapters are never put off: they take little, and what they need would be held for long.

Shapes, all of one rank: T tokens that the linear sees, t those between halves of a layer, r the rank.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from omni.config import ConfigError
from omni.llm_sections import LoraConfig
from ops.linear import linear_bytes, linear_flops
from parallel.work import Collective, Weight, all_reduce, reduce_scatter

A, B = "lora_a", "lora_b"
"""What the parameters of a linear's adapter are called."""


@dataclass(frozen=True)
class Lora:
    """Adapters of a component, as `LoraConfig` calls them."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @classmethod
    def of(cls, config: LoraConfig) -> Self | None:
        """Return them, None if there are none."""
        return cls(config.rank, config.alpha, tuple(config.targets)) if config.rank else None

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class Adapter:
    """The adapter of a linear from `inputs` to `outputs`, of which each of `tp` ranks has a part: of the
    outputs if the linear is the `first` of its half of a layer, else of the inputs. With `splits_tokens` the
    ranks divide the tokens between halves; `element` are the bytes of a number.
    """

    inputs: int
    outputs: int
    first: bool
    rank: int
    tp: int
    splits_tokens: bool
    element: int

    @property
    def sides(self) -> tuple[int, int]:
        """Inputs and outputs on this rank."""
        if self.first:
            return self.inputs, self.outputs // self.tp
        return self.inputs // self.tp, self.outputs

    def weights(self) -> tuple[Weight, ...]:
        """A and B."""
        inputs, outputs = self.sides
        return (
            Weight(self.rank * inputs, partial=self.first and self.splits_tokens),
            Weight(outputs * self.rank, partial=not self.first and self.splits_tokens),
        )

    def forward_flops(self, tokens: int) -> int:
        """Of both products."""
        inputs, outputs = self.sides
        return linear_flops(tokens, inputs, self.rank) + linear_flops(tokens, self.rank, outputs)

    def backward_flops(self, tokens: int, learns: bool) -> int:
        """Gradients of the inputs of both products and, if it `learns`, of A and B."""
        inputs, outputs = self.sides
        own = tokens // self.tp if self.first and self.splits_tokens else tokens
        each = linear_flops(own, inputs, self.rank) + linear_flops(tokens, self.rank, outputs)
        return each * (2 if learns else 1)

    def bytes(self, tokens: int) -> int:
        """What a forward moves, and each half of a backward."""
        inputs, outputs = self.sides
        return linear_bytes(tokens, inputs, self.rank, self.element) + linear_bytes(
            tokens, self.rank, outputs, self.element
        )

    def inner(self, tokens: int) -> int:
        """Bytes of what A makes of the tokens, which is kept for the gradient of B."""
        return tokens * self.rank * self.element

    def sums(self, tokens: int, learns: bool) -> tuple[Collective, ...]:
        """What a backward communicates beside the gradient of the linear's input."""
        if self.first and self.splits_tokens:
            return reduce_scatter("tp", self.inner(tokens) // self.tp, self.tp)
        needed = not self.splits_tokens and (self.first or learns)
        return all_reduce("tp", self.inner(tokens), self.tp) if needed else ()


def check_adapters(section: str, config: LoraConfig, linears: Mapping[str, tuple[int, int]]) -> None:
    """Refuse adapters that the `linears` of a component, by name with their inputs and outputs, do not allow.

    Raises:
        ConfigError: naming the key under `section`.
    """
    for name in config.targets:
        if name not in linears:
            raise ConfigError(
                f"{section}.lora.targets={config.targets}: there is no linear {name} that takes adapters; "
                f"choose among {', '.join(linears)}"
            )
        if config.rank > (least := min(linears[name])):
            raise ConfigError(
                f"{section}.lora.rank={config.rank}: {name} has {linears[name][0]} inputs and "
                f"{linears[name][1]} outputs, and is of no higher rank than {least}: choose at most that"
            )

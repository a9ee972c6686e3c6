"""Rows of attention in their context, as plans and masks state them: no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """`rows` queries against `context` keys; query i stands at place `offset` + i among the keys."""

    rows: int
    context: int
    offset: int

"""A step in rounds: items of some microbatches are encoded, passed and gone back through before those of the
next ones, so that encoders keep the activations of a round and not of the step.

Six microbatches in two rounds, under a schedule that encodes before all passes, as one stage runs them: `E`
encodes the items of a round, `B` goes back through them, a digit is a forward and a letter a backward:

    E 0 1 2 a b c B   E 3 4 5 d e f B

Each round has the order that the schedule gives it alone, so a step fills and drains the pipeline as often as
it has rounds.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from pipeline.builders.schedule import Facts, Order, SchedulePolicy
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Op
from pipeline.rules.lists import ENCODES


def in_rounds(policy: SchedulePolicy, domain: DomainPlan, facts: Facts, starts: Sequence[int]) -> Order:
    """Order the teams of a domain round by round; `starts` are the first microbatches of the rounds, in
    order. No encoder batch may have items of two rounds.
    """
    if len(starts) == 1:
        return policy(domain, facts)
    order: Order = [[] for _ in domain.teams]
    done = 0  # encoder batches
    for first, stop in pairwise([*starts, len(domain.microbatches)]):
        batches = [
            replace(batch, microbatches=tuple(m - first for m in batch.microbatches))
            for batch in domain.encoder_batches
            if first <= batch.microbatches[0] < stop
        ]
        assert all(batch.microbatches[-1] < stop - first for batch in batches), "a batch of two rounds"
        alone = replace(
            domain,
            microbatches=domain.microbatches[first:stop],
            encoder_batches=tuple(batches),
            routes=domain.routes[first:stop],
        )
        of_round = policy(alone, _from(facts, first, done))
        for ops, more in zip(order, of_round, strict=True):
            ops += (_counted(op, first, done) for op in more)
        done += len(batches)
    return order


def _from(facts: Facts, microbatch: int, encoder_batch: int) -> Facts:
    """What is known of ops that count microbatches and encoder batches from these on."""
    (compute_ns, message_ns), kept = facts.costs, facts.kept

    def of(op: Op) -> Op:
        return _counted(op, microbatch, encoder_batch)

    costs = lambda rank, op: compute_ns(rank, of(op)), lambda op: message_ns(of(op))
    return replace(facts, costs=costs, kept=lambda rank, op: kept(rank, of(op)))


def _counted(op: Op, microbatch: int, encoder_batch: int) -> Op:
    return replace(op, index=op.index + (encoder_batch if op.kind in ENCODES else microbatch))

"""Refuse a plan that could hang, lose a row or hold too much, before any of it runs.

R1  every communicator sees one order of collectives on all its ranks; gradients are reduced in the plan's
    order
R2  sends and receives of each directed pair of ranks are in the same order
R3  data order on a rank: encode < ship, wait(ship) < forward, backward < return, wait(return) <
    encode-backward, and the same for activations and their gradients, from virtual stage to virtual
    stage; gradients of weights after those of inputs; every gradient before it is reduced; what goes within
    a pass needs nothing of it
R4  every op is issued once and waited for exactly once, after it was issued
R5  each item is encoded once, and its backward runs once, whole or split in two, on the same ranks (never for
    a frozen encoder), neighbours that hold its encoder; each microbatch passes every virtual stage
    once; every rank reduces once what it holds
R6  activations that a domain rank holds stay under the bound of their part
R7  the abstract machine runs the lists to the end (`pipeline/simulator.py`)

Each kind of rule has a file in `pipeline/rules`.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from pipeline.plan import StepPlan
from pipeline.rules.communication import collective_order, pair_order, waits_once
from pipeline.rules.data_order import data_order, within_passes
from pipeline.rules.lists import encoder_batches_by_team, lists_of
from pipeline.rules.memory import Kept, in_flight
from pipeline.rules.once import everything_once, rows_in_place
from pipeline.rules.table import unclear_encoder_batches, unclear_table, unknown_ops
from pipeline.simulator import StuckError, run


class PlanRefusedError(RuntimeError):
    """A plan broke a rule; nothing of it has run. The message lists the rules and where they broke."""


def verify(plan: StepPlan, kept: Kept, single_fifo: bool = False, ranks: Sequence[int] = ()) -> None:
    """Check all rules on the domain of a plan.

    With `single_fifo` the lists must also run with one communication queue a rank. Rules name domain ranks; a
    refusal says which of the run's `ranks` they are, if these are given.

    Raises:
        PlanRefusedError: with the first violations.
    """
    found = list(violations(plan, kept, single_fifo))
    if found:
        lines = "\n  ".join(f"domain {plan.number}: {text}" for text in found[:10])
        if ranks:
            lines += (
                f"\n  domain ranks 0 to {len(ranks) - 1} of domain {plan.number} are ranks {_spans(ranks)}"
            )
        raise PlanRefusedError(f"the plan of step {plan.step} is refused:\n  {lines}")


def _spans(numbers: Sequence[int]) -> str:
    """Numbers in words, those that follow one another as "4 to 7"."""
    runs = groupby(enumerate(numbers), key=lambda entry: entry[1] - entry[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(group) for _, group in runs)]
    return ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in ends)


def violations(plan: StepPlan, kept: Kept, single_fifo: bool = False) -> Iterator[str]:
    """Yield every broken rule as text; nothing if the plan is safe."""
    domain = plan.domain
    if unclear := [*unclear_table(domain), *unclear_encoder_batches(domain)]:
        yield from unclear
        return
    lists = lists_of(domain)
    if unknown := list(unknown_ops(plan, lists)):
        yield from unknown
        return
    if misplaced := list(within_passes(domain)):
        yield from misplaced
        return
    yield from collective_order(domain, lists)
    yield from pair_order(domain, lists)
    for team, (ops, encoder_batches) in enumerate(zip(lists, encoder_batches_by_team(domain), strict=True)):
        yield from data_order(plan, team, ops, encoder_batches)
        yield from waits_once(domain, team, ops)
    yield from everything_once(plan, lists)
    yield from rows_in_place(domain, lists)
    yield from in_flight(plan, kept)
    try:
        run(domain, lambda rank, op: 1, lambda op: 1, single_fifo=single_fifo)
    except StuckError as error:
        yield f"R7{' with a single queue a rank' if single_fifo else ''}: {error}"

"""Where reductions of gradients begin: as soon as a team has all gradients that they sum.

A reduction is issued there and waited for at the end of the list, so it hides behind what is left to compute:
that of the LLM behind the backwards of encoders, that of a rank's last virtual stage behind those of its
first. Where it follows a backward at once, it begins behind that, layer by layer (`closing`); in one queue,
where it would hold up the layers' own messages otherwise, so does that of the LLM behind the backward of an
encoder.
"""

from collections.abc import Callable, Mapping, Sequence

from pipeline.domain_plan import DomainPlan
from pipeline.ops import BACKWARDS, Kind, Op

Order = list[list[Op]]
Pair = tuple[int, int]
"""A component's number and its virtual stage, 0 of an encoder."""


def with_reductions(order: Order, domain: DomainPlan, components: Sequence[str]) -> Order:
    """Add to an order of compute the reductions that it lacks, `components` being those of the plan.

    Each team issues them in the order of the domain's `reductions`, none before its gradients are complete; a
    team that makes none of the gradients issues it after all it computes, lest a device wait for peers
    meanwhile.
    """
    given = {op for ops in order for op in ops if op.kind is Kind.REDUCE}
    return [_of_team(team, ops, domain, components, given) for team, ops in enumerate(order)]


def _of_team(
    team: int, ops: list[Op], domain: DomainPlan, components: Sequence[str], given: set[Op]
) -> list[Op]:
    complete = _complete(ops, domain, components)
    place = -1
    added: list[tuple[int, Op]] = []
    for number, virtual_stage in domain.reductions:
        op = Op(Kind.REDUCE, number, virtual_stage=virtual_stage)
        if team not in domain.reducing(op):
            continue
        if op in given:
            place = ops.index(op) if op in ops else place
        else:
            place = max(place, complete.get((number, virtual_stage), len(ops) - 1))
            added.append((place, op))
    out, before = [], 0
    for place, op in added:
        out += [*ops[before : place + 1], op]
        before = place + 1
    return out + ops[before:]


def closing(
    domain: DomainPlan, team: int, fronts: Callable[[int], Mapping[Op, tuple[Pair, ...]]]
) -> dict[Op, tuple[Pair, ...]]:
    """Return the backwards of a team behind which reductions begin, and of what, in their order: those that
    REDUCEs follow at once, on all ranks that run them together. `fronts` says of a team what `in_front` does.

    Only the collectives of its own layers then stand between what the verifier proved and what runs, and all
    that take part in these run the same layers beside the same reductions: none can wait for the other.
    """

    def teams(op: Op) -> range:
        collective_group = domain.collective_group_of(op, team * domain.team)
        return range(collective_group[0] // domain.team, collective_group[-1] // domain.team + 1)

    return {op: of for op, of in fronts(team).items() if all(op in fronts(other) for other in teams(op))}


def in_front(domain: DomainPlan, components: Sequence[str], team: int) -> dict[Op, tuple[Pair, ...]]:
    """Return the backwards of a team that REDUCEs follow at once, and what begins to be reduced behind each,
    in the order of the list. `components` are those of the plan.

    The reduction of what a backward makes gradients of begins layer by layer. What stands in front of it is
    complete before, and begins behind the backward of an encoder that the team runs alone, which no other
    team can wait for meanwhile: in one queue it would keep rows of others waiting if it began before they
    went back.
    """
    found: dict[Op, tuple[Pair, ...]] = {}
    ops = domain.ops[team]
    for at, before in enumerate(ops):
        if before.kind not in BACKWARDS:
            continue
        run = _reduced_behind(ops, at)
        own = made_by(domain, components, before)
        ahead = run.index(own) if own in run else len(run)
        begins = run[: ahead + before.makes_weight]
        if begins and (not ahead or runs_alone(domain, before, team)):
            found[before] = tuple(begins)
    return found


def _reduced_behind(ops: Sequence[Op], at: int) -> list[Pair]:
    """What the REDUCEs sum that follow a place of a list at once."""
    run = []
    while at + 1 < len(ops) and ops[at + 1].kind is Kind.REDUCE:
        at += 1
        run.append((ops[at].index, ops[at].virtual_stage))
    return run


def made_by(domain: DomainPlan, components: Sequence[str], op: Op) -> Pair:
    """What a backward makes gradients of."""
    if op.kind is Kind.BACKWARD:
        return domain.llm, op.virtual_stage
    return components.index(domain.encoder_batches[op.index].component), 0


def runs_alone(domain: DomainPlan, op: Op, team: int) -> bool:
    """Whether an op is the backward of an encoder that a team runs without others."""
    return (
        op.kind is Kind.ENCODE_BACKWARD
        and len(domain.collective_group_of(op, team * domain.team)) <= domain.team
    )


def follows_llm(domain: DomainPlan, before: Op, op: Op) -> bool:
    """Whether an op is the REDUCE of a virtual stage whose last gradients the op before it makes."""
    return (
        op.kind is Kind.REDUCE
        and before.kind is Kind.BACKWARD
        and before.makes_weight
        and (op.index, op.virtual_stage) == (domain.llm, before.virtual_stage)
    )


def _complete(ops: Sequence[Op], domain: DomainPlan, components: Sequence[str]) -> dict[Pair, int]:
    """For what a team makes gradients of, the place of the op after which they are complete."""
    numbers = {name: number for number, name in enumerate(components)}
    last: dict[Pair, int] = {}
    for at, op in enumerate(ops):
        if op.kind is Kind.BACKWARD:
            last[domain.llm, op.virtual_stage] = at
        elif op.kind is Kind.ENCODE_BACKWARD:
            last[numbers[domain.encoder_batches[op.index].component], 0] = at
    # An output that is tied to the embedding of its own rank makes gradients of the first one's weight.
    first, end = (domain.llm, 0), (domain.llm, domain.num_virtual_stages - 1)
    if first in last and end in last:
        last[first] = max(last[first], last[end])
    return last

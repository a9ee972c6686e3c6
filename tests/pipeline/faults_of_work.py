"""Faults in what lists run, and in what a plan says of virtual stages, encoder batches and rows (R5, R6): see
`faults.py`.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

from edits import with_domain
from faults import PASSES, Fault, Planted, lists_of, sites, with_ops

from parallel.work import Grad
from pipeline.ops import Kind, Op
from pipeline.plan import StepPlan
from pipeline.rules.lists import ENCODES, who

# R5: once.


def changed_count(wanted: Callable[[Op], bool], times: int) -> Fault:
    """One team runs one of its ops not at all, or twice; halves of a backward are ops."""

    def plant(plan: StepPlan, random: Random) -> Planted | None:
        places = sites(plan, lambda plan, team, op: wanted(op))
        if not places:
            return None
        team, at = random.choice(places)
        lists, op = lists_of(plan), plan.domain.ops[team][at]
        lists[team][at : at + 1] = [op] * times
        whole = replace(op, grad=Grad.BOTH)
        words = f"{who(plan.domain, team)} runs {whole} ", ", not 1: "
        return Planted(with_ops(plan, lists), "R5", words)

    return plant


def microbatch_left_out(plan: StepPlan, random: Random) -> Planted | None:
    """One team runs a microbatch less than the others."""
    places = sites(plan, lambda plan, team, op: op.kind is Kind.FORWARD)
    if not places:
        return None
    team, at = random.choice(places)
    lists, left = lists_of(plan), plan.domain.ops[team][at]
    lists[team] = [op for op in lists[team] if op.kind not in PASSES or op.index != left.index]
    return Planted(with_ops(plan, lists), "R5", (f"{who(plan.domain, team)} runs {left} 0 times, not 1: ",))


def added_op(make: Callable[[StepPlan, int], Op | None], *said: str) -> Fault:
    """One team runs an op more, before its last one."""

    def plant(plan: StepPlan, random: Random) -> Planted | None:
        made = [(team, op) for team in plan.domain.teams if (op := make(plan, team)) is not None]
        if not made:
            return None
        (team, op), lists = random.choice(made), lists_of(plan)
        lists[team].insert(max(0, len(lists[team]) - 1), op)
        whole = op if said[0].startswith(",") else replace(op, grad=Grad.BOTH)
        return Planted(with_ops(plan, lists), "R5", (f"{who(plan.domain, team)} runs {whole}", *said))

    return plant


def a_microbatch_too_many(plan: StepPlan, team: int) -> Op | None:
    own = plan.domain.holds[team]
    return Op(Kind.FORWARD, len(plan.domain.microbatches), virtual_stage=own[0]) if own else None


def a_virtual_stage_it_lacks(plan: StepPlan, team: int) -> Op | None:
    others = set(range(plan.domain.num_virtual_stages)) - set(plan.domain.holds[team])
    return Op(Kind.FORWARD, 0, virtual_stage=min(others)) if others and plan.domain.microbatches else None


def an_encoder_batch_of_others(plan: StepPlan, team: int) -> Op | None:
    for c, batch in enumerate(plan.domain.encoder_batches):
        if team * plan.domain.team not in batch.ranks:
            return Op(Kind.ENCODE, c)
    return None


def a_frozen_encoder_batch(plan: StepPlan, team: int) -> Op | None:
    for c, batch in enumerate(plan.domain.encoder_batches):
        if batch.component in plan.frozen and team * plan.domain.team in batch.ranks:
            return Op(Kind.ENCODE_BACKWARD, c)
    return None


def a_frozen_weight(plan: StepPlan, team: int) -> Op | None:
    own = plan.domain.holds[team]
    if plan.components[plan.domain.llm] not in plan.frozen or not own or not plan.domain.microbatches:
        return None
    return Op(Kind.BACKWARD, 0, virtual_stage=own[0], grad=Grad.WEIGHT)


def a_whole_beside_halves(plan: StepPlan, team: int) -> Op | None:
    split = [op for op in plan.domain.ops[team] if op.grad is Grad.WEIGHT]
    return replace(split[-1], grad=Grad.BOTH) if split else None


# R5: places.


def encoder_batch_where_its_encoder_is_not(plan: StepPlan, random: Random) -> Planted | None:
    """An encoder batch moves to other ranks, with its ops and its rows."""
    domain, found = plan.domain, []
    homes = dict(zip(plan.components, domain.homes, strict=True))
    for c, batch in enumerate(domain.encoder_batches):
        for start in range(0, domain.num_ranks - len(batch.ranks) + 1, domain.team):
            if start < homes[batch.component][0] or start + len(batch.ranks) > homes[batch.component][1]:
                found.append((c, tuple(range(start, start + len(batch.ranks)))))
    if not found:
        return None
    c, ranks = random.choice(found)
    lists, batch = lists_of(plan), domain.encoder_batches[c]
    own = [Op(kind, c, grad=grad) for kind in ENCODES for grad in Grad]
    ran = [op for op in lists[batch.ranks[0] // domain.team] if op in own]
    lists = [[op for op in ops if op not in own] for ops in lists]
    for team in range(ranks[0] // domain.team, ranks[-1] // domain.team + 1):
        lists[team] = ran[:1] + lists[team] + ran[1:]
    encoder_batches = (
        *domain.encoder_batches[:c],
        replace(batch, ranks=ranks),
        *domain.encoder_batches[c + 1 :],
    )
    words = f"encoder batch {c} is on domain ranks {ranks}, which do not all hold {batch.component}"
    return Planted(with_domain(with_ops(plan, lists), encoder_batches=encoder_batches), "R5", (words,))


def changed_encoder_batches(
    change: Callable[[StepPlan, Random], tuple[tuple[int, ...], str] | None],
) -> Fault:
    """The encoder batches of these numbers take the place of all; those that are new have the ops of the
    old.
    """

    def plant(plan: StepPlan, random: Random) -> Planted | None:
        changed = change(plan, random)
        if changed is None:
            return None
        numbers, said = changed
        lists = [
            [
                replace(op, index=new)
                for op in ops
                for new in (
                    [n for n, old in enumerate(numbers) if old == op.index]
                    if op.kind in ENCODES
                    else [op.index]
                )
            ]
            for ops in plan.domain.ops
        ]
        encoder_batches = tuple(plan.domain.encoder_batches[number] for number in numbers)
        return Planted(with_domain(with_ops(plan, lists), encoder_batches=encoder_batches), "R5", (said,))

    return plant


def an_encoder_batch_two_times(plan: StepPlan, random: Random) -> tuple[tuple[int, ...], str] | None:
    numbers = range(len(plan.domain.encoder_batches))
    if not numbers:
        return None
    again = random.choice(numbers)
    item = random.choice(plan.domain.encoder_batches[again].items)
    return (*numbers, again), f"item {item} is in 2 encoder batches"


def an_encoder_batch_less(plan: StepPlan, random: Random) -> tuple[tuple[int, ...], str] | None:
    numbers = range(len(plan.domain.encoder_batches))
    if not numbers:
        return None
    left = random.choice(numbers)
    kept = tuple(number for number in numbers if number != left)
    item = random.choice(plan.domain.encoder_batches[left].items)
    return kept, f"item {item} is in 0 encoder batches"


def changed_route(lose: bool) -> Fault:
    """An interval of rows is lost, or arrives a row further on."""

    def plant(plan: StepPlan, random: Random) -> Planted | None:
        routes = list(plan.domain.routes)
        with_rows = [m for m, route in enumerate(routes) if route is not None and route.segments]
        if not with_rows:
            return None
        m = random.choice(with_rows)
        segments = list(routes[m].segments)
        moved = segments.pop(random.randrange(len(segments)))
        if not lose:
            segments.append(replace(moved, destination_start=moved.destination_start + 1))
        routes[m] = replace(routes[m], segments=tuple(segments))
        words = f"the route of microbatch {m} does not bring each row to the place of its item"
        return Planted(with_domain(plan, routes=tuple(routes)), "R5", (words,))

    return plant


def virtual_stage_held_twice(plan: StepPlan, random: Random) -> Planted | None:
    domain = plan.domain
    team = random.randrange(domain.llm_size // domain.team)
    others = set(range(domain.num_virtual_stages)) - set(domain.holds[team])
    if not others:
        return None
    holds = list(domain.holds)
    holds[team] = (*holds[team], min(others))
    counts = dict(sorted(Counter(number for held in holds for number in held).items()))
    words = f"virtual stages of the LLM are on {counts} teams"
    return Planted(with_domain(plan, holds=tuple(holds)), "R5", (words,))


def backward_in_evaluation(plan: StepPlan, random: Random) -> Planted | None:
    """The lists of a training step in a step of evaluation."""
    places = sites(plan, lambda plan, team, op: op.kind is Kind.BACKWARD and op.grad is Grad.BOTH)
    if not places:
        return None
    team, at = random.choice(places)
    words = f"{who(plan.domain, team)} runs {plan.domain.ops[team][at]} 1 times, not 0: "
    return Planted(replace(plan, train=False), "R5", (words,))


# R6: memory.


def forwards_over_the_bound(plan: StepPlan, random: Random) -> Planted | None:
    """A team runs more forwards of a virtual stage before any backward than that may hold."""
    bounds = dict(plan.domain.bounds)
    found = [
        (team, virtual_stage)
        for team, virtual_stages in enumerate(plan.domain.holds)
        for virtual_stage in virtual_stages
        if plan.train and bounds[f"llm/{virtual_stage}"] < len(plan.domain.microbatches)
    ]
    if not found:
        return None
    (team, virtual_stage), lists = random.choice(found), lists_of(plan)
    ops = lists[team]
    forwards = [op for op in ops if op.kind is Kind.FORWARD and op.virtual_stage == virtual_stage]
    back = next(
        at for at, op in enumerate(ops) if op.kind is Kind.BACKWARD and op.virtual_stage == virtual_stage
    )
    lists[team] = [*(op for op in ops[:back] if op not in forwards), *forwards]
    lists[team] += [op for op in ops[back:] if op not in forwards]
    words = (
        f"{who(plan.domain, team)} holds {len(forwards)} ",
        f"of llm/{virtual_stage} at {forwards[-1]}, more than its",
    )
    return Planted(with_ops(plan, lists), "R6", words)


def of_kind(*kinds: Kind) -> Callable[[Op], bool]:
    return lambda op: op.kind in kinds


WORK: dict[str, Fault] = {
    "a microbatch left out": microbatch_left_out,
    "a microbatch too many": added_op(a_microbatch_too_many, ", which is not in the plan"),
    "a pass left out": changed_count(of_kind(*PASSES), 0),
    "a pass twice": changed_count(of_kind(*PASSES), 2),
    "an encoder batch left out": changed_count(of_kind(*ENCODES), 0),
    "an encoder batch twice": changed_count(of_kind(*ENCODES), 2),
    "an encoder batch of others": added_op(
        an_encoder_batch_of_others, " 1 times, not 0: an encoder batch of domain ranks "
    ),
    "a weight gradient left out": changed_count(lambda op: op.grad is Grad.WEIGHT, 0),
    "a weight gradient twice": changed_count(lambda op: op.grad is Grad.WEIGHT, 2),
    "a whole backward beside its halves": added_op(a_whole_beside_halves, " 1 times whole, 1 times "),
    "a reduction left out": changed_count(of_kind(Kind.REDUCE), 0),
    "a virtual stage that its rank lacks": added_op(a_virtual_stage_it_lacks, ", which is not in the plan"),
    "a backward of a frozen encoder": added_op(a_frozen_encoder_batch, " 1 times, not 0: "),
    "a weight gradient of a frozen llm": added_op(a_frozen_weight, " 1 for weights, not "),
    "an encoder batch where its encoder is not": encoder_batch_where_its_encoder_is_not,
    "an encoder batch two times": changed_encoder_batches(an_encoder_batch_two_times),
    "an encoder batch less": changed_encoder_batches(an_encoder_batch_less),
    "rows that arrive elsewhere": changed_route(lose=False),
    "rows that are lost": changed_route(lose=True),
    "a virtual stage that two ranks hold": virtual_stage_held_twice,
    "a backward in evaluation": backward_in_evaluation,
    "forwards over the bound": forwards_over_the_bound,
}

"""R5, second half: each item, pass, reduction and row happens once, and where it belongs."""

from collections import Counter
from collections.abc import Iterator

from parallel.boundary import Route
from parallel.work import Grad
from pipeline.domain_plan import DomainPlan
from pipeline.ops import BACKWARDS, COLLECTIVE, COMPUTE, Kind, Op
from pipeline.plan import StepPlan
from pipeline.routes import plan_routes
from pipeline.rules.lists import ENCODES, Fields, Lists, fields, who

_ONCE = COMPUTE | {Kind.REDUCE}


def everything_once(plan: StepPlan, lists: Lists) -> Iterator[str]:
    """Each item is in one encoder batch, which its ranks run once; each pass and each reduction happens
    once.
    """
    domain = plan.domain
    homes = dict(zip(plan.components, domain.homes, strict=True))
    owners = Counter(number for batch in domain.encoder_batches for number in batch.items)
    for number in range(len(domain.items)):
        if owners[number] != 1:
            yield f"R5: item {number} is in {owners[number]} encoder batches"
    for c, batch in enumerate(domain.encoder_batches):
        first, stop = homes[batch.component]
        if not (first <= batch.ranks[0] and batch.ranks[-1] < stop):
            where = f"on domain ranks {batch.ranks}, which do not all hold {batch.component}"
            yield f"R5: encoder batch {c} is {where}"
    for team, (ops, own) in enumerate(zip(lists, _expected(plan), strict=True)):
        counts = Counter([op for op in ops if op[0] in _ONCE])
        if counts != own:
            yield from _not_once(plan, team, counts, own)


def _not_once(plan: StepPlan, team: int, counts: Counter[Fields], own: dict[Fields, int]) -> Iterator[str]:
    """What a team does not run as often as it must, where a backward may be split."""
    learns = plan.trains(plan.components[plan.domain.llm])
    for op in dict.fromkeys((*own, *((*op[:4], Grad.BOTH) for op in counts))):
        whole = counts[op]
        halves = [counts[*op[:4], grad] for grad in (Grad.INPUT, Grad.WEIGHT)]
        split = [1, int(learns or op[0] is not Kind.BACKWARD)]
        if op in own and op[0] in BACKWARDS and not whole and halves == split:
            continue
        if whole == int(op in own) and not any(halves):
            continue
        times = f"{whole} times"
        if any(halves):
            times += f" whole, {halves[0]} times for inputs and {halves[1]} for weights"
        what, why = Op(*op), _why(op, plan)
        yield f"R5: {who(plan.domain, team)} runs {what} {times}, not {int(op in own)}: {why}"


def _expected(plan: StepPlan) -> list[dict[Fields, int]]:
    """What each team must run once; a backward as a whole."""
    domain = plan.domain
    expected: list[dict[Fields, int]] = [{} for _ in domain.teams]
    for c, batch in enumerate(domain.encoder_batches):
        for kind in ENCODES if plan.trains(batch.component) else ENCODES[:1]:
            for rank in range(batch.ranks[0], batch.ranks[-1] + 1, domain.team):
                expected[rank // domain.team][fields(kind, c)] = 1
    for number, component in enumerate(plan.components):
        if plan.trains(component):
            for virtual_stage in range(domain.num_virtual_stages) if number == domain.llm else (0,):
                for team in domain.reducing(Op(Kind.REDUCE, number, virtual_stage=virtual_stage)):
                    expected[team][fields(Kind.REDUCE, number, virtual_stage)] = 1
    kinds = (Kind.FORWARD, Kind.BACKWARD) if plan.train else (Kind.FORWARD,)
    passes = [(kind, m) for kind in kinds for m in range(len(domain.microbatches))]
    of_each = [
        {fields(kind, m, number): 1 for kind, m in passes} for number in range(domain.num_virtual_stages)
    ]
    for team, held in enumerate(domain.holds):
        for number in held:
            expected[team].update(of_each[number])
    return expected


def _why(op: Fields, plan: StepPlan) -> str:
    """The reason for how often an op runs."""
    kind, index, *_ = op
    if kind in ENCODES:
        return f"an encoder batch of domain ranks {plan.domain.encoder_batches[index].ranks}"
    return plan.components[index] if kind is Kind.REDUCE else "a microbatch passes every virtual stage"


def rows_in_place(domain: DomainPlan, lists: Lists) -> Iterator[str]:
    """Every row leaves the rank that encoded it once, and arrives where its item stands, once."""
    for m, route in enumerate(domain.routes):
        for team, ops in enumerate(lists) if route is None else ():
            if any(op[0] in COLLECTIVE and op[1] == m for op in ops):
                yield f"R5: {who(domain, team)} ships microbatch {m}, which has no route"
    try:
        routes = plan_routes(domain)
    except AssertionError as error:
        yield f"R5: rows have no place, or that of others: {error}"
        return
    for m, (route, expected) in enumerate(zip(domain.routes, routes, strict=True)):
        # How the rows travel is a choice; which rows and where to is not.
        if _rows(route) != _rows(expected):
            yield f"R5: the route of microbatch {m} does not bring each row to the place of its item"


def _rows(route: Route | None) -> object:
    return None if route is None else (route.num_ranks, route.segments)

"""The passes of the LLM by themselves: who waits for whom, and when they would run without encoders."""

from collections.abc import Sequence
from functools import lru_cache
from operator import itemgetter

from pipeline.builders.joint.crews import Crews
from pipeline.builders.joint.shares import Room
from pipeline.builders.joint.timed import Boundary, Pass, PassKind, Times, most
from pipeline.builders.passes import Passes, split_where_kept
from pipeline.builders.schedule import Facts
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Kind, Op


def timed_passes(
    order: Passes, domain: DomainPlan, facts: Facts, crews: Crews, shipped: Times
) -> list[list[Pass]]:
    """Return the passes of each crew in the order of its stage, with what they take and wait for.

    Gradients of weights that do not learn are left out.
    """
    compute_ns, _ = facts.costs
    stages, count = domain.num_stages, len(domain.microbatches)
    learns = any(number == domain.llm for number, _ in domain.reductions)
    ranks = [[team * domain.team for unit in crew for team in crews.units[unit]] for crew in crews.crews]
    steps = _steps(domain, facts, crews, ranks, shipped)
    passes = []
    for crew, of in enumerate(ranks):
        stage = domain.stage(of[0])
        vpp = domain.num_virtual_stages // stages
        ops = () if stage is None else _ordered(order, stages, vpp, count, stage)
        at_once = PassKind(crew, (), [0] * count, ())  # gradients of weights, for which nothing waits
        passes.append(
            [
                Pass(
                    op,
                    max(1, most(compute_ns, of, op)),
                    steps[op.kind, op.virtual_stage, crew] if op.makes_input else at_once,
                    goes_back=op.kind is Kind.BACKWARD and op.makes_input,
                )
                for op in split_where_kept(ops, domain)
                if learns or op.makes_input
            ]
        )
    return passes


@lru_cache(maxsize=256)
def _ordered(order: Passes, stages: int, vpp: int, microbatches: int, stage: int) -> tuple[Op, ...]:
    """An order of passes, which is the same from step to step."""
    return tuple(order(stages, vpp, microbatches, stage))


def _steps(
    domain: DomainPlan, facts: Facts, crews: Crews, ranks: Sequence[Sequence[int]], shipped: Times
) -> dict[tuple[Kind, int, int], PassKind]:
    """What passes wait for, by kind, virtual stage and crew."""
    _, message_ns = facts.costs
    count = len(domain.microbatches)
    at_once = [0] * count
    messages = [message_ns(Op(Kind.SEND_FORWARD, m)) for m in range(count)]
    keys = [
        (kind, virtual_stage, crew)
        for crew, of in enumerate(ranks)
        for virtual_stage in domain.virtual_stages(of[0])
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    ]
    done: dict[tuple[Kind, int, int], Times] = {key: [-1] * count for key in keys}

    def holders(virtual_stage: int, crew: int) -> tuple[int, ...]:
        """The crews that hold another virtual stage where this crew holds its own."""
        if not 0 <= virtual_stage < domain.num_virtual_stages:
            return ()
        teams = {domain.holder(virtual_stage, rank) // domain.team for rank in ranks[crew]}
        return tuple(sorted({crews.crew_of[crews.unit_of[team]] for team in teams}))

    steps = {}
    for kind, virtual_stage, crew in keys:
        step = 1 if kind is Kind.FORWARD else -1
        before, after = virtual_stage - step, virtual_stage + step
        after_those = [
            (done[kind, before, other], at_once if other == crew else messages)
            for other in holders(before, crew)
        ]
        if kind is Kind.BACKWARD:
            after_those.append((done[Kind.FORWARD, virtual_stage, crew], at_once))
        elif virtual_stage in domain.virtual_stages_with_rows(ranks[crew][0]):
            after_those.append((shipped, at_once))
        wakes = tuple(other for other in holders(after, crew) if other != crew)
        steps[kind, virtual_stage, crew] = PassKind(
            crew, tuple(after_those), done[kind, virtual_stage, crew], wakes
        )
    return steps


def rooms_of(
    passes: Sequence[Sequence[Pass]], boundary: Boundary, apart: bool = False
) -> tuple[list[Room], int]:
    """Time the passes without encoders. Returns what each crew does and idles, and the end of the last pass.

    If encoder batches are to stay `apart` from passes, a crew has nothing but passes from its first to its
    last one: it idles before and after, late stages the longest.

    Passes are left with the latest moments at which they may begin, by themselves.
    """
    shipped = list(boundary.shipped)
    boundary.shipped[:] = [0] * len(shipped)
    ends = _run_alone(passes)
    makespan = max((of[-1] for of in ends if of), default=0)
    # By microbatch, when all crews of the first virtual stage have been through its backward.
    gone_back: dict[int, int] = {}
    for crew in boundary.entered:
        for one, end in zip(passes[crew], ends[crew], strict=True):
            if one.goes_back:
                gone_back[one.op.index] = max(end, gone_back.get(one.op.index, 0))
    first = min((end for m, end in gone_back.items() if boundary.ship_ns[m] >= 0), default=makespan)
    rooms = []
    for of, own in zip(passes, ends, strict=True):
        if apart and of:
            rooms.append(Room(own[-1] - own[0] + of[0].ns, makespan - own[-1]))
            continue
        busy = sum(min(one.ns, max(0, end - first)) for one, end in zip(of, own, strict=True))
        rooms.append(Room(sum(one.ns for one in of), makespan - first - busy))
    _note_latest(passes, ends, makespan)
    for of in passes:
        for one in of:
            one.step.done[one.op.index] = -1
    boundary.shipped[:] = shipped
    return rooms, makespan


def _note_latest(passes: Sequence[Sequence[Pass]], ends: Sequence[Sequence[int]], makespan: int) -> None:
    """Note for each pass when it may begin at the latest, so that the last pass ends no later: the backward
    sweep of the critical path method (Kelley and Walker, 1959), over passes from the last to end on.
    """
    steps = {id(one.step): one.step for of in passes for one in of}
    # For each step, by microbatch, when it must be done; and where it says so of those that it waits for.
    needed = {key: [makespan] * len(step.done) for key, step in steps.items()}
    of_done = {id(step.done): needed[key] for key, step in steps.items()}
    tells = {
        key: [(of_done[id(times)], delays) for times, delays in step.after if id(times) in of_done]
        for key, step in steps.items()
    }
    following = [makespan] * len(passes)
    last_first = sorted(
        ((end, crew, one) for crew, of in enumerate(passes) for one, end in zip(of, ends[crew], strict=True)),
        key=itemgetter(0),
        reverse=True,
    )
    for _, crew, one in last_first:
        m, step = one.op.index, id(one.step)
        one.latest = following[crew] = latest = min(following[crew], needed[step][m]) - one.ns
        for times, delays in tells[step]:
            times[m] = min(times[m], latest - delays[m])


def _run_alone(passes: Sequence[Sequence[Pass]]) -> list[list[int]]:
    """When each pass ends if every crew runs its own in order, as soon as it can."""
    ends: list[list[int]] = [[] for _ in passes]
    to_go = {crew for crew, of in enumerate(passes) if of}
    while to_go:
        crew = to_go.pop()
        of, own = passes[crew], ends[crew]
        woken: set[int] = set()
        free = own[-1] if own else 0
        for at in range(len(own), len(of)):
            one = of[at]
            step, m = one.step, one.op.index
            begins = step.begins(m)
            if begins < 0:
                break
            free = step.done[m] = max(begins, free) + one.ns
            own.append(free)
            woken.update(step.wakes)
        to_go |= woken
    assert all(len(of) == len(own) for of, own in zip(passes, ends, strict=True)), "passes wait in a circle"
    return ends

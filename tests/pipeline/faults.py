"""Faults in the order of a plan's lists (R1 to R4, R7): what each plants, and what must be said.

A fault looks for the places of a safe plan where it can be planted and chooses one at random. What must be
found is a line of the refusal that begins with its rule and holds its words: who is meant, and what is wrong.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from random import Random

from edits import Lists, with_domain

from parallel.work import Grad
from pipeline.ops import BACKWARDS, Kind, Op
from pipeline.plan import StepPlan
from pipeline.rules.lists import who

Pair = tuple[Op, Op]
Pairs = Callable[[StepPlan, int, tuple[Op, ...]], Iterator[Pair]]
Wanted = Callable[[StepPlan, int, Op], bool]
PASSES = (Kind.FORWARD, Kind.BACKWARD)


@dataclass(frozen=True)
class Planted:
    """A plan with a fault, the rule that it breaks and words of the line that must say so."""

    plan: StepPlan
    rule: str
    words: tuple[str, ...]

    def found(self, lines: list[str]) -> bool:
        """Whether one of the lines is the one that must be there."""
        return any(
            line.startswith(f"{self.rule}: ") and all(word in line for word in self.words) for line in lines
        )


Fault = Callable[[StepPlan, Random], Planted | None]


def sites(plan: StepPlan, wanted: Wanted) -> list[tuple[int, int]]:
    """The teams and places of the ops that are wanted."""
    return [
        (team, at)
        for team, ops in enumerate(plan.domain.ops)
        for at, op in enumerate(ops)
        if wanted(plan, team, op)
    ]


def lists_of(plan: StepPlan) -> Lists:
    return [list(ops) for ops in plan.domain.ops]


def with_ops(plan: StepPlan, lists: Lists) -> StepPlan:
    return with_domain(plan, ops=tuple(map(tuple, lists)))


def first_of(plan: StepPlan, team: int) -> str:
    """How rules that name one domain rank of a team call it."""
    return f"domain rank {team * plan.domain.team}"


def wait_for(op: Op) -> Op:
    return Op(Kind.WAIT, op.index, op.kind, op.virtual_stage)


def is_local(plan: StepPlan, op: Op) -> bool:
    route = plan.domain.routes[op.index]
    return route is None or route.is_local


# R1 and R2: order between ranks.


def dropped_message(kinds: tuple[Kind, ...]) -> Fault:
    def plant(plan: StepPlan, random: Random) -> Planted | None:
        places = sites(plan, lambda plan, team, op: op.kind in kinds)
        if not places:
            return None
        team, at = random.choice(places)
        lists, op = lists_of(plan), plan.domain.ops[team][at]
        lists[team] = [other for other in lists[team] if other not in (op, wait_for(op))]
        source, destination = plan.domain.sender(op, team * plan.domain.team)
        words = f"domain rank {source} sends {_sends(op)} ", f"domain rank {destination} receives "
        return Planted(with_ops(plan, lists), "R2", words)

    return plant


def _sends(op: Op) -> str:
    return "send_forward" if op.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD) else "send_backward"


def swapped_messages(kinds: tuple[Kind, ...]) -> Fault:
    """Two messages of one virtual stage to the same neighbour."""

    def plant(plan: StepPlan, random: Random) -> Planted | None:
        places = sites(plan, lambda plan, team, op: op.kind in kinds)
        random.shuffle(places)
        for team, at in places:
            ops = plan.domain.ops[team]
            later = [n for n in range(at + 1, len(ops)) if replace(ops[n], index=ops[at].index) == ops[at]]
            if not later:
                continue
            lists, other = lists_of(plan), random.choice(later)
            lists[team][at], lists[team][other] = ops[other], ops[at]
            source, destination = plan.domain.sender(ops[at], team * plan.domain.team)
            words = f"domain rank {source} sends {_sends(ops[at])} ", f"domain rank {destination} receives "
            return Planted(with_ops(plan, lists), "R2", words)
        return None

    return plant


def changed_collectives(kind: Kind, skipped: bool) -> Fault:
    """One team issues two of its collectives in the other order, or leaves one out."""

    def plant(plan: StepPlan, random: Random) -> Planted | None:
        shared = {
            op.index for ops in plan.domain.ops for op in ops if op.kind is kind and not is_local(plan, op)
        }
        if len(shared) < 2 - skipped:
            return None
        team, lists = random.choice(plan.domain.teams), lists_of(plan)
        first, second = (Op(kind, m) for m in random.sample([*shared, *shared][: max(2, len(shared))], 2))
        ops = lists[team]
        if skipped:
            lists[team] = [op for op in ops if op not in (first, wait_for(first))]
        else:
            i, j = ops.index(first), ops.index(second)
            ops[i], ops[j] = second, first
        # All orders are held against that of the first team.
        words = (
            (f"{who(plan.domain, team)} issues {kind} in order ",)
            if team
            else (f"issues {kind} ", "domain rank 0 [")
        )
        return Planted(with_ops(plan, lists), "R1", words)

    return plant


def swapped_reductions(plan: StepPlan, random: Random) -> Planted | None:
    teams = [t for t, ops in enumerate(plan.domain.ops) if sum(op.kind is Kind.REDUCE for op in ops) > 1]
    if not teams:
        return None
    team, lists = random.choice(teams), lists_of(plan)
    ops = lists[team]
    i, j = random.sample([at for at, op in enumerate(ops) if op.kind is Kind.REDUCE], 2)
    ops[i], ops[j] = ops[j], ops[i]
    return Planted(with_ops(plan, lists), "R1", (f"{who(plan.domain, team)} reduces in order ",))


# R3: what an op needs comes after it.


def out_of_order(pairs: Pairs) -> Fault:
    """Move the first op of a pair behind the second, which needs it."""

    def plant(plan: StepPlan, random: Random) -> Planted | None:
        found = [
            (team, early, late)
            for team, ops in enumerate(plan.domain.ops)
            for early, late in pairs(plan, team, ops)
            if early in ops and late in ops
        ]
        if not found:
            return None
        team, early, late = random.choice(found)
        lists = lists_of(plan)
        lists[team].remove(early)
        lists[team].insert(lists[team].index(late) + 1, early)
        words = f"{who(plan.domain, team)} must run {early} before {late}"
        return Planted(with_ops(plan, lists), "R3", (words,))

    return plant


def waits_of_passes(plan: StepPlan, team: int, ops: tuple[Op, ...]) -> Iterator[Pair]:
    took = {Kind.FORWARD: Kind.RECV_FORWARD, Kind.BACKWARD: Kind.RECV_BACKWARD}
    for op in ops:
        if op.kind in PASSES and op.makes_input:
            yield Op(Kind.WAIT, op.index, took[op.kind], op.virtual_stage), op


def waits_of_rows(plan: StepPlan, team: int, ops: tuple[Op, ...]) -> Iterator[Pair]:
    with_rows = plan.domain.virtual_stages_with_rows(team * plan.domain.team)
    for op in ops:
        if op.kind is Kind.FORWARD and op.virtual_stage in with_rows:
            yield Op(Kind.WAIT, op.index, Kind.SHIP), op


def forwards_of_backwards(plan: StepPlan, team: int, ops: tuple[Op, ...]) -> Iterator[Pair]:
    back = {Kind.BACKWARD: Kind.FORWARD, Kind.ENCODE_BACKWARD: Kind.ENCODE}
    for op in ops:
        if op.kind in back and op.makes_input:
            yield Op(back[op.kind], op.index, virtual_stage=op.virtual_stage), op


def passes_of_sends(plan: StepPlan, team: int, ops: tuple[Op, ...]) -> Iterator[Pair]:
    sent = {Kind.FORWARD: Kind.SEND_FORWARD, Kind.BACKWARD: Kind.SEND_BACKWARD}
    for op in ops:
        if op.kind in PASSES and op.makes_input:
            yield op, Op(sent[op.kind], op.index, virtual_stage=op.virtual_stage)


def encodes_of_ships(plan: StepPlan, team: int, ops: tuple[Op, ...]) -> Iterator[Pair]:
    for op in ops:
        if op.kind is Kind.ENCODE:
            for m in plan.domain.encoder_batches[op.index].microbatches:
                yield op, Op(Kind.SHIP, m)


def backwards_of_returns(plan: StepPlan, team: int, ops: tuple[Op, ...]) -> Iterator[Pair]:
    with_rows = plan.domain.virtual_stages_with_rows(team * plan.domain.team)
    for op in ops:
        if op.kind is Kind.BACKWARD and op.makes_input and op.virtual_stage in with_rows:
            yield op, Op(Kind.RETURN, op.index)


def returns_of_encoders(plan: StepPlan, team: int, ops: tuple[Op, ...]) -> Iterator[Pair]:
    for op in ops:
        if op.kind is Kind.ENCODE_BACKWARD and op.makes_input:
            for m in plan.domain.encoder_batches[op.index].microbatches:
                yield Op(Kind.WAIT, m, Kind.RETURN), op


def halves(plan: StepPlan, team: int, ops: tuple[Op, ...]) -> Iterator[Pair]:
    for op in ops:
        if op.grad is Grad.WEIGHT:
            yield replace(op, grad=Grad.INPUT), op


def gradients_of_reductions(plan: StepPlan, team: int, ops: tuple[Op, ...]) -> Iterator[Pair]:
    for op in ops:
        if op.kind in BACKWARDS and op.makes_weight:
            llm = op.kind is Kind.BACKWARD
            name = (
                plan.components[plan.domain.llm] if llm else plan.domain.encoder_batches[op.index].component
            )
            yield op, Op(Kind.REDUCE, plan.components.index(name), virtual_stage=op.virtual_stage)


# R4: waits.


def changed_wait(change: Callable[[list[Op], Op], str]) -> Fault:
    """`change` one wait of a team, and say what is wrong."""

    def plant(plan: StepPlan, random: Random) -> Planted | None:
        places = sites(plan, lambda plan, team, op: op.kind is Kind.WAIT)
        if not places:
            return None
        team, at = random.choice(places)
        lists = lists_of(plan)
        said = change(lists[team], lists[team][at])
        return Planted(with_ops(plan, lists), "R4", (f"{who(plan.domain, team)} ", said))

    return plant


def _issue(wait: Op) -> Op:
    assert wait.on is not None
    return Op(wait.on, wait.index, virtual_stage=wait.virtual_stage)


def wait_before_issue(ops: list[Op], wait: Op) -> str:
    ops.remove(wait)
    ops.insert(ops.index(_issue(wait)), wait)
    return f"waits for {wait.on}({wait.index}) that is not in flight"


def wait_twice(ops: list[Op], wait: Op) -> str:
    ops.insert(ops.index(wait), wait)
    return f"waits for {wait.on}({wait.index}) that is not in flight"


def no_wait(ops: list[Op], wait: Op) -> str:
    ops.remove(wait)
    return f"never waits for {_issue(wait)}"


def issue_twice(ops: list[Op], wait: Op) -> str:
    ops.insert(ops.index(_issue(wait)), _issue(wait))
    return f"issues {_issue(wait)} twice"


# R7: circles.


def circle_of_messages(plan: StepPlan, random: Random) -> Planted | None:
    """A team awaits the gradient of an activation before it sends the activation."""
    places = sites(
        plan,
        lambda plan, team, op: (
            op.kind is Kind.SEND_FORWARD
            and Op(Kind.RECV_BACKWARD, op.index, virtual_stage=op.virtual_stage) in plan.domain.ops[team]
        ),
    )
    if not places:
        return None
    team, at = random.choice(places)
    lists = lists_of(plan)
    sent = lists[team][at]
    receive = Op(Kind.RECV_BACKWARD, sent.index, virtual_stage=sent.virtual_stage)
    for op in (wait_for(receive), receive):
        lists[team].remove(op)
    place = lists[team].index(sent)
    lists[team][place:place] = [receive, wait_for(receive)]
    return Planted(with_ops(plan, lists), "R7", (f"{first_of(plan, team)} stands at op ",))


def return_before_its_gradient(plan: StepPlan, random: Random) -> Planted | None:
    """A team awaits the gradients of rows before it sends what the first stage makes them of."""

    def wanted(plan: StepPlan, team: int, op: Op) -> bool:
        returns = Op(Kind.RETURN, op.index) in plan.domain.ops[team]
        return op.kind is Kind.SEND_BACKWARD and returns and not is_local(plan, op)

    places = sites(plan, wanted)
    if not places:
        return None
    team, at = random.choice(places)
    lists = lists_of(plan)
    sent = lists[team][at]
    returned = wait_for(Op(Kind.RETURN, sent.index))
    for op in (sent, wait_for(sent)):
        lists[team].remove(op)
    place = lists[team].index(returned) + 1
    lists[team][place:place] = [sent, wait_for(sent)]
    return Planted(with_ops(plan, lists), "R7", (f"{first_of(plan, team)} stands at op ",))


def collective_group_in_opposite_orders(plan: StepPlan, random: Random) -> Planted | None:
    """One team of a collective group runs two forwards, whose layers communicate, in the other order."""
    domain = plan.domain
    if domain.collective_group <= domain.team or len(domain.microbatches) < 2:
        return None
    team, lists = random.randrange(domain.llm_size // domain.team), lists_of(plan)
    ops = lists[team]
    first, second = random.sample(range(len(domain.microbatches)), 2)
    i, j = (ops.index(Op(Kind.FORWARD, m, virtual_stage=domain.holds[team][0])) for m in (first, second))
    ops[i], ops[j] = ops[j], ops[i]
    return Planted(with_ops(plan, lists), "R7", (f"{first_of(plan, team)} stands at op ",))


RECEIVES, SENDS = (Kind.RECV_FORWARD, Kind.RECV_BACKWARD), (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
ORDERS: dict[str, Fault] = {
    "a ship skipped": changed_collectives(Kind.SHIP, skipped=True),
    "ships swapped": changed_collectives(Kind.SHIP, skipped=False),
    "a return skipped": changed_collectives(Kind.RETURN, skipped=True),
    "returns swapped": changed_collectives(Kind.RETURN, skipped=False),
    "reductions swapped": swapped_reductions,
    "a receive dropped": dropped_message(RECEIVES),
    "a send dropped": dropped_message(SENDS),
    "receives swapped": swapped_messages(RECEIVES),
    "sends swapped": swapped_messages(SENDS),
    "a pass before its message": out_of_order(waits_of_passes),
    "a pass before its rows": out_of_order(waits_of_rows),
    "a backward before its forward": out_of_order(forwards_of_backwards),
    "a send before its pass": out_of_order(passes_of_sends),
    "a ship before its encoder batch": out_of_order(encodes_of_ships),
    "a return before its backward": out_of_order(backwards_of_returns),
    "an encoder's backward before its gradients": out_of_order(returns_of_encoders),
    "a weight gradient before its input gradient": out_of_order(halves),
    "a reduction before a gradient": out_of_order(gradients_of_reductions),
    "a wait before its issue": changed_wait(wait_before_issue),
    "a wait twice": changed_wait(wait_twice),
    "a wait dropped": changed_wait(no_wait),
    "an issue twice": changed_wait(issue_twice),
    "an activation that awaits its own gradient": circle_of_messages,
    "a return that awaits its own gradient": return_before_its_gradient,
    "a collective group in opposite orders": collective_group_in_opposite_orders,
}

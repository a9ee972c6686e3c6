"""Edits of plans, and what becomes of them: what the verifier says, and what happens on random ranks."""

from collections.abc import Callable
from dataclasses import replace
from random import Random

from domain_plans import one
from random_ranks import DataError, DeadlockError, RandomRanks

from parallel.work import Grad
from pipeline.ops import BACKWARDS, Kind, Op
from pipeline.plan import StepPlan
from pipeline.verifier import Kept, violations

Lists = list[list[Op]]


def wait_for(kind: Kind, index: int) -> Op:
    return Op(Kind.WAIT, index, kind)


def with_domain(plan: StepPlan, **changes: object) -> StepPlan:
    return replace(plan, domain=replace(plan.domain, **changes))


def with_lists(plan: StepPlan, edit: Callable[[Lists], object]) -> StepPlan:
    lists = [list(ops) for ops in plan.domain.ops]
    edit(lists)
    return with_domain(plan, ops=tuple(map(tuple, lists)))


def problems(
    plan: StepPlan, bound: int | None = None, single_fifo: bool = False, kept: Kept = one
) -> list[str]:
    """Broken rules, where every virtual stage may hold `bound` microbatches, or as many as the plan says."""
    if bound is not None:
        bounds = tuple((f"llm/{number}", bound) for number in range(plan.domain.num_virtual_stages))
        plan = with_domain(plan, bounds=bounds)
    return list(violations(plan, kept, single_fifo))


def rules(plan: StepPlan, bound: int | None = None) -> set[str]:
    return {text.split(":")[0] for text in problems(plan, bound)}


def at(ops: list[Op], op: Op) -> int:
    """Where an op stands in a list, whatever virtual stage it is of."""
    return next(n for n, o in enumerate(ops) if (o.kind, o.index, o.on) == (op.kind, op.index, op.on))


def of_rank(plan: StepPlan, rank: int, op: Op) -> Op:
    """The op as a rank's list has it, with its virtual stage."""
    ops = list(plan.domain.ops[rank])
    return ops[at(ops, op)]


def swap(ops: list[Op], a: Op, b: Op) -> None:
    i, j = at(ops, a), at(ops, b)
    ops[i], ops[j] = ops[j], ops[i]


def move_before(ops: list[Op], op: Op, other: Op) -> None:
    moved = ops.pop(at(ops, op))
    ops.insert(at(ops, other), moved)


def move_after(ops: list[Op], op: Op, other: Op) -> None:
    moved = ops.pop(at(ops, op))
    ops.insert(at(ops, other) + 1, moved)


def remove(ops: list[Op], op: Op) -> None:
    del ops[at(ops, op)]


def swap_two(ops: list[Op], random: Random) -> None:
    i, j = random.randrange(len(ops)), random.randrange(len(ops))
    ops[i], ops[j] = ops[j], ops[i]


def move_one(ops: list[Op], random: Random) -> None:
    op = ops.pop(random.randrange(len(ops)))
    ops.insert(random.randint(0, len(ops)), op)


def swap_neighbours(ops: list[Op], random: Random) -> None:
    i = random.randrange(max(1, len(ops) - 1))
    ops[i : i + 2] = reversed(ops[i : i + 2])


def drop_one(ops: list[Op], random: Random) -> None:
    ops.pop(random.randrange(len(ops)))


def what_happens(plan: StepPlan, seed: int = 0, single_queue: bool = False) -> str | None:
    """How a run on random ranks fails, None if it does not."""
    try:
        RandomRanks(plan, seed, single_queue).run()
    except (DeadlockError, DataError) as error:
        return str(error)
    except (LookupError, ValueError) as error:
        return f"an op of something that is not there: {error}"
    return None


def copy_one(ops: list[Op], random: Random) -> None:
    ops.insert(random.randint(0, len(ops)), random.choice(ops))


def other_virtual_stage(ops: list[Op], random: Random) -> None:
    at = random.randrange(len(ops))
    ops[at] = replace(ops[at], virtual_stage=random.choice(ops).virtual_stage)


def other_half(ops: list[Op], random: Random) -> None:
    backwards = [at for at, op in enumerate(ops) if op.kind in BACKWARDS]
    if backwards:
        at = random.choice(backwards)
        ops[at] = replace(ops[at], grad=random.choice(list(Grad)))


EDITS = (swap_two, swap_two, move_one, swap_neighbours, swap_neighbours, drop_one)
WIDE_EDITS = (*EDITS, copy_one, other_virtual_stage, other_half)


def with_edits(
    plan: StepPlan, random: Random, edits: tuple[Callable[[list[Op], Random], None], ...] = EDITS
) -> StepPlan:
    """Change the lists of a plan in up to three places."""

    def edit(lists: Lists) -> None:
        for _ in range(random.randint(1, 3) if any(lists) else 0):
            change = random.choice(edits)
            change(random.choice([ops for ops in lists if ops]), random)

    return with_lists(plan, edit)

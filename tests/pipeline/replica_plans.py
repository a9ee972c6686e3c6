"""Small replica plans for tests: work drawn at random, ordered by any builder."""

from collections import defaultdict
from dataclasses import dataclass
from random import Random

from parallel.boundary import Rows, make_route
from parallel.sequence import SequenceLayout
from pipeline.builders import BUILDERS, build_forward_only, expand, without_encoder_backward
from pipeline.plan import Chunk, Kind, Microbatch, Op, PlannedItem, PlannedSample, ReplicaPlan, StepPlan

COMPONENTS = ("audio", "image", "llm")
SCHEDULES = (*BUILDERS, "forward_only")


@dataclass(frozen=True)
class Work:
    """One chunk of encoder work: where it runs, for which microbatch, and the rows of its items."""

    component: str
    microbatch: int
    rank: int
    rows: tuple[int, ...]


def random_work(random: Random, stages: int, microbatches: int) -> list[Work]:
    """Up to eight chunks in any order; some microbatches and some ranks have none."""
    if microbatches == 0:
        return []
    encoding = random.sample(range(stages), random.randint(1, stages))
    with_items = random.sample(range(microbatches), random.randint(1, microbatches))
    return [
        Work(
            random.choice(("audio", "image")),
            random.choice(with_items),
            random.choice(encoding),
            tuple(random.randint(0, 4) for _ in range(random.randint(1, 3))),
        )
        for _ in range(random.randint(0, 8))
    ]


def make_plan(
    stages: int,
    microbatches: int,
    work: list[Work],
    schedule: str,
    frozen: tuple[str, ...] = (),
    replicas: int = 1,
) -> StepPlan:
    """A step of equal replicas, made of the parts that the planner is made of, but for its policies."""
    train = schedule != "forward_only"
    items: list[PlannedItem] = []
    chunks: list[Chunk] = []
    runs: dict[int, list[Rows]] = defaultdict(list)
    filled: dict[tuple[int, int], int] = defaultdict(int)
    length = [2] * microbatches
    for piece in work:
        m = piece.microbatch
        numbers = []
        for rows in piece.rows:
            numbers.append(len(items))
            items.append(PlannedItem(piece.component, m, len(items), m, 4 * rows, rows, length[m]))
            runs[m].append(Rows(piece.rank, filled[m, piece.rank], length[m], rows))
            filled[m, piece.rank] += rows
            length[m] += rows + 1
        tokens = [4 * rows for rows in piece.rows]
        squares = sum(n * n for n in tokens)
        chunks.append(
            Chunk(piece.component, m, piece.rank, tuple(numbers), sum(tokens), squares, sum(piece.rows))
        )
    packs = tuple(
        Microbatch((m,), SequenceLayout.whole([length[m]], [0], stages)) for m in range(microbatches)
    )
    routes = tuple(make_route(runs[m], packs[m].layout) if m in runs else None for m in range(microbatches))
    order = (BUILDERS[schedule] if train else build_forward_only)(stages, microbatches, chunks)
    order = without_encoder_backward(order, chunks, frozenset(frozen))
    reduces = [Op(Kind.REDUCE, i) for i, name in enumerate(COMPONENTS) if train and name not in frozen]
    ops = tuple(tuple(ops + reduces) for ops in expand(order, chunks, routes))
    replica = ReplicaPlan(stages, packs, tuple(items), tuple(chunks), routes, ops)
    samples = tuple(PlannedSample("text", m, n) for m, n in enumerate(length))
    return StepPlan(
        1, train, 0, microbatches, 0, COMPONENTS, frozen, samples, (), tuple([replica] * replicas)
    )

"""The best of all plans of a few samples on at most four ranks, by trying them all: an oracle for bounds.

Every way to divide samples over replicas, to pack those of a replica into passes, to place its items on its
ranks and to order forwards, backwards for inputs and for weights, encodings and their backwards. Nothing of
this is the planner's: only what an op takes is.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

ENDLESS = 1 << 62
Job = tuple[str, int, int]
"""A kind of op, what it works on, and the stage."""


@dataclass(frozen=True)
class Ops:
    """Jobs of a replica: the rank that runs each, what it takes, and what it waits for, with the delay."""

    rank: Mapping[Job, int]
    ns: Mapping[Job, int]
    after: Mapping[Job, Sequence[tuple[Job, int]]]


def partitions(of: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to divide numbers into sets."""
    if not of:
        yield []
        return
    first, rest = of[0], of[1:]
    for made in partitions(rest):
        yield [[first], *made]
        for at in range(len(made)):
            yield [*made[:at], [first, *made[at]], *made[at + 1 :]]


def least_makespan(ops: Ops, below: int) -> int:
    """Return the least time in which ranks run all jobs, or `below` if that is not less: branch and bound
    over active schedules (Giffler and Thompson, 1960), which have an optimal one among them.
    """
    tails, jobs = _tails(ops), _in_turn(ops)
    ranks = sorted(set(ops.rank.values()))
    best = below
    seen: dict[frozenset[Job], list[tuple[int, ...]]] = {}

    def go(ends: dict[Job, int], free: dict[int, int]) -> None:
        nonlocal best
        if len(ends) == len(jobs):
            best = min(best, max(free.values()))
            return
        # When each job can begin at the earliest, and what each rank still has before it, in it and after it.
        starts: dict[Job, int] = {}
        heads, works = dict.fromkeys(ranks, ENDLESS), dict.fromkeys(ranks, 0)
        rests = dict.fromkeys(ranks, ENDLESS)
        done = dict(ends)
        for job in jobs:
            if job in ends:
                continue
            rank, ns = ops.rank[job], ops.ns[job]
            start = max([free[rank], *(done[of] + delay for of, delay in ops.after[job])])
            starts[job], done[job] = start, start + ns
            if start + tails[job] >= best:
                return
            heads[rank], works[rank] = min(heads[rank], start), works[rank] + ns
            rests[rank] = min(rests[rank], tails[job] - ns)
        if any(works[rank] and heads[rank] + works[rank] + rests[rank] >= best for rank in ranks):
            return
        # The same jobs were done before, and no rank and no job can begin later than now.
        state = (*(free[rank] for rank in ranks), *(starts[job] for job in jobs if job in starts))
        before = seen.setdefault(frozenset(ends), [])
        if any(all(a <= b for a, b in zip(old, state, strict=True)) for old in before):
            return
        before.append(state)
        ready = [job for job in starts if all(of in ends for of, _ in ops.after[job])]
        first = min(ready, key=lambda job: (done[job], job))
        rank, end = ops.rank[first], done[first]
        tried = [job for job in ready if ops.rank[job] == rank and starts[job] < end]
        for job in sorted(tried, key=lambda job: (starts[job], -tails[job], job)):
            go(ends | {job: done[job]}, free | {rank: done[job]})

    go({}, dict.fromkeys(ranks, 0))
    return best


def _in_turn(ops: Ops) -> list[Job]:
    """The jobs, each behind those that it waits for."""
    turn: list[Job] = []
    while len(turn) < len(ops.rank):
        turn += [j for j in ops.rank if j not in turn and all(of in turn for of, _ in ops.after[j])]
    return turn


def _tails(ops: Ops) -> dict[Job, int]:
    """The longest chain from the start of each job on."""
    followed: dict[Job, list[tuple[Job, int]]] = {job: [] for job in ops.rank}
    for job, of in ops.after.items():
        for before, delay in of:
            followed[before].append((job, delay))

    @cache
    def tail(job: Job) -> int:
        return ops.ns[job] + max([0, *(delay + tail(after) for after, delay in followed[job])])

    return {job: tail(job) for job in ops.rank}


@dataclass(frozen=True)
class Case:
    """Samples by tokens of the LLM and of their item, 0 for none; a stage's times of a pass are functions of
    its tokens and squares, those of an item of its tokens; a pass holds `room` tokens, or one sample.
    """

    samples: tuple[tuple[int, int], ...]
    replicas: int
    stages: int
    room: int
    times: "Times"


@dataclass(frozen=True)
class Times:
    """What ops take: each is (of a token, of a square, of any op) in nanoseconds; what a message takes."""

    forward: tuple[int, int, int]
    input: tuple[int, int, int]
    weight: tuple[int, int, int]
    encode: tuple[int, int, int]
    encode_back: tuple[int, int, int]
    message_token: int

    @staticmethod
    def ns(of: tuple[int, int, int], tokens: int, squares: int) -> int:
        """Nanoseconds of an op."""
        return of[0] * tokens + of[1] * squares + of[2]


def best_step(case: Case) -> int:
    """Return the time of the best plan."""

    @cache
    def of_replica(mine: frozenset[int]) -> int:
        best = ENDLESS
        for passes in partitions(sorted(mine)):
            if all(_fits(case, own) for own in passes):
                best = _best_of(case, passes, best)
        return best

    best = None
    for chosen in product(range(case.replicas), repeat=len(case.samples)):
        if any(where > max(chosen[:at], default=-1) + 1 for at, where in enumerate(chosen)):
            continue  # replicas are alike
        own = [frozenset(i for i, r in enumerate(chosen) if r == replica) for replica in set(chosen)]
        most = max(map(of_replica, own))
        best = most if best is None else min(best, most)
    assert best is not None
    return best


def _fits(case: Case, own: Sequence[int]) -> bool:
    return len(own) == 1 or sum(case.samples[i][0] for i in own) <= case.room


def _best_of(case: Case, passes: Sequence[Sequence[int]], best: int) -> int:
    """The best order of these passes of a replica, over all places of its items, if it is below the best."""
    items = [i for own in passes for i in own if case.samples[i][1]]
    for places in product(range(case.stages), repeat=len(items)):
        best = least_makespan(_ops(case, passes, dict(zip(items, places, strict=True))), best)
    return best


def _ops(case: Case, passes: Sequence[Sequence[int]], place: Mapping[int, int]) -> Ops:
    rank: dict[Job, int] = {}
    ns: dict[Job, int] = {}
    after: dict[Job, list[tuple[Job, int]]] = {}
    times, last = case.times, case.stages - 1
    for m, own in enumerate(passes):
        tokens = sum(case.samples[i][0] for i in own)
        squares = sum(case.samples[i][0] ** 2 for i in own)
        hop = times.message_token * tokens if last else 0
        for s in range(case.stages):
            forward, input_, weight = ("F", m, s), ("I", m, s), ("W", m, s)
            for job, of in ((forward, times.forward), (input_, times.input), (weight, times.weight)):
                rank[job], ns[job] = s, times.ns(of, tokens, squares)
            after[forward] = [(("F", m, s - 1), hop)] if s else [(("e", i, 0), 0) for i in own if i in place]
            after[input_] = [(forward, 0), *([(("I", m, s + 1), hop)] if s < last else [])]
            after[weight] = [(input_, 0)]
        for i in own:
            if i in place:
                size = case.samples[i][1]
                for job, of in ((("e", i, 0), times.encode), (("r", i, 0), times.encode_back)):
                    rank[job], ns[job] = place[i], times.ns(of, size, size * size)
                after["e", i, 0], after["r", i, 0] = [], [(("I", m, 0), 0)]
    return Ops(rank, ns, after)

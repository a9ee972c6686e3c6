"""Do ranks meet? Each rehearses alone, with peers that answer at once: here what they issued is compared.

On real devices a collective waits for all members of its group. So of any group all members must issue the
same collectives, of the same sizes, in the same order, and what one sends to another must be what that one
expects. Where a rank's communication is one queue, as on a GPU, the order across groups counts, too: rank 0
that issues A, then B, and rank 1 that issues B, then A, wait for each other for ever, though each group by
itself is in order.

Example: ranks 0 and 1, of which both issue an all-reduce of 8 bytes in group "a" and one of 4 bytes in "b":

    0: a 8, b 4   1: a 8, b 4    they meet
    0: a 8, b 4   1: a 4, b 4    group a, call 1: rank 0 an all_reduce of 8 bytes, rank 1 of 4
    0: a 8, b 4   1: b 4, a 8    rank 0 waits for 1 in group a, rank 1 for 0 in group b
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

SEND, RECEIVE, PAIRS = "send", "recv", "all_to_all"


@dataclass(frozen=True)
class Call:
    """A rank issues a collective of a `kind` in the group of a `label`, of `ranks`, during the op `where`.

    `sent` and `expected` are bytes: of an all-to-all by member, of a message to or from the one member of
    `ranks` that is not this rank, else one number, and `expected` is empty.
    """

    label: str
    ranks: tuple[int, ...]
    kind: str
    sent: tuple[int, ...]
    expected: tuple[int, ...]
    where: str

    def __str__(self) -> str:
        sizes = ", ".join(map(str, self.sent or self.expected))
        return f"{self.kind} of {sizes} bytes at {self.where}"


Group = tuple[str, tuple[int, ...]]


def by_group(calls: Mapping[int, Sequence[Call]]) -> dict[Group, dict[int, list[Call]]]:
    """What each of the ranks issued in each of their groups. Messages between two are a group each way."""
    found: dict[Group, dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for rank, issued in calls.items():
        for call in issued:
            found[group_of(rank, call)][rank].append(call)
    return found


def group_of(rank: int, call: Call) -> Group:
    """Which calls meet: those of a label and its ranks, and messages of one direction."""
    if call.kind not in (SEND, RECEIVE):
        return call.label, call.ranks
    (other,) = (member for member in call.ranks if member != rank)
    return call.label, (rank, other) if call.kind == SEND else (other, rank)


def unequal(calls: Mapping[int, Sequence[Call]]) -> Iterator[str]:
    """Say of each group in which members issue something else where they first do. Members whose calls are
    not given are left out.
    """
    for (label, ranks), issued in by_group(calls).items():
        members = [rank for rank in ranks if rank in calls]
        for number in range(max(map(len, issued.values()))):
            at = {rank: issued.get(rank, [])[number : number + 1] for rank in members}
            wrong = next(_clashes(ranks, at), None)
            if wrong is not None:
                one, other = wrong
                yield (
                    f"group {label} of {_few(ranks)}, call {number + 1}: rank {one} "
                    f"{_said(at[one])}, rank {other} {_said(at[other])}"
                )
                break


def _clashes(ranks: tuple[int, ...], at: Mapping[int, list[Call]]) -> Iterator[tuple[int, int]]:
    """Yield pairs of members whose calls of one number cannot be the same collective."""
    first = next(iter(at))
    for rank, of in at.items():
        one = at[first]
        if len(one) != len(of) or (one and not _fits(ranks, first, one[0], rank, of[0])):
            yield first, rank


def _fits(ranks: tuple[int, ...], first: int, one: Call, rank: int, own: Call) -> bool:
    if {one.kind, own.kind} == {SEND, RECEIVE}:
        return (one.sent or one.expected) == (own.sent or own.expected)
    if one.kind != own.kind:
        return False
    if one.kind != PAIRS:
        return one.sent == own.sent
    here, there = ranks.index(first), ranks.index(rank)
    return one.sent[there] == own.expected[here] and own.sent[here] == one.expected[there]


def stuck(calls: Mapping[int, Sequence[Call]]) -> Iterator[str]:
    """Issue all calls, each rank one after the other, and say who then waits for whom for ever. Members whose
    calls are not given never keep anybody waiting.
    """
    left = {rank: list(reversed(issued)) for rank, issued in calls.items()}
    moved = True
    while moved:
        moved = False
        for rank in left:
            while left[rank] and (members := _waiting(left, rank)) is not None:
                for member in members:
                    left[member].pop()
                moved = True
    for rank, issued in left.items():
        if issued:
            call = issued[-1]
            group = group_of(rank, call)
            absent = [member for member in group[1] if member in left and not _at(left, member, group)]
            yield f"rank {rank} waits for {_few(tuple(absent))} in group {call.label}: {call}"


def _waiting(left: Mapping[int, list[Call]], rank: int) -> list[int] | None:
    """The members of the group of a rank's next call, if all have come to it."""
    group = group_of(rank, left[rank][-1])
    members = [member for member in group[1] if member in left]
    return members if all(_at(left, member, group) for member in members) else None


def _at(left: Mapping[int, list[Call]], rank: int, group: Group) -> bool:
    return bool(left[rank]) and group_of(rank, left[rank][-1]) == group


def _said(calls: Sequence[Call]) -> str:
    return f"issues {calls[0]}" if calls else "has issued all that it does"


def _few(ranks: tuple[int, ...]) -> str:
    text = ", ".join(map(str, ranks[:8]))
    return f"ranks {text}{', …' if len(ranks) > 8 else ''}" if len(ranks) != 1 else f"rank {text}"

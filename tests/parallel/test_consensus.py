"""Digests of the levels of a plan, compared among the ranks that share each; and what is said of them."""

from dataclasses import dataclass
from typing import Any

import pytest

from parallel.consensus import Among, diverging, explain, plain, weighed
from parallel.control_of_run import connected
from pipeline.plan import GroupPlan, Taken, diff

LARGEST = 2**63 - 1


def among(rank: int) -> tuple[Among, ...]:
    """Of four ranks: one world, groups of two, and a domain each."""
    return Among(0, rank, 4), Among(rank // 2, rank % 2, 2), Among(rank, 0, 1)


def level(digests: list[list[int]]) -> int | None:
    """The level at which ranks with these digests differ, as their sums say, which wrap as numpy's do."""
    sums = [0, 0, 0]
    for rank, own in enumerate(digests):
        told = weighed(own, among(rank))
        assert all(-(2**63) <= of < 2**63 for of in told)
        sums = [a + b for a, b in zip(sums, told, strict=True)]
    return diverging([of % 2**64 for of in sums])


def equal(world: int = 7) -> list[list[int]]:
    """Digests of four ranks that agree where they share a level; groups and domains differ, as they may."""
    return [[world, 20 + rank // 2, 30 + rank] for rank in range(4)]


def changed(rank: int, level: int, digest: int) -> list[list[int]]:
    digests = equal()
    digests[rank][level] = digest
    return digests


@pytest.mark.parametrize("digests", [equal(0), equal(1), equal(LARGEST), [[LARGEST] * 3] * 4, [[0] * 3] * 4])
def test_levels_that_are_equal_where_they_are_shared_agree(digests: list[list[int]]) -> None:
    assert level(digests) is None


@pytest.mark.parametrize(
    ("digests", "expected"),
    [
        (changed(1, 0, 9), 0),  # higher
        (changed(2, 0, 0), 0),  # lower
        (changed(0, 1, LARGEST), 1),
        (changed(3, 1, 0), 1),
        (changed(2, 2, 0), None),  # alone in its domain
        ([[LARGEST - (rank == 3), 0, 0] for rank in range(4)], 0),  # off by one at the edge
        ([[1, 20 + (rank % 2), 5] for rank in range(4)], 1),  # both groups, alike
        ([[1, 20 + (rank % 2) * (1 - rank // 2 * 2), 5] for rank in range(4)], 1),  # and against each other
        ([[rank, rank, 5] for rank in range(4)], 0),  # the widest of two
    ],
)
def test_digests_that_differ_are_noticed_with_their_level(
    digests: list[list[int]], expected: int | None
) -> None:
    assert level(digests) == expected


def test_16384_ranks_that_agree_sum_up_to_0_and_one_that_does_not_is_noticed() -> None:
    size, digest = 16_384, 0x5DEECE66D1234567
    sums = sum(weighed([digest], [Among(0, rank, size)])[0] for rank in range(size))
    assert sums % 2**64 == 0
    for rank in (0, 1, size - 1):
        for other in (digest + 1, digest ^ 1 << 62, 0):
            own, changed = (weighed([of], [Among(0, rank, size)])[0] for of in (digest, other))
            assert (sums - own + changed) % 2**64 != 0


def test_plans_are_compared_as_plain_values_alike() -> None:
    one, two = (Taken(0, 2, ("text",), (0, 0), (0, 1), (4, length)) for length in (8, 9))
    assert diff(plain(one), plain(two), "plan") == diff(one, two, "plan") == ["plan.lengths[1]: 8 != 9"]


# What is said of a divergence.


@dataclass(frozen=True)
class TwoLevels:
    """A plan of step 7 of which ranks share a world, and in pairs a group."""

    rank: int
    world: Taken
    group: GroupPlan
    step: int = 7

    @property
    def levels(self) -> list[tuple[str, int, int, Any]]:
        number = self.rank // 2
        return [
            ("world", 0, hash(self.world.lengths), self.world),
            ("group", number, hash(self.group.replicas), self.group),
        ]


def explain_all(rank, lengths, samples, level):
    world = Taken(0, 2, ("text",), (0, 0), (0, 1), (4, lengths[rank]))
    plan = TwoLevels(rank, world, GroupPlan(rank // 2, 0, (((0, samples[rank]),),)))
    return explain(plan, level, diff, connected(rank, 4, 60))


def explained(ranks, lengths=(8,) * 4, samples=(1,) * 4, level=0) -> str:
    (text,) = {*ranks.run(4, explain_all, lengths, samples, level)}
    return text


def test_explain_names_the_first_difference_on_every_rank(ranks):
    text = explained(ranks, lengths=[8, 8, 9, 8])
    assert "ranks planned step 7 differently; nothing of it has run" in text
    assert "the plan of the world: 3 of 4 ranks have that of rank 0, 1 that of rank 2; there are 2" in text
    assert "rank 0 against rank 2: plan.world.lengths[1]: 8 != 9" in text


def test_explain_sends_two_plans_of_many(ranks):
    text = explained(ranks, lengths=[8, 9, 10, 9])
    assert "1 of 4 ranks have that of rank 0, 2 that of rank 1; there are 3 plans" in text
    assert "10" not in text


def test_explain_compares_a_group_among_its_own_ranks(ranks):
    text = explained(ranks, samples=[1, 1, 5, 6], level=1)
    assert "the plan of group 1: 1 of 2 ranks have that of rank 2, 1 that of rank 3; there are 2" in text
    assert "rank 2 against rank 3: plan.group.replicas[0][0][1]: 5 != 6" in text

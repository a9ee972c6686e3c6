"""Digests of the levels of a plan, compared over real ranks."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from parallel.consensus import Consensus, Divergence, explain
from pipeline.plan import GroupPlan, Taken, diff

LARGEST = 2**63 - 1
SIZES = (1, 2, 4)  # four ranks: one world, groups of two, and a domain each


def numbers_of(rank: int) -> tuple[int, int, int]:
    return 0, rank // 2, rank


def settle_all(rank, steps):
    """Offer all steps, each the digests and figures of every rank, before the first is settled."""
    consensus = Consensus(dist.group.WORLD, SIZES)
    for step, (digests, figures) in enumerate(steps):
        consensus.offer(step, digests[rank], numbers_of(rank), figures[rank])
    answers = [consensus.settle(step) for step in range(len(steps))]
    assert not consensus.offered
    return [(answer.divergence, answer.figures) for answer in answers]


def settled(ranks, *steps_of_digests) -> list[Divergence | None]:
    """What four ranks, which must all say the same, learn of the digests in steps."""
    answers = ranks.run(4, settle_all, [(digests, [()] * 4) for digests in steps_of_digests])
    assert answers == [answers[0]] * 4
    return [divergence for divergence, _ in answers[0]]


def equal(world: int = 7) -> list[list[int]]:
    """Digests of four ranks that agree where they share a level; groups and domains differ, as they may."""
    return [[world, 20 + rank // 2, 30 + rank] for rank in range(4)]


def changed(rank: int, level: int, digest: int) -> list[list[int]]:
    digests = equal()
    digests[rank][level] = digest
    return digests


def test_levels_that_are_equal_where_they_are_shared_agree(ranks):
    steps = [equal(0), equal(1), equal(LARGEST), [[LARGEST] * 3] * 4, [[0] * 3] * 4]
    assert settled(ranks, *steps) == [None] * 5


def test_one_differing_digest_is_noticed_on_every_rank_with_its_level_and_number(ranks):
    steps = [
        changed(1, 0, 9),  # higher
        changed(2, 0, 0),  # lower
        changed(0, 1, LARGEST),
        changed(3, 1, 0),
        equal(),
        [[LARGEST - (rank == 3), 0, 0] for rank in range(4)],  # off by one at the edge
    ]
    expected = [(0, 0), (0, 0), (1, 0), (1, 1), None, (0, 0)]
    assert settled(ranks, *steps) == [of and Divergence(*of) for of in expected]


def test_the_widest_level_that_differs_is_named_and_its_first_number(ranks):
    everything = [[rank, rank, 5] for rank in range(4)]
    groups = [[1, rank, 5] for rank in range(4)]
    assert settled(ranks, everything, groups) == [Divergence(0, 0), Divergence(1, 0)]


def pairs_of_domains(rank, digests):
    """Two domains of two ranks in one group."""
    consensus = Consensus(dist.group.WORLD, (1, 1, 2))
    consensus.offer(1, (1, 2, digests[rank]), (0, 0, rank // 2))
    return consensus.settle(1).divergence


def test_a_domain_of_several_ranks_is_compared_among_its_own(ranks):
    assert ranks.run(4, pairs_of_domains, [3, 3, 4, 4]) == [None] * 4
    assert ranks.run(4, pairs_of_domains, [3, 3, 4, 5]) == [Divergence(2, 1)] * 4
    assert ranks.run(4, pairs_of_domains, [5, 3, 4, 4]) == [Divergence(2, 0)] * 4


def test_figures_are_the_largest_that_any_rank_offered_whether_ranks_agree_or_not(ranks):
    figures = [(3, 0), (1, 0), (LARGEST, 0), (2, 5)]
    steps = [(equal(), figures), (changed(1, 0, 9), [(rank,) for rank in range(4)])]
    for answers in ranks.run(4, settle_all, steps):
        assert answers == [(None, (LARGEST, 5)), (Divergence(0, 0), (3,))]


def settle_alone(rank):
    consensus = Consensus(dist.group.WORLD, (1, 1, 1))
    consensus.offer(4, (3, LARGEST, 0), (0, 0, 0), (8, 9))
    return consensus.settle(4)


def test_a_single_rank_agrees_with_itself(ranks):
    (agreement,) = ranks.run(1, settle_alone)
    assert (agreement.divergence, agreement.figures) == (None, (8, 9))


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


def explain_all(rank, lengths, samples, level, number):
    world = Taken(0, 2, ("text",), (0, 0), (0, 1), (4, lengths[rank]))
    plan = TwoLevels(rank, world, GroupPlan(rank // 2, 0, (((0, samples[rank]),),)))
    return explain(plan, Divergence(level, number), diff, dist.group.WORLD)


def explained(ranks, lengths=(8,) * 4, samples=(1,) * 4, level=0, number=0) -> str:
    (text,) = {*ranks.run(4, explain_all, lengths, samples, level, number)}
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
    text = explained(ranks, samples=[1, 1, 5, 6], level=1, number=1)
    assert "the plan of group 1: 1 of 2 ranks have that of rank 2, 1 that of rank 3; there are 2" in text
    assert "rank 2 against rank 3: plan.group.replicas[0][0][1]: 5 != 6" in text

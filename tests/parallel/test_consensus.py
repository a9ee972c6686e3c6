import torch.distributed as dist

from parallel.consensus import Consensus, explain
from pipeline.plan import PlannedSample, StepPlan, diff

LARGEST = 2**63 - 1


def settle_all(rank, digests_of_ranks):
    consensus = Consensus(dist.group.WORLD)
    for step, digest in enumerate(digests_of_ranks[rank]):
        consensus.offer(step, digest)
    answers = [consensus.settle(step) for step in range(len(digests_of_ranks[rank]))]
    assert not consensus.offered
    return answers


def plan_with(length: int) -> StepPlan:
    samples = (PlannedSample("text", 0, 4), PlannedSample("text", 1, length))
    return StepPlan(7, True, 0, 2, 0, ("llm",), (), samples, (), ())


def explain_lengths(rank, lengths):
    return explain(plan_with(lengths[rank]), diff, dist.group.WORLD, 7)


def test_equal_digests_agree_on_every_rank(ranks):
    digests = [0, 1, 12345, LARGEST]
    assert ranks.run(3, settle_all, [digests] * 3) == [[True] * 4] * 3


def test_one_differing_digest_is_noticed_on_every_rank(ranks):
    # Step 0: rank 1 alone is higher; 1: rank 2 alone is lower; 2: all agree; 3: off by one at the edge.
    digests = [[5, 9, 4, LARGEST], [6, 9, 4, LARGEST - 1], [5, 0, 4, LARGEST]]
    assert ranks.run(3, settle_all, digests) == [[False, False, True, False]] * 3


def test_a_single_rank_agrees_with_itself(ranks):
    assert ranks.run(1, settle_all, [[3, LARGEST]]) == [[True, True]]


def test_explain_names_the_first_difference_on_every_rank(ranks):
    texts = ranks.run(4, explain_lengths, [8, 8, 9, 8])
    assert len(set(texts)) == 1
    assert "step 7" in texts[0]
    assert "3 of 4 ranks have the plan of rank 0, 1 that of rank 2; there are 2 plans" in texts[0]
    assert "rank 0 against rank 2: plan.samples[1].length: 8 != 9" in texts[0]


def test_explain_sends_two_plans_of_many(ranks):
    (text,) = {*ranks.run(4, explain_lengths, [8, 9, 10, 9])}
    assert "1 of 4 ranks have the plan of rank 0, 2 that of rank 1; there are 3 plans" in text
    assert "10" not in text

"""Sequences to share at random, what they cost, and how evenly a layout shares them."""

import math
from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from parallel.cluster import Link
from parallel.policies import make_pool
from parallel.policies.pool import Pool, degree_times
from parallel.schemes import SequenceCost, rank_times
from parallel.sequence import SequenceLayout
from parallel.tiles import AttentionShape

# so400m and llama3_1b by `cluster=h100`, in bf16.
LINK, INSIDE = Link(15_000, 50 * 10**9), Link(8_000, 450 * 10**9)
VIT = SequenceCost(AttentionShape(16, 16), 27, 1_874_199_555, 279_555, 144, LINK)
LLM = SequenceCost(AttentionShape(32, 8, causal=True), 16, 5_553_294_308, 294_510, 128, LINK)
COSTS = {"vit": VIT, "llm": LLM}


def heavy_tailed(count: int, seed: int, median: int = 3000, most: int = 131_072) -> list[int]:
    random = Random(seed)
    return [max(1, min(most, round(math.exp(random.gauss(math.log(median), 1.4))))) for _ in range(count)]


def makespan(layout: SequenceLayout, cost: SequenceCost) -> int:
    return max(time.total_ns for time in rank_times(layout, cost))


def ideal(lengths: list[int], pool: Pool) -> float:
    """Nanoseconds if all work were spread evenly and nothing had to travel."""
    return int(degree_times(lengths, pool)[:, 0].sum()) / pool.num_cp_ranks


lengths_of = st.lists(st.integers(0, 60) | st.integers(0, 100_000), max_size=12)


@st.composite
def pools(draw) -> Pool:
    cost, num_cp_ranks = draw(st.sampled_from([VIT, LLM])), draw(st.integers(1, 9))
    if size := draw(st.sampled_from([0, 1, 2, 4])):
        cost = replace(cost, inside=INSIDE, nodes=tuple(cp_rank // size for cp_rank in range(num_cp_ranks)))
    return make_pool(cost, num_cp_ranks, draw(st.sampled_from([1, 4, 64])))

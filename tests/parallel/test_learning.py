"""The cost table learns from op times: laws are recovered, ranks agree, noise and nonsense do little."""

import random
from dataclasses import replace

import pytest
from work_costs import work_cost

from parallel.cluster import Link, Links
from parallel.costs import CostTable
from parallel.laws import DIRECTIONS, Direction, Law, Laws
from parallel.learning import NUM_SUMS, Sample, learn, sums_of
from parallel.work import Grad

LINK = Link(1000, 10**9)
PARTS = {
    "llm/0": work_cost(token_fs=10**9, square_fs=2 * 10**5, fixed_ns=1_500_000, times=3),
    "image": work_cost(token_fs=3 * 10**8, square_fs=10**5, fixed_ns=1_500_000, weight_fs=10**8),
}
TABLE = CostTable(0, PARTS, Links(LINK, LINK), row_bytes=4)
# Far from what is stated, and each law by other factors.
TRUE = {
    "llm/0": Laws(Law(14 * 10**8, 10**5, 200_000), Law(10**9, 10**6, 3_000_000), Law(3 * 10**9, 0, 400_000)),
    "image": Laws(Law(9 * 10**8, 10**4, 50_000), Law(2 * 10**8, 9 * 10**5, 900_000), Law(10**8, 0, 10_000)),
}


def samples(
    seed: int, noise: float, number: int = 40, directions: tuple[Direction, ...] = DIRECTIONS
) -> list[Sample]:
    """Passes of random sizes that take what the true laws say, off by a normal relative error."""
    rng, out = random.Random(seed), []
    for name in PARTS:
        for direction in directions:
            for _ in range(number):
                tokens = int(2 ** rng.uniform(3, 14))
                squares = tokens * min(tokens, int(2 ** rng.uniform(5, 14)))
                ns = TRUE[name].ns(tokens, squares, direction)
                out.append(Sample(name, direction, tokens, squares, int(ns * rng.gauss(1, noise))))
    return out


def added(*sums: list[int]) -> list[int]:
    return [sum(of) for of in zip(*sums, strict=True)]


def taught(table: CostTable, *steps: list[Sample]) -> CostTable:
    """The table after some learnt steps."""
    for of in steps:
        table = learn(table, sums_of(of, table))
    return table


def worst(table: CostTable, directions: tuple[Direction, ...] = DIRECTIONS) -> float:
    """The largest relative error of a table over sizes that it was not taught with."""
    return max(
        abs(table.parts[s.part].compute_ns(s.tokens, s.squares, s.direction) / s.ns - 1)
        for s in samples(99, 0, 200, directions)
    )


def test_a_linear_law_is_recovered_exactly_but_for_rounding():
    assert worst(TABLE) > 0.5
    table = taught(TABLE, samples(1, 0), samples(2, 0))
    assert table.number >= 1
    assert worst(table) < 0.01
    for name, true in TRUE.items():
        laws = table.parts[name].laws
        assert laws.forward.token_fs == pytest.approx(true.forward.token_fs, rel=0.01)
        assert laws.input.token_fs == pytest.approx(true.input.token_fs, rel=0.01)
        assert laws.weight.fixed_ns == pytest.approx(true.weight.fixed_ns, rel=0.02)


def test_whole_backwards_teach_both_halves():
    whole = (None, Grad.BOTH)
    table = taught(TABLE, *(samples(seed, 0, directions=whole) for seed in (1, 2)))
    assert worst(table, whole) < 0.01
    for cost in table.parts.values():
        halves = (cost.compute_ns(999, 999**2, half) for half in (Grad.INPUT, Grad.WEIGHT))
        assert sum(halves) == cost.compute_ns(999, 999**2, Grad.BOTH)
        assert min(cost.laws.input.coefficients) >= 0


def test_noise_and_passes_that_were_disturbed_do_little():
    rng = random.Random(3)

    def disturbed(seed: int) -> list[Sample]:
        noisy = samples(seed, 0.05, 128)
        return [s._replace(ns=s.ns * rng.choice((5, 30))) if rng.random() < 0.08 else s for s in noisy]

    assert worst(taught(TABLE, disturbed(1), disturbed(2))) < 0.08


def test_ranks_of_other_noise_learn_one_table_in_whatever_order_their_sums_are_added():
    sums = [sums_of(samples(seed, 0.3), TABLE) for seed in range(4)]
    assert len({tuple(of) for of in sums}) == 4
    assert all(len(of) == len(PARTS) * len(DIRECTIONS) * NUM_SUMS for of in sums)
    tables = [learn(TABLE, added(*order)) for order in (sums, sums[::-1], [*sums[2:], *sums[:2]])]
    assert tables[0] == tables[1] == tables[2]
    assert all(type(x) is int for _, laws in tables[0].learnt for x in laws.forward.coefficients)


def test_too_few_samples_leave_what_was_known():
    few = [s for s in samples(1, 0) if s.part == "llm/0"] + [s for s in samples(1, 0, 7) if s.part == "image"]
    table = learn(TABLE, sums_of(few, TABLE))
    assert [name for name, _ in table.learnt] == ["llm/0"]
    again = taught(table, [s for s in samples(5, 0.2) if s.part == "image"])
    assert again.number == 2
    assert again.parts["llm/0"] == table.parts["llm/0"]
    assert learn(TABLE, sums_of([], TABLE)) is TABLE


def test_a_table_that_is_right_is_not_replaced():
    table = taught(TABLE, samples(1, 0), samples(2, 0))
    assert taught(table, samples(7, 0.01), samples(8, 0.01)) is table
    slower = [s._replace(ns=s.ns * 21 // 20) for s in samples(7, 0)]
    assert taught(table, slower).number == table.number + 1


def test_nonsense_gives_no_negative_time():
    """Large passes that take less than small ones fit a falling line best."""
    falling = [Sample("image", None, n, n * n, 10**9 // n) for n in range(100, 5000, 100)]
    law = learn(TABLE, sums_of(falling, TABLE)).parts["image"].laws.forward
    assert min(law.coefficients) >= 0
    assert law.ns(100, 10**4) > 0
    mad = [Sample("image", None, 100, 10**4, 10**18)] * 20 + [Sample("image", None, 0, 0, -5)]
    sums = sums_of(mad, TABLE)
    assert max(sums) <= 20 * 2**36
    assert learn(TABLE, sums).parts["image"].compute_ns(100, 10**4) <= 65 * TABLE.parts["image"].compute_ns(
        100, 10**4
    )


def test_passes_of_one_size_keep_the_proportions_that_were_stated():
    same = [Sample("image", None, 1000, 10**6, 3 * PARTS["image"].compute_ns(1000, 10**6))] * 30
    law = learn(TABLE, sums_of(same, TABLE)).parts["image"].laws.forward
    assert law.ns(1000, 10**6) == pytest.approx(same[0].ns, rel=0.01)
    assert law.ns(4000, 4 * 10**6) < 4.2 * law.ns(1000, 10**6)


def test_what_is_stated_as_free_stays_free():
    free = replace(TABLE, parts={"image": work_cost(10**8, 0, 0)})
    measured = [Sample("image", None, n, n * n, 700 * n) for n in range(1, 50)]
    law = taught(free, measured).parts["image"].laws.forward
    assert law.coefficients == (pytest.approx(7 * 10**8, rel=0.01), 0, 0)

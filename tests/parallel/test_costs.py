from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stated import Stated
from work_costs import even_cluster, work_cost

from parallel.cluster import Link, Links
from parallel.costs import Axis, CostTable, collectives_ns, table_from_work
from parallel.laws import Law
from parallel.work import Grad, even_load

LAPTOP = even_cluster("laptop", 60 * 10**9, 0.5, op_overhead_ns=2_000_000)
H100 = even_cluster(
    "h100",
    989 * 10**12,
    0.45,
    moved_per_s=3350 * 10**9,
    links=Links(Link(8_000, 450 * 10**9), Link(15_000, 50 * 10**9)),
    op_overhead_ns=50_000,
)
PARTS = {
    "llm/0": Stated(2_000_000_000, 8_192, recomputed=True),
    "image": Stated(800_000_000, 4_608),
}

works = st.builds(
    work_cost,
    token_fs=st.integers(0, 10**12),
    square_fs=st.integers(0, 10**9),
    fixed_ns=st.integers(0, 10**7),
    times=st.integers(1, 3),
)
tokens = st.integers(0, 1_000_000)
squares = st.integers(0, 10**12)


def all_integers(value) -> bool:
    if isinstance(value, dict):
        return all(map(all_integers, value.values()))
    if isinstance(value, (tuple, list)):
        return all(map(all_integers, value))
    return value is None or type(value) is int


def coefficients(table: CostTable) -> list[object]:
    """All numbers of a table."""
    costs = [astuple(cost) for cost in table.parts.values()]
    return [*costs, table.number, astuple(table.links), table.row_bytes]


@given(works, tokens, squares)
def test_times_are_integers(work, tokens, squares):
    assert type(work.forward_ns(tokens, squares)) is int
    assert type(work.backward_ns(tokens, squares)) is int
    times = work.stated.input.square_fs // (work.stated.forward.square_fs or 1) or None
    assert times is None or work.backward_ns(tokens, squares) == pytest.approx(
        times * work.forward_ns(tokens, squares), abs=times + 1
    )


@given(works, tokens, tokens, squares, squares)
def test_more_work_never_takes_less_time(work, tokens, more_tokens, squares, more_squares):
    less = work.forward_ns(tokens, squares)
    assert work.forward_ns(tokens + more_tokens, squares + more_squares) >= less
    assert less >= work.stated.forward.fixed_ns == work.forward_ns(0, 0)


def test_a_forward_pass_adds_tokens_squares_and_overhead():
    work = work_cost(3_000_000, 500_000, 7)
    assert work.forward_ns(10, 4) == 7 + 30 + 2
    assert work.backward_ns(10, 4) == 2 * 39


@pytest.mark.parametrize("cluster", [LAPTOP, H100], ids=lambda cluster: cluster.name)
def test_a_table_holds_integers_and_is_the_same_every_time(cluster):
    table = table_from_work(PARTS, cluster, row_bytes=512, number=3)
    assert all_integers(coefficients(table))
    assert table == table_from_work(PARTS, cluster, row_bytes=512, number=3)
    assert table.number == 3


@pytest.mark.parametrize("cluster", [LAPTOP, H100], ids=lambda cluster: cluster.name)
def test_a_table_gives_the_time_of_the_arithmetic(cluster):
    table = table_from_work(PARTS, cluster, row_bytes=512)
    for name, part in PARTS.items():
        exact = part.forward(even_load(4096, 4096**2)).flops / cluster.products * 1e9
        assert table.parts[name].forward_ns(4096, 4096**2) == pytest.approx(
            exact + cluster.op_overhead_ns, rel=1e-3
        )


def test_a_faster_cluster_never_takes_longer():
    slow, fast = (table_from_work(PARTS, cluster, row_bytes=512) for cluster in (LAPTOP, H100))
    for name in PARTS:
        assert fast.parts[name].forward_ns(1000, 10**6) <= slow.parts[name].forward_ns(1000, 10**6)
    assert fast.message_ns(1000) <= slow.message_ns(1000)


def test_recomputation_costs_another_forward():
    table = table_from_work(PARTS, LAPTOP, row_bytes=512)
    for name, times in (("llm/0", 3), ("image", 2)):
        cost = table.parts[name]
        assert cost.backward_ns(4096, 4096**2) == pytest.approx(
            times * cost.forward_ns(4096, 4096**2), rel=1e-9
        )
        assert cost.back_exchanges == (times - 1) * cost.exchanges


def test_a_message_costs_latency_and_its_bytes():
    table = CostTable(0, {}, Links(Link(1, 10**12), Link(1000, 50 * 10**9)), row_bytes=512)
    assert table.message_ns(0) == 1000
    assert table.message_ns(4) == 1000 + 4 * 512 // 50


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_a_longer_message_never_takes_less_time(rows, more):
    table = table_from_work(PARTS, H100, row_bytes=4096)
    assert type(table.message_ns(rows)) is int
    assert table.message_ns(rows + more) >= table.message_ns(rows) >= H100.links.across.latency_ns


def test_exchanges_of_shared_sequences_take_time_in_every_layer():
    cost = work_cost(10**6, 0, 5, times=3, exchanges=4, back_exchanges=8)
    assert cost.forward_ns(10, 0, exchange_ns=7) == 5 + 10 + 4 * 7
    # Recomputed once and for the gradients once more, which are exchanged once.
    assert cost.backward_ns(10, 0, exchange_ns=7) == 3 * (5 + 10) + 2 * 4 * 7


def test_memory_traffic_takes_its_time_beside_arithmetic() -> None:
    light = Stated(token_flops=30_000, square_flops=0, moved=10_000, weight_bytes=10**6)
    cost = table_from_work({"light": light}, LAPTOP, row_bytes=1024).parts["light"]
    assert cost.forward_ns(1000, 0) == LAPTOP.op_overhead_ns + 100_000 + 1_000_000 + 1_000_000


# What ranks tell each other.

NEAR, FAR = Link(8_000, 450 * 10**9), Link(15_000, 50 * 10**9)


def divided(link: Link) -> tuple[Stated, CostTable]:
    """A part that four ranks share over `link`, and the table read off it."""
    part = Stated(10**9, 0, tp=4, token_bytes=8192, recomputed=True)
    axes = {"tp": Axis(4, link), "dp_cp": Axis(2, FAR), "expt_dp": Axis(2, NEAR), "embd": Axis(2, FAR)}
    return part, table_from_work({"part": part}, H100, row_bytes=4096, axes={"part": axes})


@pytest.mark.parametrize("link", [NEAR, FAR], ids=["inside", "across"])
@pytest.mark.parametrize("tokens", [0, 4, 4096, 65536])
def test_collectives_in_a_pass_take_what_the_statement_sends_over_their_link(link, tokens):
    part, table = divided(link)
    alone = table_from_work({"part": replace(part, tp=1)}, H100, row_bytes=4096).parts["part"]
    cost, load, axes = table.parts["part"], even_load(tokens), {"tp": Axis(4, link)}
    forward = collectives_ns(part.forward(load).collectives, axes)
    assert cost.forward_ns(tokens, 0) - alone.forward_ns(tokens, 0) == pytest.approx(forward, abs=4)
    sent = 2 * 3 * tokens // 4 * 8192
    assert forward == pytest.approx(2 * link.latency_ns + sent * 10**9 / link.bytes_per_s, abs=2)
    for grad in Grad:
        talk = collectives_ns(part.backward(load, grad).collectives, axes)
        taken = cost.backward_ns(tokens, 0, grad=grad) - alone.backward_ns(tokens, 0, grad=grad)
        assert taken == pytest.approx(talk, abs=8)


@given(works, tokens, squares)
def test_the_halves_of_a_backward_take_as_long_as_the_whole(work, tokens, squares):
    halves = (work.backward_ns(tokens, squares, 5, grad=half) for half in (Grad.INPUT, Grad.WEIGHT))
    assert sum(halves) == work.backward_ns(tokens, squares, 5)


def test_balancing_counts_what_more_tokens_communicate():
    _, table = divided(FAR)
    cost = table.parts["part"]
    assert cost.marginal_ns(8192, 0) == pytest.approx(cost.forward_ns(8192, 0) - cost.forward_ns(0, 0), abs=2)


def test_a_reduction_takes_every_bucket_over_its_own_replicas():
    _, table = divided(NEAR)
    # Partial sums over tp, the tied one over the ends; buckets scattered, and gathered once.
    sums = NEAR.message_ns(2 * 3 * 128 * 4 // 4) + FAR.message_ns(256 * 4)
    dense = sum(FAR.message_ns(size // 2 * 4) for size in (256, 1408))
    experts = NEAR.message_ns(512 // 2 * 4)
    assert table.parts["part"].reduce_ns == sums + dense + experts
    assert table.parts["part"].gather_ns == dense + experts


def test_what_travels_in_bf16_takes_half_the_bytes_over_the_links_of_pairs():
    part = Stated(10**9, 0, tp=4, token_bytes=8192, by_layer=True)
    axes = {"tp": Axis(4, NEAR), "dp_cp": Axis(8, NEAR, FAR), "expt_dp": Axis(2, FAR), "embd": Axis(2, FAR)}
    exact, rounded = (
        table_from_work({"part": part}, H100, row_bytes=4096, axes={"part": axes}, sent=sent).parts["part"]
        for sent in (4, 2)
    )
    sizes = {axis: of.ranks for axis, of in axes.items()}
    scattered = [one for one in part.reduction(sizes) if one.kind == "reduce_scatter"]
    exchanged = [one for one in part.reduction(sizes, 2) if one.kind == "all_to_all"]
    assert {one.axis for one in scattered} == {"dp_cp", "expt_dp"}
    assert exchanged == [replace(one, kind="all_to_all", bytes=one.bytes // 2) for one in scattered]
    saved = collectives_ns(scattered, axes) - sum(FAR.message_ns(one.bytes) * one.calls for one in exchanged)
    assert exact.reduce_ns - rounded.reduce_ns == saved
    assert (exact.gather_ns, exact.pieces) == (rounded.gather_ns, rounded.pieces)
    assert exact.pieces == sum(one.calls for one in scattered)
    apart = table_from_work({"part": part}, H100, 4096, axes={"part": axes}, overlaps=False).parts["part"]
    assert apart == replace(exact, pieces=1)


def test_a_table_says_what_a_forward_keeps():
    _, table = divided(NEAR)
    assert table.parts["part"].kept_bytes(100) == 300


def test_a_recomputed_attention_costs_itself_again():
    once, again = (
        table_from_work({"part": Stated(10**6, 10**3, layers=2, attention_again=of)}, H100, 1).parts["part"]
        for of in (False, True)
    )
    attended = again.forward_ns(0, 10**9) - again.forward_ns(0, 0)
    assert again.backward_ns(50, 10**9) - once.backward_ns(50, 10**9) == pytest.approx(attended, abs=1)
    assert (once.exchanges, once.back_exchanges, again.back_exchanges) == (2, 2, 4)


def test_passes_that_are_computed_anew_cost_a_forward_more_and_keep_less():
    usual, full, some = (
        table_from_work({"part": Stated(10**6, 10**3, layers=2, **of)}, H100, 1).parts["part"]
        for of in ({}, {"recomputed": True}, {"all_anew": True})
    )
    assert usual.anew is None
    assert usual.of(True) is usual
    assert some.of(False) == replace(usual, anew=some.anew)
    assert some.of(True) == replace(full, kept_token=1)
    assert [some.of(anew).kept_bytes(100) for anew in (False, True)] == [300, 100]
    more = some.of(True).backward_ns(50, 10**9) - some.backward_ns(50, 10**9)
    assert more == pytest.approx(usual.forward_ns(50, 10**9), abs=2)
    laws = replace(some.stated, forward=Law(7, 0, 0), input=Law(11, 0, 0))
    learnt = replace(CostTable(1, {"part": some}, H100.links, 1)).with_laws(2, {"part": laws}).parts["part"]
    assert learnt.laws.input.token_fs == 11
    assert learnt.of(True).laws.input.token_fs == 7 + 11


def test_attention_in_a_backward_reaches_a_share_of_its_own():
    slower = replace(H100, attention_backward=H100.attention // 3)
    even, uneven = (table_from_work(PARTS, of, 1).parts["image"] for of in (H100, slower))
    assert even.forward_ns(7, 10**9) == uneven.forward_ns(7, 10**9)
    back = even.backward_ns(0, 10**9) - even.backward_ns(0, 0)
    assert uneven.backward_ns(0, 10**9) - uneven.backward_ns(0, 0) == pytest.approx(3 * back, rel=1e-3)

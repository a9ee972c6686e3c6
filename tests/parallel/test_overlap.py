"""What other frameworks hide, and the links that groups of ranks talk over."""

from dataclasses import replace

import pytest
from stated import Stated
from work_costs import even_cluster

from parallel.axes import axes_of
from parallel.cluster import Link, Links
from parallel.costs import Axis, collectives_ns, table_from_work
from parallel.layout import Arrangement, Layout
from parallel.overlap import Overlap, overlapped
from parallel.work import Grad

NEAR, FAR, BEYOND = Link(8_000, 400 * 10**9), Link(15_000, 50 * 10**9), Link(20_000, 25 * 10**9)
CLUSTER = even_cluster("h100", 10**15, 0.5, moved_per_s=10**12, links=Links(NEAR, FAR, BEYOND))
PART = Stated(10**10, 0, tp=4, token_bytes=8192)
AXES = {"tp": Axis(4, NEAR), "dp_cp": Axis(8, FAR), "expt_dp": Axis(8, FAR), "embd": Axis(2, FAR)}
NOTHING = Overlap(pass_tokens=4096)
TOKENS = 4096


def costs(overlap: Overlap, part: Stated = PART):
    ours = table_from_work({"part": part}, CLUSTER, 1, axes={"part": AXES}).parts["part"]
    return ours, overlapped(ours, part, AXES, overlap)


def test_who_hides_nothing_waits_for_everything() -> None:
    ours, theirs = costs(NOTHING)
    assert theirs == ours


def test_a_split_message_is_waited_for_by_a_share() -> None:
    ours, theirs = costs(replace(NOTHING, tensor=250))
    assert theirs.talk_ns(TOKENS) == pytest.approx(ours.talk_ns(TOKENS) / 4, abs=4)
    assert theirs.compute_ns(TOKENS, 0) == ours.compute_ns(TOKENS, 0)


def test_no_message_hides_behind_less_compute_than_it_takes() -> None:
    light = replace(PART, token_flops=10**6)  # 2 ns a token, and its messages take 31
    ours, theirs = costs(replace(NOTHING, tensor=100), light)
    law = ours.stated.forward
    hidden = ours.forward_talk.token_fs - theirs.forward_talk.token_fs
    assert hidden == law.token_fs < 0.9 * ours.forward_talk.token_fs


def test_buckets_hide_behind_the_last_backward_and_the_first_forward() -> None:
    large = replace(PART, token_flops=10**7)
    for tokens in (1, 4096):
        ours, theirs = costs(replace(NOTHING, pass_tokens=tokens, bucket=100), large)
        back, there = ours.compute_ns(tokens, 0, Grad.BOTH), ours.compute_ns(tokens, 0)
        sums = {"reduce_scatter": 0, "all_gather": 0, "all_reduce": 0}
        for one in large.reduction({axis: of.ranks for axis, of in AXES.items()}):
            sums[one.kind] += collectives_ns([one], AXES)
        left = max(sums["reduce_scatter"] // 10, sums["reduce_scatter"] - back)
        assert theirs.reduce_ns == pytest.approx(sums["all_reduce"] + left, abs=2)
        before = max(sums["all_gather"] // 10, sums["all_gather"] - there)
        assert theirs.gather_ns == pytest.approx(before, abs=2)


def test_sharded_weights_are_gathered_in_every_pass() -> None:
    ours, theirs = costs(replace(NOTHING, sharded=True))
    gathered = sum(
        collectives_ns([one], AXES)
        for one in PART.reduction({axis: of.ranks for axis, of in AXES.items()})
        if one.kind == "all_gather"
    )
    assert theirs.forward_ns(TOKENS, 0) - ours.forward_ns(TOKENS, 0) == gathered
    assert theirs.backward_ns(TOKENS, 0) - ours.backward_ns(TOKENS, 0) > gathered
    assert theirs.reduce_ns < ours.reduce_ns


# Links.


def axis(name: str, per_node: int, rail: int | None = None, **sizes: int) -> Axis:
    """An axis of the LLM in a layout, where nodes have `per_node` ranks and rails `rail`."""
    layout = Layout(**sizes)
    arrangement = Arrangement(layout, {}, "colocated", 0, 1, (0, layout.tp * layout.cp * layout.pp))
    cluster = replace(CLUSTER, ranks_per_node=per_node, ranks_per_rail=rail)
    return axes_of(arrangement, None, cluster)[name]


def test_a_group_inside_a_node_talks_over_its_link() -> None:
    assert axis("tp", 4, tp=4, dp=2) == Axis(4, NEAR)
    assert axis("dp_cp", 8, tp=4, dp=2) == Axis(2, NEAR)


def test_rings_use_the_links_of_all_members_of_a_node() -> None:
    """Four ranks of each of four nodes: what leaves a node goes over four links at once."""
    of = axis("dp_cp", 4, dp=16)
    assert (of.ranks, of.link) == (16, replace(FAR, bytes_per_s=4 * FAR.bytes_per_s))
    assert axis("dp_cp", 4, tp=4, dp=16).link == FAR, "one member a node"
    assert axis("dp_cp", 16, dp=64).link.bytes_per_s == NEAR.bytes_per_s, "no faster than a member's own"


def test_an_all_to_all_goes_over_a_members_own_link() -> None:
    """Of 15 others 3 are near: 12 of 15 parts of what a member sends leave the node."""
    assert axis("dp_cp", 4, dp=16).of("all_to_all").bytes_per_s == FAR.bytes_per_s * 15 // 12
    assert axis("dp_cp", 4, tp=4, dp=16).of("all_to_all") == FAR


def test_beyond_a_rail_links_are_other_ones() -> None:
    assert axis("dp_cp", 4, 32, tp=4, dp=8).link == FAR
    assert axis("dp_cp", 4, 16, tp=4, dp=8).link == BEYOND
    assert axis("pp", 4, None, tp=4, pp=2, dp=2).link == FAR

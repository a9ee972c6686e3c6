import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.layout import AXES, Layout, LayoutError, stage_layers

sizes = st.integers(1, 4)
layouts = st.builds(Layout, tp=sizes, cp=sizes, dp=sizes, pp=sizes)
axis_sets = st.sets(st.sampled_from(AXES)).map(lambda axes: tuple(sorted(axes)))


@settings(deadline=None)
@given(layouts)
def test_ranks_and_coordinates_are_a_bijection(layout):
    seen = set()
    for rank in range(layout.world):
        at = layout.coordinates(rank)
        assert set(at) == set(AXES)
        assert all(0 <= at[axis] < getattr(layout, axis) for axis in AXES)
        assert layout.rank(**at) == rank
        seen.add(tuple(at.values()))
    assert len(seen) == layout.world == layout.tp * layout.cp * layout.dp * layout.pp


def test_tp_lies_closest_together_then_cp_dp_and_pp():
    layout = Layout(tp=2, cp=3, dp=5, pp=7)
    assert [layout.rank(**{axis: 1}) for axis in AXES] == [1, 2, 6, 30]
    assert layout.rank() == 0


@settings(deadline=None)
@given(layouts, axis_sets)
def test_groups_of_any_axes_partition_the_world(layout, axes):
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(layout.world))
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)
    others = [axis for axis in AXES if axis not in axes]
    for group in groups:
        assert list(group) == sorted(group)
        fixed = {tuple(layout.coordinates(rank)[axis] for axis in others) for rank in group}
        assert len(fixed) == 1
        assert all(layout.group(rank, *axes) == group for rank in group)


@settings(deadline=None)
@given(layouts)
def test_replicas_partition_the_world_and_list_their_ranks_stage_by_stage(layout):
    replicas = [layout.replica_ranks(number) for number in range(layout.dp)]
    assert sorted(rank for ranks in replicas for rank in ranks) == list(range(layout.world))
    for number, ranks in enumerate(replicas):
        assert len(ranks) == layout.replica_size
        assert {layout.replica(rank) for rank in ranks} == {number}
        stages = [layout.coordinates(rank)["pp"] for rank in ranks]
        assert stages == sorted(stages)


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_without_ranks_is_refused_by_name(axis):
    with pytest.raises(LayoutError, match=f"layout.{axis}=0"):
        Layout(**{axis: 0})


def test_ranks_and_coordinates_outside_the_world_are_refused():
    layout = Layout(tp=2, dp=2)
    for rank in (-1, 4):
        with pytest.raises(AssertionError):
            layout.coordinates(rank)
    with pytest.raises(AssertionError):
        layout.rank(tp=2)


def test_sixteen_thousand_ranks():
    layout = Layout(tp=8, cp=2, dp=128, pp=8)
    assert layout.world == 16_384
    for axes in (("tp",), ("cp", "pp")):
        groups = layout.groups(*axes)
        size = len(groups[0])
        assert len(groups) * size == layout.world
        assert len({rank for group in groups for rank in group}) == layout.world
    assert layout.replica_ranks(127)[-1] == layout.world - 1


def test_a_layout_is_described_by_the_axes_that_split_it():
    assert Layout(dp=2, pp=2).describe() == "dp2·pp2"
    assert Layout().describe() == "single"


@given(st.integers(1, 16), st.integers(0, 200))
def test_stages_share_layers_evenly_and_the_first_take_the_rest(stages, more):
    shares = stage_layers(stages + more, stages)
    assert len(shares) == stages
    assert sum(shares) == stages + more
    assert max(shares) - min(shares) <= 1
    assert list(shares) == sorted(shares, reverse=True)


def test_a_stage_without_a_layer_is_refused_with_the_remedy():
    with pytest.raises(LayoutError, match=r"pp=5 .* choose pp at most 4"):
        stage_layers(4, 5)

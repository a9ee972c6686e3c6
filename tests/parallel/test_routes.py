import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from random_routes import Problem, moves, random_layout, random_problem

from parallel.boundary import Rows, Segment, make_route
from parallel.sequence import Interval, SequenceLayout, Shard
from parallel.shipping import make_ends, ship

WIDTH = 3

problems = st.randoms(use_true_random=False).map(random_problem)


# Where tokens live.


@settings(deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 6), st.integers(1, 5))
def test_intervals_and_local_views_tell_the_same_as_counting_tokens(random, num_cp_ranks, tp):
    layout = random_layout(random, num_cp_ranks)
    place = Problem((), layout, tp, num_cp_ranks * tp).places()
    told = [
        (interval.start + i, (interval.rank, interval.local_start + i))
        for interval in layout.intervals(tp)
        for i in range(interval.length)
    ]
    assert told == list(enumerate(place))
    assert sum(layout.lengths) == len(place)


def test_whole_sequences_are_one_shard_each():
    layout = SequenceLayout.whole([3, 0, 5], [1, 0, 1], 2)
    assert layout.lengths == (3, 0, 5)
    assert layout.shards == ((Shard(1, 0, 3),), (Shard(0, 0, 0),), (Shard(1, 0, 5),))
    with pytest.raises(ValueError):
        SequenceLayout.whole([3, 5], [0], 1)


@pytest.mark.parametrize(
    "shards, what",
    [
        ([Shard(2, 0, 4)], "member 2 not in the pool"),
        ([Shard(-1, 0, 4)], "member -1 not in the pool"),
        ([Shard(0, 0, 4), Shard(1, 5, 1)], "token 4 is not covered once"),
        ([Shard(0, 0, 4), Shard(1, 3, 2)], "token 4 is not covered once"),
        ([Shard(0, 1, 4)], "token 0 is not covered once"),
        ([Shard(1, 4, 4), Shard(0, 0, 4)], "token 0 is not covered once"),
        ([Shard(0, 0, -1)], "negative length"),
    ],
)
def test_shards_that_do_not_cover_a_sequence_in_order_are_refused(shards, what):
    with pytest.raises(AssertionError, match=f"sequence 1: {what}"):
        SequenceLayout(2, ((Shard(0, 0, 2),), tuple(shards)))


# Where rows go.


@settings(deadline=None, max_examples=300)
@given(problems)
def test_every_row_is_delivered_exactly_once_to_the_holder_of_its_position(problem):
    route = problem.route()
    assert moves(route) == problem.wanted_moves()
    assert route.num_rows == sum(run.length for run in problem.runs)
    assert all(segment.length > 0 for segment in route.segments)
    arrivals = [token for rank in range(problem.num_ranks) for token in landed(route, rank)]
    assert len(arrivals) == len(set(arrivals)) == route.num_rows


def landed(route, rank):
    return [(rank, token) for token in make_ends(route, rank).receive.tolist()]


@settings(deadline=None, max_examples=200)
@given(problems, st.randoms(use_true_random=False))
def test_the_order_in_which_places_and_rows_are_named_changes_nothing(problem, random):
    intervals = list(problem.layout.intervals(problem.tp))
    random.shuffle(intervals)
    runs = random.sample(problem.runs, len(problem.runs))
    assert make_route(runs, intervals, problem.num_ranks) == problem.route()


@settings(deadline=None, max_examples=200)
@given(problems)
def test_only_rows_that_must_move_do(problem):
    route = problem.route()
    must = sum(source != destination for source, _, destination, _ in problem.wanted_moves())
    assert route.moved_rows() == must
    assert route.is_local == (must == 0)
    crossing = [
        sum(make_ends(route, rank).send_counts) - make_ends(route, rank).send_counts[rank]
        for rank in range(route.num_ranks)
    ]
    assert sum(crossing) == must


@settings(deadline=None, max_examples=200)
@given(problems)
def test_what_one_side_sends_the_other_expects(problem):
    route = problem.route()
    ends = [make_ends(route, rank) for rank in range(route.num_ranks)]
    for one in range(route.num_ranks):
        assert len(ends[one].send) == sum(ends[one].send_counts)
        assert len(ends[one].receive) == sum(ends[one].receive_counts)
        for other in range(route.num_ranks):
            assert ends[one].send_counts[other] == ends[other].receive_counts[one]


@pytest.mark.parametrize(
    "run", [Rows(0, 0, 3, 3), Rows(0, 0, 5, 1), Rows(0, 0, 40, 2), Rows(0, 0, -1, 2), Rows(0, 0, -3, 1)]
)
def test_rows_beyond_the_packed_axis_are_refused(run):
    layout = SequenceLayout(2, ((Shard(0, 0, 2), Shard(1, 2, 3)),))
    with pytest.raises(AssertionError, match="rows have a place"):
        make_route([run], layout.intervals(), 2)


@pytest.mark.parametrize(
    "run, covered", [(Rows(0, 0, 1, 4), 1), (Rows(0, 0, 2, 1), 0), (Rows(0, 0, 3, 3), 0)]
)
def test_rows_for_positions_that_nobody_holds_are_refused(run, covered):
    held = [Interval(0, 2, 0, 0), Interval(4, 3, 1, 0)]
    assert make_route([Rows(0, 0, 4, 3)], held, 2).num_rows == 3
    with pytest.raises(AssertionError, match=f"only {covered} of {run.length} rows have a place"):
        make_route([run], held, 2)


def test_positions_with_two_holders_are_refused():
    with pytest.raises(AssertionError, match="hold the same places"):
        make_route([], [Interval(0, 4, 0, 0), Interval(3, 4, 1, 0)], 2)
    with pytest.raises(AssertionError, match="the group has 2 ranks"):
        make_route([], [Interval(0, 4, 2, 0)], 2)


def test_runs_that_claim_the_same_places_or_rows_are_refused():
    held = list(SequenceLayout(2, ((Shard(0, 0, 9),),)).intervals())
    with pytest.raises(AssertionError, match="claim the same places"):
        make_route([Rows(0, 0, 2, 3), Rows(1, 0, 4, 2)], held, 2)
    with pytest.raises(AssertionError, match="send the same rows"):
        make_route([Rows(1, 2, 0, 3), Rows(1, 0, 4, 3)], held, 2)
    with pytest.raises(AssertionError, match="the group has 2 ranks"):
        make_route([Rows(2, 0, 2, 3)], held, 2)


def test_rows_of_zero_length_need_no_place():
    assert make_route([Rows(0, 0, 0, 0), Rows(1, 0, 99, 0)], [], 2).segments == ()


def test_a_run_over_several_shards_is_cut_at_their_edges():
    layout = SequenceLayout(3, ((Shard(2, 0, 2), Shard(0, 2, 2)), (Shard(2, 0, 4),)))
    assert make_route([Rows(1, 5, 1, 5)], layout.intervals(), 3).segments == (
        Segment(1, 5, 2, 1, 1),
        Segment(1, 6, 0, 0, 2),
        Segment(1, 8, 2, 2, 2),
    )


def test_a_run_is_cut_where_tensor_parallel_ranks_divide_the_tokens():
    # Seven tokens over two ranks: four and three, after padding to eight. Rank 2 only encodes.
    layout = SequenceLayout(1, ((Shard(0, 0, 7),),))
    assert make_route([Rows(2, 0, 1, 6)], layout.intervals(2), 3).segments == (
        Segment(2, 0, 0, 1, 3),
        Segment(2, 3, 1, 0, 3),
    )


# On real ranks.

CROSSING = Problem(
    (Rows(2, 0, 7, 2), Rows(1, 0, 1, 4), Rows(1, 4, 10, 2), Rows(0, 0, 5, 1)),
    SequenceLayout(3, ((Shard(0, 0, 3), Shard(2, 3, 4)), (), (Shard(0, 0, 5),))),
    1,
    3,
)
LOCAL = Problem(
    (Rows(0, 0, 1, 2), Rows(2, 0, 3, 2)),
    SequenceLayout(3, ((Shard(0, 0, 3), Shard(2, 3, 4)),)),
    1,
    3,
)


def ship_both_ways(rank, problem):
    route = problem.route()
    ends = make_ends(route, rank)
    group = None if route.is_local else dist.group.WORLD
    number = torch.arange(problem.rows_out(rank), dtype=torch.float64)
    x = torch.stack([number + 100 * rank] * WIDTH, dim=1)
    sent = ship(ends, x[ends.send], group)
    if sent.work is not None:
        sent.work.wait()
    embeddings = torch.full((problem.tokens(rank), WIDTH), -1.0, dtype=torch.float64)
    embeddings[ends.receive] = sent.rows

    y = torch.stack([torch.arange(len(embeddings), dtype=torch.float64) + 1000 * rank] * WIDTH, dim=1)
    returned = ship(ends.transpose(), y[ends.receive], group)
    if returned.work is not None:
        returned.work.wait()
    grads = torch.full_like(x, -1.0)
    grads[ends.send] = returned.rows
    return embeddings[:, 0].tolist(), grads[:, 0].tolist()


@pytest.mark.parametrize("problem", [CROSSING, LOCAL], ids=["between ranks", "local"])
def test_rows_and_gradients_arrive_on_real_ranks(ranks, problem):
    assert problem.route().is_local == (problem is LOCAL)
    embeddings = [[-1.0] * problem.tokens(rank) for rank in range(3)]
    grads = [[-1.0] * problem.rows_out(rank) for rank in range(3)]
    for source, row, destination, token in problem.wanted_moves():
        embeddings[destination][token] = 100.0 * source + row
        grads[source][row] = 1000.0 * destination + token
    assert ranks.run(3, ship_both_ways, problem) == list(zip(embeddings, grads, strict=True))


def ship_too_little(rank, problem):
    ends = make_ends(problem.route(), rank)
    with pytest.raises(AssertionError, match="rows for"):
        ship(ends, torch.zeros(len(ends.send) + 1, WIDTH), dist.group.WORLD)


def test_rows_that_do_not_match_the_route_are_refused(ranks):
    ranks.run(3, ship_too_little, CROSSING)


def test_a_route_between_ranks_needs_a_communicator():
    ends = make_ends(CROSSING.route(), 1)
    with pytest.raises(AssertionError, match="needs a communicator"):
        ship(ends, torch.zeros(len(ends.send), WIDTH), None)

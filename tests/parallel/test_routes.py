import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.boundary import Route, Rows, Segment, make_ends, make_route, ship
from parallel.sequence import SequenceLayout, Shard

CPU = torch.device("cpu")
WIDTH = 3


@st.composite
def layouts(draw, max_ranks: int = 6) -> SequenceLayout:
    num_ranks = draw(st.integers(1, max_ranks))
    piece = st.tuples(st.integers(0, num_ranks - 1), st.integers(0, 6))
    sequences = draw(st.lists(st.lists(piece, max_size=4), max_size=5))
    shards = []
    for pieces in sequences:
        start, cut = 0, []
        for rank, length in pieces:
            cut.append(Shard(rank, start, length))
            start += length
        shards.append(tuple(cut))
    return SequenceLayout(num_ranks, tuple(shards))


@st.composite
def problems(draw, max_ranks: int = 6) -> tuple[list[Rows], SequenceLayout]:
    """Disjoint runs of rows on the packed axis, in any order; each source's rows are counted run by run."""
    layout = draw(layouts(max_ranks))
    total = sum(layout.lengths)
    cuts = sorted(draw(st.lists(st.integers(0, total), max_size=8)))
    spans = list(zip(cuts[::2], cuts[1::2], strict=False))
    filled = [0] * layout.num_ranks
    runs = []
    for start, stop in draw(st.permutations(spans)):
        source = draw(st.integers(0, layout.num_ranks - 1))
        runs.append(Rows(source, filled[source], start, stop - start))
        filled[source] += stop - start
    return draw(st.permutations(runs)), layout


def places(layout: SequenceLayout) -> list[tuple[int, int]]:
    """Rank and local index of every packed token, one token at a time."""
    counts = [0] * layout.num_ranks
    out = []
    for pieces in layout.shards:
        for piece in pieces:
            for _ in range(piece.length):
                out.append((piece.rank, counts[piece.rank]))
                counts[piece.rank] += 1
    return out


def wanted_moves(runs: list[Rows], layout: SequenceLayout) -> list[tuple[int, int, int, int]]:
    """(source, row, destination, token) of every row, one row at a time."""
    place = places(layout)
    return sorted(
        (run.source, run.source_start + i, *place[run.start + i]) for run in runs for i in range(run.length)
    )


def moves(route: Route) -> list[tuple[int, int, int, int]]:
    return sorted(
        (s.source, s.source_start + i, s.destination, s.destination_start + i)
        for s in route.segments
        for i in range(s.length)
    )


def rows_out(runs: list[Rows], rank: int) -> int:
    return sum(run.length for run in runs if run.source == rank)


def transport(ends_of_ranks, outgoing):
    """What an uneven all-to-all does, for all ranks in one process."""
    parts = [x.split(ends.send_counts) for ends, x in zip(ends_of_ranks, outgoing, strict=True)]
    return [torch.cat([row[rank] for row in parts]) for rank in range(len(ends_of_ranks))]


# Where tokens live.


@settings(deadline=None)
@given(layouts())
def test_intervals_and_local_views_tell_the_same_as_counting_tokens(layout):
    place = places(layout)
    told = [
        (interval.start + i, (interval.rank, interval.local_start + i))
        for interval in layout.intervals()
        for i in range(interval.length)
    ]
    assert told == list(enumerate(place))
    assert sum(layout.lengths) == len(place)
    positions = {rank: [] for rank in range(layout.num_ranks)}
    for pieces in layout.shards:
        position = 0
        for piece in pieces:
            positions[piece.rank] += range(position, position + piece.length)
            position += piece.length
    for rank in range(layout.num_ranks):
        held = sum(holder == rank for holder, _ in place)
        assert sum(layout.local_lengths(rank)) == held
        local = [position for run in layout.local_positions(rank) for position in run]
        assert local == positions[rank]


def test_whole_sequences_are_one_shard_each():
    layout = SequenceLayout.whole([3, 0, 5], [1, 0, 1], 2)
    assert layout.lengths == (3, 0, 5)
    assert layout.local_lengths(1) == (3, 5)
    assert layout.local_positions(1) == (range(3), range(5))
    with pytest.raises(ValueError):
        SequenceLayout.whole([3, 5], [0], 1)


@pytest.mark.parametrize(
    "shards, what",
    [
        ([Shard(2, 0, 4)], "rank 2 not in group"),
        ([Shard(-1, 0, 4)], "rank -1 not in group"),
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


@settings(deadline=None, max_examples=200)
@given(problems())
def test_every_row_is_delivered_exactly_once_to_the_holder_of_its_position(problem):
    runs, layout = problem
    route = make_route(runs, layout)
    assert moves(route) == wanted_moves(runs, layout)
    assert route.num_rows == sum(run.length for run in runs)
    assert all(segment.length > 0 for segment in route.segments)


@settings(deadline=None, max_examples=200)
@given(problems())
def test_only_rows_that_must_move_do(problem):
    runs, layout = problem
    route = make_route(runs, layout)
    must = sum(source != destination for source, _, destination, _ in wanted_moves(runs, layout))
    assert route.moved_rows() == must
    assert route.is_local == (must == 0)
    crossing = [
        sum(make_ends(route, rank, CPU).send_counts) - make_ends(route, rank, CPU).send_counts[rank]
        for rank in range(route.num_ranks)
    ]
    assert sum(crossing) == must


@settings(deadline=None, max_examples=200)
@given(problems())
def test_the_way_back_is_the_transpose(problem):
    route = make_route(*problem)
    back = route.transpose()
    assert back.transpose() == route
    assert (back.num_rows, back.moved_rows(), back.is_local) == (
        route.num_rows,
        route.moved_rows(),
        route.is_local,
    )
    for rank in range(route.num_ranks):
        here, there = make_ends(route, rank, CPU).transpose(), make_ends(back, rank, CPU)
        assert torch.equal(here.send, there.send)
        assert torch.equal(here.receive, there.receive)
        assert (here.send_counts, here.receive_counts) == (there.send_counts, there.receive_counts)


@settings(deadline=None, max_examples=200)
@given(problems())
def test_what_one_side_sends_the_other_expects(problem):
    route = make_route(*problem)
    ends = [make_ends(route, rank, CPU) for rank in range(route.num_ranks)]
    for one in range(route.num_ranks):
        assert len(ends[one].send) == sum(ends[one].send_counts)
        assert len(ends[one].receive) == sum(ends[one].receive_counts)
        for other in range(route.num_ranks):
            assert ends[one].send_counts[other] == ends[other].receive_counts[one]


@settings(deadline=None, max_examples=150)
@given(problems(), st.integers(0, 2**31))
def test_the_return_is_the_adjoint_of_the_shipment(problem, seed):
    runs, layout = problem
    route = make_route(runs, layout)
    world = range(route.num_ranks)
    ends = [make_ends(route, rank, CPU) for rank in world]
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(rows_out(runs, rank), WIDTH, generator=generator, dtype=torch.float64) for rank in world]
    y = [
        torch.randn(sum(layout.local_lengths(rank)), WIDTH, generator=generator, dtype=torch.float64)
        for rank in world
    ]

    arrived = transport(ends, [x[rank][ends[rank].send] for rank in world])
    ax = [torch.zeros_like(y[rank]).index_add_(0, ends[rank].receive, arrived[rank]) for rank in world]
    back = [ends[rank].transpose() for rank in world]
    returned = transport(back, [y[rank][back[rank].send] for rank in world])
    aty = [torch.zeros_like(x[rank]).index_add_(0, back[rank].receive, returned[rank]) for rank in world]

    forward = sum(float((a * b).sum()) for a, b in zip(ax, y, strict=True))
    backward = sum(float((a * b).sum()) for a, b in zip(x, aty, strict=True))
    assert forward == pytest.approx(backward, rel=1e-12, abs=1e-12)
    place = places(layout)
    for run in runs:
        for i in range(run.length):
            rank, token = place[run.start + i]
            assert torch.equal(ax[rank][token], x[run.source][run.source_start + i])
            assert torch.equal(aty[run.source][run.source_start + i], y[rank][token])


@pytest.mark.parametrize(
    "run", [Rows(0, 0, 3, 3), Rows(0, 0, 5, 1), Rows(0, 0, 40, 2), Rows(0, 0, -1, 2), Rows(0, 0, -3, 1)]
)
def test_rows_beyond_the_packed_axis_are_refused(run):
    layout = SequenceLayout(2, ((Shard(0, 0, 2), Shard(1, 2, 3)),))
    with pytest.raises(AssertionError, match="rows have a place"):
        make_route([run], layout)


def test_rows_of_zero_length_need_no_place():
    assert make_route([Rows(0, 0, 0, 0), Rows(1, 0, 99, 0)], SequenceLayout(2, ())).segments == ()


def test_a_run_over_several_shards_is_cut_at_their_edges():
    layout = SequenceLayout(3, ((Shard(2, 0, 2), Shard(0, 2, 2)), (Shard(2, 0, 4),)))
    assert make_route([Rows(1, 5, 1, 5)], layout).segments == (
        Segment(1, 5, 2, 1, 1),
        Segment(1, 6, 0, 0, 2),
        Segment(1, 8, 2, 2, 2),
    )


# On real ranks.

CROSSING = (
    [Rows(2, 0, 7, 2), Rows(1, 0, 1, 4), Rows(1, 4, 10, 2), Rows(0, 0, 5, 1)],
    SequenceLayout(3, ((Shard(0, 0, 3), Shard(2, 3, 4)), (), (Shard(0, 0, 5),))),
)
LOCAL = (
    [Rows(0, 0, 1, 2), Rows(2, 0, 3, 2)],
    SequenceLayout(3, ((Shard(0, 0, 3), Shard(2, 3, 4)),)),
)


def ship_both_ways(rank, runs, layout):
    route = make_route(runs, layout)
    ends = make_ends(route, rank, CPU)
    group = None if route.is_local else dist.group.WORLD
    number = torch.arange(rows_out(runs, rank), dtype=torch.float64)
    x = torch.stack([number + 100 * rank] * WIDTH, dim=1)
    sent = ship(ends, x[ends.send], group)
    if sent.work is not None:
        sent.work.wait()
    embeddings = torch.full((sum(layout.local_lengths(rank)), WIDTH), -1.0, dtype=torch.float64)
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
    runs, layout = problem
    assert make_route(runs, layout).is_local == (problem is LOCAL)
    embeddings = [[-1.0] * sum(layout.local_lengths(rank)) for rank in range(3)]
    grads = [[-1.0] * rows_out(runs, rank) for rank in range(3)]
    for source, row, destination, token in wanted_moves(runs, layout):
        embeddings[destination][token] = 100.0 * source + row
        grads[source][row] = 1000.0 * destination + token
    assert ranks.run(3, ship_both_ways, runs, layout) == list(zip(embeddings, grads, strict=True))


def ship_too_little(rank, runs, layout):
    ends = make_ends(make_route(runs, layout), rank, CPU)
    with pytest.raises(AssertionError, match="rows for"):
        ship(ends, torch.zeros(len(ends.send) + 1, WIDTH), dist.group.WORLD)


def test_rows_that_do_not_match_the_route_are_refused(ranks):
    ranks.run(3, ship_too_little, *CROSSING)


def test_a_route_between_ranks_needs_a_communicator():
    ends = make_ends(make_route(*CROSSING), 1, CPU)
    with pytest.raises(AssertionError, match="needs a communicator"):
        ship(ends, torch.zeros(len(ends.send), WIDTH), None)


def test_runs_that_claim_the_same_places_are_refused():
    layout = SequenceLayout(2, ((Shard(0, 0, 9),),))
    with pytest.raises(AssertionError, match="claim the same places"):
        make_route([Rows(0, 0, 2, 3), Rows(1, 0, 4, 2)], layout)
    with pytest.raises(AssertionError, match="the group has 2 ranks"):
        make_route([Rows(2, 0, 2, 3)], layout)

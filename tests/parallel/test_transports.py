import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from random import Random

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from random_routes import carry, random_problem

from parallel.boundary import Route, Segment
from parallel.cluster import Link, Links
from parallel.collectives import Stop, two_hops
from parallel.lane import Lane
from parallel.shipping import make_ends, ship
from parallel.transports import (
    TRANSPOSED,
    choose_transport,
    hops,
    node_map,
    relays,
    route_bytes,
    transport_ns,
)

CPU = torch.device("cpu")
WIDTH = 3
MOVING = tuple(name for name in TRANSPOSED if name != "local")


def random_nodes(random: Random, num_ranks: int) -> tuple[int, ...]:
    """Any ranks on any nodes: of one size or not, in order or not."""
    return tuple(random.randint(0, random.choice((0, 1, 3))) for _ in range(num_ranks))


def random_traffic(random: Random) -> tuple[dict, tuple[int, ...]]:
    num_ranks = random.randint(1, 9)
    pairs = [(random.randrange(num_ranks), random.randrange(num_ranks)) for _ in range(random.randint(0, 20))]
    return {pair: random.randint(1, 50) for pair in pairs}, random_nodes(random, num_ranks)


def transposed(traffic):
    return {(b, a): rows for (a, b), rows in traffic.items()}


traffics = st.randoms(use_true_random=False).map(random_traffic)
transports = st.sampled_from(MOVING)


# What travels.


@settings(deadline=None, max_examples=200)
@given(st.randoms(use_true_random=False))
def test_direct_sends_the_lower_bound_on_every_layout(random):
    """A row whose source is not its destination has to be sent once; no other has to."""
    problem = random_problem(random)
    nodes = random_nodes(random, problem.num_ranks)
    apart = [(a, b) for a, _, b, _ in problem.wanted_moves() if a != b]
    moved = route_bytes("direct", problem.route().traffic(), nodes, 7)
    assert moved.total == 7 * len(apart)
    assert moved.across == 7 * sum(nodes[a] != nodes[b] for a, b in apart)
    of_rank = [max(sum(a == r for a, _ in apart), sum(b == r for _, b in apart)) for r in range(len(nodes))]
    assert moved.busiest == 7 * max(of_rank)


@settings(deadline=None, max_examples=200)
@given(traffics, transports)
def test_following_every_hop_brings_the_traffic(traffic_and_nodes, transport):
    """Of a two-level transport, what leaves a rank after the first hop is what stayed or arrived there."""
    traffic, nodes = traffic_and_nodes
    if transport.startswith("two_level"):
        stop = relays(transport, nodes)
        first, second = hops(transport, traffic, nodes)
        for rank in range(len(nodes)):
            starts = sum(rows for (a, _), rows in traffic.items() if a == rank)
            held = sum(rows for (a, b), rows in traffic.items() if stop(a, b) == rank)
            ends = sum(rows for (_, b), rows in traffic.items() if b == rank)
            assert starts - flow(first, rank) == held
            assert held - flow(second, rank) == ends
    elif transport == "direct":
        (only,) = hops(transport, traffic, nodes)
        assert only == {pair: rows for pair, rows in traffic.items() if pair[0] != pair[1]}


def flow(hop, rank):
    """Rows that a rank sends less those that it receives."""
    return sum(n for (a, _), n in hop.items() if a == rank) - sum(n for (_, b), n in hop.items() if b == rank)


@settings(deadline=None, max_examples=200)
@given(traffics)
def test_two_levels_cross_between_nodes_once_and_in_few_messages(traffic_and_nodes):
    traffic, nodes = traffic_and_nodes
    first, second = hops("two_level", traffic, nodes)
    assert all(nodes[a] == nodes[b] for a, b in first)
    for a, b in second:
        assert sum(y == b and nodes[x] == nodes[a] for x, y in second) == 1
        met = sum(x == a and nodes[y] == nodes[b] for x, y in second)
        assert met <= -(-nodes.count(nodes[b]) // nodes.count(nodes[a]))
    assert (
        route_bytes("two_level", traffic, nodes, 1).across == route_bytes("direct", traffic, nodes, 1).across
    )


@settings(deadline=None, max_examples=200)
@given(traffics, transports)
def test_the_way_back_moves_the_same_bytes_in_the_same_time(traffic_and_nodes, transport):
    traffic, nodes = traffic_and_nodes
    back = hops(TRANSPOSED[transport], transposed(traffic), nodes)
    assert back == [transposed(hop) for hop in reversed(hops(transport, traffic, nodes))]
    there, again = (transport, traffic, nodes, 5), (TRANSPOSED[transport], transposed(traffic), nodes, 5)
    assert route_bytes(*there) == route_bytes(*again)
    assert transport_ns(*there, LINKS) == transport_ns(*again, LINKS)


@settings(deadline=None, max_examples=100)
@given(traffics)
def test_buffers_reach_every_rank_in_logarithmic_steps(traffic_and_nodes):
    traffic, nodes = traffic_and_nodes
    n = len(nodes)
    blocks = {"all_gather": 0, "reduce_scatter": 1}
    for transport, end in blocks.items():
        block = max((sum(r for pair, r in traffic.items() if pair[end] == k) for k in range(n)), default=0)
        steps = hops(transport, traffic, nodes)
        assert len(steps) == ((n - 1).bit_length() if block else 0)
        moved = route_bytes(transport, traffic, nodes, 3)
        assert moved.total == 3 * block * n * (n - 1)
        assert moved.busiest == 3 * block * (n - 1)
    # Following the steps of an all-gather, every rank ends with the block of every rank.
    known = [{rank} for rank in range(n)]
    for step in hops("all_gather", {(k, k): 1 for k in range(n)}, nodes):
        before = [
            sorted(blocks, key=lambda owner, at=rank: (owner - at) % n) for rank, blocks in enumerate(known)
        ]
        for (a, b), rows in step.items():
            known[b] |= set(before[a][:rows])
    assert all(blocks == set(range(n)) for blocks in known)


def test_ranks_of_a_group_need_not_be_neighbours_in_the_world():
    assert node_map([0, 1, 8, 9, 16, 17], 8) == (0, 0, 1, 1, 2, 2)
    assert node_map([2, 3, 6, 7], 4) == (0, 0, 1, 1)


def test_a_stop_has_the_number_of_the_far_end_in_its_own_node():
    stop = relays("two_level", (0, 0, 0, 1, 1))
    assert [stop(0, d) for d in range(5)] == [0, 1, 2, 0, 1]
    assert [stop(4, d) for d in range(5)] == [3, 4, 3, 3, 4]
    back = relays("two_level_back", (0, 0, 0, 1, 1))
    assert [back(s, 4) for s in range(5)] == [3, 4, 3, 3, 4]
    with pytest.raises(AssertionError, match="direct has no stop"):
        relays("direct", (0, 0))


# What it costs.

LINKS = Links(Link(1_000, 400 * 10**9), Link(10_000, 50 * 10**9))
TWO_NODES_OF_EIGHT = node_map(range(16), 8)
ROW_BYTES = 16_384


def everyone_to(destinations, rows, num_ranks=16):
    return {(a, b): rows for a in range(num_ranks) for b in destinations}


def test_times_are_those_of_the_busiest_link_of_each_hop():
    traffic = {(0, 1): 1000, (2, 1): 500, (0, 0): 9000, (0, 8): 100}
    # Rank 1 receives both; the link between the nodes works at the same time.
    inside = (1_000 + 1000 * 8 // 400) + (1_000 + 500 * 8 // 400)
    across = 10_000 + 100 * 8 // 50
    assert transport_ns("direct", traffic, TWO_NODES_OF_EIGHT, 8, LINKS) == across
    assert transport_ns("two_level", traffic, TWO_NODES_OF_EIGHT, 8, LINKS) == inside + across
    slow_inside = replace(LINKS, inside=Link(7_000, 400 * 10**9))
    assert transport_ns("direct", traffic, TWO_NODES_OF_EIGHT, 8, slow_inside) == inside + 12_000


def test_each_transport_is_chosen_where_it_is_the_best():
    single = node_map(range(8), 8)
    assert choose_transport({(3, 3): 5}, single, ROW_BYTES, LINKS) == "local"
    assert choose_transport({}, single, ROW_BYTES, LINKS) == "local"
    assert choose_transport(everyone_to(range(8), 500, 8), single, ROW_BYTES, LINKS) == "direct"
    # Rows from everywhere to one node: few large messages between the nodes.
    many_nodes = node_map(range(64), 8)
    from_afar = everyone_to(range(8), 4, 64)
    assert choose_transport(from_afar, many_nodes, ROW_BYTES, LINKS) == "two_level"
    assert choose_transport(transposed(from_afar), many_nodes, ROW_BYTES, LINKS) == "two_level_back"
    # A few bytes from everyone to everyone: few steps.
    tiny = everyone_to(range(64), 1, 64)
    assert choose_transport(tiny, many_nodes, 8, LINKS) in ("reduce_scatter", "all_gather")
    spread = {(k, (k + shift) % 64): 1 for k in range(64) for shift in range(64)}
    assert choose_transport(spread, many_nodes, ROW_BYTES, LINKS) != "reduce_scatter"


@settings(deadline=None, max_examples=100)
@given(traffics)
def test_the_choice_is_the_fastest_and_the_simplest_among_equals(traffic_and_nodes):
    traffic, nodes = traffic_and_nodes
    chosen = choose_transport(traffic, nodes, ROW_BYTES, LINKS)
    times = {name: transport_ns(name, traffic, nodes, ROW_BYTES, LINKS) for name in MOVING}
    if all(a == b for a, b in traffic):
        assert chosen == "local"
        return
    assert times[chosen] == min(times.values())
    assert chosen == "direct" or times["direct"] > times[chosen]
    if len(set(nodes)) == 1:
        assert not chosen.startswith("two_level")


# All ranks in one process.


def over(route: Route, transport: str, nodes: tuple[int, ...]) -> Route:
    return route.over(transport, nodes)


@settings(deadline=None, max_examples=200)
@given(st.randoms(use_true_random=False), transports)
def test_the_ends_of_the_way_back_are_the_transposed_ends(random, transport):
    problem = random_problem(random)
    route = problem.route().over(transport, random_nodes(random, problem.num_ranks))
    back = route.transpose()
    assert back.transpose() == route
    assert (back.num_rows, back.moved_rows(), back.is_local) == (
        route.num_rows,
        route.moved_rows(),
        route.is_local,
    )
    for rank in range(route.num_ranks):
        # Gradients land nowhere: they go back to the encoder batches that put the rows out.
        expected = replace(make_ends(back, rank), landings=())
        assert_same(make_ends(route, rank).transpose(), expected)


def assert_same(here, there):
    assert type(here) is type(there)
    if not hasattr(here, "__dataclass_fields__"):
        assert torch.equal(here, there) if isinstance(here, torch.Tensor) else here == there
        return
    for name in here.__dataclass_fields__:
        assert_same(getattr(here, name), getattr(there, name))


@settings(deadline=None, max_examples=300)
@given(st.randoms(use_true_random=False), transports)
def test_every_transport_is_exact_and_its_transpose_the_adjoint(random, transport):
    problem = random_problem(random)
    route = problem.route().over(transport, random_nodes(random, problem.num_ranks))
    world = range(route.num_ranks)
    ends = [make_ends(route, rank) for rank in world]
    x = [torch.randn(problem.rows_out(rank), WIDTH, dtype=torch.float64) for rank in world]
    y = [torch.randn(problem.tokens(rank), WIDTH, dtype=torch.float64) for rank in world]
    arrived = carry(ends, [x[rank][ends[rank].send] for rank in world])
    back = [end.transpose() for end in ends]
    returned = carry(back, [y[rank][back[rank].send] for rank in world])
    ax = [torch.zeros_like(y[rank]).index_add_(0, ends[rank].receive, arrived[rank]) for rank in world]
    aty = [torch.zeros_like(x[rank]).index_add_(0, back[rank].receive, returned[rank]) for rank in world]
    for source, row, destination, token in problem.wanted_moves():
        assert torch.equal(ax[destination][token], x[source][row])
        assert torch.equal(aty[source][row], y[destination][token])
    forward = sum(float((a * b).sum()) for a, b in zip(ax, y, strict=True))
    backward = sum(float((a * b).sum()) for a, b in zip(x, aty, strict=True))
    assert forward == pytest.approx(backward, rel=1e-12, abs=1e-12)


@settings(deadline=None, max_examples=200)
@given(st.randoms(use_true_random=False), transports)
def test_what_is_sent_is_what_was_planned(random, transport):
    """The counts that the collectives are given add up to the bytes that planning counts."""
    problem = random_problem(random)
    nodes = random_nodes(random, problem.num_ranks)
    route = problem.route().over(transport, nodes)
    ends = [make_ends(route, rank) for rank in range(route.num_ranks)]
    planned = hops(transport, route.traffic(), nodes)
    if ends[0].slots is not None:
        n, block = len(ends), ends[0].slots.block
        assert route_bytes(transport, route.traffic(), nodes, 1).total == n * (n - 1) * block
        return
    counts = [[e.send_counts for e in ends]]
    expected = [[e.receive_counts for e in ends]]
    if ends[0].stop is not None:
        counts.append([e.stop.send_counts for e in ends])
        expected.insert(0, [e.stop.receive_counts for e in ends])
    for hop, sent, received in zip(planned, counts, expected, strict=True):
        assert sent == [tuple(column) for column in zip(*received, strict=True)]
        assert hop == {
            (a, b): rows for a, of in enumerate(sent) for b, rows in enumerate(of) if rows and a != b
        }


def test_routes_over_unknown_transports_or_nodes_are_refused():
    route = Route(2, (Segment(0, 0, 1, 0, 4),))
    with pytest.raises(AssertionError, match="unknown transport carrier_pigeon"):
        route.over("carrier_pigeon")
    with pytest.raises(AssertionError, match="not local"):
        route.over("local")
    with pytest.raises(AssertionError, match="1 nodes for 2 ranks"):
        route.over("two_level", (0,))
    assert route.over("two_level", (0, 1)).over("direct") == route
    assert Route(2, (Segment(1, 0, 1, 0, 4),)).over("local").transpose().transport == "local"


# On real ranks.

NODES = ((0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1))


def check_all_transports(rank, problems):
    """Every transport against the places counted one by one; returns ⟨A x, y⟩ and ⟨x, Aᵀ y⟩ of this rank."""
    lane, back_lane, products = Lane(CPU), Lane(CPU), []
    for number, problem in enumerate(problems):
        generator = torch.Generator().manual_seed(number)
        x, y = (
            [torch.randn(count(r), WIDTH, dtype=torch.float64, generator=generator) for r in range(4)]
            for count in (problem.rows_out, problem.tokens)
        )
        for rows in x:
            rows[:, 0] = -0.0  # a sum with +0.0 would lose the sign
        for transport in MOVING:
            route = problem.route().over(transport, NODES[number % len(NODES)])
            ends = make_ends(route, rank)
            embeddings = torch.full_like(y[rank], 7.0)
            sent = ship(ends, x[rank][ends.send], dist.group.WORLD, lane)
            wait(sent)
            embeddings[ends.receive] = sent.rows
            grads = torch.full_like(x[rank], 7.0)
            returned = ship(ends.transpose(), y[rank][ends.receive], dist.group.WORLD, back_lane)
            wait(returned)
            grads[ends.send] = returned.rows
            ax, aty = torch.full_like(y[rank], 7.0), torch.full_like(x[rank], 7.0)
            for source, row, destination, token in problem.wanted_moves():
                if destination == rank:
                    ax[token] = x[source][row]
                if source == rank:
                    aty[row] = y[destination][token]
            assert torch.equal(embeddings.view(torch.int64), ax.view(torch.int64)), f"{transport}: {problem}"
            assert torch.equal(grads, aty), f"{transport}: {problem}"
            products.append((inner(embeddings, y[rank], ends.receive), inner(x[rank], grads, ends.send)))
    return products


def wait(shipment):
    if shipment.work is not None:
        shipment.work.wait()


def inner(a, b, where):
    return float((a[where] * b[where]).sum())


def test_every_transport_is_exact_and_its_transpose_the_adjoint_on_real_ranks(ranks):
    problems = [random_problem(Random(seed), 4) for seed in range(24)]
    assert sum(not p.route().is_local for p in problems) >= 12
    for products in zip(*ranks.run(4, check_all_transports, problems), strict=True):
        forward, backward = (sum(side) for side in zip(*products, strict=True))
        assert forward == pytest.approx(backward, rel=1e-12, abs=1e-12)


def ship_while_others_wait(rank, problems):
    """Half of the ranks wait for every shipment at once, the others only after issuing all of them."""
    group, lane, answers = dist.group.WORLD, Lane(CPU), []
    flights = []
    for number, problem in enumerate(problems):
        transport = ("two_level", "direct", "reduce_scatter", "two_level_back")[number % 4]
        ends = make_ends(problem.route().over(transport, NODES[0]), rank)
        rows = torch.arange(problem.rows_out(rank), dtype=torch.float64) + 1000 * rank + 10000 * number
        sent = ship(ends, rows[ends.send].unsqueeze(1), group, lane)
        flights.append((problem, ends, sent))
        if rank % 2 == 0:
            wait(sent)
    for problem, ends, sent in flights:
        wait(sent)
        embeddings = torch.zeros(problem.tokens(rank), dtype=torch.float64)
        embeddings[ends.receive] = sent.rows.flatten()
        answers.append(embeddings.tolist())
    return answers


def test_shipments_of_two_hops_do_not_hang_ranks_that_wait_in_different_places(ranks):
    found = [random_problem(Random(seed), 4) for seed in range(40)]
    problems = [p for p in found if not p.route().is_local][:12]
    answers = ranks.run(4, ship_while_others_wait, problems)
    for number, problem in enumerate(problems):
        expected = [[0.0] * problem.tokens(rank) for rank in range(4)]
        for source, row, destination, token in problem.wanted_moves():
            expected[destination][token] = 1000.0 * source + row + 10000 * number
        assert [answers[rank][number] for rank in range(4)] == expected


def wait_for_a_late_rank(rank, problem):
    if rank == 3:
        time.sleep(1.5)
    ends = make_ends(problem.route().over("two_level", NODES[0]), rank)
    sent = ship(ends, torch.full((len(ends.send), 1), 1.0), dist.group.WORLD, Lane(CPU))
    if rank != 3:
        with pytest.raises(RuntimeError, match=r"not done after 0\.2 s"):
            sent.work.wait(timedelta(seconds=0.2))
    sent.work.wait(timedelta(seconds=30))
    return float(sent.rows.sum())


def test_a_wait_for_two_hops_has_a_timeout(ranks):
    problem = next(
        p for p in map(random_problem, map(Random, range(99)), [4] * 99) if p.route().moved_rows() > 9
    )
    assert sum(ranks.run(4, wait_for_a_late_rank, problem)) == problem.route().num_rows


def test_a_shipment_that_fails_says_so_where_it_is_waited_for():
    def fail():
        raise OSError("the cable is gone")

    lane = Lane(CPU)
    first = lane.run_long(fail)
    second = lane.run_long(lambda: None)  # never started: its group is out of step
    for work in (first, second):
        with pytest.raises(OSError, match="the cable is gone"):
            work.wait()


def test_two_hops_need_a_lane():
    ends = make_ends(Route(2, (Segment(0, 0, 1, 0, 4),)).over("two_level", (0, 1)), 1)
    with pytest.raises(AssertionError, match="two_level needs a lane"):
        ship(ends, torch.zeros(0, WIDTH), object())


@pytest.mark.gpu
def test_two_hops_are_queued_on_a_stream_of_the_gpu(tmp_path):
    """One NCCL rank that sends to itself: both hops run, in order, without the host waiting in between."""
    dist.init_process_group("nccl", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        device, count = torch.device("cuda", torch.cuda.current_device()), 100_000
        order = torch.randperm(count, device=device)
        stop = Stop((count,), order, order.argsort(), (count,))
        lane = Lane(device)
        for _ in range(3):
            rows, incoming = torch.randn(2, count, WIDTH, device=device)
            job = partial(two_hops, incoming, rows, (count,), (count,), stop, dist.group.WORLD)
            lane.run_long(job).wait()
            assert torch.equal(incoming, rows[order])
    finally:
        dist.destroy_process_group()

"""The control plane: its tree is small, its numbers exact, its waits end with names."""

import errno
import json
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from control_ranks import EXCHANGES, LOST, OTHER, SLOW, STEPS

from parallel.control import Control
from parallel.control_tree import Tree
from parallel.control_values import Op
from parallel.handshake import StrangerError
from parallel.stalls import StallError

ROOT = Path(__file__).parents[2]
SECRET = b"s" * 32


class Shelf:
    """A store among threads."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def add(self, key, amount):
        with self.changed:
            self.values[key] = self.values.get(key, 0) + amount
            return self.values[key]

    def set(self, key, value):
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.values, 20), key
            return self.values[key]


def meet(world: int, per_node: int, function: Callable, timeout_s: float = 20):
    """Call `function(control)` for every rank in a thread; errors are returned in place of results."""
    store, tree = Shelf(), Tree(world, per_node)

    def call(rank):
        control = Control(rank, tree, store, SECRET, timeout_s)
        try:
            return function(control)
        except StallError as error:
            return error
        finally:
            control.close()

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(call, range(world)))


# The tree.


@pytest.mark.parametrize(
    ("world", "per_node"), [(1, 8), (5, 8), (9, 8), (128, 8), (130, 4), (7, 1), (16_384, 8)]
)
def test_the_tree_spans_all_ranks_within_its_bounds(world, per_node):
    tree = Tree(world, per_node)
    above = [tree.parent(rank) for rank in range(world)]
    assert above[0] is None
    assert all(above[rank] is not None and above[rank] < rank for rank in range(1, world))
    below = sorted((child, rank) for rank in range(world) for child in tree.children(rank))
    assert below == [(rank, above[rank]) for rank in range(1, world)]
    levels = 2 * math.ceil(math.log2(tree.num_nodes))
    assert max(map(tree.connections, range(world))) <= min(per_node + levels, per_node + 4)
    assert tree.depth == 2 * max(map(tree.level, range(world))) <= levels + 2
    assert max(max(tree.messages(rank)) for rank in range(world)) <= per_node + 4


def test_16384_ranks_need_few_connections_messages_and_hops():
    tree = Tree(16_384, 8)
    assert max(map(tree.connections, range(tree.world))) == 10  # of 30 that are allowed
    assert tree.depth == 24 == 2 * 11 + 2
    assert sum(map(tree.connections, range(tree.world))) == 2 * (tree.world - 1)


@pytest.mark.parametrize(("world", "per_node"), [(0, 8), (8, 0)])
def test_a_tree_of_nothing_is_refused(world, per_node):
    with pytest.raises(ValueError, match="no tree has"):
        Tree(world, per_node)


# Numbers.


def sums(control):
    big = 2**62 - 1
    for step in range(3):
        control.offer(
            "a",
            step,
            {
                "sums": (Op.SUM, [control.rank, step]),
                "most": (Op.MAX, [-control.rank, big + control.rank]),
                "rare": (Op.UNION, [1000 - control.rank, 7]),
                "none": (Op.UNION, []),
            },
        )
    return [control.settle("a", step) for step in (1, 0, 2)]


@pytest.mark.parametrize(("world", "per_node"), [(1, 4), (2, 2), (6, 2), (11, 3)])
def test_all_ranks_learn_the_same_exact_numbers_in_any_order(world, per_node):
    every = meet(world, per_node, sums)
    for found in every:
        assert [of["sums"] for of in found] == [
            (world * (world - 1) // 2, step * world) for step in (1, 0, 2)
        ]
        assert found[0]["most"] == (0, 2**62 - 1 + world - 1)
        assert found[0]["rare"] == (7, *sorted(1000 - rank for rank in range(world)))
        assert found[0]["none"] == ()


def test_a_union_keeps_all():
    def function(control):
        control.offer("a", 0, {"rare": (Op.UNION, range(50 * control.rank, 50 * control.rank + 60))})
        return control.settle("a", 0)["rare"]

    assert meet(3, 1, function) == [tuple(range(160))] * 3


def test_what_is_collected_reaches_the_first_rank_alone():
    """With names and texts that JSON must quote, and nothing of some ranks."""

    def function(control):
        texts = {f'"{control.rank}"': "}, {"} if control.rank % 2 else {}
        own = [control.rank, '{"a": "\\}"}', None]
        return control.collect("index", own), control.share("texts", texts), control.barrier("end")

    for rank, (found, shared, _) in enumerate(meet(6, 2, function)):
        assert found == (None if rank else [[of, '{"a": "\\}"}', None] for of in range(6)])
        assert shared == {f'"{odd}"': "}, {" for odd in (1, 3, 5)}


def test_an_answer_that_is_not_there_in_a_time_is_named_and_may_be_waited_for_again():
    late = threading.Event()

    def function(control):
        if control.rank == 3:
            late.wait(20)
        control.offer("plans", 2, {"a": (Op.SUM, [1])})
        if control.rank == 0:
            with pytest.raises(StallError, match=r"rank 0 waited at step 2: plans .* no answer in 0.1 s"):
                control.settle("plans", 2, 0.1)
            late.set()
        return control.settle("plans", 2)["a"]

    assert meet(4, 2, function) == [(4,)] * 4


def test_texts_travel_on_two_tags_from_two_threads_at_once():
    def function(control):
        def often(tag):
            return [control.gather(tag, [tag, n, control.rank]) for n in range(5)]

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(often, ["one", "two"]))
        return found, control.broadcast("end", {"from": control.rank}, source=3)

    for found, told in meet(5, 2, function):
        assert found == [[[[tag, n, rank] for rank in range(5)] for n in range(5)] for tag in ("one", "two")]
        assert told == {"from": 3}


# What goes wrong.


def test_ranks_that_offer_other_numbers_are_told_at_once():
    def function(control):
        control.offer("a", 4, {"b" if control.rank == 2 else "c": (Op.SUM, [1])})
        control.settle("a", 4)

    for error in meet(4, 2, function):
        assert "step 4: a: ranks [2, 3] offered other numbers than" in str(error)


def test_a_rank_that_sends_nothing_is_named_on_all_others():
    over = threading.Barrier(7)

    def function(control):
        try:
            if control.rank != 5:
                control.offer("plans", 9, {"a": (Op.SUM, [1])})
                control.settle("plans", 9)
        finally:
            over.wait(30)

    found = meet(7, 2, function, timeout_s=2)
    assert found[5] is None
    assert {str(error) for error in found[:5] + found[6:]} == {
        "all ranks waited at step 9: plans for rank 5: nothing was sent in 2 s"
    }


@pytest.mark.parametrize("slow", [0, 5])
def test_a_rank_that_is_coming_is_waited_for_beyond_the_time(slow):
    def function(control):
        if control.rank == slow:
            for _ in range(30):
                control.coming("saving")
                time.sleep(0.1)
        return control.gather("saving", control.rank), control.came_at

    found = meet(7, 2, function, timeout_s=1)
    assert not any(isinstance(of, StallError) for of in found), found
    assert [ranks for ranks, _ in found] == [list(range(7))] * 7
    assert max(time.monotonic() - came_at for _, came_at in found) < 2, "all ranks have heard of it"


def test_of_a_rank_that_is_coming_and_one_that_hangs_the_latter_is_named():
    """Also where both were late before, and were said to be."""
    over = threading.Barrier(9)

    def function(control):
        try:
            if control.rank == 4:
                time.sleep(1.4)
                for _ in range(5):
                    control.coming("saving")
                    time.sleep(0.1)
            if control.rank != 5:
                control.barrier("saving")
        finally:
            over.wait(30)

    found = meet(9, 3, function, timeout_s=2)
    assert {str(error) for error in found[:5] + found[6:]} == {
        "all ranks waited at saving for rank 5: nothing was sent in 2 s"
    }


def test_a_rank_that_is_no_longer_coming_is_named():
    over = threading.Barrier(7)

    def function(control):
        try:
            if control.rank == 5:
                for _ in range(15):
                    control.coming("saving")
                    time.sleep(0.1)
            else:
                control.barrier("saving")
        finally:
            over.wait(30)

    found = meet(7, 2, function, timeout_s=1)
    assert {str(error) for error in found[:5] + found[6:]} == {
        "all ranks waited at saving for rank 5: nothing was sent in 1 s"
    }


def test_a_rank_that_leaves_is_named_at_once():
    def function(control):
        if control.rank == 3:
            return
        control.offer("plans", 9, {"a": (Op.SUM, [1])})
        control.settle("plans", 9)

    found = meet(6, 2, function, timeout_s=300)
    assert all("for rank 3: it left the run" in str(error) for error in found[:3] + found[4:]), found


def test_a_connection_that_breaks_ends_all_waits_at_once():
    def function(control):
        if control.rank == 4:
            control.peers[2].connection.shutdown(socket.SHUT_RDWR) if 2 in control.peers else None
            control.peers[0].connection.shutdown(socket.SHUT_RDWR) if 0 in control.peers else None
        control.offer("plans", 9, {"a": (Op.SUM, [1])})
        control.settle("plans", 9)

    found = meet(6, 2, function, timeout_s=300)
    assert all("lost rank" in str(error) or "waited at" in str(error) for error in found), found
    assert any("rank 0 lost rank 4" in str(error) for error in found)


def test_a_rank_with_another_secret_is_not_let_in():
    store, tree = Shelf(), Tree(2, 2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(Control, 0, tree, store, SECRET, 2)
        other = pool.submit(Control, 1, tree, store, b"t" * 32, 2)
        with pytest.raises(StallError, match="rank 0 waited at start-up for rank 1 to connect"):
            first.result()
        with pytest.raises(StrangerError):
            other.result()


def test_a_rank_goes_on_after_it_could_take_no_connection(monkeypatch):
    accept, failing = socket.socket.accept, iter([OSError(errno.EMFILE, "Too many open files")])

    def sometimes(listener):
        for error in failing:
            raise error
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", sometimes)
    assert meet(3, 4, lambda control: control.gather("all", control.rank), timeout_s=5) == [[0, 1, 2]] * 3


def test_a_world_of_one_opens_nothing():
    control = Control(0, Tree(1, 8), Shelf(), SECRET, 5)
    threads = threading.active_count()
    control.offer("a", 0, {"b": (Op.SUM, [3])})
    assert control.settle("a", 0) == {"b": (3,)}
    assert control.gather("t", "x") == ["x"]
    assert not control.peers
    assert threading.active_count() == threads
    control.close()


# Light processes.


def light(world, per_node, seconds):
    done = subprocess.run(
        [
            sys.executable,
            str(Path(__file__).with_name("control_ranks.py")),
            *map(str, (world, per_node, seconds)),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.slow
def test_128_light_processes_name_a_plan_a_slow_rank_and_a_bad_sample():
    tree = Tree(128, 8)
    for rank, of in enumerate(light(128, 8, 60)):
        found, opened, sent, received, others, told, uss, heavy = of
        assert opened == tree.connections(rank) <= 8 + 2 * 4
        assert sent == received == EXCHANGES * tree.connections(rank) <= EXCHANGES * (8 + 4)
        for step, numbers in enumerate(found):
            agreed = numbers["plan"][0] == -numbers["plan"][1]
            assert agreed == (step != STEPS - 1)
            assert numbers["slowest"] == [3_200 << 32 | SLOW]
            assert numbers["idle"] == [128 * 127 // 2, 128]
            assert numbers["bad_samples"] == ([LOST] if step == 2 else [])
        assert others == [OTHER]
        assert told == "from 127"
        assert uss < 40e6
        assert heavy == []

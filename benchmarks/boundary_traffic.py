"""What the boundary moves, against the least that can be moved and against bridges with a leader.

    python benchmarks/boundary_traffic.py [--repetitions 60] [--rows 1024] [--width 1024]

The table counts bytes for encoders and LLMs of several layouts, with images of very different sizes: the
lower bound (each row whose source is not its destination, once), the direct transport, and a bridge with a
leader for each replica of the LLM, which gathers the replica's rows and broadcasts them to every rank of it
that holds tokens of them. It names the transport that the cost model chooses for links of 400 GB/s inside a
node and 50 GB/s across nodes, and what that moves.

The second part measures the two on 2 gloo ranks of this machine, alternating in one run: rank 0 and rank 1
encode half of the rows each, and hold half of the places each, in an order that leaves half of the rows where
they are. It gives medians and quartiles of the slower rank's time. Loopback stands for no network: bytes are
exact, times are an example.
"""

import argparse
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist

from parallel.boundary import Route, Rows, make_route
from parallel.cluster import Link, Links
from parallel.sequence import SequenceLayout, Shard
from parallel.shipping import make_ends, ship
from parallel.transports import choose_transport, node_map, route_bytes

ROW_BYTES = 8192 * 2  # a row of an LLM of hidden 8192 in bf16
RANKS_PER_NODE = 8
LINKS = Links(inside=Link(5_000, 400 * 10**9), across=Link(15_000, 50 * 10**9))


@dataclass(frozen=True)
class Case:
    """An LLM of tp·cp·dp·pp ranks, and what encodes: all ranks, its first stage, or ranks `beside` it."""

    name: str
    tp: int
    cp: int
    dp: int
    pp: int
    encoders: str = "all"
    beside: int = 0

    @property
    def num_ranks(self) -> int:
        """Ranks of the domain: the LLM's, stage by stage, then those beside it."""
        return self.tp * self.cp * self.dp * self.pp + self.beside

    def sources(self) -> range:
        """Ranks that encode: all, those of the first stage, or those beside the LLM."""
        if self.encoders == "beside":
            return range(self.num_ranks - self.beside, self.num_ranks)
        return range(self.tp * self.cp * self.dp if self.encoders == "stage0" else self.num_ranks)


CASES = (
    Case("colocated, tp8 cp2 pp4", 8, 2, 1, 4),
    Case("colocated, tp4 dp2 pp4", 4, 1, 2, 4),
    Case("stage 0, tp8 cp2 pp4", 8, 2, 1, 4, "stage0"),
    Case("24 ranks beside tp8 cp3 pp2", 8, 3, 1, 2, "beside", 24),
    Case("3 ranks beside tp2 dp2", 2, 1, 2, 1, "beside", 3),
    Case("one node, cp5", 1, 5, 1, 1),
    Case("thumbnails, tp8 cp2 pp32", 8, 2, 1, 32),
)


def make_case(case: Case, seed: int) -> Route:
    """One microbatch: images on ranks by turns, each beside a little text; sequences cut into shards."""
    rng = random.Random(seed)
    small = case.name.startswith("thumbnails")
    runs, shards, at = [], [], 0
    filled: dict[int, int] = defaultdict(int)
    sources = list(case.sources()) * 2
    rng.shuffle(sources)
    for start in range(0, len(sources), 4):
        length = 0
        for source in sources[start : start + 4]:
            rows = 2 if small else max(16, min(4096, int(rng.lognormvariate(5.5, 1.2))))
            runs.append(Rows(source, filled[source], at + length + 32, rows))
            filled[source] += rows
            length += 32 + rows
        replica = rng.randrange(case.dp)
        edges = [length * i // case.cp for i in range(case.cp + 1)]
        shards.append(
            tuple(Shard(replica * case.cp + i, a, b - a) for i, (a, b) in enumerate(pairwise(edges)))
        )
        at += length
    layout = SequenceLayout(case.cp * case.dp, tuple(shards))
    return make_route(runs, layout.intervals(case.tp), case.num_ranks)


def lower_bound(route: Route) -> int:
    """Rows that have to be sent, counted one segment at a time without any transport."""
    return sum(s.length for s in route.segments if s.source != s.destination)


def gather_then_broadcast(route: Route, replica_size: int) -> int:
    """Rows that bridges send: those of a replica to its leader, and from it to all who hold any of them."""
    moved = 0
    replicas = {s.destination // replica_size for s in route.segments}
    for replica in replicas:
        mine = [s for s in route.segments if s.destination // replica_size == replica]
        receivers = {s.destination for s in mine}
        leader = min(receivers)
        moved += sum(s.length for s in mine if s.source != leader)
        moved += (len(receivers) - 1) * sum(s.length for s in mine)
    return moved


def print_bytes(seed: int) -> None:
    title = f"{'layout':34}{'ranks':>6}{'rows':>8}{'bound':>9}{'direct':>9}{'leader':>10}{'ratio':>7}  chosen"
    print(f"MB by transport, rows of {ROW_BYTES} bytes\n{title}")
    for case in CASES:
        route = make_case(case, seed)
        traffic, nodes = route.traffic(), node_map(range(case.num_ranks), RANKS_PER_NODE)
        bound = lower_bound(route) * ROW_BYTES
        direct = route_bytes("direct", traffic, nodes, ROW_BYTES).total
        leader = gather_then_broadcast(route, case.tp * case.cp) * ROW_BYTES
        assert direct == bound, f"{case.name}: direct sends {direct} bytes, {bound} are enough"
        chosen = choose_transport(traffic, nodes, ROW_BYTES, LINKS)
        moved = route_bytes(chosen, traffic, nodes, ROW_BYTES)
        print(
            f"{case.name:34}{case.num_ranks:6}{route.num_rows:8}{bound / 1e6:9.1f}{direct / 1e6:9.1f}"
            f"{leader / 1e6:10.1f}{leader / direct:7.1f}  {chosen}"
            f" ({moved.inside / 1e6:.1f} inside nodes, {moved.across / 1e6:.1f} across)"
        )


# Times, on two ranks.


def two_ranks(rows: int) -> Route:
    """Runs of 16 rows by turns on both ranks; the places are divided in two halves, one for each."""
    filled = [0, 0]
    runs = []
    for start in range(0, rows, 16):
        source = start // 16 % 2
        runs.append(Rows(source, filled[source], start, min(16, rows - start)))
        filled[source] += runs[-1].length
    layout = SequenceLayout.whole([rows // 2, rows - rows // 2], [0, 1], 2)
    return make_route(runs, layout.intervals(), 2)


def bridge(route: Route, rank: int, mine: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Gather on rank 0, broadcast, and pick this rank's rows: gradients would go the same way back."""
    counts = [sum(s.length for s in route.segments if s.source == r) for r in range(2)]
    starts = [0, counts[0]]
    places = sorted((s for s in route.segments if s.destination == rank), key=lambda s: s.destination_start)
    picked = torch.cat([torch.arange(s.length) + starts[s.source] + s.source_start for s in places])
    gathered = mine.new_empty(sum(counts), mine.shape[1])

    def run() -> torch.Tensor:
        incoming = gathered if rank == 0 else gathered[:0]
        to_leader = [len(mine), 0]
        from_all = counts if rank == 0 else [0, 0]
        dist.all_to_all_single(incoming, mine, from_all, to_leader)
        dist.broadcast(gathered, 0)
        return gathered[picked]

    return run


def direct(route: Route, rank: int, mine: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Each row straight to its place."""
    ends = make_ends(route, rank)
    tokens = mine.new_empty(len(ends.receive), mine.shape[1])

    def run() -> torch.Tensor:
        shipment = ship(ends, mine.index_select(0, ends.send), dist.group.WORLD)
        assert shipment.work is not None
        shipment.work.wait()
        return tokens.index_copy_(0, ends.receive, shipment.rows)

    return run


def measure(
    rank: int, store: str, rows: int, width: int, repetitions: int, results: "multiprocessing.Queue[object]"
) -> None:
    """Alternate the two ways; every time begins at a barrier and is the slower rank's."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    route = two_ranks(rows)
    number = sum(s.length for s in route.segments if s.source == rank)
    mine = torch.randn(number, width, generator=torch.Generator().manual_seed(rank))
    ways = {"direct": direct(route, rank, mine), "leader": bridge(route, rank, mine)}
    assert torch.equal(ways["direct"](), ways["leader"]()), "the two ways bring different rows"
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(repetitions + 5):
        for name in sorted(ways, reverse=repetition % 2 == 0):
            dist.barrier()
            start = time.perf_counter()
            ways[name]()
            taken = torch.tensor(time.perf_counter() - start)
            dist.all_reduce(taken, dist.ReduceOp.MAX)
            if repetition >= 5:
                times[name].append(float(taken))
    dist.destroy_process_group()
    if rank == 0:
        results.put(times)


def quartiles(values: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def print_times(rows: int, width: int, repetitions: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=measure, args=(rank, store, rows, width, repetitions, results))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        times = results.get(timeout=300)
        for process in ranks:
            process.join()
    route = two_ranks(rows)
    sent = {"direct": lower_bound(route), "leader": gather_then_broadcast(route, 2)}
    print(f"\n2 gloo ranks, {rows} rows of {width} fp32, {repetitions} repetitions each, alternating")
    for name, values in times.items():
        print(f"{name:8}{sent[name] * width * 4 / 1e6:7.2f} MB  {quartiles([t * 1e3 for t in values])} ms")
    ratios = [b / a for a, b in zip(times["direct"], times["leader"], strict=True)]
    print(f"leader over direct: bytes {sent['leader'] / sent['direct']:.2f}, time {quartiles(ratios)}")


def main() -> None:
    """Count, measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=60)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print_bytes(arguments.seed)
    print_times(arguments.rows, arguments.width, arguments.repetitions)


if __name__ == "__main__":
    main()

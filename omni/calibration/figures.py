"""From what was measured on a machine to a file of the group `cluster`. Pure: no tensors, no clock.

Every figure is the slowest rank's, since ranks wait for each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low

from parallel.cluster import Link

_UNSURE = " (unsure: bytes not told from latency; measure again with nothing beside it)"


@dataclass(frozen=True)
class Measured:
    """What one rank measured.

    FLOP/s of matrix products by their size, of attention by tokens, in a forward and a backward, and of a
    layer's products; bytes that memory reads and writes in a second; nanoseconds of starting a pass, of
    starting the kernels of each of its layers and of sorting tokens by experts, and those that issuing a
    message, or taking one in, keeps a rank from computing. `inside` and `across`
    are, by kind of collective, pairs of the bytes that a rank sends and the nanoseconds that this takes,
    inside its node and between nodes; empty where there is nobody to talk to.
    """

    products: Mapping[int, int]
    attention: Mapping[int, tuple[int, int]]
    layer: int
    memory_bytes_per_s: int
    memory_bytes: int | None
    op_overhead_ns: int
    launch_ns: int
    dispatch_ns: int
    issue_ns: int
    inside: Mapping[str, Sequence[tuple[int, int]]]
    across: Mapping[str, Sequence[tuple[int, int]]]


def link_of(times: Sequence[tuple[int, int]]) -> Link:
    """Return the link that takes so long for so many bytes: its latency is the shortest time, its bandwidth
    that at which the most bytes take what they take beyond it.

    That is taken as half of their time or more: where a busy machine hides what bytes cost, the bandwidth is
    unsure (`told_apart`) and at most twice the rate that was seen.
    """
    most, longest, latency = _ends(times)
    return Link(latency, max(1, most * 10**9 // max(1, longest - latency, longest // 2)))


def told_apart(times: Sequence[tuple[int, int]]) -> bool:
    """Whether the most bytes took twice the latency or more, so that their own cost is what was measured."""
    _, longest, latency = _ends(times)
    return longest >= 2 * latency


def _ends(times: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """The most bytes, the nanoseconds that they take, and the least that any number takes."""
    most, longest = max(times)
    return most, longest, max(1, min(taken for _, taken in times))


def links_of(ranks: Sequence[Mapping[str, Sequence[tuple[int, int]]]]) -> dict[str, Link]:
    """Return the link of each kind of collective: that of the rank that it takes longest."""
    kinds = dict.fromkeys(kind for of in ranks for kind in of)
    return {
        kind: max((link_of(of[kind]) for of in ranks if kind in of), key=lambda link: link.message_ns(2**20))
        for kind in kinds
    }


def typical(links: Mapping[str, Link]) -> Link | None:
    """Return one link for all kinds of collectives: the median of each figure."""
    if not links:
        return None
    of = links.values()
    return Link(median_low([one.latency_ns for one in of]), median_low([one.bytes_per_s for one in of]))


def cluster_file(
    name: str, device: str, precision: str, ranks: Sequence[Measured], ranks_per_node: int, what: str
) -> str:
    """Return the text of a cluster file: figures of `ranks` on a device, "cpu" or "cuda", in a precision,
    "fp32" or "bf16", the first line saying `what` was measured.

    Links that nobody could measure are noted, and stand for the next slower thing that was: one between nodes
    for one inside, one inside for a rank's own memory.
    """
    flops = min(max(one.products.values()) for one in ranks)
    memory = min(one.memory_bytes_per_s for one in ranks)
    overhead = max(one.op_overhead_ns for one in ranks)
    by_kind = {"inside a node": [one.inside for one in ranks], "between nodes": [one.across for one in ranks]}
    near, far = (typical(links_of(times)) for times in by_kind.values())
    inside = near or Link(overhead, memory)
    across = far or inside
    sizes = [one.memory_bytes for one in ranks if one.memory_bytes is not None]
    lines = [f"# {what} Figures of the slowest rank; written by omni calibrate."]
    lines += [f"# products of {n} x {n}: {_least(ranks, n) / 1e9:.1f} GFLOP/s" for n in ranks[0].products]
    for tokens in ranks[0].attention:
        there, back = (min(one.attention[tokens][way] for one in ranks) for way in (0, 1))
        lines.append(f"# attention of {tokens} tokens: {there / 1e9:.1f} GFLOP/s, back {back / 1e9:.1f}")
    for where, times in by_kind.items():
        lines += _links_said(where, times)
        if not any(times):
            stands = "that inside one" if near else "a rank's own memory"
            lines.append(f"# links {where}: not measured, nobody to talk to; {stands} stands for them")
    longest = max(ranks[0].attention)
    there, back = (min(one.attention[longest][way] for one in ranks) for way in (0, 1))
    values = {
        "name": name,
        "device": device,
        "flops": f"{{{precision}: {flops}}}",
        "efficiency": f"{{products: {{{precision}: {_share(min(one.layer for one in ranks), flops)}}}, "
        f"attention: {_share(there, flops)}, attention_backward: {_share(back, flops)}}}",
        "memory_bytes_per_s": memory,
        "link_bytes_per_s": across.bytes_per_s,
        "link_latency_ns": across.latency_ns,
        "ranks_per_node": ranks_per_node,
        "node_link_bytes_per_s": inside.bytes_per_s,
        "node_link_latency_ns": inside.latency_ns,
        "op_overhead_ns": overhead,
        "launch_ns": max(one.launch_ns for one in ranks),
        "dispatch_ns": max(one.dispatch_ns for one in ranks),
        "issue_ns": max(one.issue_ns for one in ranks),
        "queues": "per_communicator" if device == "cpu" else "one",
        "memory_bytes": min(sizes) if sizes else "null",
    }
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in values.items()), ""])


def _links_said(where: str, ranks: Sequence[Mapping[str, Sequence[tuple[int, int]]]]) -> list[str]:
    """Return a comment for each kind of collective, saying so where its bandwidth is unsure."""
    said = []
    for kind, link in links_of(ranks).items():
        unsure = "" if all(told_apart(of[kind]) for of in ranks if kind in of) else _UNSURE
        gigabytes = link.bytes_per_s / 1e9
        said.append(f"# {kind} {where}: {gigabytes:.2f} GB/s, latency {link.latency_ns / 1e3:.0f} us{unsure}")
    return said


def _share(rate: int, peak: int) -> str:
    return f"{min(1.0, rate / peak):.3f}"


def _least(ranks: Sequence[Measured], size: int) -> int:
    return min(one.products[size] for one in ranks)

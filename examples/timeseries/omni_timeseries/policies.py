"""Policies in a package of its own, one of each kind: simple ones, to begin your own from.

Everything here comes from `omni.policies`; docs/policies.md says what each kind is given and must promise.
"""

from collections.abc import Mapping, Sequence
from itertools import zip_longest

import numpy as np

from omni.policies import (
    BalancePolicy,
    Bins,
    DealPolicy,
    DomainPlan,
    DomainSizes,
    Facts,
    Kind,
    Links,
    Op,
    PackingPolicy,
    PairingPolicy,
    PlacementPolicy,
    Pool,
    SampleCosts,
    SchedulePolicy,
    SequenceLayout,
    Shard,
    SharingPolicy,
    TransportPolicy,
)


def deal_in_turn(work: np.ndarray, sizes: Sequence[int]) -> list[int]:
    """Deal samples to groups in turn, whatever they are: to each as many in a row as it has domains."""
    turns = [group for group, size in enumerate(sizes) for _ in range(size)]
    return [turns[sample % len(turns)] for sample in range(len(work))]


def deal_back_and_forth(samples: SampleCosts, bins: Bins) -> list[int]:
    """Deal samples like cards, the costliest first: to bins 0 … n-1, then n-1 … 0, and so on.

    Every bin gets as many samples as any other, up to one. Ties go to the smaller sample.
    """
    costs = samples.total_ns
    there_and_back = [*range(bins.count), *reversed(range(bins.count))]
    chosen = [0] * len(samples)
    for turn, sample in enumerate(sorted(range(len(samples)), key=lambda i: (-costs[i], i))):
        chosen[sample] = there_and_back[turn % len(there_and_back)]
    return chosen


def pack_in_order(samples: SampleCosts, budget: int) -> list[list[int]]:
    """Next fit: fill a pack in the order of the stream, and open the next where a sample has no room. A
    sample beyond the budget has a pack of its own.
    """
    packs: list[list[int]] = []
    room = 0
    for sample, length in enumerate(samples.tokens.tolist()):
        if length > room:
            packs.append([])
            room = budget
        packs[-1].append(sample)
        room -= length
    return packs


def pair_by_cost(packs: Sequence[SampleCosts], room: int, stages: int) -> list[tuple[int | None, ...]]:
    """The costliest packs of all replicas pass together, then the next ones: nobody waits for a short one.
    Where they find no room together, each passes alone.
    """
    together: list[tuple[int | None, ...]] = []
    ordered = [sorted(range(len(own)), key=lambda pack: -own.total_ns[pack]) for own in packs]
    for chosen in zip_longest(*ordered):
        each = [(replica, pack) for replica, pack in enumerate(chosen) if pack is not None]
        if sum(packs[replica].tokens[pack] for replica, pack in each) <= room:
            together.append(chosen)
        else:
            others = range(len(chosen))
            together += [tuple(pack if r == replica else None for r in others) for replica, pack in each]
    return together


def on_last_stage(sizes: DomainSizes) -> tuple[int, int]:
    """Encoders live with the last stage of the pipeline, which waits longest for its first microbatch."""
    return sizes.llm_size - sizes.stage_size, sizes.llm_size


def share_by_two(lengths: Sequence[int], pool: Pool) -> SequenceLayout:
    """Each sequence in two halves on neighbouring ranks, pair after pair, whether it pays or not."""
    shards = []
    for number, length in enumerate(lengths):
        first = 2 * number % (pool.num_cp_ranks - pool.num_cp_ranks % 2) if pool.num_cp_ranks > 1 else 0
        units = -(-length // pool.unit)
        half = min(length, -(-units // 2) * pool.unit)
        if pool.num_cp_ranks == 1 or half == length:
            shards.append((Shard(first, 0, length),))
        else:
            shards.append((Shard(first, 0, half), Shard(first + 1, half, length - half)))
    return SequenceLayout(pool.num_cp_ranks, tuple(shards))


def cross_nodes_once(
    traffic: Mapping[tuple[int, int], int], nodes: Sequence[int], row_bytes: int, links: Links
) -> str:
    """Two levels as soon as a row crosses nodes, else the direct way, whatever they cost."""
    crosses = any(nodes[source] != nodes[destination] for source, destination in traffic)
    return "two_level" if crosses else "direct"


def all_forward_then_all_backward(domain: DomainPlan, facts: Facts) -> list[list[Op]]:
    """GPipe (Huang et al., 2019, section 2.3): all forward passes, then all backward passes, with the
    encoders before and after. A virtual stage of the LLM holds the activations of every microbatch.
    """
    order = []
    for team, held in enumerate(domain.holds):
        first = team * domain.team
        encoder_batches = [
            number for number, batch in enumerate(domain.encoder_batches) if first in batch.ranks
        ]
        passes = [(m, number) for m in range(len(domain.microbatches)) for number in held]
        order.append(
            [Op(Kind.ENCODE, batch) for batch in encoder_batches]
            + [Op(Kind.FORWARD, m, virtual_stage=number) for m, number in passes]
            + [Op(Kind.BACKWARD, m, virtual_stage=number) for m, number in passes]
            + [Op(Kind.ENCODE_BACKWARD, batch) for batch in encoder_batches]
        )
    return order


def every_microbatch(domain: DomainPlan, virtual_stage: int) -> int:
    """All microbatches of a step."""
    return len(domain.microbatches)


IN_TURN = DealPolicy("in_turn", deal_in_turn)
SNAKE = BalancePolicy("snake", deal_back_and_forth)
NEXT_FIT = PackingPolicy("next_fit", pack_in_order)
BY_COST = PairingPolicy("by_cost", pair_by_cost)
LAST_STAGE = PlacementPolicy("last_stage", on_last_stage)
BY_TWO = SharingPolicy("by_two", share_by_two, forced=True)
ONCE_ACROSS = TransportPolicy("once_across", cross_nodes_once)
FILL_AND_DRAIN = SchedulePolicy("fill_and_drain", all_forward_then_all_backward, in_flight=every_microbatch)

"""Sequences → the ranks that hold their tokens: how a plan shares microbatches and items among ranks.

Where a component has a policy of sequence sharding, it decides for all its sequences at once; where it has
none, sequences of the LLM are cut evenly over the cp ranks of their replica, and items stay whole, spread
over the slots by cost. Pure, like all planning.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from parallel.layout import split_evenly
from parallel.schemes import SequenceCost, choose_tiles
from parallel.sequence import SequenceLayout, Shard
from parallel.tiles import Tile
from pipeline.plan import Chunk, Microbatch, PlannedItem
from pipeline.policies import Slot, spread
from pipeline.routes import row_counts


@dataclass(frozen=True)
class Sharing:
    """How the `num_ranks` members of a component's pool may share sequences: by which policy, from lengths to
    a layout (None where the component's layout says it all), and at which cost attention is divided. Items
    have rows for each of `num_points` attach points.
    """

    num_ranks: int
    cost: SequenceCost
    policy: Callable[[Sequence[int]], SequenceLayout] | None = None
    num_points: int = 1

    def tiles(self, layout: SequenceLayout) -> tuple[tuple[Tile, ...], ...]:
        """Divide the attention of each sequence that several ranks share."""
        return tuple(choose_tiles(shards, self.cost) if len(shards) > 1 else () for shards in layout.shards)


def lay_out(packs: Sequence[Sequence[int]], lengths: Sequence[int], sharing: Sharing, cp: int) -> Microbatch:
    """Lay the packs of all replicas of a domain, samples by number, over its pool."""
    samples = tuple(sample for pack in packs for sample in pack)
    if sharing.policy is not None:
        layout = sharing.policy([lengths[i] for i in samples])
    else:
        shards = [_cut(lengths[i], cp, replica * cp) for replica, pack in enumerate(packs) for i in pack]
        layout = SequenceLayout(sharing.num_ranks, tuple(shards))
    return Microbatch(samples, layout, sharing.tiles(layout))


def _cut(length: int, parts: int, first: int) -> tuple[Shard, ...]:
    """Cut a sequence evenly over `parts` ranks from `first` on."""
    sizes = split_evenly(length, parts)
    starts = [0, *accumulate(sizes)]
    return tuple(Shard(first + i, starts[i], size) for i, size in enumerate(sizes) if size)


def make_chunks(
    items: Sequence[PlannedItem],
    slots: Mapping[str, Sequence[Slot]],
    sharing: Mapping[str, Sharing],
    cost_ns: Callable[[str, int], int],
) -> tuple[Chunk, ...]:
    """Share the items of a domain among the slots of their components, or place them whole.

    Items of one microbatch on one slot are a chunk; if any item of a microbatch is shared, all its items of
    that component are one chunk of all slots. `cost_ns` gives the cost of an item by component and tokens.
    """
    shared = [name for name in sorted(slots) if sharing[name].policy is not None]
    chunks = [chunk for name in shared for chunk in _by_policy(name, items, slots[name], sharing[name])]
    whole = [number for number, item in enumerate(items) if item.component not in shared]
    costs = [cost_ns(items[i].component, items[i].tokens) for i in whole]
    places = spread(costs, [slots[items[i].component] for i in whole])
    members: dict[tuple[int, str, Slot], list[int]] = defaultdict(list)
    for number, slot in zip(whole, places, strict=True):
        members[items[number].microbatch, items[number].component, slot].append(number)
    chunks += [
        _whole_chunk(items, numbers, slot, sharing[name]) for (_, name, slot), numbers in members.items()
    ]
    return tuple(sorted(chunks, key=lambda chunk: (chunk.microbatch, chunk.component, chunk.ranks)))


def _by_policy(
    component: str, items: Sequence[PlannedItem], slots: Sequence[Slot], sharing: Sharing
) -> Iterator[Chunk]:
    """Share all items of a step among the slots, then take them microbatch by microbatch."""
    assert sharing.policy is not None
    mine = [number for number, item in enumerate(items) if item.component == component]
    layout = sharing.policy([items[i].tokens for i in mine])
    shards = dict(zip(mine, layout.shards, strict=True))
    everyone = tuple(rank for slot in slots for rank in slot)
    for microbatch in sorted({items[i].microbatch for i in mine}):
        numbers = [i for i in mine if items[i].microbatch == microbatch]
        if any(len(shards[i]) > 1 for i in numbers):
            pieces = SequenceLayout(len(slots), tuple(shards[i] for i in numbers))
            yield _chunk(items, numbers, everyone, pieces, sharing)
            continue
        for number, slot in enumerate(slots):
            here = [i for i in numbers if shards[i][0].rank == number]
            if here:
                yield _whole_chunk(items, here, slot, sharing)


def _whole_chunk(items: Sequence[PlannedItem], numbers: Sequence[int], slot: Slot, sharing: Sharing) -> Chunk:
    layout = SequenceLayout.whole([items[i].tokens for i in numbers], [0] * len(numbers), 1)
    return _chunk(items, numbers, slot, layout, sharing)


def _chunk(
    items: Sequence[PlannedItem],
    numbers: Sequence[int],
    ranks: Slot,
    layout: SequenceLayout,
    sharing: Sharing,
) -> Chunk:
    first, tp = items[numbers[0]], len(ranks) // layout.num_ranks
    rows = row_counts([items[i] for i in numbers], layout, tp, sharing.num_points)
    tiles = sharing.tiles(layout)
    return Chunk(first.component, first.microbatch, ranks, tuple(numbers), layout, tiles, rows)

"""Sequences → the ranks that hold their tokens: how a plan shares microbatches and items among ranks.

A policy of sharing decides for one microbatch of a component at a time, because ranks that share sequences
run them together and wait for the slowest. Items that stay whole are spread over the tp groups by cost: over
several microbatches at once, since nobody waits for anybody. Pure, like all planning.
"""

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt

from parallel.costs import WorkCost
from parallel.least_loaded import longest_first
from parallel.policies import Pool, SharingPolicy
from parallel.policies.sharing import NONE
from parallel.schemes import SequenceCost, choose_tiles, layer_exchange_ns, rank_times
from parallel.sequence import SequenceLayout
from parallel.tiles import Tile, pairs_before
from pipeline.domain_plan import EncoderBatch, Microbatch, PlannedItem
from pipeline.policies import TpGroup, spread
from pipeline.routes import outputs_of

EVEN = 1.01  # of even work, that items take at most, whole or shared at once, for nothing else to be tried
# Times what starting an encoder batch takes: items of several microbatches take at most so much together.
WORTH = 64

EncoderBatching = Callable[
    [
        Sequence[PlannedItem],
        Mapping[str, Sequence[TpGroup]],
        Mapping[str, "Sharing"],
        Mapping[str, WorkCost],
        Sequence[int],
    ],
    tuple[EncoderBatch, ...],
]
"""From the items of a domain to encoder batches, in the order of their microbatches: see
`make_encoder_batches`.
"""


@dataclass(frozen=True)
class Sharing:
    """How the `num_cp_ranks` cp ranks of a component share sequences: by which policy, and over which pool it
    decides, a replica's cp ranks or all. Items have rows for each of `num_points` attach points; if they stay
    `whole`, the policy has no say.
    """

    policy: SharingPolicy
    pool: Pool
    num_cp_ranks: int
    num_points: int = 1
    whole: bool = False

    @property
    def cost(self) -> SequenceCost:
        """What sequences of the component cost."""
        return self.pool.cost

    def layout(self, packs: Sequence[Sequence[int]]) -> SequenceLayout:
        """Lay out sequences, given by the lengths of those of each replica, over all cp ranks.

        A sequence alone that is longer than the pool holds otherwise is spread evenly.
        """
        if not self.policy.within_replica:
            lengths = [length for pack in packs for length in pack]
            pool = self.pool.holding(*lengths) if len(lengths) == 1 else self.pool
            return self.policy(lengths, pool)
        shards = [
            tuple(replace(shard, cp_rank=shard.cp_rank + replica * self.pool.num_cp_ranks) for shard in of)
            for replica, pack in enumerate(packs)
            if pack
            for of in self.policy(pack, self.pool).shards
        ]
        return SequenceLayout(self.num_cp_ranks, tuple(shards))

    def kept_whole(self) -> "Sharing":
        """Sharing of the same cp ranks in which no sequence is cut."""
        pool = replace(self.pool, num_cp_ranks=self.num_cp_ranks, tokens_per_rank=None)
        return replace(self, policy=NONE, pool=pool)

    def tiles(self, layout: SequenceLayout) -> tuple[tuple[Tile, ...], ...]:
        """Divide the attention of each sequence that several ranks share."""
        return tuple(choose_tiles(shards, self.cost) if len(shards) > 1 else () for shards in layout.shards)

    def whole_ns(self, tokens: int) -> int:
        """Time of a sequence on one rank."""
        pairs = pairs_before(tokens, tokens, self.cost.shape) * self.cost.shape.heads
        return self.cost.linear_ns(tokens) + self.cost.attention_ns(pairs)

    def slowest_ns(self, layout: SequenceLayout) -> int:
        """Time of the slowest rank of a layout."""
        return max(times.total_ns for times in rank_times(layout, self.cost))


def lay_out(packs: Sequence[Sequence[int]], lengths: Sequence[int], sharing: Sharing) -> Microbatch:
    """Lay the packs of all replicas of a domain, samples by number, over its pool."""
    layout = sharing.layout([[lengths[i] for i in pack] for pack in packs])
    samples = tuple(sample for pack in packs for sample in pack)
    return Microbatch(samples, layout, sharing.tiles(layout), layer_exchange_ns(layout, sharing.cost))


def make_encoder_batches(
    items: Sequence[PlannedItem],
    tp_groups: Mapping[str, Sequence[TpGroup]],
    sharing: Mapping[str, Sharing],
    costs: Mapping[str, WorkCost],
    waves: Sequence[int],
    at_once: int = 0,
) -> tuple[EncoderBatch, ...]:
    """Share the items of a domain among the tp groups of their components, or place them whole.

    `waves` tell the microbatch with which each item is encoded, that of its sample or one before it. Items of
    one wave on one tp group are an encoder batch; if any item of a wave is shared, all its items of that
    component are one encoder batch of all tp groups. `costs` are those of each component. Where the schedule
    encodes all items `at_once`, the shared ones of all waves of a component may be one encoder batch, or so
    many that are alike, if one takes less time, and whole ones of consecutive waves on one tp group are one
    encoder batch, as long as starting it takes more than 1 / `WORTH` of it.
    """
    encoder_batches = [
        batch
        for name in sorted(tp_groups)
        if not sharing[name].whole
        for batch in _shared_encoder_batches(name, items, tp_groups[name], sharing[name], waves, at_once)
    ]
    shared = {number for batch in encoder_batches for number in batch.items}
    barriers = sorted((waves[batch.items[0]], batch.component) for batch in encoder_batches)
    # Between two shared encoder batches, whole items find a balance of their own.
    stretches: list[list[int]] = [[] for _ in range(len(barriers) + 1)]
    for number, item in enumerate(items):
        if number not in shared:
            stretches[bisect(barriers, (waves[number], item.component))].append(number)
    members: dict[tuple[int, str, TpGroup], list[int]] = defaultdict(list)
    for whole in stretches:
        work = [_marginal_ns(costs, items[i]) for i in whole]
        starts = _starts(whole, work, items, waves, costs, tp_groups) if at_once else {}
        for number, tp_group in zip(
            whole, spread(work, [tp_groups[items[i].component] for i in whole]), strict=True
        ):
            name = items[number].component
            members[starts.get((name, waves[number]), waves[number]), name, tp_group].append(number)
    for (_, name, tp_group), numbers in members.items():
        layout = SequenceLayout.whole([items[i].tokens for i in numbers], [0] * len(numbers), 1)
        encoder_batches.append(_encoder_batch(items, numbers, tp_group, layout, sharing[name]))
    return tuple(
        sorted(encoder_batches, key=lambda batch: (batch.microbatches, batch.component, batch.ranks))
    )


def make_even_encoder_batches(
    items: Sequence[PlannedItem],
    tp_groups: Mapping[str, Sequence[TpGroup]],
    sharing: Mapping[str, Sharing],
    costs: Mapping[str, WorkCost],
    waves: Sequence[int],
    count: int,
    coarse: int = 0,
) -> tuple[EncoderBatch, ...]:
    """Share the items of a domain as `make_encoder_batches` does, but leave open who takes those that stay
    whole.

    They come in the order of their `waves` to encoder batches of about equal cost, `count` for each tp group
    of their encoder: an encoder batch holds whole items, of several microbatches if need be, or a single one
    that costs more. Each stands on its encoder's first tp group, until a schedule places it.

    Where they are to be `coarse`, what is shared of all waves may be one encoder batch, as `at_once` there,
    and there are as few encoder batches as starting them is worth: of w work on a tp group in q batches, each
    of which takes s to start, starting takes q s, and gaps as long as a batch's work stay empty, w / q. Both
    together are least at the square root of w / s.
    """
    encoder_batches: list[EncoderBatch] = []
    for name in sorted(tp_groups):
        own = sharing[name]
        together = (
            []
            if own.whole
            else list(_shared_encoder_batches(name, items, tp_groups[name], own, waves, coarse))
        )
        shared = {number for batch in together for number in batch.items}
        whole = [n for n, item in enumerate(items) if item.component == name and n not in shared]
        whole.sort(key=waves.__getitem__)
        work = [_marginal_ns(costs, items[n]) for n in whole]
        encoder_batches += together
        each = count
        if coarse:
            each = min(count, max(1, isqrt(sum(work) // (len(tp_groups[name]) * _starting_ns(costs[name])))))
        for numbers in _cut_evenly(whole, work, each * len(tp_groups[name])):
            layout = SequenceLayout.whole([items[n].tokens for n in numbers], [0] * len(numbers), 1)
            encoder_batches.append(_encoder_batch(items, numbers, tp_groups[name][0], layout, own))
    return tuple(
        sorted(encoder_batches, key=lambda batch: (batch.microbatches, batch.component, batch.items))
    )


def _marginal_ns(costs: Mapping[str, WorkCost], item: PlannedItem) -> int:
    """What an item adds to a pass through its encoder."""
    return costs[item.component].marginal_ns(item.tokens, item.tokens * item.tokens)


def _starting_ns(cost: WorkCost) -> int:
    """What a pass through an encoder takes without any token, at least 1 ns."""
    return max(1, cost.forward_ns(0, 0))


def _starts(
    numbers: Sequence[int],
    work: Sequence[int],
    items: Sequence[PlannedItem],
    waves: Sequence[int],
    costs: Mapping[str, WorkCost],
    tp_groups: Mapping[str, Sequence[TpGroup]],
) -> dict[tuple[str, int], int]:
    """By component and wave, the first of the consecutive waves whose items, with `numbers`, of so much
    `work`, are encoded together: as few as starting their encoder batches is worth. A wave that is worth it
    by itself stays apart, since rows of others would only wait for it.
    """
    of_wave: dict[str, Counter[int]] = defaultdict(Counter)
    for number, ns in zip(numbers, work, strict=True):
        of_wave[items[number].component][waves[number]] += ns
    starts = {}
    for name, of in of_wave.items():
        least = WORTH * _starting_ns(costs[name]) * len(tp_groups[name])
        first, taken, left = -1, 0, of.total()
        for wave in sorted(of):
            if first < 0 or (taken >= least and left >= least):
                first, taken = wave, 0
            starts[name, wave] = first
            taken, left = taken + of[wave], left - of[wave]
    return starts


def _cut_evenly(numbers: Sequence[int], costs: Sequence[int], count: int) -> Iterator[list[int]]:
    """Cut a list into at most `count` runs of about equal cost: each number goes where its middle lies."""
    total, before, last = max(1, sum(costs)), 0, -1
    run: list[int] = []
    for number, cost in zip(numbers, costs, strict=True):
        place = (2 * before + cost) * count // (2 * total)
        if place != last and run:
            yield run
            run = []
        run.append(number)
        before, last = before + cost, place
    if run:
        yield run


def _shared_encoder_batches(
    component: str,
    items: Sequence[PlannedItem],
    tp_groups: Sequence[TpGroup],
    sharing: Sharing,
    waves: Sequence[int],
    at_once: int,
) -> Iterator[EncoderBatch]:
    """The waves of which items are shared, or all of them as so many `at_once`."""
    batches: dict[int, list[int]] = defaultdict(list)
    for number, item in enumerate(items):
        if item.component == component:
            batches[waves[number]].append(number)
    lengths = {m: [items[i].tokens for i in numbers] for m, numbers in batches.items()}
    everyone = tuple(rank for tp_group in tp_groups for rank in tp_group)
    numbers = [number for wave in sorted(batches) for number in batches[wave]]
    costs = [sharing.whole_ns(items[number].tokens) for number in numbers]
    even_ns, whole_ns = sum(costs) // sharing.num_cp_ranks, _makespan(costs, sharing.num_cp_ranks)
    if whole_ns <= EVEN * even_ns and not sharing.policy.forced:
        return  # whatever is shared takes no less than even work
    layouts, shared, together = dict[int, SequenceLayout](), list[int](), None
    together_ns = whole_ns
    if at_once and len(lengths) > 1:
        layout = sharing.layout([[items[i].tokens for i in numbers]])
        if layout.is_cut:
            together, together_ns = layout, sharing.slowest_ns(layout)
    if together is None or together_ns > EVEN * even_ns:
        layouts = {m: sharing.layout([tokens]) for m, tokens in lengths.items()}
        shared = worth_sharing(lengths, layouts, sharing)
        if not shared or together_ns >= _taken_ns(shared, lengths, layouts, sharing):
            together = None
    if together is None:
        for microbatch in shared:
            yield _encoder_batch(items, batches[microbatch], everyone, layouts[microbatch], sharing)
    elif at_once == 1:
        yield _encoder_batch(items, numbers, everyone, together, sharing)
    else:
        # Dealt from the longest item on, so that all portions have long and short ones.
        dealt = [numbers[at] for at in sorted(range(len(numbers)), key=lambda at: -costs[at])]
        for first in range(at_once):
            if own := sorted(dealt[first::at_once]):
                layout = sharing.layout([[items[number].tokens for number in own]])
                if layout.is_cut:  # else its items stay whole, and nobody waits for the others
                    yield _encoder_batch(items, own, everyone, layout, sharing)


def worth_sharing(
    lengths: Mapping[int, Sequence[int]], layouts: Mapping[int, SequenceLayout], sharing: Sharing
) -> list[int]:
    """Return the microbatches to share, as in their `layouts`; the items of the others stay whole.

    A shared microbatch is a barrier to all tp groups, and whole items find their balance only between
    barriers. So the microbatches are tried from the one with the longest item on, and as many are shared as
    let the step take the least time.
    """
    candidates = [m for m, layout in layouts.items() if layout.is_cut]
    if sharing.policy.forced:
        return candidates
    candidates.sort(key=lambda m: -max(lengths[m]))
    whole = {m: [sharing.whole_ns(tokens) for tokens in of] for m, of in lengths.items()}
    chosen: dict[int, int] = {}  # nanoseconds by shared microbatch
    least = _step_ns(whole, chosen, sharing.num_cp_ranks)
    best = 0
    for count, microbatch in enumerate(candidates, 1):
        chosen[microbatch] = sharing.slowest_ns(layouts[microbatch])
        if sum(chosen.values()) >= least:
            break
        taken = _step_ns(whole, chosen, sharing.num_cp_ranks)
        if taken < least:
            best, least = count, taken
    return candidates[:best]


def _taken_ns(
    shared: Sequence[int],
    lengths: Mapping[int, Sequence[int]],
    layouts: Mapping[int, SequenceLayout],
    sharing: Sharing,
) -> int:
    """Time of all microbatches in order, of which some are shared."""
    whole = {m: [sharing.whole_ns(tokens) for tokens in of] for m, of in lengths.items()}
    return _step_ns(whole, {m: sharing.slowest_ns(layouts[m]) for m in shared}, sharing.num_cp_ranks)


def _step_ns(whole: Mapping[int, Sequence[int]], shared: Mapping[int, int], ranks: int) -> int:
    """Time of all microbatches in order: of those `shared`, and of the `whole` items between them."""
    total, stretch = 0, list[int]()
    for microbatch in sorted(whole):
        if microbatch in shared:
            total += shared[microbatch] + _makespan(stretch, ranks)
            stretch = []
        else:
            stretch += whole[microbatch]
    return total + _makespan(stretch, ranks)


def _makespan(costs: Sequence[int], ranks: int) -> int:
    """The load of the busiest rank, if whole items are placed as they will be."""
    _, loads = longest_first(costs, ranks)
    return max(loads)


def _encoder_batch(
    items: Sequence[PlannedItem],
    numbers: Sequence[int],
    ranks: TpGroup,
    layout: SequenceLayout,
    sharing: Sharing,
) -> EncoderBatch:
    first, tp = items[numbers[0]], len(ranks) // layout.num_cp_ranks
    return EncoderBatch(
        component=first.component,
        microbatches=tuple(sorted({items[number].microbatch for number in numbers})),
        ranks=ranks,
        items=tuple(numbers),
        layout=layout,
        tiles=sharing.tiles(layout),
        outputs=outputs_of(numbers, items, layout, tp, sharing.num_points),
        exchange_ns=layer_exchange_ns(layout, sharing.cost),
    )

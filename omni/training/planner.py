"""Compose the plan of a step from all policies: pure, from metadata to op lists.

    stream      which samples, up to the step's budget
    balance     samples → replicas, by cost
    packing     samples → microbatches, without padding; replicas of a domain pass theirs together
    sharding    sequences → the ranks that hold their tokens
    placement   items → slots of the domain, by cost; items of one microbatch on one slot are a chunk
    boundary    rows → the rank that holds their position
    schedule    chunks and microbatches → ordered ops

The planner knows every policy only as a function. It reads no clock and no rank: all ranks call it with the
same arguments and get the same plan.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, zip_longest
from math import lcm

from dataloader.format import DataError
from dataloader.packing import pack
from dataloader.policies import POLICIES as BALANCES
from dataloader.stream import Stream
from dataloader.tokens import SampleMeta, fit, item_row_offsets, length
from parallel.costs import CostTable
from parallel.layout import Arrangement, split_evenly
from parallel.sequence import SequenceLayout, Shard
from pipeline.builders import BUILDERS, build_forward_only, expand, without_encoder_backward
from pipeline.plan import Chunk, DomainPlan, Kind, Microbatch, Op, PlannedItem, PlannedSample, StepPlan
from pipeline.policies import Slot, spread
from pipeline.routes import plan_route, row_counts
from pipeline.serial import serialise
from pipeline.simulator import plan_costs


@dataclass(frozen=True)
class Policies:
    """Names of the policies that shape the plan."""

    balance: str
    schedule: str


@dataclass(frozen=True)
class Budget:
    """Tokens of a microbatch, and what a step takes: LLM tokens or samples (one of them)."""

    microbatch_tokens: int
    step_tokens: int | None
    step_samples: int | None
    on_long: str


@dataclass(frozen=True)
class Planner:
    """Plans any step of a run over the ranks of `arrangement`.

    `metas` reads a sample's metadata by source and id; `encoders` maps a modality to the component that takes
    it; `frozen` tells the components frozen at a step; `single_queue` asks for op lists that are safe where
    all communication of a rank shares one queue.
    """

    stream: Stream
    metas: Callable[[str, int], SampleMeta]
    encoders: Mapping[str, str]
    components: tuple[str, ...]
    arrangement: Arrangement
    policies: Policies
    budget: Budget
    table: CostTable
    frozen: Callable[[int], tuple[str, ...]]
    single_queue: bool = False

    def next_step(self, step: int, cursor: int) -> StepPlan:
        """Plan step `step` of training from stream position `cursor`; the plan says where the next begins."""
        samples, skipped, next_cursor = self._take(cursor)
        return self._compose(step, samples, self.arrangement.num_domains, True, cursor, next_cursor, skipped)

    def evaluation(self, step: int, samples: Sequence[SampleMeta], num_domains: int) -> StepPlan:
        """Plan one forward pass over given samples, which must fit a microbatch each."""
        return self._compose(step, samples, num_domains, False, 0, 0, ())

    def meta(self, source: str, sample: int) -> SampleMeta | None:
        """Return a sample's metadata as it is trained on: truncated if it must be, None if it is dropped."""
        return fit(self.metas(source, sample), self.budget.microbatch_tokens, self.budget.on_long)

    def _take(self, cursor: int) -> tuple[list[SampleMeta], tuple[tuple[str, int], ...], int]:
        """A prefix of the stream within the budget: at least one sample, whatever its length."""
        samples: list[SampleMeta] = []
        skipped: list[tuple[str, int]] = []
        tokens = 0
        # Within so many positions the stream shows every sample, so beyond them all would be dropped.
        limit = cursor + 2 * self.stream.cycle
        while cursor < limit:
            source, sample, _ = self.stream.at(cursor)
            meta = self.meta(source, sample)
            if meta is None:
                skipped.append((source, sample))
                cursor += 1
                continue
            if samples and self._is_full(len(samples), tokens + length(meta)):
                break
            samples.append(meta)
            tokens += length(meta)
            cursor += 1
        if not samples:
            raise DataError(
                f"data.microbatch_tokens={self.budget.microbatch_tokens} fits no sample: "
                f"{len(skipped)} in a row were dropped; raise it, or set data.on_long=truncate"
            )
        return samples, tuple(skipped), cursor

    def _is_full(self, num_samples: int, tokens_with_next: int) -> bool:
        if self.budget.step_samples is not None:
            return num_samples >= self.budget.step_samples
        assert self.budget.step_tokens is not None
        return tokens_with_next > self.budget.step_tokens

    def _compose(
        self,
        step: int,
        metas: Sequence[SampleMeta],
        num_domains: int,
        train: bool,
        cursor: int,
        next_cursor: int,
        skipped: tuple[tuple[str, int], ...],
    ) -> StepPlan:
        frozen = self.frozen(step) if train else ()
        costs = [self._sample_cost(meta) for meta in metas]
        shared = self.arrangement.replicas
        homes = BALANCES[self.policies.balance](costs, num_domains * shared)
        members: list[list[int]] = [[] for _ in range(num_domains * shared)]
        for sample, home in enumerate(homes):
            members[home].append(sample)
        domains = tuple(
            self._domain(members[domain * shared : (domain + 1) * shared], metas, train, frozen)
            for domain in range(num_domains)
        )
        return StepPlan(
            step=step,
            train=train,
            cursor=cursor,
            next_cursor=next_cursor,
            cost_table=self.table.number,
            components=self.components,
            frozen=frozen,
            samples=tuple(PlannedSample(meta.source, meta.id, length(meta)) for meta in metas),
            skipped=skipped,
            domains=domains,
        )

    def _sample_cost(self, meta: SampleMeta) -> int:
        """Nanoseconds of a sample on the slowest stage, its items spread over all slots of its replica."""
        tokens = length(meta)
        stages = (self.table.parts[f"llm/{stage}"] for stage in range(self.arrangement.llm.pp))
        llm = max(part.marginal_ns(tokens, tokens * tokens) for part in stages) // self.arrangement.llm.cp
        return llm + sum(
            self._item_cost(item.modality, item.tokens)
            * self.arrangement.replicas
            // len(self._slots[self.encoders[item.modality]])
            for item in meta.items
        )

    def _item_cost(self, modality: str, tokens: int) -> int:
        return self.table.parts[self.encoders[modality]].marginal_ns(tokens, tokens * tokens)

    @cached_property
    def _slots(self) -> dict[str, tuple[Slot, ...]]:
        return {name: self.arrangement.slots(name) for name in self.encoders.values()}

    def _domain(
        self,
        members: Sequence[Sequence[int]],
        metas: Sequence[SampleMeta],
        train: bool,
        frozen: tuple[str, ...],
    ) -> DomainPlan:
        """Plan a domain; `members` are the samples of each of its replicas."""
        world = self.arrangement
        lengths = [length(meta) for meta in metas]
        microbatches = self._microbatches(members, lengths)
        items = [
            item for m, batch in enumerate(microbatches) for item in self._items(m, batch.samples, metas)
        ]
        costs = [self._item_cost(metas[i.sample].items[i.index].modality, i.tokens) for i in items]
        places = spread(costs, [self._slots[i.component] for i in items], world.domain_size)
        chunks = _chunks(items, places)
        routes = tuple(
            plan_route(m, batch.layout, world.llm.tp, world.domain_size, items, chunks)
            for m, batch in enumerate(microbatches)
        )
        domain = DomainPlan(
            num_stages=world.llm.pp,
            pool=world.pool,
            tp=world.llm.tp,
            party=lcm(world.llm.tp * world.llm.cp, world.llm.ep),
            beside=world.domain_size - world.llm_size,
            homes=tuple(self._home(component) for component in self.components),
            microbatches=microbatches,
            items=tuple(items),
            chunks=chunks,
            routes=routes,
            ops=(),
        )
        domain = replace(domain, ops=self._ops(domain, train, frozen))
        if not self.single_queue:
            return domain
        lists = serialise(domain, *plan_costs(domain, self.table))
        return replace(domain, ops=tuple(map(tuple, lists)))

    def _home(self, component: str) -> tuple[int, int]:
        """The first position that holds a component, and the one after the last."""
        if component not in self._slots:
            return 0, self.arrangement.llm_size
        slots = self._slots[component]
        return slots[0][0], slots[-1][-1] + 1

    def _microbatches(
        self, members: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> tuple[Microbatch, ...]:
        """Pack the samples of each replica; one pass of the domain takes one pack of every replica."""
        packs = [
            [
                [mine[i] for i in pack_]
                for pack_ in pack([lengths[i] for i in mine], self.budget.microbatch_tokens)
            ]
            for mine in members
        ]
        return tuple(
            self._microbatch([pack_ or [] for pack_ in together], lengths) for together in zip_longest(*packs)
        )

    def _microbatch(self, packs: Sequence[Sequence[int]], lengths: Sequence[int]) -> Microbatch:
        """Cut each sequence evenly over the cp ranks of its replica."""
        cp = self.arrangement.llm.cp
        shards = []
        for replica, samples in enumerate(packs):
            for sample in samples:
                pieces = split_evenly(lengths[sample], cp)
                starts = accumulate(pieces, initial=0)
                ranks = range(replica * cp, (replica + 1) * cp)
                shards.append(tuple(map(Shard, ranks, starts, pieces)))
        return Microbatch(
            tuple(sample for samples in packs for sample in samples),
            SequenceLayout(self.arrangement.pool, tuple(shards)),
        )

    def _items(
        self, microbatch: int, samples: Sequence[int], metas: Sequence[SampleMeta]
    ) -> list[PlannedItem]:
        items = []
        start = 0
        for sample in samples:
            meta = metas[sample]
            for index, (item, offset) in enumerate(zip(meta.items, item_row_offsets(meta), strict=True)):
                component = self.encoders[item.modality]
                items.append(
                    PlannedItem(component, sample, index, microbatch, item.tokens, item.rows, start + offset)
                )
            start += length(meta)
        return items

    def _ops(self, domain: DomainPlan, train: bool, frozen: tuple[str, ...]) -> tuple[tuple[Op, ...], ...]:
        build = BUILDERS[self.policies.schedule] if train else build_forward_only
        order = without_encoder_backward(build(domain), domain, frozenset(frozen))
        lists = expand(order, domain)
        for number, component in enumerate(self.components):
            if train and component not in frozen:
                for rank in range(*domain.homes[number]):
                    lists[rank].append(Op(Kind.REDUCE, number))
        return tuple(map(tuple, lists))


def _chunks(items: Sequence[PlannedItem], places: Sequence[Slot]) -> tuple[Chunk, ...]:
    """Group items by microbatch, component and slot, in that order."""
    members: dict[tuple[int, str, Slot], list[int]] = defaultdict(list)
    for number, (item, slot) in enumerate(zip(items, places, strict=True)):
        members[item.microbatch, item.component, slot].append(number)
    chunks = []
    for (microbatch, component, slot), numbers in sorted(members.items()):
        layout = SequenceLayout.whole([items[i].tokens for i in numbers], [0] * len(numbers), 1)
        rows = row_counts([items[i] for i in numbers], layout, len(slot))
        chunks.append(Chunk(component, microbatch, slot, tuple(numbers), layout, rows))
    return tuple(chunks)

"""Compose the plan of a step from all policies: pure, from metadata to op lists.

    stream      which samples, up to the step's budget
    balance     samples → replicas, by cost
    packing     samples → microbatches, without padding
    placement   items → ranks of the replica, by cost; items of one microbatch on one rank are a chunk
    boundary    rows → the rank that holds their position
    schedule    chunks and microbatches → ordered ops

The planner knows every policy only as a function. It reads no clock and no rank: all ranks call it with the
same arguments and get the same plan.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from dataloader.format import DataError
from dataloader.packing import pack
from dataloader.policies import POLICIES as BALANCES
from dataloader.stream import Stream
from dataloader.tokens import SampleMeta, fit, item_row_offsets, length
from parallel.boundary import Route
from parallel.costs import CostTable
from parallel.sequence import SequenceLayout
from pipeline.builders import BUILDERS, build_forward_only, expand, without_encoder_backward
from pipeline.plan import Chunk, Kind, Microbatch, Op, PlannedItem, PlannedSample, ReplicaPlan, StepPlan
from pipeline.policies import PLACEMENTS
from pipeline.routes import plan_route
from pipeline.serial import serialise
from pipeline.simulator import plan_costs


@dataclass(frozen=True)
class Policies:
    """Names of the policies that shape the plan."""

    balance: str
    placement: str
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
    """Plans any step of a run.

    `metas` reads a sample's metadata by source and id; `encoders` maps a modality to the component that takes
    it; `frozen` tells the components frozen at a step; `single_queue` asks for op lists that are safe where
    all communication of a rank shares one queue.
    """

    stream: Stream
    metas: Callable[[str, int], SampleMeta]
    encoders: Mapping[str, str]
    components: tuple[str, ...]
    num_replicas: int
    num_stages: int
    policies: Policies
    budget: Budget
    table: CostTable
    frozen: Callable[[int], tuple[str, ...]]
    single_queue: bool = False

    def next_step(self, step: int, cursor: int) -> StepPlan:
        """Plan step `step` of training from stream position `cursor`; the plan says where the next begins."""
        samples, skipped, next_cursor = self._take(cursor)
        return self._compose(step, samples, self.num_replicas, True, cursor, next_cursor, skipped)

    def evaluation(self, step: int, samples: Sequence[SampleMeta], num_replicas: int) -> StepPlan:
        """Plan one forward pass over given samples, which must fit a microbatch each."""
        return self._compose(step, samples, num_replicas, False, 0, 0, ())

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
        num_replicas: int,
        train: bool,
        cursor: int,
        next_cursor: int,
        skipped: tuple[tuple[str, int], ...],
    ) -> StepPlan:
        frozen = self.frozen(step) if train else ()
        costs = [self._sample_cost(meta) for meta in metas]
        homes = BALANCES[self.policies.balance](costs, num_replicas)
        replicas = tuple(
            self._replica([i for i, home in enumerate(homes) if home == replica], metas, train, frozen)
            for replica in range(num_replicas)
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
            replicas=replicas,
        )

    def _sample_cost(self, meta: SampleMeta) -> int:
        """Nanoseconds of a sample on the slowest stage, its items spread over all stages."""
        tokens = length(meta)
        stages = (self.table.parts[f"llm/{stage}"] for stage in range(self.num_stages))
        llm = max(part.marginal_ns(tokens, tokens * tokens) for part in stages)
        items = (self._item_cost(item.modality, item.tokens) for item in meta.items)
        return llm + sum(items) // self.num_stages

    def _item_cost(self, modality: str, tokens: int) -> int:
        return self.table.parts[self.encoders[modality]].marginal_ns(tokens, tokens * tokens)

    def _replica(
        self, mine: Sequence[int], metas: Sequence[SampleMeta], train: bool, frozen: tuple[str, ...]
    ) -> ReplicaPlan:
        lengths = [length(metas[i]) for i in mine]
        bins = pack(lengths, self.budget.microbatch_tokens)
        microbatches = []
        items: list[PlannedItem] = []
        for number, members in enumerate(bins):
            samples = tuple(mine[i] for i in members)
            items += self._items(number, samples, metas)
            # The first stage holds all tokens of the pack until context parallelism shards them.
            layout = SequenceLayout.whole([lengths[i] for i in members], [0] * len(members), self.num_stages)
            microbatches.append(Microbatch(samples, layout))
        costs = [self._item_cost(metas[i.sample].items[i.index].modality, i.tokens) for i in items]
        ranks = PLACEMENTS[self.policies.placement](costs, self.num_stages)
        chunks = _chunks(items, ranks)
        routes = tuple(plan_route(m, batch.layout, items, chunks) for m, batch in enumerate(microbatches))
        ops = self._ops(len(microbatches), chunks, routes, train, frozen)
        planned = ReplicaPlan(self.num_stages, tuple(microbatches), tuple(items), chunks, routes, ops)
        if not self.single_queue:
            return planned
        lists = serialise(ops, routes, *plan_costs(planned, self.table))
        return replace(planned, ops=tuple(map(tuple, lists)))

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

    def _ops(
        self,
        num_microbatches: int,
        chunks: Sequence[Chunk],
        routes: Sequence[Route | None],
        train: bool,
        frozen: tuple[str, ...],
    ) -> tuple[tuple[Op, ...], ...]:
        build = BUILDERS[self.policies.schedule] if train else build_forward_only
        order = build(self.num_stages, num_microbatches, chunks)
        order = without_encoder_backward(order, chunks, frozenset(frozen))
        lists = expand(order, chunks, routes)
        reduces = [
            Op(Kind.REDUCE, number)
            for number, component in enumerate(self.components)
            if train and component not in frozen
        ]
        return tuple(tuple(ops + reduces) for ops in lists)


def _chunks(items: Sequence[PlannedItem], ranks: Sequence[int]) -> tuple[Chunk, ...]:
    """Group items by microbatch, component and rank, in that order."""
    members: dict[tuple[int, str, int], list[int]] = defaultdict(list)
    for number, (item, rank) in enumerate(zip(items, ranks, strict=True)):
        members[item.microbatch, item.component, rank].append(number)
    return tuple(
        Chunk(
            component=component,
            microbatch=microbatch,
            rank=rank,
            items=tuple(numbers),
            tokens=sum(items[i].tokens for i in numbers),
            squares=sum(items[i].tokens ** 2 for i in numbers),
            rows=sum(items[i].rows for i in numbers),
        )
        for (microbatch, component, rank), numbers in sorted(members.items())
    )

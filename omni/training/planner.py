"""Compose the plan of a step from all policies: pure, from metadata to op lists.

    stream      which samples, up to the step's budget
    balance     samples → replicas, by cost
    packing     samples → microbatches, without padding; replicas of a domain pass theirs together
    sharding    sequences → the ranks that hold their tokens, and tiles of attention that ranks share
    placement   items → slots of the domain, by cost; items of one microbatch on one slot are a chunk, and
                items of a microbatch that all slots share are one chunk
    boundary    rows → the rank that holds their position, by the cheapest transport
    schedule    chunks and microbatches → ordered ops

The planner knows every policy only as a function. It reads no clock and no rank: all ranks call it with the
same arguments and get the same plan.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from math import lcm

from dataloader.format import DataError
from dataloader.packing import pack
from dataloader.policies import POLICIES as BALANCES
from dataloader.stream import Stream
from dataloader.tokens import SampleMeta, fit, item_row_offsets, length
from omni.training.sharing import Sharing, lay_out, make_chunks
from parallel.boundary import Route
from parallel.costs import CostTable, Links
from parallel.layout import Arrangement
from parallel.transports import choose_transport, node_map, transport_ns
from pipeline.builders import BUILDERS, build_forward_only, expand, without_encoder_backward
from pipeline.costs import plan_costs
from pipeline.plan import DomainPlan, Kind, Microbatch, Op, PlannedItem, PlannedSample, Point, StepPlan
from pipeline.policies import Slot
from pipeline.routes import plan_route
from pipeline.serial import serialise


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


AUTO = "auto"


@dataclass(frozen=True)
class Boundary:
    """How rows travel: over one transport, or with `auto` the one of each route that takes the least time."""

    transport: str
    ranks_per_node: int
    row_bytes: int
    links: Links

    def send(self, route: Route, ranks: Sequence[int]) -> Route:
        """Choose the transport of a route over global `ranks`, and note its time."""
        if route.is_local:
            return route.over("local")
        nodes, rows = node_map(ranks, self.ranks_per_node), route.traffic()
        transport = self.transport
        if transport == AUTO:
            transport = choose_transport(rows, nodes, self.row_bytes, self.links)
        return route.over(transport, nodes, transport_ns(transport, rows, nodes, self.row_bytes, self.links))


@dataclass(frozen=True)
class Planner:
    """Plans any step of a run over the ranks of `arrangement`.

    `metas` reads a sample's metadata by source and id; `encoders` maps a modality to the component that takes
    it; `sharing` says how each component shares sequences, `feeds` where its rows enter; `frozen` tells the
    components frozen at a step; `single_queue` asks for op lists that are safe where all communication of a
    rank shares one queue.
    """

    stream: Stream
    metas: Callable[[str, int], SampleMeta]
    encoders: Mapping[str, str]
    components: tuple[str, ...]
    arrangement: Arrangement
    llm: str
    sharing: Mapping[str, Sharing]
    boundary: Boundary
    feeds: tuple[tuple[str, tuple[Point, ...]], ...]
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
                f"{len(skipped)} in a row were dropped, as too long or for an item that its encoder cannot "
                f"take; raise it, or set data.on_long=truncate (data.on_long=error names the first and why)"
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
            self._domain(domain, members[domain * shared : (domain + 1) * shared], metas, train, frozen)
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
        return self._tokens_cost(self.encoders[modality], tokens)

    def _tokens_cost(self, component: str, tokens: int) -> int:
        return self.table.parts[component].marginal_ns(tokens, tokens * tokens)

    @cached_property
    def _slots(self) -> dict[str, tuple[Slot, ...]]:
        return {name: self.arrangement.slots(name) for name in self.encoders.values()}

    def _domain(
        self,
        number: int,
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
        chunks = make_chunks(items, self._slots, self.sharing, self._tokens_cost)
        domain = DomainPlan(
            num_stages=world.llm.pp,
            pool=world.pool,
            tp=world.llm.tp,
            party=self._party,
            beside=world.domain_size - world.llm_size,
            homes=tuple(self._home(component) for component in self.components),
            microbatches=microbatches,
            items=tuple(items),
            chunks=chunks,
            routes=(),
            ops=(),
            feeds=self.feeds,
        )
        domain = replace(domain, routes=self._routes(domain, world.domain_ranks(number)))
        domain = replace(domain, ops=self._ops(domain, train, frozen))
        if not self.single_queue:
            return domain
        lists = serialise(domain, *plan_costs(domain, self.table))
        return replace(domain, ops=tuple(map(tuple, lists)))

    def _routes(self, domain: DomainPlan, ranks: Sequence[int]) -> tuple[Route | None, ...]:
        """Plan the way of every microbatch's rows over a domain of global `ranks`."""
        routes = (
            plan_route(
                m, batch.layout, domain.tp, domain.num_ranks, domain.items, domain.chunks, domain.fed_by
            )
            for m, batch in enumerate(domain.microbatches)
        )
        return tuple(None if route is None else self.boundary.send(route, ranks) for route in routes)

    def _home(self, component: str) -> tuple[int, int]:
        """The first position that holds a component, and the one after the last."""
        if component not in self._slots:
            return 0, self.arrangement.llm_size
        slots = self._slots[component]
        return slots[0][0], slots[-1][-1] + 1

    @property
    def _party(self) -> int:
        """Neighbouring ranks of a stage whose layers communicate, for any reason."""
        world = self.arrangement
        # Attention exchanges over the whole pool, all replicas of the domain, whoever shares a sequence.
        if self.sharing[self.llm].policy is not None or world.llm.cp > 1:
            return world.stage_size
        return lcm(world.llm.tp, world.llm.ep)

    def _microbatches(
        self, members: Sequence[Sequence[int]], lengths: Sequence[int]
    ) -> tuple[Microbatch, ...]:
        """Pack the samples of each replica; one pass of the domain takes one pack of every replica."""
        size = self.budget.microbatch_tokens
        packs = [[[mine[i] for i in of] for of in pack([lengths[i] for i in mine], size)] for mine in members]
        world, sharing = self.arrangement, self.sharing[self.llm]
        return tuple(
            lay_out([of or [] for of in together], lengths, sharing, world.llm.cp)
            for together in zip_longest(*packs)
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

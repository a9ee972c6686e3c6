"""Compose the plan of one domain, from its samples to op lists: one decision after the other, each a policy.

    packing     samples of a replica → packs, without padding, and the packs with which items are encoded
    pairing     packs of a domain's replicas → microbatches, which they pass together
    sharing     sequences → the ranks that hold their tokens, and tiles of attention that ranks share
    placement   items → tp groups of the domain, by cost; items encoded with one microbatch on one tp group
                are an encoder batch, and such items that all tp groups share are one encoder batch
    boundary    rows → the rank that holds their position, by the cheapest transport
    schedule    encoder batches and microbatches → ordered ops

Pure: no clock, no rank. All ranks of the domain call it with the same arguments and get the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from math import gcd

from dataloader.balance import SampleCosts
from dataloader.packing import PackingPolicy
from dataloader.pairing import PairingPolicy, Pairs
from dataloader.tokens import SampleMeta, item_row_offsets, length
from omni.models.item_layout import LayoutOf, plain_layout
from omni.planning.candidates import quickest_first
from omni.planning.microbatches import ReplicaPacks, encoded_with, microbatch_of, packed
from omni.planning.replanning import Replanning
from omni.planning.rounds import batches_of_rounds, starts_of
from omni.planning.sample_costs import Costing
from omni.planning.sharing import EncoderBatching, Sharing, make_encoder_batches, make_even_encoder_batches
from parallel.boundary import Route
from parallel.cluster import Link, Links
from parallel.costs import CostTable
from parallel.layout import Arrangement
from parallel.sequence import SequenceLayout
from parallel.transport_policies import TransportPolicy
from parallel.transports import node_map, transport_ns
from parallel.work import virtual_stage_name
from pipeline.builders import Facts, Order, SchedulePolicy, as_ordered, build_forward_only, without_frozen
from pipeline.builders.one_queue.serial import serialise
from pipeline.builders.rounds import in_rounds
from pipeline.builders.schedule import candidates_of
from pipeline.costs import begun_before, plan_costs, plan_memory
from pipeline.domain_plan import DomainPlan, EncoderBatch, Microbatch, PlannedItem, Point
from pipeline.expand import expand
from pipeline.ops import Kind, Op
from pipeline.policies import TpGroup
from pipeline.reductions import with_reductions
from pipeline.routes import plan_routes

SHARED_ROOM = 3, 4
"""Share of the room of cp ranks that share sequences that a pack of several samples takes at most: where all
is full, none can take more of the tokens that cost less than others, and all wait for the slowest.
"""


Batched = Callable[[Pairs, int, int, int], tuple[DomainPlan, list[int]]]
"""A domain with encoder batches, and the first microbatches of its rounds: from the packs that pass together,
the encoder batches of each tp group in a round, how many hold what is shared of it if these are coarse, else
0, and the number of rounds.
"""


@dataclass(frozen=True)
class TransportChoice:
    """How rows travel: by the transport that a policy chooses for each route."""

    policy: TransportPolicy
    ranks_per_node: int
    row_bytes: int
    links: Links

    def link(self, ranks: Sequence[int]) -> Link:
        """Return the slowest link between global `ranks`: that between nodes, if they are on several."""
        one_node = len(set(node_map(ranks, self.ranks_per_node))) == 1
        return self.links.inside if one_node else self.links.across

    def choose(self, route: Route, ranks: Sequence[int]) -> Route:
        """Choose the transport of a route over global `ranks`, and note its time."""
        if route.is_local:
            return route.over("local")
        nodes, rows = node_map(ranks, self.ranks_per_node), route.traffic()
        transport = self.policy(rows, nodes, self.row_bytes, self.links)
        return route.over(transport, nodes, transport_ns(transport, rows, nodes, self.row_bytes, self.links))


@dataclass(frozen=True, kw_only=True)
class DomainPlanner:
    """Plans a domain over the ranks of `arrangement`.

    `encoders` maps a modality to the component that takes it; `sharing` says how each component shares
    sequences, `feeds` where its rows enter; `collective_group` neighbouring ranks of a stage run passes of
    the LLM together, because its layers communicate; `single_queue` asks for op lists that are safe where all
    communication of a rank shares one queue; `encoder_bytes` bounds the activations of each encoder that a
    rank holds, if given; a step has so many `rounds`, if given, else as few as fit; plans that do not fit are
    not taken if `guarded`; `encoder_batching` makes encoder batches of a domain's items; packs have
    `microbatch_tokens` / `pack_divisor` tokens at most; all layers are computed anew in passes of more than
    `kept_tokens` on some rank, None if in no pass; `layout_of` says how rows of an item stand.
    """

    encoders: Mapping[str, str]
    components: tuple[str, ...]
    arrangement: Arrangement
    llm: str
    sharing: Mapping[str, Sharing]
    transport: TransportChoice
    feeds: tuple[tuple[str, tuple[Point, ...]], ...]
    packing: PackingPolicy
    pairing: PairingPolicy
    schedule: SchedulePolicy
    microbatch_tokens: int
    table: CostTable
    collective_group: int
    single_queue: bool = False
    encoder_bytes: int | None = None
    rounds: int | None = None
    guarded: bool = True
    encoder_batching: EncoderBatching = make_encoder_batches
    pack_divisor: int = 1
    kept_tokens: int | None = None
    layout_of: LayoutOf = plain_layout

    @cached_property
    def costing(self) -> Costing:
        """What samples cost."""
        return Costing(self.table, self.arrangement, self.llm, self.encoders, self.sharing)

    @property
    def pack_tokens(self) -> int:
        """The most tokens of a pack of several samples."""
        return max(1, self.microbatch_tokens // self.pack_divisor)

    @cached_property
    def _tp_groups(self) -> dict[str, tuple[TpGroup, ...]]:
        return {name: self.arrangement.tp_groups(name) for name in self.encoders.values()}

    def plan_domain(
        self,
        number: int,
        members: Sequence[Sequence[int]],
        metas: Sequence[SampleMeta],
        costs: SampleCosts,
        frozen: tuple[str, ...],
        train: bool,
        beyond: Callable[[DomainPlan, bool], int] = lambda domain, closely: 0,
    ) -> Iterator[tuple[DomainPlan, int]]:
        """Plan a domain; `members` are the samples of each of its replicas, by place in `metas`.

        Yields a plan for each candidate of the schedule that is not `beyond` what devices hold, in bytes, in
        the order of their simulated times; then those that hold less, then the others; with each the bytes
        that it is beyond, asked closely, at most 0 if it fits.
        """
        replicas, ranks = self._packed(members, costs), self.arrangement.global_ranks(number)
        lay = cache(partial(self._laid, replicas, costs.tokens.tolist(), train))
        asked = [own.costs for own in replicas], self._room, self.arrangement.llm.pp
        in_order = cache(partial(self._in_order, replicas, lay, metas))
        if not train:
            domain, waves = in_order(self.pairing(*asked), ())
            domain = replace(domain, encoder_batches=self._encoder_batches(domain, waves))
            domain = self._with_routes(domain, ranks)
            yield self._with_one_queue(self._with_ops(domain, build_forward_only(domain))), 0
            return

        reductions = self._reductions(frozen)

        @cache
        def orders(filled: bool) -> tuple[Pairs, ...]:
            """The orders of microbatches to try, for a schedule that fills gaps if `filled`."""
            return self.pairing.orders(*asked) if filled else (self.pairing(*asked),)

        @cache
        def batched(pairs: Pairs, each: int, coarse: int, rounds: int) -> tuple[DomainPlan, list[int]]:
            """With encoder batches for a schedule; where these stay where they are, with routes."""
            ordered, waves = in_order(pairs, reductions)
            starts = starts_of(ordered, rounds, self.table)
            batches_of = partial(self._encoder_batches, each=each, coarse=coarse)
            batches = batches_of_rounds(ordered, waves, starts, batches_of)
            made = replace(ordered, encoder_batches=batches)
            return made if each else self._with_routes(made, ranks), starts

        yield from self._candidates(orders, batched, ranks, frozenset(frozen), beyond)

    def _laid(
        self,
        replicas: Sequence[ReplicaPacks],
        lengths: Sequence[int],
        train: bool,
        chosen: Sequence[int | None],
    ) -> Microbatch:
        """Lay packs over the pool, and say whether all layers are computed anew for the backward."""
        batch = microbatch_of(replicas, lengths, self.sharing[self.llm], chosen)
        if not train or self.kept_tokens is None:
            return batch
        longest = max(map(batch.layout.local_tokens, range(batch.layout.num_cp_ranks)))
        return replace(batch, anew=longest > self.kept_tokens)

    def _in_order(
        self,
        replicas: Sequence[ReplicaPacks],
        lay: Callable[[Sequence[int | None]], Microbatch],
        metas: Sequence[SampleMeta],
        pairs: Pairs,
        reductions: tuple[tuple[int, int], ...],
    ) -> tuple[DomainPlan, list[int]]:
        """Make a domain of packs that pass together in this order: its microbatches and items, and for each
        item the microbatch with which it is encoded.
        """
        microbatches, encoded = tuple(map(lay, pairs)), encoded_with(replicas, pairs)
        items = [
            item for m, batch in enumerate(microbatches) for item in self._items(m, batch.samples, metas)
        ]
        domain = DomainPlan(
            team=self._team,
            holds=self._holds,
            pool=self.arrangement.pool,
            tp=self.arrangement.llm.tp,
            collective_group=self.collective_group,
            llm=self.components.index(self.llm),
            homes=tuple(self._home(component) for component in self.components),
            samples=(),
            microbatches=microbatches,
            items=tuple(items),
            encoder_batches=(),
            routes=(),
            ops=(),
            reductions=reductions,
            feeds=self.feeds,
        )
        return domain, [encoded[item.sample] for item in items]

    def _candidates(
        self,
        orders: Callable[[bool], tuple[Pairs, ...]],
        batched: Batched,
        ranks: Sequence[int],
        frozen: frozenset[str],
        beyond: Callable[[DomainPlan, bool], int],
    ) -> Iterator[tuple[DomainPlan, int]]:
        """Plan a domain of global `ranks` by each candidate of the schedule."""
        vpp, pp = self.arrangement.llm.vpp, self.arrangement.llm.pp
        candidates = candidates_of(self.schedule, vpp, pp, guarded=self.guarded)

        def make(policy: SchedulePolicy, rounds: int, portions: int, order: int) -> DomainPlan:
            pairs = orders(policy.fills_gaps)[order]
            return self._scheduled(batched, ranks, frozen, policy, pairs, rounds, portions)

        def count(policy: SchedulePolicy) -> int:
            return len(orders(policy.fills_gaps))

        planned = [make(policy, self.rounds or 1, 1, 0) for policy in candidates]
        others = self.guarded and (self.schedule.lean or candidates[0].encodes_ahead)
        if len(planned) == 1 and not others and count(candidates[0]) == 1:
            made = self._with_one_queue(planned[0])
            yield made, beyond(made, True)
            return
        replanning = Replanning(make, count, self.schedule, candidates, vpp, self.rounds, self.table, beyond)
        yield from quickest_first(planned, replanning, self._with_one_queue, self.table, self.single_queue)

    def next_tokens(self, domain: DomainPlan, lasting: Sequence[int]) -> DomainPlan:
        """Plan one token more of samples whose sequences a forward pass has left whole on cp ranks of the
        pool: in as many microbatches as there are stages, so that all work at a time.
        """
        cp_rank = {
            sample: next(shard.cp_rank for shard in shards if shard.length)
            for batch in domain.microbatches
            for sample, shards in zip(batch.samples, batch.layout.shards, strict=True)
        }
        count = min(len(lasting), self.arrangement.llm.pp)
        packs = [tuple(range(len(lasting)))[first::count] for first in range(count)]
        layouts = [
            SequenceLayout.whole([1] * len(pack), [cp_rank[lasting[i]] for i in pack], domain.pool)
            for pack in packs
        ]
        batches = (
            Microbatch(pack, layout, ((),) * len(pack)) for pack, layout in zip(packs, layouts, strict=True)
        )
        after = replace(
            domain,
            samples=tuple(replace(domain.samples[i], length=1, targets=()) for i in lasting),
            microbatches=tuple(batches),
            items=(),
            encoder_batches=(),
            routes=(None,) * count,
        )
        return self._with_ops(after, build_forward_only(after))

    def _scheduled(
        self,
        batched: Batched,
        ranks: Sequence[int],
        frozen: frozenset[str],
        policy: SchedulePolicy,
        pairs: Pairs,
        rounds: int,
        portions: int,
    ) -> DomainPlan:
        """Plan the encoder batches, routes and ops of a domain of global `ranks` by one schedule in so many
        rounds, ops for a queue for each communicator. Encoder batches are coarse where the schedule allows
        that and nothing bounds what encoders hold; all that is shared is in so many `portions` then.
        """
        most = self.encoder_bytes
        coarse = portions if most is None and (policy.at_once or policy.fills_gaps) else 0
        each = policy.encoder_batches_for(-(-len(pairs) // rounds), most is not None)
        domain, starts = batched(pairs, each, coarse, rounds)
        domain = replace(
            domain, bounds=self._bounds(domain, policy), schedule=policy.name, rounds=len(starts)
        )
        costs = plan_costs(domain, self.table, self.transport.link(ranks))
        kept = plan_memory(domain, self.table)
        one_queue = self.single_queue and self.collective_group > 1
        order = in_rounds(policy, domain, Facts(costs, kept, self._tp_groups, frozen, one_queue), starts)
        if policy.encoder_batches:
            domain = self._with_routes(as_ordered(domain, order), ranks)
        return self._with_ops(domain, without_frozen(order, domain, frozen))

    def _encoder_batches(
        self, domain: DomainPlan, waves: Sequence[int], each: int = 0, coarse: int = 0
    ) -> tuple[EncoderBatch, ...]:
        """Make encoder batches of a domain's items, each encoded with the microbatch that `waves` tell: so
        many for each tp group, if any, else one for each wave. They are `coarse` where starting them takes
        long: fewer of them, or those of a schedule that encodes all items at once, in so many portions.
        """
        encoder_batching = (
            partial(make_even_encoder_batches, count=each, coarse=coarse) if each else self.encoder_batching
        )
        if coarse and encoder_batching is make_encoder_batches:
            encoder_batching = partial(make_encoder_batches, at_once=coarse)
        return encoder_batching(domain.items, self._tp_groups, self.sharing, self.table.parts, waves)

    def _with_ops(self, domain: DomainPlan, order: Order) -> DomainPlan:
        """Make op lists of an order of compute, with all communication and reductions."""
        lists = expand(with_reductions(order, domain, self.components), domain)
        return replace(domain, ops=tuple(map(tuple, lists)))

    def _with_one_queue(self, domain: DomainPlan) -> DomainPlan:
        """Make op lists safe where all communication of a rank shares one queue, if it does."""
        if not self.single_queue:
            return domain
        costs = plan_costs(domain, self.table)
        lists = serialise(domain, *costs, begun_before(domain, self.table, costs[0]))
        return replace(domain, ops=tuple(map(tuple, lists)))

    def _with_routes(self, domain: DomainPlan, ranks: Sequence[int]) -> DomainPlan:
        """Plan the way of every microbatch's rows over a domain of global `ranks`."""
        routes = (
            None if route is None else self.transport.choose(route, ranks) for route in plan_routes(domain)
        )
        return replace(domain, routes=tuple(routes))

    def _reductions(self, frozen: Sequence[str]) -> tuple[tuple[int, int], ...]:
        """The order in which gradients are reduced: components in theirs, the LLM's virtual stages from
        the last on, since its gradients are complete first.
        """
        of_llm = self.arrangement.llm.num_virtual_stages
        return tuple(
            (number, virtual_stage)
            for number, component in enumerate(self.components)
            if component not in frozen
            for virtual_stage in reversed(range(of_llm if component == self.llm else 1))
        )

    def _bounds(self, domain: DomainPlan, policy: SchedulePolicy) -> tuple[tuple[str, int], ...]:
        """Bytes of each part's activations: of the most microbatches that a schedule has in flight, and of
        encoders at most so many, if they are bounded.
        """
        kept, bounds = plan_memory(domain, self.table), []
        microbatches = range(len(domain.microbatches))
        for number in range(domain.num_virtual_stages):
            most = policy.in_flight(domain, number)
            first = domain.holder(number, 0)
            sizes = (
                sorted(
                    (kept(rank, Op(Kind.FORWARD, m, virtual_stage=number)) for m in microbatches),
                    reverse=True,
                )
                for rank in range(first, first + domain.stage_size, domain.tp)
            )
            bounds.append((virtual_stage_name(self.llm, number), max(sum(of[:most]) for of in sizes)))
        if self.encoder_bytes is not None:
            bounds += [(name, self.encoder_bytes) for name in self._tp_groups]
        return tuple(bounds)

    @cached_property
    def _team(self) -> int:
        """Neighbouring ranks that share every layer that they run."""
        world = self.arrangement
        return gcd(world.llm.tp, *world.encoder_tp.values(), world.domain_size - world.llm_size)

    @cached_property
    def _holds(self) -> tuple[tuple[int, ...], ...]:
        """The virtual stages of the LLM of each team, none beside it."""
        world = self.arrangement
        stage = world.stage_size // self._team
        llm = [held for held in world.virtual_stages_by_stage for _ in range(stage)]
        return (*llm, *((),) * ((world.domain_size - world.llm_size) // self._team))

    def _home(self, component: str) -> tuple[int, int]:
        """The first domain rank that holds a component, and the one after the last."""
        if component not in self._tp_groups:
            return 0, self.arrangement.llm_size
        tp_groups = self._tp_groups[component]
        return tp_groups[0][0], tp_groups[-1][-1] + 1

    def _packed(self, members: Sequence[Sequence[int]], costs: SampleCosts) -> list[ReplicaPacks]:
        """Pack the samples of each replica. Where the cp ranks of all replicas share sequences, these are
        one, with room for what they hold.
        """
        size = self.pack_tokens
        if len(members) > 1 and not self.sharing[self.llm].policy.within_replica:
            size = max(size, self._room * SHARED_ROOM[0] // (SHARED_ROOM[1] * self.pack_divisor))
            members = [sorted(i for mine in members for i in mine)]
        return packed(self.packing, members, costs, size)

    @property
    def _room(self) -> int:
        """Tokens of a microbatch of several packs: a full pack of each replica."""
        return self.microbatch_tokens * self.arrangement.replicas

    def _items(
        self, microbatch: int, samples: Sequence[int], metas: Sequence[SampleMeta]
    ) -> list[PlannedItem]:
        items = []
        start = 0
        for sample in samples:
            meta = metas[sample]
            for index, (item, offset) in enumerate(zip(meta.items, item_row_offsets(meta), strict=True)):
                component = self.encoders[item.modality]
                place = sample, index, microbatch
                rows, grid, runs = self.layout_of(item)
                items.append(PlannedItem(component, *place, item.tokens, rows, start + offset, grid, runs))
            start += length(meta)
        return items

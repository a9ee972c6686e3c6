"""Compose the plan of a step, level by level: pure, from metadata to op lists.

    stream      which samples, up to the step's budget                          (the world's level)
    deal        samples → groups of domains, if there are several, by length or cost
    balance     samples of a group → its domains, and those of each → its replicas, by cost      (a group's)
    domain      everything that the ranks of a domain do together: `domain_planner.py`         (a domain's)

A rank composes the world's level, its group's and its domain's, and nothing of other groups and domains. The
planner knows no policy by name, only the facts that its kind states. It reads no clock and no rank: all
ranks that share a level compose it from the same arguments and get the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dataloader.balance import SampleCosts
from dataloader.global_batch import Lengths, take_global_batch
from dataloader.stream import Ints, Order
from dataloader.tokens import SampleMeta, fit, length
from omni.planning.domain_planner import DomainPlanner
from omni.planning.encoder_memory import check_encoder_bytes
from omni.planning.sharing import Sharing
from parallel.costs import CostTable
from pipeline.costs import plan_memory
from pipeline.domain_plan import DomainPlan
from pipeline.plan import GroupPlan, StepPlan, Taken
from pipeline.verifier import verify

ItemTokens = Callable[[str, Ints], Mapping[str, tuple[Ints, Ints]]]
"""From a source's name and ids [n] to its items, by modality: the place of each item's sample among the ids
[k], and its encoder tokens [k]: `Index.item_tokens` of the source.
"""


def _anything(plan: StepPlan) -> None:
    """Admit a plan."""


def _always(plan: StepPlan) -> bool:
    """Say that a plan fits."""
    return True


@dataclass(frozen=True)
class _Group:
    """The level of a group: its domains; the numbers of its samples in the step, their metadata and costs;
    and by domain, for each replica, the places of its samples among these.
    """

    domains: range
    numbers: tuple[int, ...]
    metas: tuple[SampleMeta, ...]
    costs: SampleCosts
    replicas: list[list[list[int]]]


@dataclass(frozen=True, kw_only=True)
class Planner(DomainPlanner):
    """Plans any step of a run.

    `metas` reads a sample's metadata by source and id, `lengths` those of many samples, `items` their items;
    `frozen` tells the components frozen at a step; samples are reordered among `group_size` neighbouring
    domains; `share` says how components share sequences by a cost table. Of a schedule with candidates, the
    plan of least simulated time is taken among those that `fits` says all ranks of the domain can hold.
    `admit` refuses a plan that breaks no rule, but that whoever plans cannot run.
    """

    stream: Order
    metas: Callable[[str, int], SampleMeta]
    lengths: Lengths
    items: ItemTokens
    frozen: Callable[[int], tuple[str, ...]]
    group_size: int
    share: Callable[[CostTable], Mapping[str, Sharing]]
    fits: Callable[[StepPlan], bool] = _always
    admit: Callable[[StepPlan], None] = _anything

    def with_table(self, table: CostTable) -> "Planner":
        """Return the planner that plans with another cost table."""
        return self if table == self.table else replace(self, table=table, sharing=self.share(table))

    def next_step(self, step: int, cursor: int, number: int) -> StepPlan:
        """Plan step `step` of training, from stream position `cursor`, for domain `number`.

        The plan says where the next step begins.
        """
        taken = self.take(cursor)
        group = self._group(taken, self.groups_of(taken), number // self.group_size)
        return self._compose(step, taken, group, number, self.frozen(step), train=True)

    def all_domains(self, step: int, cursor: int) -> Iterator[StepPlan]:
        """Plan step `step` of training for every domain in turn; what domains share is composed once."""
        taken = self.take(cursor)
        groups = self.groups_of(taken)
        for place in range(self.num_groups):
            group = self._group(taken, groups, place)
            for number in group.domains:
                yield self._compose(step, taken, group, number, self.frozen(step), train=True)

    def cursor_of(self, step: int) -> int:
        """Return the stream position at which a step of training begins: it depends on those before it."""
        cursor = 0
        for _ in range(1, step):
            cursor = self.take(cursor).next_cursor
        return cursor

    def groups_of(self, taken: Taken) -> list[int]:
        """Return the number of the group that each sample of a step goes to."""
        if self.num_groups == 1:
            return [0] * len(taken)  # without looking up what samples cost
        num_domains = self.arrangement.num_domains
        sizes = [len(range(*self._group_of(first))) for first in range(0, num_domains, self.group_size)]
        deal = self.policies.deal
        work = self._phases_of(taken) if deal.by_cost else np.array(taken.lengths, np.int64)[:, None]
        return deal(work, sizes)

    def _phases_of(self, taken: Taken) -> Ints:
        """What the samples of a step take of the LLM and of encoders [n, 2]."""
        sources, ids = np.array(taken.source, np.int64), np.array(taken.ids, np.int64)
        items = []
        for number in sorted(set(taken.source)):
            of = np.flatnonzero(sources == number)
            for modality, (place, tokens) in self.items(taken.sources[number], ids[of]).items():
                items.append((modality, of[place], tokens))
        return self.costing.phases(taken.lengths, items)

    def _group(self, taken: Taken, groups: Sequence[int], place: int) -> _Group:
        """Compose the level of a group: `groups` are those that the samples of the step go to."""
        metas = {n: self.meta_of(taken, n) for n, group in enumerate(groups) if group == place}
        return self._divided(metas, range(*self._group_of(place * self.group_size)))

    def _divided(self, metas: Mapping[int, SampleMeta], domains: range) -> _Group:
        """Divide samples, by number in the step, over domains and their replicas."""
        costs = self.costing.costs(list(metas.values()))
        return _Group(domains, tuple(metas), tuple(metas.values()), costs, self.divide(costs, len(domains)))

    def evaluation(
        self, step: int, samples: Sequence[SampleMeta], num_domains: int, number: int = 0
    ) -> StepPlan:
        """Plan one forward pass over given samples, no longer than the budget allows, for domain `number`
        of `num_domains`.
        """
        sources = tuple(dict.fromkeys(meta.source for meta in samples))
        taken = Taken(
            cursor=0,
            next_cursor=0,
            sources=sources,
            source=tuple(sources.index(meta.source) for meta in samples),
            ids=tuple(meta.id for meta in samples),
            lengths=tuple(map(length, samples)),
        )
        group = self._divided(dict(enumerate(samples)), range(num_domains))
        return self._compose(step, taken, group, number, (), train=False)

    def verify(self, plan: StepPlan) -> None:
        """Refuse a plan that could hang or hold too much.

        Raises:
            PlanRefusedError: with the rules that it breaks.
            ConfigError: if encoders hold more than they may.
            Exception: what `admit` raises.
        """
        ranks, kept = self.arrangement.domain_ranks(plan.number), plan_memory(plan.domain, self.table)
        if self.encoder_bytes is not None:
            check_encoder_bytes(plan, kept, self.encoder_bytes, ranks)
        verify(plan, kept, self.single_queue, ranks)
        self.admit(plan)

    def meta(self, source: str, sample: int) -> SampleMeta | None:
        """Return a sample's metadata as it is trained on: truncated if it must be, None if it is dropped."""
        return fit(self.metas(source, sample), self.budget.longest, self.budget.on_long)

    def metas_of(self, domain: DomainPlan) -> list[SampleMeta]:
        """Return the metadata of a domain's samples in training, in their order."""
        return [self._kept(sample.source, sample.id) for sample in domain.samples]

    def meta_of(self, taken: Taken, number: int) -> SampleMeta:
        """Return the metadata of a sample of a step as it is trained on."""
        return self._kept(taken.sources[taken.source[number]], taken.ids[number])

    def _kept(self, source: str, sample: int) -> SampleMeta:
        meta = self.meta(source, sample)
        assert meta is not None, "a dropped sample is in no plan"
        return meta

    @property
    def num_groups(self) -> int:
        """Groups of domains."""
        return -(-self.arrangement.num_domains // self.group_size)

    def _group_of(self, domain: int) -> tuple[int, int]:
        """The first domain of the group that a domain belongs to, and the one after its last."""
        first = domain - domain % self.group_size
        return first, min(first + self.group_size, self.arrangement.num_domains)

    def take(self, cursor: int) -> Taken:
        """Take a step's samples from stream position `cursor` on."""
        batch = take_global_batch(self.stream, self.lengths, self.metas, cursor, self.budget)
        return Taken(
            cursor=cursor,
            next_cursor=batch.next_cursor,
            sources=self.stream.names,
            source=tuple(batch.sources.tolist()),
            ids=tuple(batch.ids.tolist()),
            lengths=tuple(batch.lengths.tolist()),
            skipped=batch.skipped,
        )

    def _compose(
        self,
        step: int,
        taken: Taken,
        group: _Group,
        number: int,
        frozen: tuple[str, ...],
        train: bool,
    ) -> StepPlan:
        """Plan domain `number` of a group."""
        numbers, costs = group.numbers, group.costs
        planned = GroupPlan(
            number=number // self.group_size if train else 0,
            first=group.domains[0],
            replicas=tuple(tuple(tuple(numbers[i] for i in of) for of in own) for own in group.replicas),
        )
        own = group.replicas[number - group.domains[0]]
        mine = sorted(i for replica in own for i in replica)
        local = {i: place for place, i in enumerate(mine)}
        candidates = self.plan_domain(
            number,
            [[local[i] for i in replica] for replica in own],
            taken,
            [group.metas[i] for i in mine],
            costs.take(mine),
            frozen,
            train,
        )
        samples = tuple(taken.sample(numbers[i]) for i in mine)
        costliest = max(((costs.total_ns[i], numbers[i]) for i in mine), default=(0, 0))
        plans = [
            StepPlan(
                step=step,
                train=train,
                cost_table=self.table.number,
                components=self.components,
                frozen=frozen,
                taken=taken,
                group=planned,
                number=number,
                domain=replace(domain, samples=samples, costliest=costliest),
                learnt=self.table.learnt,
            )
            for domain in candidates
        ]
        if len(plans) == 1:
            return plans[0]
        # Where none fits, the quickest goes on, and is refused with what it is made of.
        return next(filter(self.fits, plans), plans[0])

"""Compose the plan of a step, level by level: pure, from metadata to op lists.

    world    which samples, up to the step's budget; samples → groups of domains      `world_planner.py`
    group    samples of a group → its domains, and those of each → its replicas       `group_planner.py`
    domain   everything that the ranks of a domain do together                        `domain_planner.py`

A rank composes the world's level, its group's and its domain's, and nothing of other groups and domains. The
planner knows no policy by name, only the facts that its kind states. It reads no clock and no rank: all
ranks that share a level compose it from the same arguments and get the same.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Protocol

import numpy as np

from dataloader.global_batch import Budget
from dataloader.tokens import SampleMeta, length, target_runs
from omni.planning.domain_planner import DomainPlanner
from omni.planning.encoder_memory import check_encoder_bytes
from omni.planning.group_planner import Group, GroupPlanner
from omni.planning.sharing import Sharing
from omni.planning.world_planner import WorldPlanner
from parallel.costs import CostTable
from pipeline.costs import plan_memory
from pipeline.domain_plan import DomainPlan
from pipeline.plan import StepPlan, Taken
from pipeline.verifier import verify


def _anything(plan: StepPlan) -> None:
    """Admit a plan."""


class Beyond(Protocol):
    """Tells of what ranks hold."""

    def __call__(self, plan: StepPlan, closely: bool = True) -> int:
        """Return the bytes a plan's fullest rank holds beyond what it can: closely, or of likely ranks."""


def _nothing(plan: StepPlan, closely: bool = True) -> int:
    """Say that a plan fits."""
    return 0


@dataclass(frozen=True, kw_only=True)
class Planner:
    """Plans any step of a run, by a planner of each level.

    `frozen` tells the components frozen at a step; `share` says how components share sequences by a cost
    table. `beyond` tells how many bytes the fullest rank of a plan's domain holds beyond what its device
    can, at most 0 if it fits, of likely ranks alone or closely. Of the candidates of a schedule that fit,
    that of least simulated time is taken; if none fits, the plan that is least beyond.
    `admit` refuses a plan that breaks no rule, but that whoever plans cannot run.
    """

    world: WorldPlanner
    group: GroupPlanner
    domain: DomainPlanner
    frozen: Callable[[int], tuple[str, ...]]
    share: Callable[[CostTable], Mapping[str, Sharing]]
    beyond: Beyond = _nothing
    admit: Callable[[StepPlan], None] = _anything

    def with_table(self, table: CostTable) -> "Planner":
        """Return the planner that plans with another cost table."""
        if table == self.domain.table:
            return self
        return replace(self, domain=replace(self.domain, table=table, sharing=self.share(table)))

    def with_budget(self, budget: Budget) -> "Planner":
        """Return the planner that plans with another budget."""
        domain = replace(self.domain, microbatch_tokens=budget.microbatch_tokens)
        return replace(self, world=self.world.with_budget(budget), domain=domain)

    def next_step(self, step: int, cursor: int, number: int) -> StepPlan:
        """Plan step `step` of training, from stream position `cursor`, for domain `number`.

        The plan says where the next step begins.
        """
        assert self.world.is_of_step(cursor, step), f"step {step} does not begin at {cursor}: other phases"
        taken = self.world.take(cursor)
        groups = self.world.groups_of(taken, self.domain.costing)
        place = number // self.world.group_size
        return self._compose(step, taken, self._group(taken, groups, place), place, number)

    def all_domains(self, step: int, cursor: int) -> Iterator[StepPlan]:
        """Plan step `step` of training for every domain in turn; what domains share is composed once."""
        for taken, place, group in self._groups(cursor):
            for number in group.domains:
                yield self._compose(step, taken, group, place, number)

    def distinct_domains(self, step: int, cursor: int) -> Iterator[StepPlan]:
        """Plan step `step` of training for every domain that has samples, and for the first of those that
        have none, which all run the same.
        """
        idle = False
        for taken, place, group in self._groups(cursor):
            for number, replicas in group.own:
                if any(replicas) or not idle:
                    yield self._compose(step, taken, group, place, number)
                idle |= not any(replicas)

    def busiest(self, step: int, cursor: int) -> Iterator[tuple[StepPlan, int]]:
        """Plan step `step` of training for the domains that samples load most, these first: of the group with
        the most work, and of that with the costliest sample. Tells of each how many bytes it is beyond what
        ranks can hold, at most 0 if it fits.
        """
        taken, costing = self.world.take(cursor), self.domain.costing
        phases = self.world.phases_of(taken, costing)
        groups, work = self.world.groups_of(taken, costing, phases), phases.sum(1)
        of_group = np.zeros(len(self.world.groups), np.int64)
        np.add.at(of_group, groups, work)
        places = dict.fromkeys((int(of_group.argmax()), groups[int(work.argmax())]))
        loads = []
        for place in places:
            group = self._group(taken, groups, place)
            loads += [(-group.load_ns(own, costing.alone), number, place, group) for number, own in group.own]
        loads.sort(key=lambda load: load[:2])
        for _, number, place, group in loads:
            yield self._checked(step, taken, group, place, number)

    def cursor_of(self, step: int) -> int:
        """Return the stream position at which a step of training begins: it depends on those before it."""
        cursor = 0
        for _ in range(1, step):
            cursor = self.world.take(cursor).next_cursor
        return cursor

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
        group = self.group.compose(dict(enumerate(samples)), range(num_domains), self.domain.costing)
        return self._compose(step, taken, group, 0, number, train=False)

    def generation(self) -> "Planner":
        """Return the planner of passes that generate: no ranks share a sequence, which stays where it is."""
        own = self.domain
        whole = {**own.sharing, own.llm: own.sharing[own.llm].kept_whole()}
        return replace(self, domain=replace(own, sharing=whole), share=lambda table: whole)

    def next_tokens(self, plan: StepPlan, lasting: Sequence[int]) -> StepPlan:
        """Plan a forward pass over one token more of some samples of a plan of generation, given by number in
        its domain. They are numbered anew, in the order given, and stay on the ranks that hold them.
        """
        return replace(plan, domain=self.domain.next_tokens(plan.domain, lasting))

    def verify(self, plan: StepPlan) -> None:
        """Refuse a plan that could hang or hold too much.

        Raises:
            PlanRefusedError: with the rules that it breaks.
            ConfigError: if encoders hold more than they may.
            Exception: what `admit` raises.
        """
        own = self.domain
        ranks, kept = own.arrangement.global_ranks(plan.number), plan_memory(plan.domain, own.table)
        if own.encoder_bytes is not None:
            check_encoder_bytes(plan, kept, own.encoder_bytes, ranks)
        verify(plan, kept, own.single_queue, ranks)
        self.admit(plan)

    def metas_of(self, domain: DomainPlan) -> list[SampleMeta]:
        """Return the metadata of a domain's samples in training, in their order."""
        return [self.world.kept(sample.source, sample.id) for sample in domain.samples]

    def _groups(self, cursor: int) -> Iterator[tuple[Taken, int, Group]]:
        """Compose the level of each group of a step in turn: the samples of the step, the group's number."""
        taken = self.world.take(cursor)
        groups = self.world.groups_of(taken, self.domain.costing)
        for place in range(len(self.world.groups)):
            yield taken, place, self._group(taken, groups, place)

    def _group(self, taken: Taken, groups: Sequence[int], place: int) -> Group:
        """Compose the level of the group of number `place`; `groups` are those that samples go to."""
        metas = self.world.metas_in(taken, groups, place)
        return self.group.compose(metas, self.world.groups[place], self.domain.costing)

    def _compose(
        self, step: int, taken: Taken, group: Group, place: int, number: int, *, train: bool = True
    ) -> StepPlan:
        """Plan domain `number` of the group of number `place`."""
        return self._checked(step, taken, group, place, number, train)[0]

    def _checked(
        self, step: int, taken: Taken, group: Group, place: int, number: int, train: bool = True
    ) -> tuple[StepPlan, int]:
        """Plan a domain, and tell how many bytes it is beyond what ranks can hold, at most 0 if it fits."""
        frozen = self.frozen(step) if train else ()
        own = group.replicas[number - group.domains[0]]
        mine = sorted(i for replica in own for i in replica)
        local = {i: at for at, i in enumerate(mine)}
        samples = tuple(taken.sample(group.numbers[i], target_runs(group.metas[i])) for i in mine)
        costliest = max(((group.costs.total_ns[i], group.numbers[i]) for i in mine), default=(0, 0))
        of_group, table = group.plan(place), self.domain.table

        def plan_of(domain: DomainPlan) -> StepPlan:
            return StepPlan(
                step=step,
                train=train,
                cost_table=table.number,
                components=self.domain.components,
                frozen=frozen,
                taken=taken,
                group=of_group,
                number=number,
                domain=replace(domain, samples=samples, costliest=costliest),
                learnt=table.learnt,
            )

        candidates = self.domain.plan_domain(
            number,
            [[local[i] for i in replica] for replica in own],
            [group.metas[i] for i in mine],
            group.costs.take(mine),
            frozen,
            train,
            lambda domain, closely: self.beyond(plan_of(domain), closely=closely),
        )
        seen = []
        for domain, more in candidates:
            seen.append((plan_of(domain), more))
            if more <= 0:
                break
        # Where none fits, the one that holds least goes on, and is refused with what it is made of.
        return min(seen, key=itemgetter(1))

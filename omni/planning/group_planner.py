"""A group's level of a plan: its samples divided over its domains, and those of each over its replicas."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dataloader.balance import BalancePolicy, Bins, SampleCosts
from dataloader.tokens import SampleMeta
from omni.planning.sample_costs import Costing
from pipeline.plan import GroupPlan


@dataclass(frozen=True)
class Group:
    """The level of a group: its domains; the numbers of its samples in the step, their metadata and costs;
    and by domain, for each replica, the places of its samples among these.
    """

    domains: range
    numbers: tuple[int, ...]
    metas: tuple[SampleMeta, ...]
    costs: SampleCosts
    replicas: list[list[list[int]]]

    @property
    def own(self) -> Iterator[tuple[int, list[list[int]]]]:
        """Its domains by number, each with the places of the samples of its replicas."""
        return zip(self.domains, self.replicas, strict=True)

    def load_ns(self, replicas: Sequence[Sequence[int]], alone: Sequence[bool]) -> int:
        """Return what samples take a domain, at least: the sum over components of what all its replicas take
        together, or where a replica bears it `alone`, the busiest of them.
        """
        sums = np.array([self.costs.ns[list(of)].sum(0) for of in replicas])
        least = self.costs.unsplit_ns[[i for of in replicas for i in of]].max(0, initial=0)
        together = np.where(alone, sums.max(0), sums.sum(0) // len(replicas))
        return int(np.maximum(together, least).sum())

    def plan(self, number: int) -> GroupPlan:
        """Return the level as it stands in plans, of the group of this number."""
        numbers = self.numbers
        replicas = tuple(tuple(tuple(numbers[i] for i in of) for of in own) for own in self.replicas)
        return GroupPlan(number=number, first=self.domains[0], replicas=replicas)


@dataclass(frozen=True)
class GroupPlanner:
    """Divides samples over domains of `replicas` replicas by a policy."""

    balance: BalancePolicy
    replicas: int

    def compose(self, metas: Mapping[int, SampleMeta], domains: range, costing: Costing) -> Group:
        """Divide samples, by number in the step, over domains and their replicas."""
        costs = costing.costs(list(metas.values()))
        replicas = self.divide(costs, len(domains), costing.alone)
        return Group(domains, tuple(metas), tuple(metas.values()), costs, replicas)

    def divide(self, costs: SampleCosts, num_domains: int, alone: tuple[bool, ...]) -> list[list[list[int]]]:
        """Divide the samples of a group over its domains, and those of each over its replicas; return their
        places among the `costs`. `alone` says of which costs a replica bears its own.
        """
        domains = Bins(num_domains, self.replicas, (True,) * len(alone))
        out = []
        for own in self._balance(list(range(len(costs))), costs, domains):
            out.append(self._balance(own, costs.take(own), Bins(self.replicas, 1, alone)))
        return out

    def _balance(self, numbers: Sequence[int], costs: SampleCosts, bins: Bins) -> list[list[int]]:
        """Divide samples, given by number, over bins."""
        out: list[list[int]] = [[] for _ in range(bins.count)]
        for number, chosen in zip(numbers, self.balance(costs, bins), strict=True):
            out[chosen].append(number)
        return out

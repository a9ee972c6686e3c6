"""What else is planned of a domain once some plan of it fits, or does not.

One that fits comes in other orders of microbatches, too. One that does not holds less where what ranks share
at once comes in portions, under a schedule that goes less far ahead, or in rounds (`rounds.py`). More of them
are tried as long as they bring something.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from omni.planning.rounds import PORTIONS, Hope, helps, of_encoders, rounds_to_try, workspace_at_once
from parallel.costs import CostTable
from pipeline.builders import SchedulePolicy
from pipeline.builders.schedule import lean_of
from pipeline.domain_plan import DomainPlan

Refused = tuple[DomainPlan, int]
"""A plan that does not fit, or may not, and the bytes that it is beyond."""


Make = Callable[[SchedulePolicy, int, int, int], DomainPlan]
"""Plans a domain by a schedule, in so many rounds, all that is shared of each in so many portions, and in one
of its orders of microbatches.
"""


@dataclass(frozen=True)
class Replanning:
    """Makes further plans of a domain, which was planned by `candidates` of a `schedule`, for so many virtual
    stages on a rank, in so many `rounds`, if these are given; in as many orders as `orders` says of a
    candidate. Plans may be `beyond` what devices hold, in bytes, asked closely or not. `tried` are, by
    schedule, the portions of its last plan, and what the one before was beyond and might free.
    """

    make: Make
    orders: Callable[[SchedulePolicy], int]
    schedule: SchedulePolicy
    candidates: Sequence[SchedulePolicy]
    vpp: int
    rounds: int | None
    table: CostTable
    beyond: Callable[[DomainPlan, bool], int]
    tried: dict[str, tuple[int, Hope | None]] = field(default_factory=dict)

    def in_other_orders(self, plan: DomainPlan) -> Iterator[DomainPlan]:
        """Plan as a plan that fits, in each other order of microbatches."""
        policy = self._policy(plan.schedule)
        portions, _ = self.tried.get(plan.schedule, (1, None))
        for order in range(1, self.orders(policy)):
            yield self.make(policy, self.rounds or 1, portions, order)

    def otherwise(self, plan: DomainPlan, more: int) -> Iterator[DomainPlan]:
        """Plan instead of a plan that is `more` bytes beyond: by a schedule that holds less, and in twice as
        many portions.
        """
        policy = self._policy(plan.schedule)
        portions, before = self.tried.get(plan.schedule, (1, None))
        now = more, workspace_at_once(plan, self.table)
        if policy.shallower is not None and self.schedule.candidates and portions == 1:
            yield self.make(policy.shallower, self.rounds or 1, 1, 0)
        if portions < PORTIONS and now[1] >= more and helps(before, now):
            self.tried[plan.schedule] = 2 * portions, now
            yield self.make(policy, self.rounds or 1, 2 * portions, 0)

    def leaner(self, refused: Sequence[Refused]) -> Iterator[Refused]:
        """Plan in rounds, where nothing fits otherwise, and by lean schedules in the end; with the bytes that
        each plan is beyond. Of those `refused` the quicker ones come first.
        """
        whole = dict[str, Refused]()  # of each schedule the plan in no portions, which came first
        for each in refused:
            whole.setdefault(each[0].schedule, each)
        ahead = [each for name, each in whole.items() if self._policy(name).encodes_ahead]
        last = {name: (more, of_encoders(plan, self.table)) for name, (plan, more) in whole.items()}
        in_vain = set[str]()
        for number, rounds in rounds_to_try(ahead if self.rounds is None else (), self.table):
            name = ahead[number][0].schedule
            for portions in (1, 2) if name not in in_vain else ():
                plan = self.make(self._policy(name), rounds, portions, 0)
                yield plan, (more := self.beyond(plan, False))
                now = more, of_encoders(plan, self.table)
                if portions == 1 and not helps(last[name], now):
                    in_vain.add(name)
                last[name] = now
                if name in in_vain or not workspace_at_once(plan, self.table):
                    break
        for policy in lean_of(self.schedule, self.vpp):
            yield (plan := self.make(policy, 1, 1, 0)), self.beyond(plan, False)

    def _policy(self, name: str) -> SchedulePolicy:
        """The candidate of a name, or the shallower schedule of one."""
        known = (policy for each in self.candidates for policy in (each, each.shallower) if policy)
        return next(policy for policy in known if policy.name == name)

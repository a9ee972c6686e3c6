"""The world's level of a plan: which samples a step takes, and the group of domains that each goes to.

Every rank composes this level of every step, whatever its domain: it is columns of numbers.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dataloader.dealing import DealPolicy
from dataloader.global_batch import Budget, take_global_batch
from dataloader.samples import Samples
from dataloader.tokens import SampleMeta, fit
from omni.planning.sample_costs import Costing
from ops.ints import Ints
from pipeline.plan import Taken


@dataclass(frozen=True)
class MixturePhase:
    """Part of a run with a mixture of its own: from step `first`, which begins at position `start` of the
    stream, steps take `samples`. A step has `step_tokens` or `step_samples`, None for what it had before.
    """

    first: int
    start: int
    samples: Samples
    step_tokens: int | None = None
    step_samples: int | None = None


@dataclass(frozen=True)
class WorldPlanner:
    """Takes the samples of a step, up to a budget, and deals them to groups of `group_size` neighbouring ones
    of `num_domains` domains. From the start of each of the `later` phases on, steps take what it says.
    """

    samples: Samples
    budget: Budget
    deal: DealPolicy
    num_domains: int
    group_size: int
    later: tuple[MixturePhase, ...] = ()

    def samples_at(self, cursor: int) -> Samples:
        """Return what steps take samples of at a position of the stream."""
        number = self._phase(cursor)
        return self.later[number - 1].samples if number else self.samples

    def budget_at(self, cursor: int) -> Budget:
        """Return what a step takes at a position of the stream."""
        budget = self.budget
        for phase in self.later[: self._phase(cursor)]:
            if (phase.step_tokens, phase.step_samples) != (None, None):
                budget = replace(budget, step_tokens=phase.step_tokens, step_samples=phase.step_samples)
        return budget

    def with_budget(self, budget: Budget) -> "WorldPlanner":
        """Return the planner of which steps have another budget, those of all phases."""
        later = tuple(replace(phase, step_tokens=None, step_samples=None) for phase in self.later)
        return replace(self, budget=budget, later=later)

    def is_of_step(self, cursor: int, step: int) -> bool:
        """Whether a step may begin at a position of the stream: both are of the same phase."""
        return self._phase(cursor) == bisect_right([phase.first for phase in self.later], step)

    def _phase(self, cursor: int) -> int:
        """How many of the later phases have begun at a position of the stream."""
        return bisect_right([phase.start for phase in self.later], cursor)

    def take(self, cursor: int) -> Taken:
        """Take a step's samples from stream position `cursor` on: all of one phase, that of the position."""
        samples, budget = self.samples_at(cursor), self.budget_at(cursor)
        batch = take_global_batch(samples.stream, samples.lengths, samples.metas, cursor, budget)
        return Taken(
            cursor=cursor,
            next_cursor=batch.next_cursor,
            sources=samples.stream.names,
            source=tuple(batch.sources.tolist()),
            ids=tuple(batch.ids.tolist()),
            lengths=tuple(batch.lengths.tolist()),
            skipped=batch.skipped,
        )

    @property
    def groups(self) -> list[range]:
        """The domains of each group."""
        every, size = range(self.num_domains), self.group_size
        return [every[first : first + size] for first in every[::size]]

    def groups_of(self, taken: Taken, costing: Costing, phases: Ints | None = None) -> list[int]:
        """Return the number of the group that each sample of a step goes to; `phases_of` it may be given."""
        if len(self.groups) == 1:
            return [0] * len(taken)  # without looking up what samples cost
        if not self.deal.by_cost:
            work = np.array(taken.lengths, np.int64)[:, None]
        else:
            work = self.phases_of(taken, costing) if phases is None else phases
        return self.deal(work, list(map(len, self.groups)))

    def phases_of(self, taken: Taken, costing: Costing) -> Ints:
        """Return what the samples of a step take of the LLM and of encoders: nanoseconds [n, 2]."""
        sources, ids = np.array(taken.source, np.int64), np.array(taken.ids, np.int64)
        items = []
        for number in sorted(set(taken.source)):
            of = np.flatnonzero(sources == number)
            for modality, (place, tokens) in self.samples.items(taken.sources[number], ids[of]).items():
                items.append((modality, of[place], tokens))
        return costing.phases(taken.lengths, items)

    def truncated(self, taken: Taken) -> list[int]:
        """Return which samples of a step, by number in it, are trained on as a prefix: those that would be
        dropped if long ones were.
        """
        if self.budget.on_long != "truncate":
            return []
        lengths, longest = self.samples_at(taken.cursor).lengths, self.budget.longest
        sources, ids = np.array(taken.source, np.int64), np.array(taken.ids, np.int64)
        found = np.zeros(len(taken), np.bool_)
        for number in sorted(set(taken.source)):
            of = sources == number
            found[of] = lengths(taken.sources[number], ids[of], longest, "drop") == 0
        return np.flatnonzero(found).tolist()

    def metas_in(self, taken: Taken, groups: Sequence[int], group: int) -> dict[int, SampleMeta]:
        """Return the metadata of the samples that go to a group, by number in the step; `groups` are those
        that all go to.
        """
        own = np.flatnonzero(np.array(groups, np.int64) == group)
        return {n: self.meta_of(taken, n) for n in own.tolist()}

    def meta(self, source: str, sample: int) -> SampleMeta | None:
        """Return a sample's metadata as it is trained on: truncated if it must be, None if it is dropped."""
        return fit(self.samples.metas(source, sample), self.budget.longest, self.budget.on_long)

    def meta_of(self, taken: Taken, number: int) -> SampleMeta:
        """Return the metadata of a sample of a step as it is trained on."""
        return self.kept(taken.sources[taken.source[number]], taken.ids[number])

    def kept(self, source: str, sample: int) -> SampleMeta:
        """Return the metadata of a sample that a step takes, as it is trained on."""
        meta = self.meta(source, sample)
        assert meta is not None, "a dropped sample is in no plan"
        return meta

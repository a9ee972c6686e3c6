"""The plan of one step: everything that a rank and those it works with will do, as plain integers.

A plan is a pure function of sample metadata, layouts, policies and a numbered cost table. It has three
levels, and a rank composes of each what it has a part in, so that planning costs a rank the same in a world
of any size:

    StepPlan       the world's: which samples the step takes, what trains, the order of reductions
      group        a group of domains: which of the group's samples go to which domain and replica
      domain       one domain, that of the rank: everything its ranks do together
        microbatches      which samples are packed together, and which ranks hold their tokens
        items             images, clips, recordings: how large, where their rows belong
        encoder_batches   which ranks of the domain encode which items, as one unit of work
        routes            for each microbatch, which rows travel from which rank to which
        holds             which ranks hold which virtual stages of the LLM
        ops               for each team of ranks, the ordered list of its actions
        bounds            bytes of activations that a domain rank may hold, by part

What a domain holds is declared in `pipeline/domain_plan.py`. Every rank computes its plan alone; equal plans
have equal digests, compared level by level before anything runs. A plan holds no tensor, no clock reading and
no float, and it can be written, compared and printed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cached_property
from typing import Any

from parallel.laws import Laws
from pipeline.digest import digest_of
from pipeline.domain_plan import DomainPlan, PlannedSample


@dataclass(frozen=True)
class GroupPlan:
    """Which samples of the step go where in a group of neighbouring domains, by number in the step.

    `replicas[d][r]` are those of replica r of domain `first + d`.
    """

    number: int
    first: int
    replicas: tuple[tuple[tuple[int, ...], ...], ...]

    @cached_property
    def digest(self) -> int:
        """A 63-bit hash of the group's plan."""
        return digest_of(self)


@dataclass(frozen=True)
class Taken:
    """What a step takes of the stream, in its order: by sample the number of its source among `sources`, its
    id there and its tokens in the LLM. `skipped` are those passed over, by source and id. The step begins
    at `cursor` of the stream, the next one at `next_cursor`.
    """

    cursor: int
    next_cursor: int
    sources: tuple[str, ...]
    source: tuple[int, ...]
    ids: tuple[int, ...]
    lengths: tuple[int, ...]
    skipped: tuple[tuple[str, int], ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def tokens(self) -> int:
        """Tokens of the step in the LLM."""
        return sum(self.lengths)

    def sample(self, number: int, targets: tuple[tuple[int, int], ...]) -> PlannedSample:
        """Return one sample, whose `targets` its metadata tells."""
        source = self.sources[self.source[number]]
        return PlannedSample(source, self.ids[number], self.lengths[number], targets)


@dataclass(frozen=True)
class World:
    """The level of a plan that all ranks of the world share: see `StepPlan`."""

    step: int
    train: bool
    cost_table: int
    learnt: tuple[tuple[str, Laws], ...]
    components: tuple[str, ...]
    frozen: tuple[str, ...]
    reductions: tuple[tuple[int, int], ...]
    taken: Taken


@dataclass(frozen=True)
class StepPlan:
    """What a rank knows of a step: the world's level, its group's and its domain's, of number `number`.

    `cost_table` is the number of the table that it was planned with, `learnt` what measurement corrected in
    it, by part. `components` are all of the run, of which the `frozen` do not learn in this step. The order
    of reductions belongs to the world's level, though a domain holds it: ranks of all domains reduce
    together, and each of them sees the op lists of its own domain alone.
    """

    step: int
    train: bool
    cost_table: int
    components: tuple[str, ...]
    frozen: tuple[str, ...]
    taken: Taken
    group: GroupPlan
    number: int
    domain: DomainPlan
    learnt: tuple[tuple[str, Laws], ...] = ()

    @cached_property
    def world(self) -> World:
        """What all ranks of the world must agree on."""
        return World(
            self.step,
            self.train,
            self.cost_table,
            self.learnt,
            self.components,
            self.frozen,
            self.domain.reductions,
            self.taken,
        )

    @cached_property
    def digests(self) -> tuple[int, int, int]:
        """63-bit hashes of the three levels: world, group, domain."""
        return digest_of(self.world), self.group.digest, self.domain.digest

    @property
    def levels(self) -> tuple[tuple[str, int, int, World | GroupPlan | DomainPlan], ...]:
        """The levels, from the widest on: name, number, digest, and what its ranks agree on."""
        world, group, domain = self.digests
        return (
            ("world", 0, world, self.world),
            ("group", self.group.number, group, self.group),
            ("domain", self.number, domain, self.domain),
        )

    def trains(self, component: str) -> bool:
        """Whether a component learns in this step."""
        return self.train and component not in self.frozen


def diff(a: Any, b: Any, path: str = "plan") -> list[str]:
    """Return where two plans differ, as lines like "plan.domain.encoder_batches[2].component: image !=
    audio". They are as they were planned, or as `parallel.consensus.plain` writes them.
    """
    return list(_differences(a, b, path))


def _differences(a: Any, b: Any, path: str) -> Iterator[str]:
    if type(a) is not type(b):
        yield f"{path}: {_short(a)} != {_short(b)}"
    elif is_dataclass(a):
        for field in fields(a):
            yield from _differences(getattr(a, field.name), getattr(b, field.name), f"{path}.{field.name}")
    elif isinstance(a, dict):
        for name in a:
            yield from _differences(a[name], b[name], f"{path}.{name}")
    elif isinstance(a, tuple | list):
        if len(a) != len(b):
            yield f"{path}: {len(a)} entries != {len(b)}"
        for i, (x, y) in enumerate(zip(a, b, strict=False)):
            yield from _differences(x, y, f"{path}[{i}]")
    elif a != b:
        yield f"{path}: {_short(a)} != {_short(b)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

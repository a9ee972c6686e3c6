"""Find the layout of a run on a cluster. Bounded by count alone: the same inputs give the same answer.

    split      every tp, cp and pp of the LLM that ranks and sizes allow (`omni.planning.layout_space`)
    fit        by a closed form of what the fullest stage holds (`omni.planning.least_held`): encoders and
               experts over more ranks, smaller passes and more recomputed, as far as they must be; what still
               holds too much is out
    simulate   those that take least by another closed form, `SIMULATED` of them, but for those whose lower
               bound is no less than the best step; of what takes about as long those with small domains
    change     one thing at a time of the best `STARTS`, as long as that gains, each `CHANGES` times at most;
               with what would be faster but does not fit, one thing more that makes it leaner
    rank       the best `RANKED` of each under the run's own schedule, in several domains

Placement, domains, sharing, balance, pairing, passes and what is recomputed are changed, too. All candidates
take the same samples, whole: the longest of the stream, unless `data.sample_tokens` is less. What is planned
of a candidate is its first step in the domain that samples load most, at the end in several of them, as where
a run chooses (`omni.planning.choose`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from types import MappingProxyType
from typing import Any

from dataloader.tokens import SampleMeta
from omni.config import Config
from omni.models.llm import NAME as LLM
from omni.planning.bound import Bound, step_bound
from omni.planning.choice import (
    AUTO,
    BESIDE,
    DOMAIN,
    LLM_SP,
    LONGEST,
    MICROBATCH,
    PACKS,
    PASS_TOKENS,
    PLACEMENT,
    POLICIES,
    RECOMPUTE,
    SCHEDULE,
    ZERO,
    Keys,
    Tried,
    recomputed,
    text_of,
    value_of,
    with_keys,
)
from omni.planning.fullest import likely_held
from omni.planning.layout_question import Question
from omni.planning.layout_space import (
    EP,
    LEAST_PASS,
    PASS,
    TP,
    VPP,
    encoder_tp,
)
from omni.planning.least_held import least_held
from omni.planning.memory import Parts
from omni.planning.memory_advice import GIB, STATE, by_component
from omni.planning.run_spec import RunSpec
from omni.planning.trials import DOMAINS, gains
from omni.planning.uncollected import uncollected
from parallel.placements import PlacementPolicy
from parallel.policies import SharingPolicy
from parallel.policy import find
from pipeline.costs import simulate
from pipeline.plan import StepPlan

SIMULATED, STARTS, CHANGES, RANKED = 16, 2, 20, 4
NOTHING: Mapping[int, int] = MappingProxyType({})
_NEVER = 1 << 60  # bytes beyond a device's memory
SHARED = 4  # replicas of a domain that a candidate begins with, unless the longest sample needs more
FILLED = 4  # passes a stage that a candidate begins with, at least
ALIKE = 4  # steps that differ by less than one in so many are about as long, as far as closed forms know
EXACTLY = 64  # ranks of a domain up to which a candidate has the queues that the run has
LEAN_PASS = 2048  # tokens, below which passes are not made smaller so that a candidate fits


@dataclass(frozen=True)
class Finalist:
    """A candidate with its run, and the plan of the slowest domain that was simulated. The one that samples
    load most, which is all that a search sees of most candidates, holds `seen` bytes.
    """

    tried: Tried
    spec: RunSpec
    plan: StepPlan
    seen: int = 0

    @property
    def step_ns(self) -> int:
        """What the domain's step takes."""
        assert self.tried.step_ns is not None
        return self.tried.step_ns

    def told(self) -> Keys:
        """Return the keys as the run's configuration has them."""
        own = [key for key in self.tried.keys if key != PASS]
        own += [MICROBATCH, PACKS] * (PASS in self.tried.keys)
        own += [BESIDE] * (self.spec.arrangement.encoder_ranks > 0)
        return {key: value_of(self.spec.config, key) for key in own}


@dataclass
class Search:
    """What was found, the best first; if none fits, what holds least. So many layouts were `split`, of which
    `pruned` hold too much by the closed form: their keys, and what their fullest stage holds. `refused` says
    why the first could not be that could not. So many candidates were `simulated`.
    """

    found: list[Finalist] = field(default_factory=list)
    split: int = 0
    pruned: list[tuple[Keys, Parts]] = field(default_factory=list)
    refused: str = ""
    simulated: int = 0


def search(question: Question, ranks: int, spare: Mapping[int, int] = NOTHING) -> Search:
    """Search the layouts of so many ranks. By the ranks of a domain, `spare` bytes of each are to stay free:
    domains that are not planned for a candidate may hold more than those that are.
    """
    searching = Searching(question, ranks, spare)
    searching.go(SIMULATED, CHANGES)
    return searching.out


def with_ranks(question: Question, keys: Keys, ranks: int) -> Finalist:
    """Simulate a candidate on another number of ranks, with as many more or fewer replicas.

    Raises:
        ValueError: where these cannot be.
    """
    return Searching(question, ranks).under_own_schedule(keys)


def _place(tried: Tried) -> tuple[bool, int, int]:
    """What fits comes first, by its step; then what holds least."""
    return bool(tried.refused), tried.beyond, tried.step_ns or 0


class Searching:
    """A search under way: what was tried, by the text of its keys."""

    def __init__(self, question: Question, ranks: int, spare: Mapping[int, int] = NOTHING) -> None:
        self.of, self.ranks, self.space, self.spare = question, ranks, question.space(ranks), spare
        self.out, self.tried = Search(), dict[str, Tried]()
        self.metas: list[SampleMeta] = []

    def go(self, simulated: int, changes: int) -> None:
        """Fit, simulate, change, rank: of so many layouts, with so many changes of the best each."""
        first = (tried for tried in self.first(self.layouts(), simulated) if tried.step_ns)
        starts = sorted(first, key=_place)[:STARTS]
        best = (self.best_near(start, changes) for start in starts)
        found = {text_of(each.tried.keys): each for each in best}
        self.out.found = sorted(found.values(), key=lambda each: _place(each.tried))

    def resolve(self, config: Config) -> RunSpec:
        """Prepare a candidate."""
        return self.of.resolve(config, self.ranks)

    def room(self, spec: RunSpec) -> int | None:
        """Bytes that a rank may hold."""
        memory, spare = spec.cluster.memory_bytes, self.spare.get(spec.arrangement.domain_size, 0)
        return None if memory is None else memory - spare

    def layouts(self) -> list[Keys]:
        """The layouts that fit by the closed form, by what their steps take by another; of those that take
        about as long, those whose domains have fewer ranks come first.
        """
        found = []
        for split in self.space.splits(beside=self.of.config.placement.ranks or 0):
            self.out.split += 1
            try:
                keys, spec, held = self._fitted(self.begun(split))
            except ValueError as error:
                self.out.refused = self.out.refused or str(error)
                continue
            most = self.room(spec)
            if most is not None and held.total() > most:
                self.out.pruned.append((keys, held))
            else:
                found.append((self._filled_ns(spec), spec.arrangement.domain_size, keys))
        least = min((ns for ns, *_ in found), default=1)
        return [keys for *_, keys in sorted(found, key=lambda of: (of[0] * ALIKE // least, of[1]))]

    def first(self, layouts: Sequence[Keys], most: int) -> Iterator[Tried]:
        """Simulate the first `most` of layouts, but for those whose bound is no less than the best step."""
        best: Tried | None = None
        for keys in layouts[:most]:
            tried = self.attempt(keys, best)
            best = tried if best is None or _place(tried) < _place(best) else best
            yield tried

    def best_near(self, start: Tried, changes: int) -> Finalist:
        """Climb. Of the best that were simulated on the way, return that which is best in several domains."""
        before = len(self.tried)
        best = self.climb(start, changes)
        others = (start, *islice(self.tried.values(), before, None))
        simulated = sorted((own for own in others if own.step_ns and own is not best), key=_place)
        ranked = [best, *simulated][:RANKED]
        return min((self.under_own_schedule(own.keys) for own in ranked), key=lambda each: _place(each.tried))

    def climb(self, best: Tried, most: int) -> Tried:
        """Change one key after the other, until a round gains nothing or `most` have been simulated."""
        most += self.out.simulated
        gained = True
        while gained:
            gained = False
            for key in self.space.values:
                for other in self._changed(best, key):
                    if gains(other, best):
                        best, gained = other, True
                    if self.out.simulated >= most:
                        return best
                    if other is best:
                        break
        return best

    def _changed(self, best: Tried, key: str) -> Iterator[Tried]:
        """Simulate the neighbours of the best on one key. One that would gain but does not fit is tried with
        each change that makes it leaner, too.
        """
        for value in self.space.neighbours(best.keys, key):
            other = self.attempt({**best.keys, key: value}, best)
            yield other
            tight = not best.refused and 0 < other.beyond < _NEVER
            if not tight or (other.step_ns or 0) >= (best.step_ns or 0):
                continue
            spec = self.resolve(self.settled(other.keys))
            for change in self._leaner(other.keys, self.least_held(spec), self.room(spec) or 0):
                if key not in change:
                    yield self.attempt({**other.keys, **change}, best)

    def attempt(self, keys: Keys, best: Tried | None = None) -> Tried:
        """Simulate a candidate, unless it holds too much or cannot take less than the `best`."""
        name = text_of(keys)
        if name not in self.tried:
            self.tried[name] = self._attempt(keys, best)
        return self.tried[name]

    def _attempt(self, keys: Keys, best: Tried | None) -> Tried:
        try:
            config = self.settled(keys)
            spec = self.resolve(config)
        except ValueError as error:
            return Tried(keys, refused=str(error), beyond=_NEVER)
        most, held = self.room(spec), self.least_held(spec).total()
        if most is not None and held > most:
            return Tried(keys, refused="holds too much", beyond=held - most)
        if best is not None and not best.refused and self.bound(spec).ns >= (best.step_ns or 0):
            return Tried(keys, refused="takes no less", beyond=_NEVER)
        self.out.simulated += 1
        return self._quick(config, keys)

    def under_own_schedule(self, keys: Keys) -> Finalist:
        """Simulate a candidate under the schedule that the run has, with its queues.

        Raises:
            ValueError: if it cannot be.
        """
        return self._simulated(self.settled(keys), keys, DOMAINS)

    def _quick(self, config: Config, keys: Keys) -> Tried:
        """Simulate a candidate as is quick. Where its schedule follows step by step, it is under one that is
        seldom far from the best, or if that does not fit, one that holds less; in a domain of many ranks,
        with queues that never wait.
        """
        llm, schedules = config.layout.llm, [config.pipeline.policy]
        if config.pipeline.policy == AUTO and llm.pp > 1:
            schedules = ["zero_bubble_h1", "encode_first"] if (llm.vpp or 1) == 1 else ["interleaved"]
        found = None
        for schedule in schedules:
            own = with_keys(config, {SCHEDULE: schedule})
            if self._domain_ranks(config) > EXACTLY:
                own.cluster.queues = "per_communicator"
            other = self._simulated(own, keys).tried
            found = other if found is None or gains(other, found) else found
            if not found.refused:
                break
        assert found is not None
        return found

    @uncollected()
    def _simulated(self, config: Config, keys: Keys, domains: int = 1) -> Finalist:
        """Simulate the first step of a candidate in so many of the domains that samples load most, of which
        the slowest counts.
        """
        spec = self.resolve(config)
        most, single_queue = self.room(spec), spec.planner.domain.single_queue
        plans = [plan for plan, _ in islice(spec.planner.busiest(*self.of.begin), domains)]
        steps = [(simulate(plan.domain, spec.table, single_queue).makespan_ns, plan) for plan in plans]
        step_ns, plan = max(steps, key=lambda step: step[0])
        held = [0] if most is None else [likely_held(spec, spec.table, plan) for _, plan in steps]
        beyond = max(0, max(held) - (most or 0))
        refused = f"does not fit cluster.memory_bytes by {beyond / GIB:.1f} GiB" if beyond else ""
        return Finalist(Tried(keys, step_ns, refused, beyond), spec, plan, held[0])

    def settled(self, keys: Keys) -> Config:
        """The configuration of a candidate: domains as large as replicas divide, and microbatches as large as
        a domain needs to hold the longest sample.
        """
        own = {key: value for key, value in keys.items() if key != PASS}
        config = with_keys(self.of.config, {**own, LONGEST: self.of.longest})
        dp, beside = self._replicas(config), find(PlacementPolicy, config.placement.policy, PLACEMENT).beside
        if DOMAIN in keys:  # ranks beside the LLM are allocated so that domains divide the replicas
            sizes = (n for n in range(1, min(keys[DOMAIN], dp) + 1) if beside or dp % n == 0)
            config.layout.domain = max(sizes)
        if PASS not in keys:
            return config
        shares = find(SharingPolicy, value_of(config, LLM_SP), LLM_SP).finds_room
        least = -(-self.of.longest // ((config.layout.domain or 1) if shares else 1))
        if MICROBATCH not in self.of.given:
            config.data.microbatch_tokens = -(-max(keys[PASS], least) // keys[PASS]) * keys[PASS]
        if PACKS not in self.of.given:
            config.packing.divisor = max(1, config.data.pass_tokens // keys[PASS])
        return config

    def _replicas(self, config: Config) -> int:
        own = config.layout.llm
        return own.dp or max(1, (self.ranks - (config.placement.ranks or 0)) // (own.tp * own.cp * own.pp))

    def _domain_ranks(self, config: Config) -> int:
        return (config.layout.domain or 1) * self.ranks // self._replicas(config)

    def begun(self, split: Keys) -> Keys:
        """A candidate to begin with."""
        config = with_keys(self.of.config, split)
        dp, pp = self._replicas(config), config.layout.llm.pp
        share = self.of.step_tokens // (dp * (FILLED * pp if pp > 1 else 1))
        usual = recomputed(config.model.llm)[0]
        replicas = min(dp, max(SHARED, -(-self.of.longest // (PASS_TOKENS * config.layout.llm.cp))))
        first: dict[str, Any] = {
            DOMAIN: 1 << (replicas - 1).bit_length(),
            PASS: 1 << (min(PASS_TOKENS, max(LEAST_PASS, share)).bit_length() - 1),
            RECOMPUTE: usual,
            EP: 1,
            VPP: 1,
            ZERO: 1,
            **{key: names[key.endswith("_sp.policy")] for key, names in POLICIES.items()},
        }
        for key in map(encoder_tp, self.of.encoders):  # tp groups within the LLM's plan quickest
            first[key] = max((n for n in self.space.values.get(key, ()) if n <= split[TP]), default=1)
        keys = {key: first.get(key) for key in self.space.values}
        keys = {key: value_of(config, key) if value is None else value for key, value in keys.items()}
        return {**split, **keys}

    def _fitted(self, keys: Keys) -> tuple[Keys, RunSpec, Parts]:
        """A candidate that fits by the closed form, if there is one, with what it holds."""
        while True:
            spec = self.resolve(self.settled(keys))
            held, most = self.least_held(spec), self.room(spec)
            if most is None or held.total() <= most:
                return keys, spec, held
            change = next(self._leaner(keys, held, most), None)
            if change is None:
                return keys, spec, held
            keys = {**keys, **change}

    def _leaner(self, keys: Keys, held: Parts, most: int) -> Iterator[Keys]:
        """Changes by which a candidate holds less, first of that which there is most of."""
        state, next_of = by_component(held, *STATE), self.space.next_of
        own = ((EP, ZERO) if name == LLM else (encoder_tp(name),) for name in state)
        of_state = (next_of(key, keys) for key in chain.from_iterable(own))
        of_passes = (
            {RECOMPUTE: "full"} if keys.get(RECOMPUTE) not in (None, "full") else None,
            {PASS: keys[PASS] // 2} if keys.get(PASS, 0) > LEAN_PASS else None,
        )
        options = of_state if sum(state.values()) > most else chain(of_passes, of_state)
        return (option for option in options if option)

    def bound(self, spec: RunSpec) -> Bound:
        """What the first step takes at least, in domains of this size."""
        step, cursor = self.of.begin
        if not self.metas:
            world = spec.planner.world
            taken = world.take(cursor)
            self.metas = [world.meta_of(taken, number) for number in range(len(taken))]
        return step_bound(self.metas, spec.planner.domain, spec.planner.frozen(step))

    def _filled_ns(self, spec: RunSpec) -> int:
        """About what it takes: no less than the bound, and even work in a pipeline that is filled and emptied
        once, by (stages - 1) / (passes · vpp) more (Narayanan et al., arXiv 2104.04473, section 2.2).
        """
        bound, own = self.bound(spec), spec.arrangement.llm
        return max(bound.ns, bound.work_ns + bound.work_ns * (own.pp - 1) // (self.passes(spec)[1] * own.vpp))

    def passes(self, spec: RunSpec) -> tuple[int, int]:
        """Tokens of a pass, and passes of a replica."""
        tokens = spec.config.data.pass_tokens // (spec.config.packing.divisor or 1)
        return tokens, max(1, self.of.step_tokens // (tokens * spec.arrangement.llm.dp))

    def least_held(self, spec: RunSpec) -> Parts:
        """What the fullest stage holds at least, by a closed form."""
        return least_held(spec, *self.passes(spec), spec.planner.frozen(self.of.begin[0]))

"""Choose for a run, when it is composed, what nobody gave: the size of domains, sharing, balance, pairing,
and how long a sample may be.

Candidates differ in open keys alone (`omni.planning.choice`); a key that was given is never changed. Domains
and sharing are searched together, then one key after the other: what gains only together is not found. Each
is prepared as a run is, and the planner and simulator of its steps say what its first steps would take: those
of the domains that samples load most; of steps with more than `A_REPLICA` samples a replica, with so many.
Candidates, steps, domains and samples are bounded by count and nothing by time, so the same configuration,
data and ranks give the same choice on any machine. A run that goes on may be told to choose again, by its
next steps.

Samples stay whole where ranks can hold them together: domains are large enough for the longest of the first
`LOOKED` samples of the run's stream, as far as links allow, and `data.sample_tokens` is what they hold.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np

from dataloader.samples import Samples
from omni.config import Config, ConfigError
from omni.planning.choice import (
    AUTO,
    BALANCE,
    CONTEXT,
    DOMAIN,
    ENCODER_SP,
    LLM_SP,
    LONGEST,
    MICROBATCH,
    PACKING,
    PACKS,
    PAIRING,
    PASS_TOKENS,
    POLICIES,
    RECOMPUTE,
    ZERO,
    Keys,
    RunChoice,
    Tried,
    chosen,
    open_keys,
    recomputed,
    text_of,
    unchosen,
    value_of,
    with_keys,
)
from omni.planning.memory_advice import GIB
from omni.planning.run_spec import RunSpec
from ops.ints import Ints
from parallel.layout import CONTEXT as ANY_CONTEXT
from parallel.layout import MOST_ZERO
from parallel.policies import SharingPolicy
from parallel.policy import find
from pipeline.costs import simulate
from pipeline.plan import StepPlan

SIZES = (1, 2, 4, 8, 16, 32)
"""Replicas of a domain that are tried, or as many below as divide dp."""
LARGER = (64, 128, 256)
"""Tried as well, but as plans of them take a rank long, taken only if the longest sample needs so many, or if
they gain `LARGE_GAIN`.
"""
LINKED = 256  # ranks of a domain at most, where the cluster does not say how many share a rail
PLANNED = 2048  # samples of a step that a domain plans at most, unless the longest sample needs more replicas
DOMAINS, STEPS = 4, 4  # simulated at most: domains of a step, steps
ENOUGH = 1024  # samples of steps after which no further one is simulated
IN_DOMAINS = 512  # samples of domains of a step, after which no further domain is
A_REPLICA = 64  # samples of a simulated step for each replica, at most
GAIN, LARGE_GAIN = 0.005, 0.1  # of the step, that a candidate must bring to be taken over a simpler one
WORSE = 2  # sizes in a row without a gain, after which no larger one is tried
DIVISORS = (2, 4, 8, 16)  # of a microbatch's tokens, that packs have: smaller ones, until one gains nothing
ROUND = 256  # tokens, of which microbatches that nobody gave have a multiple
LOOKED = 1 << 16
_ANY = 1 << 40  # tokens
_FIRST, _SECOND = ({key: names[place] for key, names in POLICIES.items()} for place in (0, 1))

Make = Callable[[Config], RunSpec]
Try = Callable[..., Tried]


def choose(
    config: Config, ranks: int, samples: Samples, make: Make, begin: tuple[int, int] = (1, 0)
) -> RunSpec:
    """Prepare a run by `make` with its open keys chosen for steps from that and the position in the stream at
    which it is to `begin`.

    Raises:
        ConfigError: where samples are too long for the ranks, and `data.on_long` is `error`.
        ValueError: what `make` raises for the first candidate, if it does so for every one.
    """
    keys = open_keys(config)
    if not keys:
        return make(config)
    start = make(with_keys(unchosen(config), {LONGEST: None}))
    longest, cut = config.data.sample_tokens, ""
    lengths, attempt = lengths_of(samples, begin[1]), partial(_tried, make=make, begin=begin)
    sizes, held = _sizes(config, start, lengths)
    if longest is None:
        longest, cut = held, _cut(config, lengths, held)
    best, tried = _search_all(config, keys, start, sizes, longest, lengths, attempt)
    budget = config.data.microbatch_tokens or PASS_TOKENS
    if best.refused and LONGEST in keys and longest > budget:  # samples that a rank holds alone may fit
        sizes, _ = _sizes(config, start, np.minimum(lengths, budget))
        longest, cut = budget, _cut(config, lengths, budget)
        best, tried = _search_all(config, keys, start, sizes, longest, lengths, attempt)
    own = {**best.keys, **({LONGEST: longest} if LONGEST in keys else {})}
    choice = RunChoice(own, best, tried, cut, again=config.choice.ranks)
    return replace(make(chosen(config, own, ranks)), choice=choice)


def lengths_of(samples: Samples, cursor: int = 0) -> Ints:
    """Return the tokens of the next `LOOKED` samples of a run's stream, whole: int64 [n]."""
    sources, ids = samples.stream.take(cursor, min(LOOKED, samples.stream.cycle))
    out = np.zeros(len(ids), np.int64)
    for number in np.unique(sources).tolist():
        of = sources == number
        out[of] = samples.lengths(samples.stream.names[number], ids[of], _ANY, "truncate")
    return np.maximum(out, 0)


def _sizes(config: Config, start: RunSpec, lengths: Ints) -> tuple[list[int], int]:
    """The replicas that a domain may have, ascending, all enough for the longest of samples of `lengths`, or
    for what is given, if any are; and the most tokens that a sample may then have.
    """
    world, budget = start.arrangement, config.data.microbatch_tokens
    most = config.data.step_tokens or _ANY  # a longer sample would be a step of its own
    longest = config.data.sample_tokens or min(int(lengths.max()), max(most, budget or PASS_TOKENS))
    count = _samples_of_step(config, lengths, longest)
    dp, least = world.llm.dp, world.replicas
    linked = max(least, (config.cluster.ranks_per_rail or LINKED) * dp // world.world)
    planned = max(least, PLANNED * dp // max(1, count))

    def divisors(limits: Sequence[int], most: int) -> list[int]:
        below = (max(n for n in range(1, limit + 1) if dp % n == 0) for limit in limits)
        return [n for n in dict.fromkeys(max(least, n) for n in below) if n <= most]

    every = divisors((*SIZES, *LARGER), linked)
    usual = [n for n in every if n <= planned]
    if config.layout.domain is not None:
        usual = every = [config.layout.domain]
    if budget is None:
        return usual, max(longest, PASS_TOKENS)
    if longest <= budget or not _cuts(value_of(config, LLM_SP)):
        return usual, budget
    enough = next((n for n in every if n * budget >= longest), every[-1])
    held = enough * budget
    return [enough, *(n for n in usual if n > enough)], min(held, most)


def _cuts(policy: str) -> bool:
    """Whether samples may be longer than what a rank holds of a pass."""
    return policy == AUTO or find(SharingPolicy, policy, LLM_SP).finds_room


def _budget(given: int | None, cuts: bool, size: int, longest: int) -> int:
    """The tokens of a microbatch, as they are given, or enough for the replicas of a domain to hold the
    longest sample, together if it may be cut.
    """
    share = -(-longest // (size if cuts else 1))
    return given or max(PASS_TOKENS, -(-share // ROUND) * ROUND)


def _context(lengths: Ints) -> int:
    """The tokens of the sequence that a token of such samples is in, on average: what its attention costs."""
    tokens = lengths.astype(np.float64)
    mean = float((tokens * tokens).sum() / max(1.0, float(tokens.sum())))
    return max(ROUND, round(mean / ROUND) * ROUND)


def _samples_of_step(config: Config, lengths: Ints, longest: int) -> int:
    """About how many samples a step has."""
    data = config.data
    if data.step_tokens is None:
        return data.step_samples or 1
    return max(1, data.step_tokens // max(1, int(np.minimum(lengths, longest).mean())))


def _shortened(config: Config, start: RunSpec, lengths: Ints, longest: int) -> Config:
    """The configuration of a run with shorter steps, where they have many samples a replica."""
    count, most = _samples_of_step(config, lengths, longest), A_REPLICA * start.arrangement.llm.dp
    keys = ("data.step_tokens", "data.step_samples")
    given = {key: value_of(config, key) for key in keys if value_of(config, key) is not None}
    return with_keys(config, {key: value * min(count, most) // count for key, value in given.items()})


def _cut(config: Config, lengths: Ints, held: int) -> str:
    """Say how many samples have more tokens than ranks hold, and what would hold them.

    Raises:
        ConfigError: where such samples are an error.
    """
    data, over = config.data, lengths[lengths > held]
    if not len(over):
        return ""
    budget = config.data.microbatch_tokens or min(held, PASS_TOKENS)
    lost, members = int((over - held).sum()), max(1, held // budget)
    if held == data.step_tokens:
        remedy = f"data.step_tokens={int(over.max())}"
    else:
        remedy = f"data.microbatch_tokens={-(-int(over.max()) // members)} or more replicas"
    said = (
        f"{len(over):,} of the first {len(lengths):,} samples have more than {held:,} tokens, which "
        f"{members} ranks share at data.microbatch_tokens={budget}; the longest has "
        f"{int(over.max()):,}. Beyond are {lost:,} tokens, {lost / int(lengths.sum()):.1%} of all: {remedy} "
        "would hold them"
    )
    if data.on_long == "error":
        raise ConfigError(f"data.on_long=error: {said}; or set data.on_long to drop or truncate")
    return f"data.on_long={data.on_long}: {said}"


def _search_all(
    config: Config,
    keys: Sequence[str],
    start: RunSpec,
    sizes: Sequence[int],
    longest: int,
    lengths: Ints,
    attempt: Try,
) -> tuple[Tried, list[Tried]]:
    """Search by what the LLM recomputes and what of it is divided, if these are open: the usual; where none
    fits, with weights and gradients divided (ZeRO-3); where the best candidate does not fit as it is, or not
    with other packs, what holds least, in domains of any size again, since where none fits large ones look
    best; and at the best of these, if it has the usual, what takes least.
    """
    usual, least, quickest = recomputed(config.model.llm)
    best, tried = _search(config, keys, start, sizes, longest, lengths, attempt, usual, 1)
    pools = [size for size in sizes if size * start.arrangement.llm.cp > 1] if ZERO in keys else []

    def tries(recompute: str, zero: int) -> None:
        nonlocal best
        own = pools if zero > 1 else sizes
        other, others = _search(config, keys, start, own, longest, lengths, attempt, recompute, zero)
        tried.extend(others)
        best = other if gains(other, best) else best

    if best.refused and pools:
        tries(usual, MOST_ZERO)
    if RECOMPUTE not in keys:
        return best, tried
    if any(each.refused for each in tried if {**each.keys, PACKS: None} == {**best.keys, PACKS: None}):
        tries(least, 1)
        if best.refused and pools:
            tries(least, MOST_ZERO)
    if best.keys[RECOMPUTE] == usual != quickest:
        # On one whole step, as packs are compared.
        own = {**best.keys, RECOMPUTE: quickest}
        now, other = (
            attempt(with_keys(config, {**of, LONGEST: longest}), of, steps=1) for of in (best.keys, own)
        )
        tried.append(_as_beside(best, now, other))
        best = tried[-1] if gains(other, now) else best
    return best, tried


# long: keys are searched one after the other, each at the best of those before
def _search(
    config: Config,
    keys: Sequence[str],
    start: RunSpec,
    sizes: Sequence[int],
    longest: int,
    lengths: Ints,
    attempt: Try,
    recompute: str,
    zero: int,
) -> tuple[Tried, list[Tried]]:
    """Try sizes of domains, without and with sharing; at the best of them sharing less; then other policies.

    Returns the best candidate and all. A single one is not simulated.
    """
    short, given = _shortened(config, start, lengths, longest), config.data.microbatch_tokens
    cuts = _cuts(value_of(config, LLM_SP))
    tried: dict[str, Tried] = {}

    def of_size(size: int) -> Iterator[Keys]:
        budget = _budget(given, cuts, size, longest)
        fixed = {
            DOMAIN: size,
            MICROBATCH: budget,
            PACKS: 1 if given else budget // PASS_TOKENS,
            RECOMPUTE: recompute,
            ZERO: zero,
            CONTEXT: _context(np.minimum(lengths, longest)) if start.arrangement.llm.pp > 1 else ANY_CONTEXT,
        }
        own = {key: fixed[key] for key in keys if key in fixed}
        return _of_size(size, own, keys, start, longest > budget)

    def simulated(own: Keys) -> Tried:
        name = text_of(own)
        if name not in tried:
            tried[name] = attempt(with_keys(short, {**own, LONGEST: longest}), own)
        return tried[name]

    first = list(of_size(sizes[0]))
    others = [key for key in (BALANCE, PAIRING) if key in keys and start.arrangement.llm.dp > 1]
    if len(first) == len(sizes) == 1 and not others and not {PACKS, RECOMPUTE, ZERO} & set(keys):
        return Tried(first[0]), []
    best, worse = None, 0
    for size in sizes:
        before = best
        for own in of_size(size):
            found = simulated(own)
            gain = GAIN if size <= max(SIZES[-1], sizes[0]) else LARGE_GAIN
            best = found if best is None or gains(found, best, gain) else best
        worse = worse + 1 if best is before else 0
        if worse == WORSE:
            break
    assert best is not None
    size = best.keys.get(DOMAIN, config.layout.domain)
    needed = longest > _budget(given, cuts, size, longest)
    for key in (LLM_SP, ENCODER_SP):
        if best.keys.get(key) == _SECOND[key] and not (needed and key == LLM_SP):
            simpler = simulated({**best.keys, key: _FIRST[key]})
            best = best if gains(best, simpler) else simpler
    for key in others:
        found = simulated({**best.keys, key: _SECOND[key]})
        best = found if gains(found, best) else best
    if {PACKS, PACKING} & set(keys) and (start.arrangement.llm.pp > 1 or best.refused):
        whole = with_keys(config, {LONGEST: longest})
        starts = [best]
        if longest <= _budget(given, cuts, sizes[0], longest):  # the first candidate shares nothing
            plainest = simulated(first[0])
            starts += [plainest] if plainest is not best and not plainest.refused else []
        best, packed = _packed(whole, starts, attempt)
        tried |= {text_of(each.keys): each for each in packed}
    return best, list(tried.values())


def _packed(config: Config, starts: Sequence[Tried], attempt: Try) -> tuple[Tried, list[Tried]]:
    """Try smaller packs, of the best candidate and of simpler ones that follow it in `starts`, and of the
    best of these packs that grow, as large or the next larger. How a pipeline fills and empties shows on a
    whole step alone, so the first one is simulated: a candidate stands among the others with as much more or
    less than the best as it takes there.
    """

    def whole_step(own: Keys) -> Tried:
        return attempt(with_keys(config, own), own, steps=1)

    reference = whole_step(starts[0].keys)
    best, least, found = starts[0], reference, list[Tried]()
    for start in starts:
        now = reference if start is starts[0] else whole_step(start.keys)
        found.append(start if start is starts[0] else _as_beside(starts[0], reference, now))
        own, larger = found[-1], None
        for divisor in DIVISORS if PACKS in start.keys else ():
            other = whole_step({**start.keys, PACKS: divisor * start.keys[PACKS]})
            found.append(_as_beside(starts[0], reference, other))
            if gains(other, now):
                own, now, larger = found[-1], other, own
            elif not now.refused:  # while none fits, a smaller one may
                break
        for plain in (own, larger) if PACKING in start.keys and config.layout.llm.pp > 1 else ():
            if plain is not None:
                other = whole_step({**plain.keys, PACKING: _SECOND[PACKING]})
                found.append(_as_beside(starts[0], reference, other))
                if gains(other, now):
                    own, now = found[-1], other
        if start is starts[0] or not gains(least, now):
            best, least = own, now
    return best, found


def _as_beside(start: Tried, first: Tried, other: Tried) -> Tried:
    """A candidate that was simulated beside `first`, as it stands among others that `start` stands among."""
    if not (start.step_ns and first.step_ns and other.step_ns):
        return replace(other, step_ns=None)
    return replace(other, step_ns=start.step_ns * other.step_ns // first.step_ns)


def gains(found: Tried, best: Tried, gain: float = GAIN) -> bool:
    """Whether a candidate is to be taken over a simpler one: it can be and that cannot, or it takes less; of
    two that no device can hold, it holds less.
    """
    if bool(found.refused) != bool(best.refused) or found.step_ns is None or best.step_ns is None:
        return not found.refused and bool(best.refused)
    if found.refused:
        return found.beyond < best.beyond
    return found.step_ns < (1 - gain) * best.step_ns


def _of_size(size: int, fixed: Keys, keys: Sequence[str], start: RunSpec, needed: bool) -> Iterator[Keys]:
    """Candidates with domains of so many replicas and keys that are `fixed` for these: without sharing,
    unless long samples `need` it, and with it. Whole items go to any ranks of a domain in either case.
    """
    world = start.arrangement
    plain = {**fixed, **{key: name for key, name in _FIRST.items() if key in keys}}
    slots = max((len(world.slots(name)) for name in start.encoders), default=0)
    helped = {
        LLM_SP: needed or world.llm.cp * size > 1,
        ENCODER_SP: slots * size > world.replicas or slots > 1,
    }
    shared = {key: _SECOND[key] for key, by_others in helped.items() if key in keys and by_others}
    if not shared or not needed:
        yield plain
    if shared:
        yield {**plain, **shared}


def _tried(config: Config, keys: Keys, make: Make, begin: tuple[int, int], steps: int = STEPS) -> Tried:
    """Simulate the first steps of a candidate, in the domains that samples load most.

    Where the schedule follows step by step, one stands for all: that which is quick to plan and seldom far
    from the best, or if a device cannot hold it, that which holds least.
    """
    schedules: tuple[str, ...] = (config.pipeline.policy,)
    if config.pipeline.policy == AUTO and config.layout.llm.pp > 1:
        schedules = ("zero_bubble_h1", "encode_first") if config.layout.llm.parts == 1 else ("interleaved",)
    found = None
    for schedule in schedules:
        other = _simulated(with_keys(config, {"pipeline.policy": schedule}), keys, make, begin, steps)
        found = other if found is None or gains(other, found) else found
        if not found.refused:
            break
    assert found is not None
    return found


def _simulated(config: Config, keys: Keys, make: Make, begin: tuple[int, int], steps: int) -> Tried:
    """Simulate the first steps of a candidate under its schedule, up to one that does not fit."""
    try:
        spec = make(config)
    except ValueError as error:
        return Tried(keys, refused=str(error))
    total, seen, beyond, refused = 0, 0, 0, ""
    first, cursor = begin
    for count in range(1, steps + 1):
        plans = _first_plans(spec, first + count - 1, cursor)
        lists = (simulate(plan.domain, spec.table, spec.planner.domain.single_queue) for plan in plans)
        total += max(timeline.makespan_ns for timeline in lists)
        if not all(map(spec.planner.fits, plans)):
            beyond = max(map(spec.planner.holds, plans)) - (spec.cluster.memory_bytes or 0)
            refused = f"does not fit cluster.memory_bytes by {beyond / GIB:.1f} GiB"
            break
        seen, cursor = seen + len(plans[0].taken), plans[0].taken.next_cursor
        if seen >= ENOUGH:
            break
    return Tried(keys, total // count, refused, beyond)


def _first_plans(spec: RunSpec, step: int, cursor: int) -> list[StepPlan]:
    """The plans of the domains that samples of a step load most, as far as they are bounded."""
    plans = list[StepPlan]()
    for plan in islice(spec.planner.busiest(step, cursor), DOMAINS):
        plans.append(plan)
        guarded = spec.cluster.memory_bytes is not None  # each of these domains is to fit
        if not guarded and sum(len(each.domain.samples) for each in plans) >= IN_DOMAINS:
            break
    return plans

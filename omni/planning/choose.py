"""Choose for a run, when it is composed, what nobody gave: the size of domains, sharing, balance, pairing,
and how long a sample may be.

Candidates differ in open keys alone (`omni.planning.choice`); a key that was given is never changed. Domains
and sharing are searched together, then one key after the other: what gains only together is not found. Each
is prepared as a run is, and the planner and simulator of its steps say what its first steps would take: those
of the domains that samples load most; of steps with more than `A_REPLICA` samples a replica, with so many.
Longer steps even out by themselves: the best size of domains is compared on a whole one with the next smaller
size that gained, unless it is far better.
Candidates, steps, domains and samples are bounded by count and nothing by time, so the same configuration,
data and ranks give the same choice on any machine. A run that goes on may be told to choose again, by its
next steps.

Samples stay whole where ranks can hold them together: domains are large enough for the longest of the first
`LOOKED` samples of the run's stream, as far as links allow, and `data.sample_tokens` is what they hold.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dataloader.samples import Samples
from omni.config import Config
from omni.models.llm import NAME as LLM
from omni.planning.choice import (
    BALANCE,
    CONTEXT,
    DOMAIN,
    ENCODER_SP,
    KEEP_ATTENTION,
    LLM_SP,
    LONGEST,
    MICROBATCH,
    PACKING,
    PACKS,
    PAIRING,
    PASS_TOKENS,
    POLICIES,
    RECOMPUTE,
    RECOMPUTE_LONG,
    ZERO,
    Keys,
    RunChoice,
    Tried,
    chosen,
    of_encoder,
    open_keys,
    recomputed,
    text_of,
    unchosen,
    value_of,
    with_keys,
)
from omni.planning.host_memory import may_keep, most_sent
from omni.planning.room import (
    A_REPLICA,
    PLANNED,
    SIZES,
    cut_of_longer,
    domain_sizes,
    lengths_of,
    may_be_cut,
    mean_context,
    microbatch_tokens,
    planned_long,
    samples_of_step,
    shortened,
)
from omni.planning.run_spec import RunSpec
from omni.planning.trials import GAIN, STEPS, Make, gains, tried_out
from ops.ints import Ints
from parallel.layout import CONTEXT as ANY_CONTEXT
from parallel.layout import MOST_ZERO, Arrangement
from parallel.work import FP32, virtual_stage_name

LARGE_GAIN = 0.1  # of the step, that domains must bring whose plans take a rank long
WORSE = 2  # sizes of domains, or of packs that do not fit, in a row without a gain, before no other is tried
DIVISORS = (2, 4, 8, 16)  # of a microbatch's tokens, that packs have: smaller ones, until one gains nothing
_FIRST, _SECOND = ({key: names[place] for key, names in POLICIES.items()} for place in (0, 1))

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
    of_encoders = {*most_sent(start), *may_keep(start)}
    keys = [key for key in keys if key in of_encoders or not of_encoder(key)]
    longest, cut = config.data.sample_tokens, ""
    lengths, attempt = lengths_of(samples, begin[1]), _once_each(partial(tried_out, make=make, begin=begin))
    sizes, held = domain_sizes(config, start, lengths)
    if longest is None:
        longest, cut = held, cut_of_longer(config, lengths, held)
    best, tried = _search_all(config, keys, start, sizes, longest, lengths, attempt)
    budget = config.data.microbatch_tokens or PASS_TOKENS
    if best.refused and LONGEST in keys and longest > budget:  # samples that a rank holds alone may fit
        sizes, _ = domain_sizes(config, start, np.minimum(lengths, budget))
        longest, cut = budget, cut_of_longer(config, lengths, budget)
        best, tried = _search_all(config, keys, start, sizes, longest, lengths, attempt)
    own = {**best.keys, **({LONGEST: longest} if LONGEST in keys else {})}
    choice = RunChoice(own, best, tried, cut, again=config.choice.ranks)
    return replace(make(chosen(config, own, ranks)), choice=choice)


def _search_all(
    config: Config,
    keys: Sequence[str],
    start: RunSpec,
    sizes: Sequence[int],
    longest: int,
    lengths: Ints,
    attempt: Try,
) -> tuple[Tried, list[Tried]]:
    """Search by what passes keep and what of the LLM is divided, if these are open: the usual; where none
    fits, with weights and gradients divided (ZeRO-3), if that may free enough; where the best candidate does
    not fit as it is, or not with other packs, what holds least, inputs of encoders' layers on the host among
    it, in domains of any size again, since where none fits large ones look best; at the best of these what
    takes less in passes that are no longer than a pack, of other packs; if it has the usual, what takes
    least; whether encoders' inputs stay or go; and whether layers that are made anew keep what attention puts
    out, with what encoders' layers keep on the host if need be.
    """
    usual, least, quickest = recomputed(config.model.llm)
    sent = {key: count for key, count in most_sent(start).items() if key in keys}
    stays, kept = dict.fromkeys(sent, 0), [key for key in may_keep(start) if key in keys]
    plain = {**stays, **dict.fromkeys(kept, False)}
    best, tried = _search(config, keys, start, sizes, longest, lengths, attempt, {RECOMPUTE: usual, **plain})
    pools = [size for size in sizes if size * start.arrangement.llm.cp > 1] if ZERO in keys else []
    freed = _freed(start)

    def tries(keeping: Keys, zero: int) -> None:
        nonlocal best
        own, fixed = pools if zero > 1 else sizes, {**keeping, ZERO: zero}
        other, others = _search(config, keys, start, own, longest, lengths, attempt, fixed)
        tried.extend(others)
        best = other if gains(other, best) else best

    if best.refused and pools and best.beyond < freed:
        tries({RECOMPUTE: usual, **plain}, MOST_ZERO)
    whole_step = _on_whole_steps(attempt, config, longest)
    if RECOMPUTE not in keys:
        best, others = _attending_once(best, kept, sent, whole_step)
        return best, tried + others
    if any(each.refused for each in tried if {**each.keys, PACKS: None} == {**best.keys, PACKS: None}):
        tries({RECOMPUTE: least, **plain, **sent}, 1)
        if best.refused and pools and best.beyond < freed:
            tries({RECOMPUTE: least, **plain, **sent}, MOST_ZERO)

    if best.keys[RECOMPUTE] == least and best.keys.get(ZERO, start.arrangement.llm.zero) == 1:
        best, packed = _long_anew(best, usual, whole_step)
        tried += packed
    if best.keys[RECOMPUTE] == usual != quickest:
        best, other = _changed(best, {RECOMPUTE: quickest}, whole_step)
        tried.append(other)
    if sent:
        goes = any(best.keys[key] for key in sent)
        # What stays is simpler: what goes must gain.
        change, gain = (stays, -GAIN) if goes else (sent, GAIN)  # one holds more here, one on the host
        best, other = _changed(best, change, whole_step, gain, holds_more=False)
        tried.append(other)
    if best.keys[RECOMPUTE] == least or best.keys[RECOMPUTE_LONG]:
        kept.append(KEEP_ATTENTION)
    best, others = _attending_once(best, kept, sent, whole_step)
    return best, tried + others


def _attending_once(
    best: Tried, kept: Sequence[str], sent: Keys, whole_step: Try
) -> tuple[Tried, list[Tried]]:
    """Try a candidate whose layers that are made anew keep what attention puts out, by the keys `kept` one
    after the other; with what encoders' layers keep `sent` to the host where it does not fit otherwise, or no
    schedule but a lean one. It must gain twice as much as others: what holds more leaves less room to the
    schedule, for which one stands here.
    """
    tried = list[Tried]()
    for key in kept:
        best, other = _changed(best, {key: True}, whole_step, 2 * GAIN)
        tried.append(other)
        if (other.refused or other.lean) and sent and not any(best.keys[own] for own in sent):
            best, other = _changed(best, {key: True, **sent}, whole_step, 2 * GAIN, holds_more=False)
            tried.append(other)
    return best, tried


def _once_each(attempt: Try) -> Try:
    """Return how candidates are tried: each of them once on so many steps."""
    known: dict[tuple[object, ...], Tried] = {}

    def once(config: Config, own: Keys, steps: int = STEPS, **more: Any) -> Tried:
        key = text_of(own), config.data.sample_tokens, steps, more.get("lean", False)
        if key not in known:
            known[key] = attempt(config, own, steps=steps, **more)
        return known[key]

    return once


def _on_whole_steps(attempt: Try, config: Config, longest: int) -> Try:
    """Return how candidates are tried on one whole step."""

    def whole_step(own: Keys, beside: Tried | None = None, lean: bool = False) -> Tried:
        return attempt(with_keys(config, {**own, LONGEST: longest}), own, steps=1, beside=beside, lean=lean)

    return whole_step


def _changed(
    best: Tried, change: Keys, whole_step: Try, gain: float = GAIN, *, holds_more: bool = True
) -> tuple[Tried, Tried]:
    """Try a candidate with other keys, on one whole step, as packs are compared: they must gain so much, or
    may lose it. Returns which of both is taken, and the other one as it stands among all.
    """
    now = whole_step(best.keys)
    best = now if best.step_ns is None else best
    other = whole_step({**best.keys, **change}, now if gain > 0 else None, now.lean and holds_more)
    found = _as_beside(best, now, other)
    return (found if gains(other, now, gain) else best), found


def _long_anew(best: Tried, recompute: str, whole_step: Try) -> tuple[Tried, list[Tried]]:
    """Try another `recompute`, but all of passes that are longer than a pack: of packs as they are, and
    smaller ones until these gain nothing. On one whole step, as packs are compared.
    """
    reference, found = whole_step(best.keys), list[Tried]()
    now, own, before = reference, best, None
    for divisor in (1, *DIVISORS) if PACKS in best.keys else (1,):
        packs = {PACKS: divisor * best.keys[PACKS]} if PACKS in best.keys else {}
        other = whole_step({**best.keys, **packs, RECOMPUTE: recompute, RECOMPUTE_LONG: True}, now)
        found.append(_as_beside(best, reference, other))
        if gains(other, now):
            now, own = other, found[-1]
        elif before is not None and not (other.refused or gains(other, before)):
            break
        before = other
    return own, found


def _freed(spec: RunSpec) -> int:
    """Bytes of the LLM's weights and gradients on the rank with most of them: ZeRO-3 frees less."""
    return max(
        sum(
            weight.elements
            for number in own
            for weight in spec.work[virtual_stage_name(LLM, number)].weights()
        )
        for own in spec.arrangement.virtual_stages_by_stage
    ) * (spec.element + FP32)


# long: keys are searched one after the other, each at the best of those before
def _search(
    config: Config,
    keys: Sequence[str],
    start: RunSpec,
    sizes: Sequence[int],
    longest: int,
    lengths: Ints,
    attempt: Try,
    fixed: Keys,
) -> tuple[Tried, list[Tried]]:
    """Try sizes of domains, without and with sharing; at the best of them sharing less; then other policies;
    with keys that are `fixed`.

    Returns the best candidate and all. A single one is not simulated.
    """
    short, given = shortened(config, start, lengths, longest), config.data.microbatch_tokens
    cuts = may_be_cut(value_of(config, LLM_SP))
    samples = samples_of_step(config, lengths, longest) // start.arrangement.llm.dp
    tried: dict[str, Tried] = {}
    whole_step = _on_whole_steps(attempt, config, longest)

    def of_size(size: int) -> Iterator[Keys]:
        budget = microbatch_tokens(given, cuts, size, longest)
        of_domain = {
            DOMAIN: size,
            MICROBATCH: budget,
            PACKS: 1 if given else budget // PASS_TOKENS,
            RECOMPUTE_LONG: False,
            KEEP_ATTENTION: False,
            ZERO: 1,
            **fixed,
            CONTEXT: mean_context(np.minimum(lengths, longest))
            if start.arrangement.llm.pp > 1
            else ANY_CONTEXT,
        }
        own = {key: of_domain[key] for key in keys if key in of_domain}
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
    node = start.arrangement, config.cluster.ranks_per_node
    best, sized = _of_best_size(*node, sizes, samples, of_size, simulated, whole_step)
    tried |= {text_of(one.keys): one for one in sized}
    size = best.keys.get(DOMAIN, config.layout.domain)
    needed = longest > microbatch_tokens(given, cuts, size, longest)
    for key in (LLM_SP, ENCODER_SP):
        if best.keys.get(key) == _SECOND[key] and not (needed and key == LLM_SP):
            simpler = simulated({**best.keys, key: _FIRST[key]})
            best = best if gains(best, simpler) else simpler
    for key in others:
        found = simulated({**best.keys, key: _SECOND[key]})
        if gains(found, best) and samples > A_REPLICA:
            now = whole_step(best.keys)
            other = whole_step(found.keys, now)
            found = tried[text_of(found.keys)] = _as_beside(best, now, other)
        best = found if gains(found, best) else best
    if best.refused and RECOMPUTE in keys and fixed[RECOMPUTE] != recomputed(config.model.llm)[1]:
        # What holds less is tried next, and then this again, of smaller packs.
        return best, list(tried.values())
    if CONTEXT in best.keys and best.keys[CONTEXT] != ANY_CONTEXT:
        # Even stages of the LLM need not be best: late ones wait for their first pass, and encode meanwhile.
        now = whole_step(best.keys)
        other = whole_step({**best.keys, CONTEXT: ANY_CONTEXT}, now)
        tried[text_of(other.keys)] = _as_beside(best, now, other)
        best = tried[text_of(other.keys)] if gains(other, now, 0) else best  # neither is simpler
    if {PACKS, PACKING} & set(keys) and (start.arrangement.llm.pp > 1 or best.refused):
        starts = [best]
        if longest <= microbatch_tokens(given, cuts, sizes[0], longest):  # the first candidate shares nothing
            plainest = simulated(first[0])
            starts += [plainest] if plainest is not best and not plainest.refused else []
        best, packed = _packed(starts, whole_step, start.arrangement.llm.pp > 1)
        tried |= {text_of(one.keys): one for one in packed}
    return best, list(tried.values())


def _of_best_size(
    world: Arrangement,
    per_node: int,
    sizes: Sequence[int],
    samples: int,
    of_size: Callable[[int], Iterator[Keys]],
    simulated: Callable[[Keys], Tried],
    whole_step: Try,
) -> tuple[Tried, list[Tried]]:
    """Return the best candidate with any size of domains, where steps have so many `samples` a replica, and
    those that stand among others otherwise than they were simulated.
    """
    best, worse, gained = None, 0, list[Tried]()
    for size in sizes:
        before = best
        if best is not None and size * samples > PLANNED:
            ranks = size * world.world // world.llm.dp
            whole_ns = (best.step_ns or 0) * max(1.0, samples / A_REPLICA)
            if planned_long(size * samples, min(ranks, per_node), whole_ns):
                break
        gain = GAIN if size <= max(SIZES[-1], sizes[0]) else LARGE_GAIN
        for own in of_size(size):
            found = simulated(own)
            best = found if best is None or gains(found, best, gain) else best
        assert best is not None
        worse = worse + 1 if best is before else 0
        gained += [best] if best is not before else []
        if worse == WORSE:
            break
    assert best is not None
    if samples > A_REPLICA and len(gained) > 1 and not gains(best, gained[-2], LARGE_GAIN):
        smaller, now, then = gained[-2], whole_step(best.keys), whole_step(gained[-2].keys)
        if not gains(now, then):
            return smaller, [_as_beside(smaller, then, now)]
    return best, []


def _packed(starts: Sequence[Tried], whole_step: Try, staged: bool) -> tuple[Tried, list[Tried]]:
    """Try smaller packs, of the best candidate and of simpler ones that follow it in `starts`, and of the
    best of these packs that grow, as large or the next larger. How a pipeline fills and empties shows on a
    whole step alone, so the first one is simulated: a candidate stands among the others with as much more or
    less than the best as it takes there.
    """
    reference = whole_step(starts[0].keys)
    best, least, found = starts[0], reference, list[Tried]()
    for start in starts:
        now = reference if start is starts[0] else whole_step(start.keys)
        found.append(start if start is starts[0] else _as_beside(starts[0], reference, now))
        own, larger, worse = found[-1], None, 0
        for divisor in DIVISORS if PACKS in start.keys else ():
            other = whole_step({**start.keys, PACKS: divisor * start.keys[PACKS]}, now)
            found.append(_as_beside(starts[0], reference, other))
            if gains(other, now):
                own, now, larger, worse = found[-1], other, own, 0
                continue
            worse += 1
            if worse == WORSE or not now.refused:  # while none fits, one more: it may
                break
        for plain in (own, larger) if PACKING in start.keys and staged else ():
            if plain is not None:
                other = whole_step({**plain.keys, PACKING: _SECOND[PACKING]}, now)
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


def _of_size(size: int, fixed: Keys, keys: Sequence[str], start: RunSpec, needed: bool) -> Iterator[Keys]:
    """Candidates with domains of so many replicas and keys that are `fixed` for these: without sharing,
    unless long samples `need` it, and with it. Whole items go to any ranks of a domain in either case.
    """
    world = start.arrangement
    plain = {**fixed, **{key: name for key, name in _FIRST.items() if key in keys}}
    num_tp_groups = max((len(world.tp_groups(name)) for name in start.encoders), default=0)
    helped = {
        LLM_SP: needed or world.llm.cp * size > 1,
        ENCODER_SP: num_tp_groups * size > world.replicas or num_tp_groups > 1,
    }
    shared = {key: _SECOND[key] for key, by_others in helped.items() if key in keys and by_others}
    if not shared or not needed:
        yield plain
    if shared:
        yield {**plain, **shared}

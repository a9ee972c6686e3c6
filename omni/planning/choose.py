"""Choose for a run, when it is composed, what nobody gave: the size of domains, sharing, balance, pairing,
and how long a sample may be.

Candidates differ in open keys alone (`omni.planning.choice`); a key that was given is never changed. Domains
and sharing are searched together, then one key after the other: what gains only together is not found. Each
is prepared as a run is, and the planner and simulator of its steps say what its first steps would take: those
of the domains that samples load most; of steps with more than `A_REPLICA` samples a replica, with so many.
Longer steps even out by themselves: the best size of domains is compared on a whole one with the next smaller
size that gained, and so is that if it is as good; so is, at last, what all other keys came to.
Candidates, steps, domains and samples are bounded by count and nothing by time, so the same configuration,
data and ranks give the same choice on any machine. A run that goes on may be told to choose again, by its
next steps.

Samples stay whole where ranks can hold them together: domains are large enough for the longest of the first
`LOOKED` samples of the run's stream, as far as links allow, and `data.sample_tokens` is what they hold.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from dataloader.samples import Samples
from omni.config import Config
from omni.models.llm import NAME as LLM
from omni.planning.choice import (
    CONTEXT,
    DOMAIN,
    ENCODER_SP,
    KEEP_ATTENTION,
    LLM_SP,
    LONGEST,
    MICROBATCH,
    PACKING,
    PACKS,
    PASS_TOKENS,
    POLICIES,
    RECOMPUTE,
    RECOMPUTE_LONG,
    VPP,
    ZERO,
    Keys,
    RunChoice,
    Tried,
    chosen,
    of_encoder,
    open_keys,
    recomputed,
    unchosen,
    with_keys,
)
from omni.planning.host_memory import may_keep, most_sent
from omni.planning.policy_search import DIVISORS, SearchSpace, search_policies
from omni.planning.room import A_REPLICA, cut_of_longer, domain_sizes, lengths_of, samples_of_step
from omni.planning.run_spec import RunSpec
from omni.planning.trials import (
    GAIN,
    Make,
    Try,
    as_beside,
    gains,
    half_empty,
    on_whole_steps,
    once_each,
    tried_out,
)
from parallel.layout import CONTEXT as ANY_CONTEXT
from parallel.layout import MOST_ZERO
from parallel.work import FP32, virtual_stage_name

STAGES = 2  # virtual, on each rank, that are tried


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
    lengths, attempt = lengths_of(samples, begin[1]), once_each(partial(tried_out, make=make, begin=begin))
    sizes, held = domain_sizes(config, start, lengths)
    if longest is None:
        longest, cut = held, cut_of_longer(config, lengths, held)
    space = SearchSpace(config, keys, start, sizes, longest, lengths, attempt)
    best, tried = _search_all(space)
    budget = config.data.microbatch_tokens or PASS_TOKENS
    if best.refused and LONGEST in keys and longest > budget:  # samples that a rank holds alone may fit
        sizes, _ = domain_sizes(config, start, np.minimum(lengths, budget))
        longest, cut = budget, cut_of_longer(config, lengths, budget)
        best, tried = _search_all(replace(space, sizes=sizes, longest=longest))
    own = {**best.keys, **({LONGEST: longest} if LONGEST in keys else {})}
    choice = RunChoice(own, best, tried, cut, again=config.choice.ranks)
    return replace(make(chosen(config, own, ranks)), choice=choice)


# long: one key is settled after the other
def _search_all(space: SearchSpace) -> tuple[Tried, list[Tried]]:
    """Search by what passes keep and what of the LLM is divided, if these are open: the usual; where none
    fits, with weights and gradients divided (ZeRO-3), if that may free enough; where the best candidate does
    not fit as it is, or not with other packs, what holds least, inputs of encoders' layers on the host among
    it, in domains of any size again, since where none fits large ones look best; at the best of these what
    takes less in passes that are no longer than a pack, of other packs; if it has the usual, what takes
    least; whether encoders' inputs stay or go; whether layers that are made anew keep what attention puts
    out, with what encoders' layers keep on the host if need be; whether even stages of the LLM take less, or
    packs that do not grow, or smaller domains; and where no schedule but a lean one fits then, whether two
    virtual stages on a rank leave less bubble, of smaller packs if these hold too much.
    """
    config, keys, start, sizes = space.config, space.keys, space.start, space.sizes
    usual, least, quickest = recomputed(config.model.llm)
    sent = {key: count for key, count in most_sent(start).items() if key in keys}
    stays, kept = dict.fromkeys(sent, 0), [key for key in may_keep(start) if key in keys]
    plain = {**stays, **dict.fromkeys(kept, False)}
    as_usual = {RECOMPUTE: usual, **plain}
    best, tried = search_policies(space, as_usual)
    pools = [size for size in sizes if size * start.arrangement.llm.cp > 1] if ZERO in keys else []
    freed = _freed(start)

    def tries(keeping: Keys, zero: int) -> None:
        nonlocal best
        own, fixed = pools if zero > 1 else sizes, {**keeping, ZERO: zero}
        other, others = search_policies(replace(space, sizes=own), fixed)
        tried.extend(others)
        best = other if gains(other, best) else best

    if best.refused and pools and best.beyond < freed:
        tries(as_usual, MOST_ZERO)
    whole_step = on_whole_steps(space.attempt, config, space.longest)
    is_long = samples_of_step(config, space.lengths, space.longest) > A_REPLICA * start.arrangement.llm.dp
    may_interleave = (
        VPP in keys
        and start.policies["pipeline"].vpp is None
        and start.config.model.llm.layers >= STAGES * start.arrangement.llm.pp
    )

    def at_last() -> tuple[Tried, list[Tried]]:
        """Whether attention is kept; under the run's own schedule, whether stages are cut by what attention
        costs in them, and whether packs that do not grow and, in long steps, smaller domains take more, as
        they did under the schedule that stood in; and whether ranks have several virtual stages.
        """
        found, others = _attending_once(best, kept, sent, whole_step, start.cluster.memory_bytes)
        as_run = whole_step if found.lean else partial(whole_step, stands_in=False)
        for other_keys in (_even_stages, _packs_that_stay, *[_smaller_domains] * is_long):
            if not found.refused and (change := other_keys(found.keys, tried)):
                found, other = _changed(found, change, as_run, 0)  # neither is simpler
                others.append(other)
        if found.lean and may_interleave:
            found, other = _changed(found, {VPP: STAGES}, whole_step)
            others.append(other)
            packs = STAGES * found.keys.get(PACKS, 0)
            least = min((each.keys[PACKS] for each in tried if PACKS in each.keys), default=0)
            if other.refused and 0 < packs <= DIVISORS[-1] * least:
                smaller = {VPP: STAGES, PACKS: packs}
                found, other = _changed(found, smaller, whole_step)
                others.append(other)
        return found, tried + others

    if RECOMPUTE not in keys:
        return at_last()
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
        change, gain = (stays, -GAIN) if goes else (sent, GAIN)
        best, other = _changed(best, change, whole_step, gain, holds_more=goes)
        tried.append(other)
    if best.keys[RECOMPUTE] == least or best.keys[RECOMPUTE_LONG]:
        kept.append(KEEP_ATTENTION)
    return at_last()


def _attending_once(
    best: Tried, kept: Sequence[str], sent: Keys, whole_step: Try, memory: int | None
) -> tuple[Tried, list[Tried]]:
    """Try a candidate whose layers that are made anew keep what attention puts out, by the keys `kept` one
    after the other; with what encoders' layers keep `sent` to the host where it does not fit otherwise, or no
    schedule but a lean one. It must gain twice as much as others where ranks hold more than half of their
    device's `memory`: what holds more leaves less room to the schedule, for which one stands here.
    """
    tried = list[Tried]()
    for key in kept:
        gain = 0 if half_empty(whole_step(best.keys), memory) else 2 * GAIN
        best, other = _changed(best, {key: True}, whole_step, gain)
        tried.append(other)
        if (other.refused or other.lean) and sent and not any(best.keys[own] for own in sent):
            best, other = _changed(best, {key: True, **sent}, whole_step, 2 * GAIN, holds_more=False)
            tried.append(other)
    return best, tried


def _changed(
    best: Tried, change: Keys, whole_step: Try, gain: float = GAIN, *, holds_more: bool = True
) -> tuple[Tried, Tried]:
    """Try a candidate with other keys, on one whole step, as packs are compared: they must gain so much, or
    may lose it. Returns which of both is taken, and the other one as it stands among all.
    """
    now = whole_step(best.keys)
    best = now if best.step_ns is None else best
    enough = now if now.step_ns is None else replace(now, step_ns=round((1 - gain) * now.step_ns))
    other = whole_step({**best.keys, **change}, enough, now.lean and holds_more)
    found = as_beside(best, now, other)
    return (found if gains(other, now, gain) else best), found


def _even_stages(own: Keys, tried: Sequence[Tried]) -> Keys:
    """Stages cut evenly: late ones wait for their first pass and may encode meanwhile."""
    return {CONTEXT: ANY_CONTEXT} if own.get(CONTEXT, ANY_CONTEXT) != ANY_CONTEXT else {}


def _packs_that_stay(own: Keys, tried: Sequence[Tried]) -> Keys:
    """Packs that do not grow."""
    plain = POLICIES[PACKING][0]
    return {PACKING: plain} if own.get(PACKING, plain) != plain else {}


def _smaller_domains(own: Keys, tried: Sequence[Tried]) -> Keys:
    """The next smaller domains that were tried, as these share, with packs of as many tokens."""
    smaller = [one for one in tried if one.keys.get(DOMAIN, 0) < own.get(DOMAIN, 0) and not one.refused]
    if not smaller:
        return {}
    found = min(smaller, key=lambda one: (-one.keys[DOMAIN], one.step_ns or 0)).keys
    change = {key: found[key] for key in (DOMAIN, MICROBATCH, LLM_SP, ENCODER_SP) if key in found}
    if MICROBATCH in found and PACKS in own:
        change[PACKS] = max(1, own[PACKS] * found[MICROBATCH] // own[MICROBATCH])
    return change


def _long_anew(best: Tried, recompute: str, whole_step: Try) -> tuple[Tried, list[Tried]]:
    """Try another `recompute`, but all of passes that are longer than a pack: of packs as they are, and
    smaller ones until these gain nothing. On one whole step, as packs are compared.
    """
    reference, found = whole_step(best.keys), list[Tried]()
    now, own, before = reference, best, None
    for divisor in (1, *DIVISORS) if PACKS in best.keys else (1,):
        packs = {PACKS: divisor * best.keys[PACKS]} if PACKS in best.keys else {}
        other = whole_step({**best.keys, **packs, RECOMPUTE: recompute, RECOMPUTE_LONG: True}, now)
        found.append(as_beside(best, reference, other))
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

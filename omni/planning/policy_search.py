"""Search for the keys of a run that say how work is shared: sizes of domains, policies, how the LLM's stages
are cut, and packs.

Sizes of domains and sharing are searched together, then one key after the other, each at the best of those
before: what gains only together is not found.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from omni.config import Config
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
    VPP,
    ZERO,
    Keys,
    Tried,
    recomputed,
    text_of,
    value_of,
    with_keys,
)
from omni.planning.room import (
    A_REPLICA,
    PLANNED,
    SIZES,
    may_be_cut,
    mean_context,
    microbatch_tokens,
    planned_long,
    samples_of_step,
    shortened,
)
from omni.planning.run_spec import RunSpec
from omni.planning.trials import GAIN, Try, as_beside, gains, on_whole_steps
from ops.ints import Ints
from parallel.layout import CONTEXT as ANY_CONTEXT
from parallel.layout import Arrangement

LARGE_GAIN = 0.1  # of the step, that domains must bring whose plans take a rank long
WORSE = 2  # sizes of domains, or of packs that do not fit, in a row without a gain, before no other is tried
DIVISORS = (2, 4, 8, 16)  # of a microbatch's tokens, that packs have: smaller ones, until one gains nothing
_FIRST, _SECOND = ({key: names[place] for key, names in POLICIES.items()} for place in (0, 1))


@dataclass(frozen=True)
class SearchSpace:
    """What candidates may be: those of a configuration with the open `keys`, whose run as it is would be
    `start`, in domains of `sizes`, for samples of at most `longest` tokens, of which the first have `lengths`
    [n]. Each is tried by `attempt`.
    """

    config: Config
    keys: Sequence[str]
    start: RunSpec
    sizes: Sequence[int]
    longest: int
    lengths: Ints
    attempt: Try


# long: keys are searched one after the other, each at the best of those before
def search_policies(space: SearchSpace, fixed: Keys) -> tuple[Tried, list[Tried]]:
    """Try sizes of domains, without and with sharing; at the best of them sharing less; then other policies;
    with keys that are `fixed`.

    Returns the best candidate and all. A single one is not simulated.
    """
    config, keys, start, sizes = space.config, space.keys, space.start, space.sizes
    longest, lengths, attempt = space.longest, space.lengths, space.attempt
    short, given = shortened(config, start, lengths, longest), config.data.microbatch_tokens
    cuts = may_be_cut(value_of(config, LLM_SP))
    samples = samples_of_step(config, lengths, longest) // start.arrangement.llm.dp
    tried: dict[str, Tried] = {}
    whole_step = on_whole_steps(attempt, config, longest)

    def of_size(size: int) -> Iterator[Keys]:
        budget = microbatch_tokens(given, cuts, size, longest)
        of_domain = {
            DOMAIN: size,
            MICROBATCH: budget,
            PACKS: 1 if given else budget // PASS_TOKENS,
            RECOMPUTE_LONG: False,
            KEEP_ATTENTION: False,
            ZERO: 1,
            VPP: 1,
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
            found = tried[text_of(found.keys)] = as_beside(best, now, other)
        best = found if gains(found, best) else best
    if best.refused and RECOMPUTE in keys and fixed[RECOMPUTE] != recomputed(config.model.llm)[1]:
        # What holds less is tried next, and then this again, of smaller packs.
        return best, list(tried.values())
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
    others = list[Tried]()
    while samples > A_REPLICA and len(gained) > 1 and not best.refused:
        *gained, larger = gained
        smaller, now, then = gained[-1], whole_step(larger.keys), whole_step(gained[-1].keys)
        if gains(now, then):
            break
        best, others = smaller, [*others, as_beside(smaller, then, now)]
    return best, others


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
        found.append(start if start is starts[0] else as_beside(starts[0], reference, now))
        own, larger, worse = found[-1], None, 0
        for divisor in DIVISORS if PACKS in start.keys else ():
            other = whole_step({**start.keys, PACKS: divisor * start.keys[PACKS]}, now)
            found.append(as_beside(starts[0], reference, other))
            if gains(other, now):
                own, now, larger, worse = found[-1], other, own, 0
                continue
            worse += 1
            if worse == WORSE or not now.refused:  # while none fits, one more: it may
                break
        for plain in (own, larger) if PACKING in start.keys and staged else ():
            if plain is not None:
                other = whole_step({**plain.keys, PACKING: _SECOND[PACKING]}, now)
                found.append(as_beside(starts[0], reference, other))
                if gains(other, now):
                    own, now = found[-1], other
        if start is starts[0] or not gains(least, now):
            best, least = own, now
    return best, found


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

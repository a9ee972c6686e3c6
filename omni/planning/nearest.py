"""The nearest configuration of which devices can hold a step, where they cannot as it stands.

Llama 3 405B on 8 H100s needs 283 GiB a rank for weights and gradients alone, however it is divided; the
nearest that fits is `launch.ranks=128 layout.llm.tp=8 layout.llm.pp=16 model.llm.recompute=full`. Nearer is
what needs fewer ranks, then what changes fewer keys, then what divides the LLM less. Candidates double the
ranks, `tp` within a node and `pp`, and divide matrices by ZeRO-3, in domains of a node where those that there
are have nothing to divide. Sizes alone say about what a rank holds of the LLM: on the fewest ranks
for which that fits, the likeliest candidate is planned, then the `NEARER` nearest, all domains of the step.
So what is named fits; something nearer may fit, too.
"""

from collections.abc import Iterator
from itertools import product
from math import gcd, inf
from operator import itemgetter
from typing import Any

from omni.config import Config, EncoderLayoutConfig
from omni.models.llm import llm_work
from omni.planning.choice import DOMAIN, RECOMPUTE, ZERO, Keys, text_of, with_keys
from omni.planning.fullest import Peak, fullest_rank
from omni.planning.held_state import kept_of_a_weight
from omni.planning.layouts import check_layout, resolve_layout
from omni.planning.memory_advice import GIB
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from parallel.costs import full_load
from parallel.layout import MOST_ZERO
from parallel.work import FP32, Part
from pipeline.verifier import PlanRefusedError

MOST_RANKS = 1 << 17
WORLDS = 8  # whose likeliest candidate is planned
NEARER = 4  # candidates that are nearer than one that fits and are planned
RANKS, DP, TP, PP = "launch.ranks", "layout.llm.dp", "layout.llm.tp", "layout.llm.pp"


def nearest(spec: RunSpec, step: int, cursor: int) -> tuple[Keys, Peak] | None:
    """Return the keys to change so that all ranks hold a step from `cursor` of the stream on, and the
    fullest rank then; None if nothing that was tried fits. Keys that were chosen stay as they were chosen.
    """
    most = spec.cluster.memory_bytes
    assert most is not None, "every device holds anything"
    beside, encoders, worlds = spec.arrangement.encoder_ranks, _encoder_tp(spec, most), 0
    for ranks in _doublings(spec.arrangement.llm.world, MOST_RANKS):
        able = [each for each in _candidates(spec, ranks + beside, encoders) if each[0] <= most]
        worlds += bool(able)
        if worlds > WORLDS:
            return None
        if able:
            found = _planned(spec, min(able, key=itemgetter(0))[1], step, cursor)
            if found is not None:
                nearer = (_planned(spec, keys, step, cursor) for _, keys in able[:NEARER])
                return next(filter(None, nearer), found)
    return None


def _planned(spec: RunSpec, keys: Keys, step: int, cursor: int) -> tuple[Keys, Peak] | None:
    """Return keys and the fullest rank of a step with these changed, or None if that does not fit."""
    try:
        changed = prepare_run(_changed(spec, keys), keys.get(RANKS, spec.arrangement.world))
        peak = fullest_rank(changed, changed.planner.distinct_domains(step, cursor))
    except (ValueError, PlanRefusedError):  # samples that nobody holds, a pass that the schedule cannot order
        return None
    return (keys, peak) if peak.bytes <= (spec.cluster.memory_bytes or 0) else None


def nearest_text(spec: RunSpec, step: int, cursor: int) -> str:
    """Say which keys are nearest so that a step fits, as `nearest` finds them."""
    found = nearest(spec, step, cursor)
    if found is None:
        return "No more ranks, tp, pp or recomputation that was tried makes it fit."
    keys, peak = found
    return f"The nearest that fits: {text_of(keys)} ({peak.bytes / GIB:.1f} GiB)."


def _candidates(spec: RunSpec, ranks: int, encoders: Keys) -> list[tuple[float, Keys]]:
    """Return keys to change on so many ranks, those of `encoders` among them, the nearest first, and about
    the least that a rank would hold.
    """
    config, llm = spec.config, spec.config.layout.llm
    recompute = config.model.llm.recompute
    zero_now = spec.arrangement.llm.zero
    now = {RANKS: spec.arrangement.world, TP: llm.tp, PP: llm.pp, ZERO: zero_now, RECOMPUTE: recompute}
    found: list[tuple[int, int, float, Keys]] = []
    sizes = product(
        _doublings(llm.tp, max(spec.cluster.ranks_per_node, llm.tp)),
        _doublings(llm.pp, config.model.llm.layers),
    )
    zeros, recomputed = dict.fromkeys((zero_now, MOST_ZERO)), dict.fromkeys((recompute, "full"))
    for (tp, pp), zero, recompute in product(sizes, zeros, recomputed):
        wanted = {RANKS: ranks, TP: tp, PP: pp, ZERO: zero, RECOMPUTE: recompute}
        keys: dict[str, Any] = {key: value for key, value in wanted.items() if now[key] != value}
        if ZERO in keys and spec.arrangement.pool == 1:
            replicas = (ranks - spec.arrangement.encoder_ranks) // (tp * llm.cp * pp)
            keys[DOMAIN] = gcd(replicas, max(1, spec.cluster.ranks_per_node // (tp * llm.cp)))
        if llm.dp is not None and keys.keys() & {RANKS, TP, PP}:
            keys[DP] = None
        keys |= encoders
        if keys:
            found.append((len(keys), tp * pp, _of_llm(spec, keys), keys))
    return [(least, keys) for *_, least, keys in sorted(found, key=lambda each: each[:2])]


def _of_llm(spec: RunSpec, keys: Keys) -> float:
    """Return about the least bytes that a rank of the first or the last stage holds of the LLM with keys
    changed: state, and what full microbatches keep in 1F1B; infinite for sizes that do not go together.
    """
    config = _changed(spec, keys)
    try:
        ranks = keys.get(RANKS, spec.arrangement.world)
        arrangement = resolve_layout(config.layout, config.placement, tuple(spec.encoders), ranks)
        check_layout(config.model.llm, spec.encoders, arrangement, (), spec.tokenizer.vocab_size)
    except ValueError:
        return inf
    layout, tokens = arrangement.llm, config.data.pass_tokens // arrangement.llm.cp
    parts = llm_work(config.model.llm, spec.tokenizer.vocab_size, layout, spec.element, arrangement.pool)
    held, of_weight = [], kept_of_a_weight(spec.element, spec.of_moments, learns=True)
    for part, passes in ((parts[0], layout.pp), (parts[-1], 1)):
        replicas = {True: arrangement.num_domains, False: layout.dp}
        learns = (w for w in part.weights() if not w.frozen)
        optimizer = of_weight * sum(w.elements / replicas[w.partition] for w in learns)
        kept = part.forward(full_load(part, tokens)).kept
        held.append(_state(spec.element, part) + optimizer + passes * kept)
    return max(held)


def _state(element: int, part: Part) -> int:
    """Bytes of weights and gradients of a part on a rank."""
    frozen, learns = (sum(w.elements for w in part.weights() if w.frozen is is_) for is_ in (True, False))
    return frozen * element + learns * (element + FP32)


def _encoder_tp(spec: RunSpec, most: int) -> Keys:
    """The tensor-parallel sizes of encoders of which weights and gradients would fill half of a device."""
    keys: dict[str, Any] = {}
    for name, tp in spec.arrangement.encoder_tp.items():
        state = tp * _state(spec.element, spec.work[name])
        least = next((n for n in _doublings(tp, spec.cluster.ranks_per_node) if 2 * state <= most * n), tp)
        if least > tp:
            keys[f"layout.encoders.{name}.tp"] = least
    return keys


def _doublings(first: int, most: int) -> Iterator[int]:
    """Yield `first` and its doubles, up to `most`."""
    while first <= most:
        yield first
        first *= 2


def _changed(spec: RunSpec, keys: Keys) -> Config:
    """Return a run's configuration with keys changed, and nothing to be chosen anew."""
    encoders = {name: key for name in spec.encoders if (key := f"layout.encoders.{name}.tp") in keys}
    config = with_keys(spec.config, {key: keys[key] for key in keys if key not in encoders.values()})
    config.choice.ranks = None
    layout, llm = config.layout, config.layout.llm
    layout.encoders |= {name: EncoderLayoutConfig(tp=keys[key]) for name, key in encoders.items()}
    if llm.dp is None and layout.domain is not None and DOMAIN not in keys:
        ranks = keys.get(RANKS, spec.arrangement.world) - spec.arrangement.encoder_ranks
        layout.domain = gcd(layout.domain, ranks // (llm.tp * llm.cp * llm.pp))
    return config

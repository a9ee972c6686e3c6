"""A candidate's first steps, planned and simulated as those of a run, in the domains that samples load most.

They are bounded by count and nothing by time, so the same configuration, data and ranks give the same figures
on any machine.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from omni.config import Config
from omni.planning.choice import AUTO, LONGEST, SCHEDULE, Keys, Tried, text_of, with_keys
from omni.planning.host_memory import offloaded
from omni.planning.memory_advice import GIB
from omni.planning.run_spec import RunSpec
from omni.planning.uncollected import uncollected
from pipeline.costs import simulate
from pipeline.plan import StepPlan

DOMAINS, STEPS = 4, 4  # simulated at most: domains of a step, steps
ENOUGH = 1024  # samples of steps after which no further one is simulated
IN_DOMAINS = 512  # samples of domains of a step, after which no further domain is
CHECKED = 2, 2048  # domains at least, and samples, if domains are to fit
ROUNDS = "pipeline.rounds"
GAIN = 0.005  # of the step, that a candidate must bring to be taken over a simpler one

Make = Callable[[Config], RunSpec]
Try = Callable[..., Tried]


def tried_out(
    config: Config,
    keys: Keys,
    make: Make,
    begin: tuple[int, int],
    steps: int = STEPS,
    beside: Tried | None = None,
    lean: bool = False,
    stands_in: bool = True,
) -> Tried:
    """Simulate the first steps of a candidate, in the domains that samples load most. Once one of them shows
    that it gains nothing `beside` another candidate of as many steps, no further one is planned.

    Where the schedule follows step by step, one `stands_in` for all: ZB-H1, or if that leaves devices half
    empty, so that they hold twice as many microbatches, ZB-H2. If a device cannot hold the former, or is
    known not to (`lean`), that which holds least, in as few rounds as it can.
    """
    pipeline, vpp = config.pipeline, config.layout.llm.vpp or 1
    attempt = partial(_simulated, keys=keys, make=make, begin=begin, steps=steps, beside=beside)
    if pipeline.policy != AUTO or config.layout.llm.pp == 1 or not stands_in:
        return attempt(config)
    if vpp > 1:
        at_once = attempt(with_keys(config, {SCHEDULE: "interleaved", ROUNDS: pipeline.rounds or 1}))
        # In rounds none gains beside one that fits at once.
        enough = not at_once.refused or (beside is not None and not beside.refused)
        return at_once if enough else attempt(with_keys(config, {SCHEDULE: "interleaved"}))
    least = with_keys(config, {SCHEDULE: "encode_first"})
    if lean:
        return replace(attempt(least), lean=True)
    quick = attempt(with_keys(config, {SCHEDULE: "zero_bubble_h1", ROUNDS: pipeline.rounds or 1}))
    if half_empty(quick, config.cluster.memory_bytes):
        return attempt(with_keys(config, {SCHEDULE: "zero_bubble_h2", ROUNDS: pipeline.rounds or 1}))
    if not quick.refused:
        return quick
    other = replace(attempt(least), lean=True)
    return other if gains(other, quick) else quick


@uncollected()
def _simulated(
    config: Config, keys: Keys, make: Make, begin: tuple[int, int], steps: int, beside: Tried | None
) -> Tried:
    """Simulate the first steps of a candidate under its schedule, up to a domain that does not fit."""
    try:
        spec = make(config)
    except ValueError as error:
        return Tried(keys, refused=str(error))
    total, seen, beyond, refused = 0, 0, -(spec.cluster.memory_bytes or 0), ""
    first, cursor = begin
    for count in range(1, steps + 1):
        slowest = 0
        for plan, more in _first_plans(spec, first + count - 1, cursor):
            timeline = simulate(plan.domain, spec.table, spec.planner.domain.single_queue)
            slowest, beyond = max(slowest, timeline.makespan_ns), max(beyond, more)
            so_far = Tried(keys, total + slowest, "beyond" if beyond > 0 else "", beyond)
            if beyond > 0 or (beside is not None and not gains(so_far, beside, 0)):
                break
        total += slowest
        if beyond > 0:
            bounds = "cluster.memory_bytes" + " or host_memory_bytes" * bool(offloaded(spec.config.model))
            refused = f"does not fit {bounds} by {beyond / GIB:.1f} GiB"
            break
        seen, cursor = seen + len(plan.taken), plan.taken.next_cursor
        if seen >= ENOUGH:
            break
    return Tried(keys, total // count, refused, beyond)


def _first_plans(spec: RunSpec, step: int, cursor: int) -> Iterator[tuple[StepPlan, int]]:
    """The plans of the domains that samples of a step load most, as far as they are bounded, each with the
    bytes that it is beyond what ranks can hold.
    """
    samples, (least, enough) = 0, (1, IN_DOMAINS) if spec.cluster.memory_bytes is None else CHECKED
    for count, (plan, beyond) in enumerate(islice(spec.planner.busiest(step, cursor), DOMAINS), 1):
        yield plan, beyond
        samples += len(plan.domain.samples)
        if count >= least and samples >= enough:
            break


def half_empty(tried: Tried, memory: int | None) -> bool:
    """Whether a candidate leaves half of a device's memory, if it is known what that is."""
    return memory is not None and 2 * tried.beyond < -memory


def gains(found: Tried, best: Tried, gain: float = GAIN) -> bool:
    """Whether a candidate is to be taken over a simpler one: it can be and that cannot, or it takes less; of
    two that no device can hold, it is as much less beyond that.
    """
    if bool(found.refused) != bool(best.refused) or found.step_ns is None or best.step_ns is None:
        return not found.refused and bool(best.refused)
    if found.refused:
        return found.beyond < (1 - gain) * best.beyond
    return found.step_ns < (1 - gain) * best.step_ns


def once_each(attempt: Try) -> Try:
    """Return how candidates are tried: each of them once on so many steps, also one that is known not to fit
    under the quick schedule when it is tried first, and that nobody says so of later.
    """
    known: dict[tuple[object, ...], Tried] = {}

    def once(config: Config, own: Keys, steps: int = STEPS, stands_in: bool = True, **more: Any) -> Tried:
        key = text_of(own), config.data.sample_tokens, steps, stands_in
        if key not in known:
            known[key] = attempt(config, own, steps=steps, stands_in=stands_in, **more)
        return known[key]

    return once


def on_whole_steps(attempt: Try, config: Config, longest: int) -> Try:
    """Return how candidates are tried on one whole step."""

    def whole_step(own: Keys, beside: Tried | None = None, lean: bool = False, **more: Any) -> Tried:
        whole = with_keys(config, {**own, LONGEST: longest})
        return attempt(whole, own, steps=1, beside=beside, lean=lean, **more)

    return whole_step


def as_beside(start: Tried, first: Tried, other: Tried) -> Tried:
    """A candidate that was simulated beside `first`, as it stands among others that `start` stands among."""
    if not (start.step_ns and first.step_ns and other.step_ns):
        return replace(other, step_ns=None)
    return replace(other, step_ns=start.step_ns * other.step_ns // first.step_ns)

"""`omni plan`: what a step will do, without ranks: the plan, the verifier's answer, the simulated time."""

import argparse
import json
import sys
from typing import TYPE_CHECKING

from omni.commands._shared import add_configuration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni.planning.run_spec import RunSpec
    from pipeline.domain_plan import Chunk, Microbatch
    from pipeline.plan import StepPlan
    from pipeline.simulator import Timeline

WIDTH = 72  # characters of a timeline
_LETTERS = {
    "encode": "e", "encode_backward": "E", "forward": "f", "backward": "B", "reduce": "r", "wait": "."
}  # fmt: skip
_DESCRIPTION = """\
Plans a training step from metadata alone, as every rank will, checks it against rules R1 to R7, and times it
with the cost table. Times are simulated. Overrides as for `omni train`; launch.ranks is two unless given.
Number format and queues are those of this machine's device.

  omni plan launch.ranks=8 layout.llm.pp=4 cluster=h100_8x8 --step 3
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--step", type=int, default=1, help="which step to plan (default 1)")
    parser.add_argument("--domain", type=int, default=0, help="which domain to show (default 0)")
    parser.add_argument("--ops", action="store_true", help="print the op list of every rank of the domain")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    add_configuration(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan, verify, simulate, print. Returns 1 if the verifier refuses the plan."""
    from omni.compose import compose_config
    from omni.config import ConfigError
    from omni.planning.pools import without_effect
    from omni.planning.run_spec import planned_ranks, prepare_run
    from pipeline.costs import simulate
    from pipeline.verifier import PlanRefusedError

    try:
        config = compose_config(arguments.overrides, arguments.config_dir)
        spec = prepare_run(config, planned_ranks(config))
        if arguments.step < 1 or not 0 <= arguments.domain < spec.arrangement.num_domains:
            raise ConfigError(
                f"--step {arguments.step} --domain {arguments.domain}: steps begin at 1, "
                f"and there are domains 0 to {spec.arrangement.num_domains - 1}"
            )
        plan = plan_of_step(spec, arguments.step, arguments.domain)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        spec.planner.verify(plan)
    except PlanRefusedError as error:
        print(error, file=sys.stderr)
        return 1
    for text in without_effect(spec.planner.sharing):
        print(f"note: {text}", file=sys.stderr)
    timeline = simulate(plan.domain, spec.table)
    if arguments.json:
        print(json.dumps(figures(spec, plan, timeline), indent=2))
        return 0
    for key, value in figures(spec, plan, timeline).items():
        print(f"{key:28} {value}")
    print("\nsimulated timeline: e encode, f forward, B backward, E encode-backward, r reduce, . wait")
    ranks, team = spec.arrangement.domain_ranks(plan.number), plan.domain.team
    names = [_ranks(ranks[first : first + team]) for first in range(0, len(ranks), team)]
    for number, name in enumerate(names):
        print(f"  {name:{max(map(len, names))}}  {draw(timeline, number)}")
    if arguments.ops:
        for name, ops in zip(names, plan.domain.ops, strict=True):
            print(f"\n{name}: {' '.join(map(str, ops))}")
    return 0


def _ranks(ranks: "Sequence[int]") -> str:
    """Global ranks that share an op list, in words."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def plan_of_step(spec: "RunSpec", step: int, domain: int = 0) -> "StepPlan":
    """Plan steps 1 … `step` for a domain: where a step begins in the stream depends on those before it."""
    plan = spec.planner.next_step(1, 0, domain)
    for number in range(2, step + 1):
        plan = spec.planner.next_step(number, plan.taken.next_cursor, domain)
    return plan


def figures(spec: "RunSpec", plan: "StepPlan", timeline: "Timeline") -> dict[str, object]:
    """What a plan amounts to, as plain values."""
    from pipeline.costs import spent_on

    domain, taken = plan.domain, plan.taken
    rows = sum(item.rows for item in domain.items)
    moved = sum(route.moved_rows() for route in domain.routes if route is not None)
    spent = [spent_on(timeline, spec.table, rank) for rank in range(0, domain.num_ranks, domain.team)]
    whole = max(1, timeline.makespan_ns * len(spent))
    shares = {
        "compute": sum(each.compute_ns for each in spent) / whole,
        "inside layers": sum(each.layers_ns for each in spent) / whole,
        "reduction": sum(each.reducing_ns for each in spent) / whole,
        "waiting": sum(each.waiting_ns for each in spent) / whole,
    }
    return {
        "step": plan.step,
        "digests": " ".join(f"{name} {digest:016x}" for name, _, digest, _ in plan.levels),
        "stream positions": f"{taken.cursor} to {taken.next_cursor - 1}",
        "samples": len(taken),
        "tokens": taken.tokens,
        "layout": spec.arrangement.describe(),
        "policies": spec.policies.describe(),
        "microbatches of the domain": [sum(batch.layout.lengths) for batch in domain.microbatches],
        "items, chunks": f"{len(domain.items)}, {len(domain.chunks)}",
        "sequences, items shared": f"{_shared(domain.microbatches)}, {_shared(domain.chunks)}",
        "rows, of them shipped": f"{rows}, {moved}",
        "verifier": "accepted, rules R1 to R7",
        "simulated step ms": round(timeline.makespan_ns / 1e6, 3),
        "simulated shares of it": ", ".join(f"{name} {share:.3f}" for name, share in shares.items()),
        "simulated on": spec.cluster.name,
    }


def _shared(parts: "Sequence[Microbatch | Chunk]") -> int:
    """Sequences of microbatches or chunks that several ranks hold parts of."""
    return sum(len(shards) > 1 for part in parts for shards in part.layout.shards)


def draw(timeline: "Timeline", team: int) -> str:
    """One character for each slice of the simulated step: what the ranks of a team do for most of it."""
    total = max(1, timeline.makespan_ns)
    cells = [dict.fromkeys(_LETTERS, 0) for _ in range(WIDTH)]
    for event in timeline.events[team]:
        if event.op.kind not in _LETTERS:
            continue
        first, last = event.start_ns * WIDTH // total, min(WIDTH - 1, event.end_ns * WIDTH // total)
        for cell in range(first, last + 1):
            low, high = cell * total // WIDTH, (cell + 1) * total // WIDTH
            cells[cell][event.op.kind] += max(0, min(high, event.end_ns) - max(low, event.start_ns))
    best = [max(cell, key=lambda kind: cell[kind]) for cell in cells]
    return "".join(_LETTERS[kind] if cell[kind] else " " for kind, cell in zip(best, cells, strict=True))

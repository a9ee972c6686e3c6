"""`omni plan`: what a step takes on a cluster, without ranks: shall I rent these machines?"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from omni.commands._shared import add_configuration, add_trace, check_drawing, signs_of_life, write_drawing

if TYPE_CHECKING:
    from collections.abc import Mapping

    from omni.planning.run_spec import RunSpec
    from omni.rehearsal.estimate import Estimate
    from omni.rehearsal.footprint import Sent
    from pipeline.plan import StepPlan
    from pipeline.simulator import Timeline

_DESCRIPTION = """\
Plans a training step of every domain from metadata alone, as the ranks will, checks the plans against rules
R1 to R7, times them with the cost table and models what ranks hold. The slowest domain sets the time, and is
shown; times are simulated. A step that does not fit cluster.memory_bytes is refused (exit code 2). Overrides
as for `omni train`; launch.ranks is two unless given. With cluster=cpu, number format and queues are those of
this machine's device, with any other cluster those of GPUs.

  omni plan --trace longtail experiment=llama3_70b launch.ranks=1024
  omni plan launch.ranks=8 layout.llm.pp=4 cluster=h100 --step 3 --draw step.svg
  omni plan -m --trace longtail experiment=llama3_70b launch.ranks=1024 layout=tp8_pp4,tp8_cp2_pp4
  omni plan --trace 8192 --framework megatron ~experiment +model/llm=llama3_8b cluster=h100 launch.ranks=8 \
      data.microbatch_tokens=8192 data.step_samples=64 optim.lr=1e-4 train.steps=1

Beside the step stands the best possible one: no plan of these samples in this layout is shorter. Where a step
takes 1.15 times that or wastes time (ranks idle, reductions, uneven work), the end says why and what other
keys bring.
With -m overrides may list values, as for `omni train -m`: each combination is planned and gets a row.

  omni plan --search --trace longtail model=qwen2_5_vl_7b experiment=llama3_70b launch.ranks=64 \
      --tokens 1e12 --out conf/experiment/found.yaml

--search finds layouts: of the LLM and of encoders, placement, domains, sharing, passes, recomputation. Keys
among the overrides stay as they are, those that only an experiment sets do not. Prints the best, why each
takes longer than even work, and what half and twice the ranks bring; --out writes the best as an experiment,
to train as `omni train --config-dir conf experiment=found`.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--step", type=int, default=1, help="which step to plan (default 1)")
    parser.add_argument("--domain", type=int, help="which domain to show (default: the slowest)")
    parser.add_argument(
        "--draw", type=Path, help="write the simulated timeline: as a picture (.svg) or for Perfetto (.json)"
    )
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="plan every combination of listed values, a row each"
    )
    parser.add_argument("--search", action="store_true", help="find the layout: the best few, and why")
    parser.add_argument(
        "--tokens", type=float, metavar="N", help="with --search: days, and price, of N tokens"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="with --search: write the best as an experiment (.yaml)"
    )
    parser.add_argument("--ops", action="store_true", help="print the op list of every rank of the domain")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument(
        "--framework",
        metavar="NAME",
        help="time the lists as another framework overlaps communication, to compare with what it publishes: "
        "megatron, megatron_2023, megascale, torchtitan, torchtitan_async_tp",
    )
    add_trace(parser)
    add_configuration(parser)


def run(arguments: argparse.Namespace) -> int:
    """Plan, verify, simulate, print. Returns 1 if the verifier refuses a plan, 2 for a user's mistake and for
    a step that does not fit the cluster.
    """
    from omni.commands._plan_search import run_search
    from omni.commands._plan_sweep import run_sweep
    from omni.config import ConfigError
    from pipeline.verifier import PlanRefusedError

    try:
        if arguments.search:
            return run_search(arguments)
        for option in ("out", "tokens"):
            if getattr(arguments, option) is not None:
                raise ConfigError(f"--{option} is of --search: add it, or leave --{option} out")
        if arguments.multirun:
            return run_sweep(arguments)
        with tempfile.TemporaryDirectory() as folder:
            _plan(arguments, Path(folder))
    except PlanRefusedError as error:
        print(error, file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _plan(arguments: argparse.Namespace, folder: Path) -> None:
    from omni.commands._plan_advice import advice
    from omni.commands._plan_estimate import estimated
    from omni.commands._plan_text import lines
    from omni.config import ConfigError
    from omni.models.registry import notes_of
    from omni.planning.few_samples import few
    from omni.planning.fullest import check_memory
    from omni.planning.nearest import nearest_text
    from omni.planning.pools import without_effect
    from omni.planning.slower_in_bf16 import slower_in_bf16
    from omni.rehearsal.estimate import sent_by_ranks
    from pipeline.costs import simulate
    from pipeline.drawing import team_names

    check_drawing(arguments.draw)
    notes: list[str] = []

    def tell(note: str) -> None:
        notes.append(note)
        print(f"note: {note}", file=sys.stderr)

    spec, found, cursor = estimated(arguments, arguments.overrides, folder, tell)
    shown = arguments.domain
    plan, timeline = found.plan, found.timeline
    if shown is not None:
        plan = spec.planner.next_step(arguments.step, cursor, shown)
        timeline = simulate(plan.domain, spec.table, spec.planner.domain.single_queue)
    names = team_names(spec.arrangement.global_ranks(plan.number), plan.domain.team)
    if arguments.draw:
        _draw(arguments.draw, timeline, f"step {plan.step}, domain {plan.number}", names)
    try:
        check_memory(spec, found.fullest)  # a picture of what does not fit is wanted all the more
    except ValueError as error:
        with signs_of_life(lambda: "looking for the nearest that fits"):
            raise ConfigError(f"{error} {nearest_text(spec, arguments.step, cursor)}") from error
    policies, own = without_effect(spec.planner.domain.sharing), notes_of(spec.encoders)
    for text in (*policies, *slower_in_bf16(spec), *own, *few(spec.planner, plan.taken)):
        tell(text)
    sent = sent_by_ranks(spec, plan)
    if arguments.json:
        print(json.dumps(figures(spec, found, plan, sent) | {"notes": notes}, indent=2))
        return
    for line in lines(spec, found, plan, timeline, sent):
        print(line)
    with signs_of_life(lambda: "simulating what would help"):
        for line in advice(spec, found, cursor):
            print(line, flush=True)
    if arguments.ops:
        for name, ops in zip(names, plan.domain.ops, strict=True):
            print(f"\n{name}: {' '.join(map(str, ops))}")


def _draw(path: Path, timeline: "Timeline", title: str, names: "list[str]") -> None:
    """Write a picture of a simulated timeline, in the format that the path ends with."""
    from pipeline.drawing import rows_of

    write_drawing(path, [(f"{title} (simulated)", rows_of(timeline, names))])


def plan_of_step(spec: "RunSpec", step: int, domain: int = 0) -> "StepPlan":
    """Plan a step for a domain: where the step begins in the stream depends on those before it."""
    return spec.planner.next_step(step, spec.planner.cursor_of(step), domain)


# long: a flat table
def figures(
    spec: "RunSpec", found: "Estimate", plan: "StepPlan", sent: "Mapping[int, Sent]"
) -> dict[str, object]:
    """What a step amounts to, and what the shown domain's plan is and its ranks send, as plain values."""
    from omni.commands._plan_text import shared
    from omni.planning.cut import cut_of
    from omni.planning.memory_advice import by_component
    from omni.planning.update_time import update_ns

    domain, taken = plan.domain, plan.taken
    return {
        "step": plan.step,
        "samples": len(taken),
        "samples_per_rank": len(taken) / spec.arrangement.world,
        "samples_per_replica": len(taken) / spec.arrangement.llm.dp,
        "tokens": taken.tokens,
        "cut": vars(cut_of(spec.planner, taken)),
        "stream positions": f"{taken.cursor} to {taken.next_cursor - 1}",
        "ranks": spec.arrangement.world,
        "layout": spec.arrangement.describe(),
        "policies": spec.policies.describe(),
        "cluster": spec.cluster.name,
        "queues": spec.cluster.queues,
        "precision": spec.config.train.precision,
        "verifier": "accepted, rules R1 to R7",
        "domains": spec.arrangement.num_domains,
        "loads_ns": {name: {"max": most, "mean": mean} for name, (most, mean) in found.loads.items()},
        "slowest_domain": found.plan.number,
        "simulated_step_ns": found.timeline.makespan_ns,
        "simulated_ns": {key.removesuffix("_ns"): value for key, value in vars(found.spent).items()},
        "update_ns": update_ns(spec, found.plan, found.fullest.rank),
        "best_possible_ns": {"these_domains": found.bound.ns, "any_domains": found.any_domain.ns},
        "best_possible_is": found.any_domain.reason,
        "simulated_step_over_best": found.over_best,
        "simulated_tokens_per_s": found.tokens_per_s(),
        "simulated_mfu": found.mfu(spec),
        "fullest_rank": found.fullest.rank,
        "held_bytes": {"all": found.fullest.bytes, **found.fullest.held},
        "activations_bytes": by_component(found.fullest.parts, "activations"),
        "held_at": found.fullest.at,
        "memory_bytes": spec.cluster.memory_bytes,
        "host_bytes": found.host_bytes,
        "shown_domain": plan.number,
        "schedule": domain.schedule,
        "rounds": domain.rounds,
        "digests": {name: f"{digest:016x}" for name, _, digest, _ in plan.levels},
        "microbatches": [sum(batch.layout.lengths) for batch in domain.microbatches],
        "items": len(domain.items),
        "encoder_batches": len(domain.encoder_batches),
        "sequences_shared": shared(domain.microbatches),
        "items_shared": shared(domain.encoder_batches),
        "rows": sum(item.rows for item in domain.items),
        "rows_shipped": sum(route.moved_rows() for route in domain.routes if route is not None),
        "sent_bytes": {
            where: {
                "max": max(getattr(of, where) for of in sent.values()),
                "mean": sum(getattr(of, where) for of in sent.values()) / len(sent),
            }
            for where in ("inside", "across")
        },
    }

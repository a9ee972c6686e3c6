"""`omni rehearse`: what ranks of a world would hold and send in a step, without the world."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from omni.commands._shared import add_configuration, add_trace, signs_of_life

if TYPE_CHECKING:
    from omni.config import Config
    from omni.planning.run_spec import RunSpec
    from omni.rehearsal.footprint import Footprint
    from omni.rehearsal.rehearse import Rehearsal

_GIB = 1 << 30
_DESCRIPTION = """\
Runs ranks through a step on fake tensors: engine, models, optimizer and plan are real and at real shapes, but
nothing is stored and no other rank is there. Prints what each holds at its fullest moment and what it sends,
beside what the analytic model says. Each expert is taken to get the same share of every rank's tokens. Which
rank holds most is found without being asked, by the model; --rank asks for others.
Overrides as for `omni train`; launch.ranks is two unless given.

  omni rehearse --dry --rank 37 --trace balanced experiment=llama3_70b
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--dry", action="store_true", required=True, help="on fake tensors: the only way yet")
    parser.add_argument(
        "--rank", help="ranks, such as 37 or 0,37,127 (default: the one that holds most, by the model)"
    )
    parser.add_argument("--step", type=int, default=1, help="which step to run (default 1)")
    add_trace(parser)
    parser.add_argument("--json", action="store_true", help="print figures as JSON, a line for each rank")
    add_configuration(parser)


def run(arguments: argparse.Namespace) -> int:
    """Rehearse and print. Returns 1 if the verifier refuses the plan, 2 for a user's mistake."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fake tensors live on the CPU, whatever this machine has
    from omni.compose import compose_config
    from omni.rehearsal.stand_in_data import use_trace
    from pipeline.verifier import PlanRefusedError

    try:
        ranks = _ranks(arguments.rank)
        config = compose_config(arguments.overrides, arguments.config_dir)
        if config.train.precision == "auto":
            config.train.precision = "bf16"  # what it is on GPUs
        what = f"rank {arguments.rank}" if ranks else "the fullest rank"
        with tempfile.TemporaryDirectory() as folder, signs_of_life(lambda: f"rehearsing {what}"):
            if arguments.trace:
                use_trace(config, arguments.trace, Path(folder) / "trace")
            for line in _rehearse(config, ranks, arguments.step, arguments.json):
                print(line, flush=True)
    except PlanRefusedError as error:
        print(error, file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _ranks(text: str | None) -> list[int] | None:
    """The ranks asked for, None if none are."""
    try:
        return [int(part) for part in text.split(",")] if text is not None else None
    except ValueError:
        raise ValueError(f"--rank {text}: give numbers, such as 37 or 0,37,127") from None


def _rehearse(config: "Config", ranks: list[int] | None, step: int, as_json: bool) -> Iterator[str]:
    from omni.commands.plan import plan_of_step
    from omni.config import ConfigError
    from omni.planning.layouts import planned_ranks
    from omni.planning.run_spec import prepare_run

    spec = prepare_run(config, planned_ranks(config))
    # These take seconds to import: a mistake in the configuration should not wait for them.
    from omni.planning.run_spec import for_gpus
    from omni.rehearsal.fullest import fullest_rank
    from omni.rehearsal.memory import model_footprint
    from omni.rehearsal.rehearse import rehearse

    spec = for_gpus(spec)
    if step < 1:
        raise ConfigError(f"--step {step}: steps begin at 1")
    if ranks is None:
        all_domains = spec.planner.all_domains(step, spec.planner.cursor_of(step))
        ranks = [fullest_rank(spec, all_domains).rank]
        print(f"rank {ranks[0]} holds most of all, by the model", file=sys.stderr)
    if any(not 0 <= rank < spec.arrangement.world for rank in ranks):
        raise ConfigError(
            f"--rank {','.join(map(str, ranks))}: there are ranks 0 to {spec.arrangement.world - 1}"
        )
    domains = sorted({spec.arrangement.domain(rank) for rank in ranks})
    plans = {domain: plan_of_step(spec, step, domain) for domain in domains}
    for plan in plans.values():
        spec.planner.verify(plan)
    for rank in ranks:
        plan = plans[spec.arrangement.domain(rank)]
        rehearsal, modelled = rehearse(spec, plan, rank), model_footprint(spec, plan, rank)
        if as_json:
            yield json.dumps(figures(rehearsal, modelled))
        else:
            yield from _lines(spec, rehearsal, modelled)


def figures(rehearsal: "Rehearsal", modelled: "Footprint") -> dict[str, object]:
    """What a rehearsal amounts to, as plain values."""
    found = rehearsal.footprint
    out: dict[str, object] = {
        "rank": rehearsal.rank,
        "parameters": dict(found.parameters),
        "peak_bytes": dict(found.peak),
        "peak_at": found.at,
        "sent": [
            {"group": group, "collective": name, **vars(sent)}
            for (group, name), sent in found.traffic.items()
        ],
        "build_cpu_s": round(rehearsal.build_s, 3),
        "step_cpu_s": round(rehearsal.step_s, 3),
    }
    out["modelled_peak_bytes"] = dict(modelled.peak)
    out["modelled_sent_bytes"] = sum(sent.total for sent in modelled.traffic.values())
    return out


def _lines(spec: "RunSpec", rehearsal: "Rehearsal", modelled: "Footprint") -> Iterator[str]:
    from omni.rehearsal.fullest import place

    rank, found = rehearsal.rank, rehearsal.footprint
    yield f"rank {rank} of {spec.arrangement.world} ({spec.arrangement.describe()}): {place(spec, rank)}"
    yield "parameters here: " + ", ".join(f"{name} {count:,}" for name, count in found.parameters.items())
    yield f"\n{'GiB held at ' + found.at:34} {'rehearsed':>12} {'modelled':>12}"
    for kind, size in [*found.peak.items(), ("all", found.bytes)]:
        of_model = modelled.bytes if kind == "all" else modelled.peak[kind]
        yield f"  {kind:32} {size / _GIB:12.3f} {of_model / _GIB:12.3f}"
    yield f"\n{'MiB sent':34} {'calls':>12} {'in the node':>12} {'to others':>12}"
    for (group, collective), sent in found.traffic.items():
        sizes = f"{sent.inside / 2**20:12.1f} {sent.across / 2**20:12.1f}"
        yield f"  {group:16} {collective:15} {sent.calls:12} {sizes}"
    total = sum(sent.total for sent in modelled.traffic.values())
    yield f"  {'modelled, in all':32} {'':12} {total / 2**20:25.1f}"
    yield f"\nbuilt in {rehearsal.build_s:.1f} s, run in {rehearsal.step_s:.1f} s of CPU\n"

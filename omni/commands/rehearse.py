"""`omni rehearse`: what ranks of a world would hold and send in a step, without the world."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omni.commands._shared import add_configuration, add_trace, signs_of_life

if TYPE_CHECKING:
    from omni.config import Config
    from omni.planning.run_spec import RunSpec
    from omni.rehearsal.footprint import Footprint
    from omni.rehearsal.launches import Launches
    from omni.rehearsal.meetings import Call
    from omni.rehearsal.rehearse import Rehearsal
    from parallel.cluster import Cluster

MOST_OFF = 0.02  # of all that a rank holds: what is more is said
_GIB = 1 << 30
_DESCRIPTION = """\
Runs ranks through a step on fake tensors: engine, models, optimizer and plan are real and at real shapes, but
nothing is stored and no other rank is there. Prints what each holds at its fullest moment and what it sends,
beside what the analytic model says. Each expert is taken to get the same share of every rank's tokens. Which
rank holds most is found without being asked, by the model; --rank asks for others.
With --device cuda the tensors are a GPU's, of which none is needed: prints what each kind of op launches and
is bound by, at the speeds of `cluster`, and exits with 1 if the host would wait where it is not known to, or
nothing orders what two streams do with the same memory.
With --domain all ranks of a domain run, one after the other, and whether they meet is all that is printed: in
each group the same collectives in the same order, and none that waits for another for ever. If not, 1.
Overrides as for `omni train`; launch.ranks is two unless given.

  omni rehearse --dry --rank 37 --trace balanced experiment=llama3_70b
  omni rehearse --dry --device cuda model=llama3_1b_so400m layout=pp2 cluster=h100
  omni rehearse --dry --domain 0 launch.ranks=4 layout.llm.tp=2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--dry", action="store_true", required=True, help="on fake tensors: the only way yet")
    parser.add_argument(
        "--rank", help="ranks, such as 37 or 0,37,127 (default: the one that holds most, by the model)"
    )
    parser.add_argument("--domain", type=int, metavar="N", help="whether all ranks of domain N meet")
    parser.add_argument("--step", type=int, default=1, help="which step to run (default 1)")
    add_trace(parser)
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="whose branches are run (default cpu); cuda needs g++ once and torch's build for CPUs",
    )
    parser.add_argument("--json", action="store_true", help="print figures as JSON, a line for each rank")
    add_configuration(parser)


def run(arguments: argparse.Namespace) -> int:
    """Rehearse and print. Returns 1 if the verifier refuses the plan, the host waits where it must not,
    something is not in order or ranks do not meet, 2 for a user's mistake.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fake tensors need no device, whatever this machine has
    from omni.rehearsal.findings import DynamicShapeError
    from pipeline.verifier import PlanRefusedError

    bad: list[object] = []
    try:
        if arguments.device == "cuda":  # before anything imports torch
            from omni.rehearsal.noop_guard import install

            install()
        from omni.compose import compose_config
        from omni.rehearsal.stand_in_data import use_trace

        ranks = _ranks(arguments.rank)
        config = compose_config(arguments.overrides, arguments.config_dir)
        if config.train.precision == "auto":
            config.train.precision = "bf16"  # what it is on GPUs
        if config.cluster.device == "cpu":
            config.cluster.queues = "one"  # as GPUs have it
        what = f"rank {arguments.rank}" if ranks else "the fullest rank"
        if arguments.domain is not None:
            if ranks is not None or arguments.json:
                raise ValueError(
                    "--domain runs all ranks of it and prints no figures: leave --rank and --json out"
                )
            what = f"domain {arguments.domain}"
        with tempfile.TemporaryDirectory() as folder, signs_of_life(lambda: f"rehearsing {what}"):
            if arguments.trace:
                use_trace(config, arguments.trace, Path(folder) / "trace")
            for text, findings in _rehearse(config, ranks, arguments):
                print(text, flush=True)
                bad += findings
    except DynamicShapeError as error:
        bad.append(error)
    except PlanRefusedError as error:
        print(error, file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for finding in bad:
        print(f"not allowed: {finding}", file=sys.stderr)
    return 1 if bad else 0


def _ranks(text: str | None) -> list[int] | None:
    """The ranks asked for, None if none are."""
    try:
        return [int(part) for part in text.split(",")] if text is not None else None
    except ValueError:
        raise ValueError(f"--rank {text}: give numbers, such as 37 or 0,37,127") from None


def _rehearse(
    config: "Config", ranks: list[int] | None, arguments: argparse.Namespace
) -> Iterator[tuple[str, Sequence[object]]]:
    """Yield what to print, and what must not be."""
    from omni.commands.plan import plan_of_step
    from omni.config import ConfigError
    from omni.planning.layouts import planned_ranks
    from omni.planning.prepare import prepare_run
    from omni.planning.trainable import check_trainable

    check_trainable(config)
    spec = prepare_run(config, planned_ranks(config.launch))
    for line in spec.choice.lines() if spec.choice else ():
        print(line, file=sys.stderr)
    # These take seconds to import: a mistake in the configuration should not wait for them.
    import torch

    from omni.planning.fullest import fullest_rank
    from omni.rehearsal.findings import unexpected
    from omni.rehearsal.footprint_model import model_footprint
    from omni.rehearsal.rehearse import rehearse

    step = arguments.step
    if step < 1:
        raise ConfigError(f"--step {step}: steps begin at 1")
    world = spec.arrangement
    if arguments.domain is not None:
        if not 0 <= arguments.domain < world.num_domains:
            raise ConfigError(f"--domain {arguments.domain}: there are domains 0 to {world.num_domains - 1}")
        ranks = list(world.global_ranks(arguments.domain))
    elif ranks is None:
        distinct = spec.planner.distinct_domains(step, spec.planner.cursor_of(step))
        ranks = [fullest_rank(spec, distinct).rank]
        print(f"rank {ranks[0]} holds most of all, by the model", file=sys.stderr)
    if any(not 0 <= rank < spec.arrangement.world for rank in ranks):
        raise ConfigError(
            f"--rank {','.join(map(str, ranks))}: there are ranks 0 to {spec.arrangement.world - 1}"
        )
    domains = sorted({spec.arrangement.domain(rank) for rank in ranks})
    plans = {domain: plan_of_step(spec, step, domain) for domain in domains}
    for plan in plans.values():
        spec.planner.verify(plan)
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    if arguments.domain is not None:
        done = [rehearse(spec, plans[arguments.domain], rank, device) for rank in ranks]
        text, wrong = _meeting(arguments.domain, {each.rank: each.calls for each in done})
        yield text, [*wrong, *dict.fromkeys(one for each in done for one in unexpected(each.findings))]
        return
    for rank in ranks:
        plan = plans[spec.arrangement.domain(rank)]
        rehearsal = rehearse(spec, plan, rank, device)
        modelled = model_footprint(spec, plan, rank)
        if arguments.json:
            text = json.dumps(figures(rehearsal, modelled, spec.cluster))
        else:
            text = "\n".join(_lines(spec, rehearsal, modelled))
        yield text, unexpected(rehearsal.findings)


def _meeting(domain: int, calls: "Mapping[int, Sequence[Call]]") -> tuple[str, list[str]]:
    """Say whether the ranks of a domain meet in what they issue, and where they do not."""
    from omni.rehearsal.meetings import by_group, stuck, unequal

    counted = f"{sum(map(len, calls.values())):,} collectives and messages in {len(by_group(calls)):,} groups"
    wrong = [*unequal(calls)] or [*stuck(calls)]
    met = "do not meet" if wrong else "all meet"
    return f"domain {domain}: {len(calls)} ranks issue {counted}, and {met}", wrong


def figures(rehearsal: "Rehearsal", modelled: "Footprint", cluster: "Cluster") -> dict[str, object]:
    """What a rehearsal amounts to, as plain values."""
    found = rehearsal.footprint
    out: dict[str, object] = {
        "rank": rehearsal.rank,
        "parameters": dict(found.parameters),
        "peak_bytes": dict(found.peak),
        "peak_at": found.at,
        "host_bytes": found.host,
        "sent": [
            {"group": group, "collective": name, **vars(sent)}
            for (group, name), sent in found.traffic.items()
        ],
        "build_cpu_s": round(rehearsal.build_s, 3),
        "step_cpu_s": round(rehearsal.step_s, 3),
    }
    out["modelled_host_bytes"] = modelled.host
    out["modelled_peak_bytes"] = dict(modelled.peak)
    out["modelled_sent_bytes"] = sum(sent.total for sent in modelled.traffic.values())
    if rehearsal.launches:
        out["launches"] = {
            phase: {
                "ops": of.ops,
                "launches": dict(of.launches),
                "memory_bytes": of.bytes,
                "product_flops": of.flops,
                "host_ms": round(of.host_s * 1e3, 3),
                "memory_ms": round(of.memory_s(cluster) * 1e3, 3),
                "products_ms": round(of.products_s(cluster) * 1e3, 3),
                "bound_by": of.bound(cluster),
            }
            for phase, of in rehearsal.launches.items()
        }
        out["unknown"] = dict(rehearsal.unknown)
        out["findings"] = [vars(f) | {"count": count} for f, count in sorted(rehearsal.findings.items())]
    return out


def _lines(spec: "RunSpec", rehearsal: "Rehearsal", modelled: "Footprint") -> Iterator[str]:
    from omni.planning.fullest import place

    rank, found = rehearsal.rank, rehearsal.footprint
    yield f"rank {rank} of {spec.arrangement.world} ({spec.arrangement.describe()}): {place(spec, rank)}"
    yield "parameters here: " + ", ".join(f"{name} {count:,}" for name, count in found.parameters.items())
    yield f"\n{'GiB held at ' + found.at:34} {'rehearsed':>12} {'modelled':>12}"
    for kind, size in [*found.peak.items(), ("all", found.bytes)]:
        of_model = modelled.bytes if kind == "all" else modelled.peak[kind]
        yield f"  {kind:32} {size / _GIB:12.3f} {of_model / _GIB:12.3f}"
    if found.host:
        yield f"  {'inputs of layers on its host':32} {found.host / _GIB:12.3f} {modelled.host / _GIB:12.3f}"
    yield from off_lines(found, modelled)
    yield f"\n{'MiB sent':34} {'calls':>12} {'in the node':>12} {'to others':>12}"
    for (group, collective), sent in found.traffic.items():
        sizes = f"{sent.inside / 2**20:12.1f} {sent.across / 2**20:12.1f}"
        yield f"  {group:16} {collective:15} {sent.calls:12} {sizes}"
    total = sum(sent.total for sent in modelled.traffic.values())
    yield f"  {'modelled, in all':32} {'':12} {total / 2**20:25.1f}"
    if rehearsal.launches:
        yield from _launch_lines(rehearsal.launches, spec.cluster)
        if rehearsal.unknown:
            yield "  counted as one launch a call, as nobody has said what they launch: " + ", ".join(
                rehearsal.unknown
            )
        yield "\ntimes  the host waits, float64, or nothing orders"
        yield from (f"{count:5}  {found}" for found, count in sorted(rehearsal.findings.items()))
    yield f"\nbuilt in {rehearsal.build_s:.1f} s, run in {rehearsal.step_s:.1f} s of CPU\n"


def off_lines(found: "Footprint", modelled: "Footprint") -> Iterator[str]:
    """Say of which kinds the model is further off what was rehearsed than statements of work should be, where
    the rank holds most; else in which pass of an encoder it has too much, wherever that is.
    """
    near = MOST_OFF * found.bytes
    remedy = (
        "if an encoder of your own is built here, look at the `kept` and `workspace` of its work() "
        "(docs/encoders.md)"
    )
    off = {kind: modelled.peak[kind] - size for kind, size in found.peak.items()}
    for kind, size in off.items():
        if abs(size) > near:
            yield (
                f"  note: the model has {abs(size) / _GIB:.3f} GiB too {'much' if size > 0 else 'little'} "
                f"{kind}, {abs(size) / found.bytes:.1%} of all (its peak is at {modelled.at}): {remedy}"
            )
    passes = {op: modelled.encoding.get(op, 0) - size for op, size in found.encoding.items()}
    size, worst = max(((size, str(op)) for op, size in passes.items()), default=(0, ""))
    if size > near and all(abs(size) <= near for size in off.values()):
        share = f"{size / found.bytes:.1%} of all at the peak"
        yield f"  note: the model has {size / _GIB:.3f} GiB too much during {worst}, {share}: {remedy}"


def _launch_lines(by_phase: "Mapping[str, Launches]", cluster: "Cluster") -> Iterator[str]:
    """What an op of each kind launches, on average, and all of the step together."""
    from omni.rehearsal.launches import of_step

    heads = ("ops", "launches", "host ms", "memory GB", "ms", "product TF", "ms")
    yield f"\n{'launched by an op':22}" + "".join(f"{head:>11}" for head in heads) + "  bound by"
    for phase, of in [*by_phase.items(), ("step", of_step(by_phase))]:
        each = 1 if phase == "step" else max(1, of.ops)
        cells = (
            f"{of.ops:11}",
            f"{of.total / each:11.1f}",
            f"{of.host_s * 1e3 / each:11.3f}",
            f"{of.bytes / 1e9 / each:11.3f}",
            f"{of.memory_s(cluster) * 1e3 / each:11.3f}",
            f"{of.flops / 1e12 / each:11.3f}",
            f"{of.products_s(cluster) * 1e3 / each:11.3f}",
        )
        yield f"  {phase:20}{''.join(cells)}  {of.bound(cluster)}"

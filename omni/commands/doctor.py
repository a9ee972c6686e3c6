"""`omni doctor`: is this machine ready for a run? What is wrong, and what to do."""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.host_checks import (
    Finding,
    check_binding,
    check_descriptors,
    check_folder,
    check_name,
    check_port,
    check_processes,
    check_ray,
    check_shadowed,
    check_slurm,
    check_threads,
    check_wandb,
)
from omni.commands._shared import add_configuration

if TYPE_CHECKING:
    from omni.config import Config

ASK_S = 60.0  # for a process that imports torch and asks each GPU
_DESCRIPTION = """\
Looks at what a run of this configuration needs of this machine: limits, cores beside GPUs, folders, names,
ports, W&B, Slurm, Ray. Then starts its ranks here, which check collectives and measure them by kind, and make
and use every process group of the configuration once. Says what is wrong and what to do; the exit code is
then 1.

  omni doctor experiment=quickstart
  srun --ntasks-per-node=1 omni doctor --no-ranks experiment=llama3_70b launch.ranks=1024     # every node
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--no-ranks", action="store_true", help="start no ranks")
    parser.add_argument("--port", type=int, help="a port at which agents are to meet: must be free here")
    parser.add_argument(
        "--timeout", type=float, default=60.0, help="seconds that a rank waits for others (default: 60)"
    )
    add_configuration(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print every finding. Returns 0 if all is as it should be, 1 if not, 2 for a bad configuration."""
    from omni.compose import compose_config
    from omni.planning.layouts import planned_ranks
    from omni.planning.trainable import check_trainable

    try:
        config = compose_config(arguments.overrides, arguments.config_dir)
        ranks = planned_ranks(config.launch)
        if not arguments.no_ranks:
            check_trainable(config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    bad = 0
    for finding in _findings(config, ranks, arguments):
        print(f"{'ok   ' if finding.ok else 'WRONG'}  {finding.what}: {finding.said}", flush=True)
        if not finding.ok:
            bad += 1
            print(f"       → {finding.remedy}", flush=True)
    print("all is as it should be" if not bad else f"{bad} to mend")
    return int(bad > 0)


def _findings(config: "Config", ranks: int, arguments: argparse.Namespace) -> Iterator[Finding]:
    from infra.machine import usable_cores

    here = min(ranks, config.cluster.ranks_per_node) if arguments.no_ranks else ranks
    yield _machine(here)
    yield from _limits(ranks, here)
    yield check_threads(os.environ, usable_cores(), here)
    yield from _binding(here)
    # Without a key of its own a run's folder carries the time: what is above it counts.
    yield check_folder(Path(config.run.dir))
    yield check_shadowed(os.environ.get("PYTHONPATH", "").split(os.pathsep), Path.cwd())
    yield check_name(platform.node())
    if arguments.port is not None:
        yield check_port(arguments.port)
    yield check_wandb(config.tracking.kind, config.tracking.mode, os.environ)
    yield check_slurm(shutil.which("sinfo"))
    yield check_ray(os.environ)
    yield from _counted(config, ranks) if arguments.no_ranks else _together(config, ranks, arguments.timeout)


def _machine(ranks: int) -> Finding:
    from infra.machine import crowding, this_machine
    from ops.device import visible_devices

    machine, gpus = this_machine(), visible_devices()
    crowded = f"it has {gpus} GPUs" if 0 < gpus < ranks else crowding(ranks, machine)
    said = f"{machine.cores} cores, {machine.memory_bytes / 2**30:.1f} GiB, {gpus} GPUs for {ranks} ranks"
    remedy = f"{crowded}: choose fewer (launch.ranks), or more machines"
    return Finding("machine", crowded is None, said, remedy)


def _binding(here: int) -> Iterator[Finding]:
    from infra.environment import Place, capability, defaults

    try:
        gpus = _addresses()
    except (OSError, subprocess.SubprocessError) as error:
        remedy = "look at the GPUs and their driver with nvidia-smi"
        yield Finding("binding", False, f"GPUs do not say where they stand: {error}", remedy)
        return
    given = os.sched_getaffinity(0) if gpus else set[int]()
    of_ranks = os.environ | defaults(Place(here, capability(), Path()), os.environ)
    yield from check_binding(of_ranks, gpus, given)


def _addresses() -> list[str]:
    """Where the visible GPUs stand. A process asks that ends at once: asking may make a context on each,
    which would take their memory, and all of one that is for a single process, while ranks are tried.
    """
    from ops.device import visible_devices

    if not (count := visible_devices()):
        return []
    ask = f"from ops.device import pci_address; print(*map(pci_address, range({count})))"
    command, safe = [sys.executable, "-c", ask], os.environ | {"PYTHONSAFEPATH": "1"}
    asked = subprocess.run(command, env=safe, capture_output=True, text=True, check=True, timeout=ASK_S)
    return asked.stdout.split()


def _limits(ranks: int, here: int) -> Iterator[Finding]:
    import resource

    import psutil

    infinite = 2**62
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    threads, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    user = psutil.Process().username()
    running = 0
    for process in psutil.process_iter(["username", "num_threads"]):
        running += (process.info["num_threads"] or 0) if process.info["username"] == user else 0
    yield check_descriptors(infinite if files < 0 else files, ranks)
    yield check_processes(infinite if threads < 0 else threads, running, here)


def _counted(config: "Config", ranks: int) -> Iterator[Finding]:
    """How many process groups a rank of the whole job will have, from the layout alone."""
    from omni.models.llm import staged
    from omni.planning.layouts import resolve_layout
    from parallel.groups import count_groups

    try:
        arrangement = resolve_layout(config.layout, config.placement, tuple(config.model.encoders), ranks)
    except ValueError as error:
        yield Finding("process groups", False, str(error), "choose a layout and ranks that fit each other")
        return
    some = {*range(0, ranks, max(1, ranks // 64)), ranks - 1}  # ranks of a stage are alike
    counts = [count_groups(arrangement, staged(config.model.llm), rank) for rank in sorted(some)]
    groups, peers = (max(of) for of in zip(*counts, strict=True))
    yield Finding("process groups", True, f"{_counts(arrangement.describe(), groups, peers)} (counted)")
    yield _at_scale(config, ranks, groups)


def _at_scale(config: "Config", ranks: int, groups: int) -> Finding:
    """What the first rank of the whole job will send and hold beside training."""
    from dataloader.tokens import SampleMeta
    from omni.planning.at_scale import at_scale
    from omni.planning.choice import LONGEST, unchosen, with_keys
    from omni.planning.prepare import prepare_run

    try:
        plain = with_keys(unchosen(config), {LONGEST: None})  # counts do not hang on what is chosen
        spec = prepare_run(plain, ranks, trace=[SampleMeta(0, "none", 1, (), 0)])
    except ValueError as error:
        return Finding("control plane", False, str(error), "choose what fits")
    found = at_scale(spec, groups)
    said = (
        f"a rank has {found.connections} connections at most and sends a vector of "
        f"{found.vector_bytes / 1e3:.1f} kB a step over them, {found.depth} messages deep; a commit brings "
        f"{found.entries:,} entries, {found.index_bytes / 1e6:.1f} MB, to the first rank; at the start its "
        f"node takes {found.store_connections:,} connections and {found.store_requests:,} requests (counted)"
    )
    return Finding("control plane", True, said, "")


def _counts(layout: str, groups: float, peers: float) -> str:
    return (
        f"{layout}: a rank shares {groups:.0f} groups with others and talks to {peers:.0f} peers in them, "
        f"at most"
    )


def _together(config: "Config", ranks: int, timeout_s: float) -> Iterator[Finding]:
    """What the ranks of this machine find together."""
    from omegaconf import OmegaConf

    from infra.launch import launch_local
    from infra.run_folder import write_text
    from omni.planning.layouts import count_ranks, resolve_layout

    try:
        count_ranks(config.launch)
        arrangement = resolve_layout(config.layout, config.placement, tuple(config.model.encoders), ranks)
    except ValueError as error:
        yield Finding("ranks", False, str(error), "choose what fits, or --no-ranks")
        return
    with tempfile.TemporaryDirectory() as folder:
        job, out, log = (Path(folder) / name for name in ("job.json", "out.json", "log"))
        resolved = Path(folder) / "config.yaml"
        write_text(resolved, OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True))
        job.write_text(json.dumps({"out": str(out), "config": str(resolved), "timeout_s": timeout_s}))
        code = launch_local(job, ranks, "omni.doctor.worker", log)
        if code:
            remedy = "see above what the ranks printed; --timeout gives them longer"
            yield Finding("ranks", False, f"failed with exit code {code}", remedy)
            return
        found = json.loads(out.read_text())
    yield from _of_ranks(found, arrangement.describe())


def _of_ranks(found: list[dict[str, Any]], layout: str) -> Iterator[Finding]:
    first = found[0]
    wrong = [str(rank) for rank, one in enumerate(found) if not one["sums_right"]]
    backend = f"{first['backend']} {first.get('nccl', '')}".strip()
    result = f"rank {', '.join(wrong)} got wrong sums" if wrong else "sums are right"
    said = f"{len(found)} ranks on {first['device']}, torch {first['torch']}, {backend}: {result}"
    yield Finding("collectives", not wrong, said, "replace the device or the link: numbers cannot be trusted")
    versions = sorted({one["torch"] for one in found})
    yield Finding(
        "versions", len(versions) == 1, f"torch {', '.join(versions)}", "install one on all machines"
    )
    for kind, times in sorted(first["links"].items()):
        (least, least_ns), (most, most_ns) = times[0], times[-1]
        short = f"{least_ns / 1e3:.0f} µs for {least / 2**10:.1f} KiB"
        yield Finding(f"link, {kind}", True, f"{most / most_ns:.2f} GB/s for {most / 2**20:.0f} MiB, {short}")
    groups = [one["groups"] for one in found]
    worst = {key: max(group[key] for group in groups) for key in groups[0]}
    said = (
        f"{_counts(layout, worst['groups'], worst['peers'])}; making them took {worst['make_s']:.1f} s, "
        f"using each once {worst['warm_s']:.1f} s, and both {worst['mib']:.0f} MiB"
    )
    yield Finding("process groups", True, said)

"""`omni compare`: published systems and ours on the same samples, simulated or measured: who wins, why?"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from omni.commands._out import check_out, make_room, writing
from omni.commands._shared import add_configuration, add_trace, signs_of_life

if TYPE_CHECKING:
    from omni.config import Config
    from omni.rehearsal.compare import Cell, Figures, MixedTrace
    from omni.rehearsal.mixtures import Weights

_DESCRIPTION = """\
Simulates a training step of each system (docs/systems.md) on the same samples, model, layout and cluster:
every preset of policies plans it, the plans of all domains are verified and timed, and a table says who is
quickest and what the others' steps are made of. Overrides as for `omni train`, but for `system`; a policy
among them is every system's. Ranks beside the LLM are allocated where placement.ranks does not say.

  omni compare --trace longtail experiment=llama3_70b launch.ranks=64
  omni compare --trace longtail --mixtures 1:9,5:5,9:1 --systems omni,megatron,disttrain \\
      experiment=llama3_70b launch.ranks=64 --html systems.html

All train on samples cut at the same length: data.sample_tokens, or data.microbatch_tokens where that is null.
--mixtures takes a trace's samples with items and without at such ratios, each mixture a run of its own;
1:9-9:1 is a run that chose for 1:9 and then has 9:1. --even has each preset a second time with what the
system `multiplexed` deals, balances, packs and pairs by. --ablate has `omni` without each thing that it does.
All times are simulated; seconds of planning are of this machine's CPU. With --measure 120 nothing is: the
systems train on the ranks of this machine and on their own data, a step of each in turn, 120 times.
"""
AS_IT_IS = "as it is"
_SHARES = ("work", "bubble", "exchange", "messages", "queue", "reducing")
_TITLES = (
    f"{'system':24} {'step ms':>10} {'x first':>7} {'tokens/s':>11} {'MFU':>6} {'of text':>7} "
    f"{'encoder':>7} {'llm':>5} {'idle':>6} {'comm.':>6} | {'uneven':>6} {'bubble':>6} {'exch.':>6} "
    f"{'messg.':>6} {'queue':>6} {'reduce':>6} | {'GiB':>6} {'sent':>6} {'across':>6} "
    f"{'plan s':>6}  schedule, keys"
)
_LEGEND = (
    "simulated. of text: share kept of what a rank of the LLM does with text alone; encoder, llm: largest "
    "over mean load;\nidle, comm.: share of the step that ranks wait for ranks and for communication; uneven "
    "to reduce: what the step is longer for\nthan all work over all ranks, as shares of it; GiB: held by the "
    "fullest rank, sent by the busiest in its node and across\nnodes; plan s: CPU of a rank"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--systems", metavar="A,B", help="which systems (default: all)")
    parser.add_argument("--mixtures", metavar="1:9,5:5", help="samples with items to samples without")
    parser.add_argument("--even", action="store_true", help="each preset with our balancing and packing, too")
    parser.add_argument("--ablate", action="store_true", help="omni without each thing that it does, too")
    parser.add_argument("--measure", type=int, metavar="TURNS", help="train for real, in turn, not simulated")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts, too")
    add_trace(parser)
    add_configuration(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compare and print. Returns 2 for a user's mistake, and where every system is refused, 1 where the page
    cannot be written.
    """
    from infra.run_folder import write_text
    from omni.commands._compare_page import page
    from omni.rehearsal.compare import compare

    cells, now = list["Cell"](), [""]

    def say(what: str) -> None:
        now[0] = what

    try:
        if arguments.measure is not None:
            return _measure(arguments)
        check_out("--html", arguments.html)
        weights = _weights(arguments)
        configs = _configs(arguments)
        mixtures = _mixtures(arguments, weights, next(iter(configs.values())))
        with signs_of_life(lambda: f"simulating {now[0]}"):
            for cell in compare(configs, mixtures, say):
                cells.append(cell)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps([cell.as_json() for cell in cells], indent=2))
    else:
        print("\n".join(lines(cells)))
    if arguments.html:
        try:
            with writing("--html", arguments.html):
                write_text(make_room(arguments.html), page(cells, " ".join(arguments.overrides)))
        except OSError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    if all(cell.refused for cell in cells):
        print("error: every system is refused", file=sys.stderr)
        return 2
    return 0


def _measure(arguments: argparse.Namespace) -> int:
    """Measure and print.

    Raises:
        ConfigError: if it cannot be.
    """
    from omni.commands._side_by_side import lines as measured_lines
    from omni.commands._side_by_side import measure, overrides
    from omni.config import ConfigError

    for option in ("trace", "mixtures", "html"):
        if getattr(arguments, option) is not None:
            raise ConfigError(
                f"--{option} is of simulated steps, and --measure trains on data.sources: leave one"
            )
    configs = _configs(arguments, overrides(arguments.measure))
    found = measure(configs)
    if arguments.json:
        print(json.dumps([asdict(of) for of in found], indent=2))
    else:
        print("\n".join(measured_lines(found)))
    return 0


def known_systems(config_dir: str | None = None) -> list[str]:
    """The names of all systems, the default first: those of the platform, and those of a user's folder."""
    from importlib.resources import files

    names = [entry.name for entry in files("hydra_conf").joinpath("system").iterdir()]
    if config_dir is not None:
        names += [path.name for path in (Path(config_dir) / "system").glob("*.yaml")]
    found = sorted({Path(name).stem for name in names if name.endswith(".yaml")})
    return ["omni", *(name for name in found if name != "omni")]


def _configs(arguments: argparse.Namespace, more: Sequence[str] = ()) -> "dict[str, Config]":
    """The configuration of each system that was asked for, with `more` overrides.

    Raises:
        ConfigError: for a system that is not known, for overrides that choose one, and for an ablation of one
            that is not there.
    """
    from omni.commands._plan_estimate import on_cluster
    from omni.compose import compose_config
    from omni.config import ConfigError
    from omni.rehearsal.ablation import ABLATED, without_each

    chosen = [word for word in arguments.overrides if word.lstrip("+~").partition("=")[0] == "system"]
    if chosen:
        raise ConfigError(f"{chosen[0]}: --systems says which are compared: --systems omni,megatron")
    known = known_systems(arguments.config_dir)
    names = known if arguments.systems is None else arguments.systems.split(",")
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, 1) or ["omni"]
            raise ConfigError(
                f"--systems {name}: there is no such system; nearest is {near[0]}, of {', '.join(known)}"
            )
    configs = {}
    for name in dict.fromkeys(names):
        configs[name] = compose_config([*arguments.overrides, *more, f"system={name}"], arguments.config_dir)
        on_cluster(configs[name])
    if arguments.ablate and ABLATED not in configs:
        raise ConfigError(f"--ablate takes things away from {ABLATED}: name it among --systems, too")
    second = evened(configs, arguments.config_dir) if arguments.even else {}
    return configs | second | (dict(without_each(configs[ABLATED])) if arguments.ablate else {})


def evened(configs: "Mapping[str, Config]", config_dir: str | None = None) -> "dict[str, Config]":
    """The systems whose dealing, balance, packing or pairing is neither chosen nor that of `multiplexed`, a
    second time with that.
    """
    from omni.compose import compose_config
    from omni.planning.choice import open_keys, with_keys

    policies = compose_config(["system=multiplexed"], config_dir).policies
    ours = {f"{section}.policy": policies[section] for section in ("deal", "balance", "packing", "pairing")}
    second = {
        name: with_keys(of, ours) for name, of in configs.items() if "balance.policy" not in open_keys(of)
    }
    return {f"{name}, even": of for name, of in second.items() if of != configs[name]}


def _weights(arguments: argparse.Namespace) -> "dict[str, tuple[Weights, ...]]":
    """The mixtures that were asked for, by name.

    Raises:
        ConfigError: for what is none, and where there is no trace to mix.
    """
    from omni.config import ConfigError
    from omni.rehearsal.mixtures import read_mixtures

    if arguments.mixtures is None:
        return {}
    if arguments.trace is None:
        raise ConfigError("--mixtures mixes the samples of a trace: give one, such as --trace longtail")
    return read_mixtures(arguments.mixtures)


def _mixtures(
    arguments: argparse.Namespace, weights: "dict[str, tuple[Weights, ...]]", config: "Config"
) -> "dict[str, MixedTrace]":
    """The samples of each mixture, by its name; none where the run's own sources count.

    Raises:
        DataError, ConfigError: for a trace that is not there, or has no samples to mix.
    """
    from omni.planning.prepare import make_encoders
    from omni.rehearsal.compare import MixedTrace
    from omni.rehearsal.mixtures import counted_trace, mixed
    from omni.rehearsal.stand_in_data import NUM_SAMPLES

    if arguments.trace is None:
        return {AS_IT_IS: MixedTrace(())}
    encoders = make_encoders(config.model.encoders)
    trace, notes = counted_trace(arguments.trace, NUM_SAMPLES, config.train.seed, encoders)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    if not weights:
        return {AS_IT_IS: MixedTrace(trace)}
    return {name: MixedTrace(*(mixed(trace, of) for of in reversed(pair))) for name, pair in weights.items()}


def lines(cells: "Sequence[Cell]") -> Iterator[str]:
    """A table for each mixture, the quickest system first."""
    from omni.rehearsal.compare import quickest

    for mixture in dict.fromkeys(cell.mixture for cell in cells):
        own = quickest([cell for cell in cells if cell.mixture == mixture])
        yield f"{mixture}: {own[0].samples or 'every system is refused'}"
        yield _TITLES
        first = own[0].figures
        for cell in own:
            if cell.figures is None or first is None:
                yield f"{cell.system:24} refused: {cell.refused}"
            else:
                yield _row(cell.system, cell.figures, first)
        yield ""
    yield _LEGEND


def _row(system: str, found: "Figures", first: "Figures") -> str:
    from omni.planning.memory_advice import GIB

    llm, *encoders = found.imbalance.values()
    shares = (found.idle, found.exposed, *(found.causes[name] for name in _SHARES))
    idle, exposed, *causes = (f"{share:6.1%}" for share in shares)
    over, ms = found.step_s / first.step_s, found.step_s * 1e3
    sizes = (found.held_bytes, found.sent_inside_bytes, found.sent_across_bytes)
    gib = " ".join(f"{size / GIB:6.1f}" for size in sizes)
    return (
        f"{system:24} {ms:10,.1f} {over:7.2f} {found.tokens_per_s:11,.0f} {found.mfu:6.1%} "
        f"{found.of_text:7.1%} {max(encoders, default=1):7.2f} {llm:5.2f} {idle} {exposed} | "
        f"{' '.join(causes)} | {gib} {found.planning_s:6.2f}  {'does not fit; ' * (not found.fits)}"
        f"{found.schedule} {found.sets}"
    )

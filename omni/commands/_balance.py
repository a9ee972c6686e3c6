"""`omni data balance`: how even policies would leave steps of a user's own data, and what to choose."""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from omni.commands._out import check_out, make_room, writing
from omni.commands._shared import add_configuration, signs_of_life

if TYPE_CHECKING:
    from dataloader.tokens import SampleMeta
    from omni.config import Config
    from omni.planning.balance_score import Step
    from omni.planning.balance_table import Row

_DESCRIPTION = """\
Scores one step of a dataset or a trace under every policy of balance, with sequences shared and not, in
domains of 1 to 64 replicas and groups of 16, of 256 and of all replicas, and suggests what to choose. Nothing
runs: times are those of the cost table for forward passes, encoders first, then the LLM. Overrides as for
`omni train`; launch.ranks is two unless given.

  omni data balance longtail experiment=llama3_70b launch.ranks=1024
  omni data balance data/mine --config-dir conf experiment=mine launch.ranks=512 --draw mine.svg

encoder, llm: the slowest rank over the mean of its phase. step: both over the mean of both; in turn: with
exchanges after the work, elsewhere they overlap with it. off 20 %: where costs are up to that far from those
planned with. bound: the least that there can be. MiB across: what a rank sends to other nodes on average.
Items of a trace that no encoder takes are left out of their samples, which is told with their share.
A policy that cannot be imported or that raises is left out and named on stderr at the end.
"""
_MOST_DOMAIN = 64
_GROUPS = (16, 256, 1 << 20)  # replicas
_SLOWEST = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "data",
        metavar="TRACE|FILE|FOLDER",
        help="a trace's name (balanced, longtail, shift), a Parquet file of lengths, or a dataset's folder",
    )
    parser.add_argument("--samples", type=int, default=16, help="of a replica in a step (default: 16)")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="histograms of lengths and costs (.svg)")
    add_configuration(parser)


def run(args: argparse.Namespace) -> int:
    """Score, print, suggest. Raises ValueError for a user's mistake."""
    from dataloader.balance import BalancePolicy
    from omni.compose import compose_config
    from omni.config import ConfigError
    from omni.planning.balance_table import TITLES, best, choices, scored, text_of, usable
    from parallel.policy import registered

    if args.samples < 1:
        raise ConfigError(f"--samples {args.samples}: a step has at least one sample of a replica")
    if args.draw is not None and args.draw.suffix != ".svg":
        raise ConfigError(f"--draw {args.draw}: histograms are drawn as .svg")
    check_out("--draw", args.draw)
    config = compose_config(args.overrides, args.config_dir)
    ranks, replicas = sized(config, args.samples)
    trace = samples_of(config, args.data, args.samples * replicas)
    domains = [size for size in _doubling(_MOST_DOMAIN) if replicas % size == 0]
    policies, broken = usable(registered(BalancePolicy.group))
    sharings = ["none", "dynamic"]
    rows: list[Row] = []
    step: Step | None = None
    print(TITLES)
    with signs_of_life(lambda: f"{len(rows)} rows"):
        every = choices(config, ranks, trace, policies, sharings, domains, _GROUPS)
        tried = (each for each in every if each[0].domain > 1 or each[0].sharing == "none")
        for row, _, taken in scored(tried, broken):
            rows.append(row)
            step = taken
            print(text_of(row), flush=True)
    for name, said in broken.items():
        print(f"left out: balance={name}: {said}", file=sys.stderr)
    if step is None:
        raise ConfigError("no policy of balance could be scored: each failed, as said above")
    for text in suggestion(best(rows)):
        print(text)
    print(f"slowest samples of the step (planned, forward): {', '.join(slowest(step))}")
    if args.draw is not None:
        draw(args.draw, step)
    return 0


def sized(config: "Config", samples: int) -> tuple[int, int]:
    """Give a configuration a step of so many samples of a replica; return its ranks and replicas."""
    from omni.planning.layouts import planned_ranks, resolve_layout

    ranks = planned_ranks(config.launch)
    arrangement = resolve_layout(config.layout, config.placement, tuple(config.model.encoders), ranks)
    config.placement.ranks = arrangement.encoder_ranks or None
    if config.cluster.device == "cuda" and config.train.precision == "auto":
        config.train.precision = "bf16"
    config.data.step_tokens, config.data.step_samples = None, samples * arrangement.llm.dp
    return ranks, arrangement.llm.dp


def samples_of(config: "Config", data: str, count: int) -> "list[SampleMeta]":
    """The samples of a trace, by name or file, without items that no encoder takes, which is told; of a
    dataset none, but it becomes the only source.
    """
    from dataloader.trace import TRACES
    from omni.data_config import SourceConfig
    from omni.planning.choice import unchosen
    from omni.planning.prepare import make_encoders
    from omni.planning.traces import for_encoders, open_trace

    longest = config.data.sample_tokens or unchosen(config).data.pass_tokens
    if data not in TRACES and Path(data).is_dir():
        config.data.sources, config.data.heldout = {Path(data).name: SourceConfig(path=data)}, {}
        config.data.mixture = {}
        return []
    encoders = make_encoders(config.model.encoders)
    trace, notes = for_encoders(open_trace(data, count, config.train.seed, longest), encoders)
    for note in notes:
        print(f"note: trace {data}: {note}", file=sys.stderr)
    return trace


def suggestion(chosen: "Row") -> Iterator[str]:
    """Say what to choose, and what it brings."""
    choice = chosen.choice
    shared = [f"encoder_sp={choice.sharing}", f"llm_sp={choice.sharing}"] if choice.sharing != "none" else []
    sizes = [f"layout.domain={choice.domain}", f"balance.group={choice.group}"]
    keys = [f"balance={choice.policy}", *sizes, *shared]
    yield f"\nsuggested: {' '.join(keys)}"
    yield (
        f"  a step of {chosen.planned.overlapped:.2f} times what even work would take, of "
        f"{chosen.off.overlapped:.2f} where costs are up to 20 % off; the bound is {chosen.planned.bound:.2f}"
    )


def slowest(step: "Step") -> Iterator[str]:
    """Name the costliest samples of a step."""
    costs, taken = step.costs.total_ns, step.taken
    for number in sorted(range(len(costs)), key=lambda n: (-costs[n], n))[:_SLOWEST]:
        source, sample = taken.sources[taken.source[number]], taken.ids[number]
        yield f"{source} {sample} ({taken.lengths[number]:,} tokens, {costs[number] / 1e6:.3g} ms)"


def draw(path: Path, step: "Step") -> None:
    """Draw how lengths and costs are spread over the samples of a step."""
    from infra.run_folder import write_text
    from pipeline.histograms import svg

    picture = svg(histograms_of(step))
    with writing("--draw", path):
        write_text(make_room(path), picture)


def histograms_of(step: "Step") -> list[tuple[str, list[int]]]:
    """Titled values: how long the samples of a step are, as a run takes them, and what each component's
    forward of them costs.
    """
    costs = zip(step.costs.components, step.costs.ns.T, strict=True)
    return [
        ("tokens of a sample in the LLM", list(step.taken.lengths)),
        *((f"{name}: microseconds of a sample's forward", (of // 1000).tolist()) for name, of in costs),
    ]


def _doubling(most: int) -> Iterable[int]:
    size = 1
    while size <= most:
        yield size
        size *= 2

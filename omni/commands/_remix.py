"""`omni data remix`: change what a run draws from a step on that it has not done yet."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infra.run_folder import RunFolder
    from omni.config import Config
    from omni.data_config import PhaseConfig

_DESCRIPTION = """\
Changes the mixture of a run that is not running, from a step on that it has not done yet, and writes it into
the configuration in its folder, for its next start:

  omni data remix runs/mine --from 2001 --add web=data/web --weight web=2 --weight docs=0
  omni data remix runs/mine --from 3001 --remove web=bad_ids.txt
  omni resume runs/mine

Every source goes on in its own order: no sample of it is lost or repeated. A source of weight 0 is left out
from then on. Weights and sizes of steps that are not named stay as they are.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument(
        "--from", dest="first", type=int, required=True, metavar="STEP", help="the first step that draws so"
    )
    parser.add_argument(
        "--add", action="append", default=[], metavar="NAME=DIR", help="a new source, of weight 1 unless said"
    )
    parser.add_argument(
        "--weight", action="append", default=[], metavar="NAME=N", help="the weight of a source from then on"
    )
    parser.add_argument(
        "--remove",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="ids of samples to leave out, one a line; or tag:NAME, for those that carry a tag",
    )
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="ids of the only samples of a source to draw from then on, one a line; or tag:NAME",
    )
    parser.add_argument("--step-tokens", type=int, metavar="N", help="LLM tokens of a step from then on")
    parser.add_argument("--step-samples", type=int, metavar="N", help="samples of a step from then on")


def run(arguments: argparse.Namespace) -> int:
    """Write the run's configuration; 0 if all is well.

    Raises:
        ValueError: for every mistake; nothing is written then.
    """
    from omegaconf import OmegaConf

    from infra.launch import new_launch
    from infra.run_folder import RunFolder, write_text
    from infra.run_lock import holding
    from omni.commands._jobs import mixture_of_folder
    from omni.compose import load_config
    from omni.config import ConfigError
    from omni.planning.layouts import planned_ranks
    from omni.planning.mixture import positions, repeats, told, with_positions
    from omni.planning.prepare import prepare_run

    folder = RunFolder(arguments.run.absolute())
    if not folder.config.exists():
        raise ConfigError(f"{arguments.run} is no run folder: it has no config.yaml")
    with holding(folder, new_launch()):
        saved = load_config(folder.config)
        config, phase = _changed(saved, arguments)
        config, begin = mixture_of_folder(config, folder)
        done = begin[0] - 1 if begin else 0
        if arguments.first <= done:
            raise ConfigError(
                f"--from {arguments.first}: the run has a checkpoint of step {done}, and what was trained on "
                f"stays as it was: name step {done + 1} or a later one, or begin a stage of its own with "
                f"omni resume {arguments.run} --fork FOLDER"
            )
        spec = prepare_run(config, config.choice.ranks or planned_ranks(config.launch), begin=begin)
        # Found here, so that ranks that start without a launcher need not find them.
        config.data = with_positions(config.data, positions(spec.config.data))
        _keep_lists(config.data.mixture[phase], folder, arguments.first)
        write_text(folder.config, OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True))
    for line in told(config.data):
        print(line)
    sizes = {name: len(index) for name, index in spec.indexes.items()}
    for note in (*repeats(config.data, sizes), *_too_late(config, arguments.first)):
        print(f"note: {note}", file=sys.stderr)
    print(f"the run's next start goes on so: omni resume {arguments.run}", file=sys.stderr)
    return 0


def _changed(saved: "Config", arguments: argparse.Namespace) -> "tuple[Config, str]":
    """Return a run's configuration with a phase that begins at the step asked for, and the phase's name."""
    from omni.config import ConfigError
    from omni.data_config import PhaseConfig, SourceConfig
    from omni.keys import check_keys

    config = deepcopy(saved)
    data, first = config.data, arguments.first
    there = [name for name, own in data.mixture.items() if own.first == first]
    name = there[0] if there else f"step_{first}"
    phase = data.mixture.setdefault(name, PhaseConfig(first))
    for source, path in _pairs("--add", arguments.add, "DIR"):
        if source in data.sources:
            raise ConfigError(
                f"--add {source}={path}: the run has a source {source} already (data.sources.{source}.path="
                f"{data.sources[source].path}): choose another name, or give that one a --weight"
            )
        data.sources[source] = SourceConfig(path, weight=0)
        phase.weights[source] = 1
    for source, number in _pairs("--weight", arguments.weight, "N"):
        if not number.isdecimal():
            raise ConfigError(f"--weight {source}={number}: give an integer, 0 to leave the source out")
        phase.weights[source] = int(number)
    for key in ("remove", "keep"):
        lists = getattr(phase, key)
        for source, file in _pairs(f"--{key}", getattr(arguments, key), "FILE"):
            lists[source] = [*lists.get(source, ()), file]
    if (arguments.step_tokens, arguments.step_samples) != (None, None):
        phase.step_tokens, phase.step_samples = arguments.step_tokens, arguments.step_samples
    if phase == saved.data.mixture.get(name, PhaseConfig(first)):
        raise ConfigError("nothing is to change: give --add, --weight, --remove, --keep or --step-tokens")
    check_keys(f"data.mixture.{name}", phase)
    return config, name


def _pairs(option: str, given: Sequence[str], value: str) -> Iterator[tuple[str, str]]:
    """Names and values of an option that is given as NAME=VALUE, any number of times."""
    from omni.config import ConfigError

    for text in given:
        name, _, said = text.partition("=")
        if not (name and said):
            raise ConfigError(f"{option} {text}: give NAME={value}")
        yield name, said


def _keep_lists(phase: "PhaseConfig", folder: "RunFolder", first: int) -> None:
    """Copy the lists of a phase into the run folder, where nobody changes them; tags stay as they are."""
    from dataloader.tags import PREFIX
    from infra.run_folder import write_text

    lists = folder.path / "lists"
    if phase.remove or phase.keep:
        lists.mkdir(exist_ok=True)
    for key, by_source in (("remove", phase.remove), ("keep", phase.keep)):
        for number, (source, files) in enumerate(by_source.items()):
            for n, file in enumerate(files):
                copy = lists / f"step_{first}-{key}-{number}-{n}.txt"
                if file.startswith(PREFIX) or Path(file) == copy:
                    continue
                write_text(copy, Path(file).read_text(encoding="utf-8"))
                by_source[source][n] = str(copy)


def _too_late(config: "Config", first: int) -> Iterator[str]:
    """Say that a run ends before a step."""
    if first > config.train.steps:
        yield (
            f"--from {first}: the run ends at train.steps={config.train.steps}: omni resume takes more steps"
        )

"""`omni parity`: loss, norms and every gradient of a candidate configuration against a reference, or loss and
logits of a configuration against transformers' model of the same folder.
"""

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omni.commands._ranks import run_to_end, written
from omni.commands._shared import add_config_dir
from omni.config import ConfigError

if TYPE_CHECKING:
    from omni.config import Config
    from omni.training.parity import Difference, Measurement

NUM_SHOWN = 8
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
NUM_SAMPLES = 8  # of a step, unless its size is given
_DESCRIPTION = """\
Runs both configurations in fp32 from the same weights on the same samples and compares the loss, the squared
gradient norm of each component and every gradient of the first step, then the weights after --steps steps.
Overrides as for `omni train`, the reference's before `--`, the candidate's after; what stands before `--`
applies to both.

  omni parity --steps 3 launch.ranks=1 -- launch.ranks=2 layout=pp2
  omni parity --cpu-reference launch.ranks=1 --         (on a GPU: does it compute what a CPU does?)

With --against FOLDER of published weights, one configuration begins with them, and the loss of its first step
and logits at each position of its samples are compared with what transformers computes on this machine's CPU
of each sample alone: the model, the tokens, the targets and the layout are then right together. The step
takes 8 samples unless its size is given. It needs the package transformers. With model=from_folder a whole
model is compared, its pictures as the folder's processor prepares them.

  omni parity --against models/qwen ~experiment +data.sources.mine.path=data/mine layout.llm.tp=2
  omni parity --against models/qwen_vl ~experiment model=from_folder +data.sources.chats.path=data/chats
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps before weights are compared")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="compare with transformers instead")
    parser.add_argument("--cpu-reference", action="store_true", help="run the reference without GPUs")
    add_config_dir(parser)
    parser.add_argument("overrides", nargs=argparse.REMAINDER, help="REFERENCE ... -- CANDIDATE ...")


def run(arguments: argparse.Namespace) -> int:
    """Measure both, print the worst differences, return 0 if all are within tolerance."""
    if arguments.against is not None:
        if arguments.steps != 1:
            print(
                f"error: --steps {arguments.steps} with --against, which compares one: leave it out",
                file=sys.stderr,
            )
            return 2
        return _against(arguments.against, arguments.overrides, arguments.config_dir)
    reference, separator, candidate = _split(arguments.overrides)
    if not separator:
        print("error: give the candidate's overrides after --", file=sys.stderr)
        return 2
    try:
        return _compare(arguments, reference, [*reference, *candidate])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _split(overrides: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in overrides:
        return overrides, False, []
    at = overrides.index("--")
    return overrides[:at], True, overrides[at + 1 :]


def _compare(arguments: argparse.Namespace, reference: list[str], candidate: list[str]) -> int:
    from omni.training.parity import TOLERANCE, WEIGHT_TOLERANCE, compare, compare_weights

    steps, config_dir = arguments.steps, arguments.config_dir
    env = NO_GPU if arguments.cpu_reference else None
    with tempfile.TemporaryDirectory() as folder:
        one, longest = measure(reference, steps, Path(folder) / "reference", config_dir, env=env)
        two, _ = measure(candidate, steps, Path(folder) / "candidate", config_dir, longest)
    return _verdict(
        ("loss, squared norms and gradients of step 1", compare(one, two), TOLERANCE),
        (f"weights after {steps} steps", compare_weights(one, two), WEIGHT_TOLERANCE),
    )


def _verdict(*compared: "tuple[str, list[Difference], float]") -> int:
    """Print the worst differences of each title; return 1 if any is beyond its tolerance."""
    failed = False
    for title, differences, tolerance in compared:
        bad = [d for d in differences if not d.relative <= tolerance]
        failed |= bool(bad)
        print(f"{title}: {len(differences)} compared, {len(bad)} beyond {tolerance:g}; the worst:")
        for difference in differences[:NUM_SHOWN]:
            print(f"  {difference.relative:9.2e}  {difference.name}")
    print("parity holds" if not failed else "parity fails")
    return int(failed)


def _against(published: Path, overrides: list[str], config_dir: str | None) -> int:
    """Measure a configuration that begins with a folder's weights, and what transformers makes of them."""
    from omni.compose import compose_config
    from omni.models.towers.processors import open_processor
    from omni.training.against import FILE, TOLERANCE, compare, load, theirs
    from omni.training.parity import OVERRIDES

    try:
        if importlib.util.find_spec("transformers") is None:
            raise ConfigError(
                f"--against {published} takes the package transformers: pip install 'omni-train[open]'"
            )
        own = [f"start.weights='{published.absolute()}'", "train.steps=1"]
        with tempfile.TemporaryDirectory() as folder:
            config = compose_config([*overrides, *OVERRIDES, *own, f"run.dir={folder}/run"], config_dir)
            whole = _checked(published, config)
            if config.data.step_tokens is config.data.step_samples is None:
                config.data.step_samples = NUM_SAMPLES
            run_to_end(written(config), "omni.training.against")
            loss, scored = load(Path(config.run.dir) / FILE)
            model = theirs(published)
            processor = open_processor(str(published), audio=False, model=model.config) if whole else None
            differences = compare(loss, scored, model, processor)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tokens = sum(len(sample.ids) for sample in scored)
    return _verdict((f"first loss, and logits at {tokens} tokens", differences, TOLERANCE))


def _checked(published: Path, config: "Config") -> bool:
    """Whether a whole model is compared, with a tower; refuse encoders that are not those of the folder, or a
    folder for which transformers takes a package that is not installed, before ranks start.
    """
    from omni.open_models.folder import open_folder
    from omni.open_models.quantised import FP8

    folder = open_folder(str(published))
    if more := [name for name in config.model.encoders if name not in folder.family.encoders]:
        raise ConfigError(
            f"model.encoders has {', '.join(more)}, and {published} is a model of "
            f"{' and '.join(['text', *folder.family.encoders])}: leave these out"
        )
    for name, own in config.model.encoders.items():
        if (token := own.get("row_break")) is not None:
            raise ConfigError(
                f"model.encoders.{name}.row_break={token}: transformers' model of {published} has no token "
                "between lines of rows: leave it out, or set it to null"
            )
    quantised = folder.quantised
    if quantised is not None and quantised.kind == FP8 and importlib.util.find_spec("accelerate") is None:
        raise ConfigError(
            f"--against {published}: its weights are in {FP8}, of which transformers makes full numbers with "
            f"the package accelerate alone: pip install accelerate, or compare a folder of the model in bf16"
        )
    return bool(config.model.encoders)


def measure(
    overrides: Sequence[str],
    steps: int,
    path: Path,
    config_dir: str | None = None,
    longest: int | None = None,
    env: Mapping[str, str] | None = None,
) -> "tuple[Measurement, int]":
    """Measure a configuration, of which no sample is longer than `longest` unless it says so itself; also
    return how long one may be. The run folder is `path`, and `env` is added to the environment of its ranks.

    Raises:
        ValueError: if it is refused, or a rank failed.
    """
    from omni.compose import compose_config
    from omni.training.parity import FILE, OVERRIDES, load

    own = [*OVERRIDES, f"run.dir={path}", f"train.steps={steps}", "optim.warmup_steps=0"]
    config = compose_config([*overrides, *own], config_dir)
    if config.data.sample_tokens is None:
        config.data.sample_tokens = longest
    spec = written(config)
    run_to_end(spec, "omni.training.parity", env)
    return load(path / FILE), spec.planner.world.budget.longest

"""`omni parity`: loss, norms and every gradient of a candidate configuration against a reference."""

import argparse
import sys
import tempfile
from pathlib import Path

from omni.commands._shared import add_config_dir
from omni.config import ConfigError

NUM_SHOWN = 8
_DESCRIPTION = """\
Runs both configurations in fp32 from the same weights on the same samples and compares the loss, the squared
gradient norm of each component and every gradient of the first step, then the weights after --steps steps.
Overrides as for `omni train`, the reference's before `--`, the candidate's after; what stands before `--`
applies to both.

  omni parity --steps 3 launch.ranks=1 -- launch.ranks=2 layout=pp2
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps before weights are compared")
    add_config_dir(parser)
    parser.add_argument("overrides", nargs=argparse.REMAINDER, help="REFERENCE ... -- CANDIDATE ...")


def run(arguments: argparse.Namespace) -> int:
    """Measure both, print the worst differences, return 0 if all are within tolerance."""
    reference, separator, candidate = _split(arguments.overrides)
    if not separator:
        print("error: give the candidate's overrides after --", file=sys.stderr)
        return 2
    try:
        return _compare(reference, [*reference, *candidate], arguments.steps, arguments.config_dir)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _split(overrides: list[str]) -> tuple[list[str], bool, list[str]]:
    if "--" not in overrides:
        return overrides, False, []
    at = overrides.index("--")
    return overrides[:at], True, overrides[at + 1 :]


def _compare(reference: list[str], candidate: list[str], steps: int, config_dir: str | None) -> int:
    from omni.training.parity import TOLERANCE, WEIGHT_TOLERANCE, Difference, compare, compare_weights

    with tempfile.TemporaryDirectory() as folder:
        one, longest = _measure(reference, steps, Path(folder) / "reference", config_dir)
        two, _ = _measure(candidate, steps, Path(folder) / "candidate", config_dir, longest)
    failed = False
    for title, differences, tolerance in (
        ("loss, squared norms and gradients of step 1", compare(one, two), TOLERANCE),
        (f"weights after {steps} steps", compare_weights(one, two), WEIGHT_TOLERANCE),
    ):
        bad: list[Difference] = [d for d in differences if not d.relative <= tolerance]
        failed |= bool(bad)
        print(f"{title}: {len(differences)} compared, {len(bad)} beyond {tolerance:g}; the worst:")
        for difference in differences[:NUM_SHOWN]:
            print(f"  {difference.relative:9.2e}  {difference.name}")
    print("parity holds" if not failed else "parity fails")
    return int(failed)


def _measure(  # type: ignore[no-untyped-def]
    overrides: list[str], steps: int, path: Path, config_dir: str | None, longest: int | None = None
):
    """Measure a configuration, of which no sample is longer than `longest` unless it says so itself; also
    return how long one may be.
    """
    from omegaconf import OmegaConf

    from infra.launch import launch_local
    from infra.run_folder import RunFolder, write_text
    from omni.compose import compose_config
    from omni.planning.layouts import count_ranks
    from omni.planning.prepare import prepare_run
    from omni.planning.trainable import check_trainable
    from omni.training.parity import FILE, OVERRIDES, load

    own = [*OVERRIDES, f"run.dir={path}", f"train.steps={steps}", "optim.warmup_steps=0"]
    config = compose_config([*overrides, *own], config_dir)
    check_trainable(config)
    ranks = count_ranks(config.launch)
    if config.data.sample_tokens is None:
        config.data.sample_tokens = longest
    spec = prepare_run(config, ranks)
    config = spec.config
    folder = RunFolder.create(path)
    write_text(folder.config, OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True))
    code = launch_local(folder.config, ranks, "omni.training.parity")
    if code:
        raise ConfigError(f"the measurement of {' '.join(overrides)} failed with exit code {code}")
    return load(path / FILE), spec.planner.world.budget.longest

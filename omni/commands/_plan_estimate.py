"""The step that `omni plan` was asked about, of one configuration: planned and timed, all domains."""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from omni.commands._shared import signs_of_life

if TYPE_CHECKING:
    from omni.config import Config
    from omni.planning.run_spec import RunSpec
    from omni.rehearsal.estimate import Estimate
    from pipeline.plan import StepPlan


def estimated(
    arguments: argparse.Namespace, overrides: Sequence[str], folder: Path, tell: Callable[[str], None]
) -> "tuple[RunSpec, Estimate, int]":
    """Plan and time all domains of the step that was asked for, under `overrides`: the run, the estimate, and
    where the step begins in the stream. A trace is written into the new `folder`; `tell` hears what of it
    cannot be planned.

    Raises:
        PlanRefusedError: for a plan that breaks a rule.
        ValueError: for a user's mistake.
    """
    from omni.compose import compose_config
    from omni.config import ConfigError
    from omni.rehearsal.estimate import estimate
    from omni.rehearsal.stand_in_data import use_trace
    from omni.training.start import check_start

    config = compose_config(overrides, arguments.config_dir)
    if arguments.trace:
        use_trace(config, arguments.trace, folder / "trace", tell=tell)
    if arguments.framework:
        tell(f"times are of these op lists as {arguments.framework} would overlap them, not of our ranks")
    spec = _resolve(config, arguments.framework)
    for line in spec.choice.lines() if spec.choice else ():
        tell(line)
    try:
        check_start(spec)
    except ConfigError as error:  # a plan needs no weights
        tell(f"a run would be refused: {error}")
    domains, shown = spec.arrangement.num_domains, arguments.domain
    if arguments.step < 1 or (shown is not None and not 0 <= shown < domains):
        raise ConfigError(
            f"--step {arguments.step} --domain {shown}: steps begin at 1, and there are domains 0 to "
            f"{domains - 1}"
        )
    cursor = spec.planner.cursor_of(arguments.step)
    plans = _counted(spec.planner.distinct_domains(arguments.step, cursor), domains)
    return spec, estimate(spec, plans), cursor


def _resolve(config: "Config", framework: str | None) -> "RunSpec":
    """The run as it is planned where the cluster is, of our steps or as a framework overlaps them."""
    from omni.planning.frameworks import framework_called
    from omni.planning.layouts import planned_ranks
    from omni.planning.prepare import prepare_run

    on_cluster(config)
    under = framework_called(framework) if framework else None
    return prepare_run(config, planned_ranks(config.launch), framework=under)


def on_cluster(config: "Config") -> None:
    """Let a run be in the number format that it has where its cluster is, whatever this machine is."""
    if config.cluster.device == "cuda" and config.train.precision == "auto":
        config.train.precision = "bf16"


def _counted(plans: Iterable["StepPlan"], domains: int) -> Iterator["StepPlan"]:
    """Pass plans on, with signs of life."""
    count = 0
    with signs_of_life(lambda: f"planned and timed {count} of at most {domains} domains"):
        for plan in plans:
            yield plan
            count += 1

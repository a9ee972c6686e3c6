"""From composed configurations to jobs: checked each by itself and against each other, then written.

Nothing is written before all jobs of a sweep have passed.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf, open_dict

from infra.launchers.job import Job, check_environment, split_ranks
from infra.launchers.script import check_batch
from infra.machine import crowding, this_machine
from infra.run_folder import RunFolder, tail_metrics, write_text
from infra.run_lock import holding
from infra.secrets import secret_in
from omni.commands._launchers import Composed, LauncherConfig
from omni.compose import check_shadowed, keys_of, load_config, to_config
from omni.compose_stages import take_steps
from omni.compose_weights import take_keys
from omni.config import Config, ConfigError

if TYPE_CHECKING:
    from omni.planning.run_spec import RunSpec

UNSAVED_RANKS = 8  # that may train without a checkpoint before the end: a machine


@dataclass(frozen=True)
class Prepared:
    """A job, its configuration, and that as its `config.yaml` is to hold it."""

    job: Job
    config: Config
    text: str


def prepare_jobs(composed: Sequence[Composed], launcher: LauncherConfig) -> list[Prepared]:
    """Check all jobs and resolve what each takes.

    Raises:
        ValueError: for every mistake that can be found before a rank starts, with what the job of a sweep
        sets.
    """
    _check_different(composed)
    jobs = []
    for each in composed:
        try:
            check_shadowed(each.config, list(each.overrides))
            take_keys(each.config, each.overrides)
            take_steps(each.config, each.overrides)
            config = _as_before(_configured(each), each.overrides)
            jobs.append(prepare_job(config, launcher, each.number, each.sets))
        except ValueError as error:
            if each.sweep is None:
                raise
            raise ConfigError(f"{named(each.number, each.sets)}: {error}") from error
    folders: dict[Path, int] = {}
    for job in (each.job for each in jobs):
        if (other := folders.setdefault(job.folder, job.number)) != job.number:
            raise ConfigError(
                f"run.dir={job.folder} would be the folder of jobs {other} and {job.number}: leave run.dir "
                f"out (each job gets a folder in hydra.sweep.dir), or give each its own"
            )
    _check_checkpoints(jobs)
    if launcher.kind == "local":
        _check_crowd(jobs, launcher.parallel)
    return jobs


def prepare_job(
    config: Config, launcher: LauncherConfig, number: int = 0, sets: tuple[str, ...] = ()
) -> Prepared:
    """Check the configuration of one job and resolve what it takes.

    Raises:
        ValueError: for every mistake that can be found before a rank starts.
    """
    from omni.planning.few_samples import few
    from omni.planning.fullest import check_first_steps
    from omni.planning.layouts import count_ranks
    from omni.planning.optim_schedule import stage_notes, stages_of
    from omni.planning.prepare import prepare_run
    from omni.planning.trainable import check_trainable
    from omni.training.start import check_start

    check_trainable(config)
    if launcher.kind == "local":
        nodes, per_node = 1, count_ranks(config.launch)
    else:
        nodes, per_node = split_ranks(
            config.launch.ranks, launcher.ranks_per_node or config.cluster.ranks_per_node
        )
    path = Path(config.run.dir).absolute()
    config, begin = mixture_of_folder(config, RunFolder(path))
    spec = prepare_run(config, nodes * per_node, begin=begin)
    done, cursor, before = _continued(RunFolder(path), spec)
    if done:
        spec = _chosen_again(spec, RunFolder(path), done, cursor)
    config = spec.config
    _check_saves(config, nodes * per_node)
    for line in spec.choice.lines() if spec.choice else ():
        print(f"{f'{named(number, sets)}: ' if sets else ''}{line}", file=sys.stderr)
    if done == 0:
        cursor = config.start.cursor or 0
        check_start(spec)
    notes = stage_notes(stages_of(config.optim, config.stages, config.train.steps), done, before)
    if done < config.train.steps:
        notes += few(spec.planner, spec.planner.world.take(cursor))
    for note in notes:
        print(f"note: {f'{named(number, sets)}: ' if sets else ''}{note}", file=sys.stderr)
    if nodes == 1:  # larger worlds are planned by their ranks
        check_first_steps(spec, done + 1, cursor)
    env = {**config.cluster.env, **launcher.env}
    check_environment(env)
    restarts = config.launch.max_restarts
    job = Job(number, config.run.name, path, nodes, per_node, restarts, sets, env)
    if launcher.kind in ("slurm", "render"):
        check_batch(job, launcher, Path.cwd())
    return Prepared(job, config, _written(config, launcher))


def _as_before(config: Config, overrides: Sequence[str]) -> Config:
    """Return a configuration that chooses nothing anew where its folder holds a run: what `overrides` do not
    say stays as it was chosen.
    """
    from omni.planning.choice import as_saved

    with suppress(ConfigError):  # a new folder, or a file of which `_continued` says more
        saved = load_config(RunFolder(Path(config.run.dir).absolute()).config)
        return as_saved(config, saved, keys_of(overrides))
    return config


def mixture_of_folder(config: Config, folder: RunFolder) -> tuple[Config, tuple[int, int] | None]:
    """Return a configuration whose phases of the mixture begin where the run's last checkpoint says, and the
    step and the position in the stream from which later ones are to be found, None for the run's first.
    """
    from infra.checkpoint import CheckpointError, newest
    from omni.planning.mixture import with_positions
    from omni.training.fingerprint import same_mixture
    from omni.training.storage import storage_of

    if not config.data.mixture:
        return config, None
    try:
        manifest, _ = newest(storage_of(config, folder))
    except (CheckpointError, OSError):  # `_continued` says so
        manifest = None
    if manifest is None:
        return replace(config, data=with_positions(config.data, {})), None
    done = manifest["step"]
    known = dict(manifest.get("mixture", ()))
    if not same_mixture(manifest, config):
        known = {first: start for first, start in known.items() if first <= done}
    return replace(config, data=with_positions(config.data, known)), (done + 1, manifest["cursor"])


def _chosen_again(spec: "RunSpec", folder: RunFolder, done: int, cursor: int) -> "RunSpec":
    """Return a run that goes on after `done` steps, at a position in the stream, chosen again for its next
    steps if it is told to and its last record says that the choice is out of date.
    """
    from omni.planning.choice import opened
    from omni.planning.prepare import prepare_run
    from omni.training.choice_watch import COSTS

    config = spec.config
    if spec.choice is None and config.health.choose_again:
        last = next(reversed(tail_metrics(folder.metrics)), {})
        if last.get(COSTS, 0.0) > config.health.choice_costs:
            spec = prepare_run(opened(config), spec.arrangement.world, begin=(done + 1, cursor))
    if spec.choice is None:
        return spec
    return replace(spec, config=replace(spec.config, choice=replace(spec.config.choice, since=done)))


def _check_saves(config: Config, ranks: int) -> None:
    """Refuse to let many ranks train without a checkpoint before the end, unless the user says so."""
    if config.train.checkpoint_every == 0 and ranks > UNSAVED_RANKS:
        raise ConfigError(
            f"train.checkpoint_every=0 with launch.ranks={ranks}: a failure would lose all that more than "
            f"{UNSAVED_RANKS} ranks have done. Set train.checkpoint_every=100, or "
            f"'train.checkpoint_every=${{train.steps}}' to save after the last step alone"
        )


def named(number: int, sets: Sequence[str]) -> str:
    """Return how messages name a job of a sweep."""
    return f"job {number} ({', '.join(sets)})" if sets else f"job {number}"


def _written(config: Config, launcher: LauncherConfig) -> str:
    """The text of config.yaml, which trackers are told of, too. Neither it nor a script holds a secret of
    this environment.
    """
    resolved = OmegaConf.structured(config)
    text = OmegaConf.to_yaml(resolved, resolve=True)
    name = secret_in((OmegaConf.to_container(resolved, resolve=True), vars(launcher)), os.environ)
    if name is not None:
        raise ConfigError(
            f"the configuration holds the value of {name}, and would be written to config.yaml and to W&B: "
            f"leave it in the environment, where ranks find it, too"
        )
    return text


@contextmanager
def in_folder(prepared: Prepared, launch: str) -> Iterator[Job]:
    """Hold the run folder of a job for `launch` inside the block, with its configuration written there, and
    how an earlier start of it ended forgotten.

    Raises:
        ValueError: if another launch holds it, or it cannot be written.
    """
    job = prepared.job
    folder = RunFolder(job.folder)
    with ExitStack() as held:
        try:
            held.enter_context(holding(folder, launch))
            write_text(folder.config, prepared.text)
            job.exit_code.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run.dir={prepared.config.run.dir}: no run folder can be written there ({error}): "
                "choose another"
            ) from error
        yield job


def _check_checkpoints(jobs: Sequence[Prepared]) -> None:
    """Refuse jobs that would take each other's checkpoints for their own."""
    seen: dict[str, Prepared] = {}
    for each in jobs:
        where = each.config.train.checkpoint_dir
        if where is not None and (other := seen.setdefault(where, each)) is not each:
            raise ConfigError(
                f"train.checkpoint_dir={where} would hold the checkpoints of jobs {other.job.number} and "
                f"{each.job.number}: give each its own, such as '{where}/${{run.name}}'"
            )


def _check_crowd(jobs: Sequence[Prepared], parallel: int) -> None:
    """Refuse jobs that are too much for this machine at a time, though each alone is not."""
    ranks = sum(sorted((each.job.ranks for each in jobs), reverse=True)[:parallel])
    crowded = crowding(ranks, this_machine())
    if crowded and not all(each.config.launch.oversubscribe for each in jobs):
        raise ConfigError(
            f"hydra.launcher.parallel={parallel}: {ranks} ranks at a time: {crowded}; choose fewer, or set "
            f"launch.oversubscribe=true"
        )


def _check_different(composed: Sequence[Composed]) -> None:
    seen: list[tuple[Any, Composed]] = []
    for each in composed:
        values: Any = OmegaConf.to_container(each.config, resolve=True)
        values["run"].pop("dir")
        for other_values, other in seen:
            if values == other_values:
                raise ConfigError(
                    f"{named(other.number, other.sets)} and {named(each.number, each.sets)} resolve to the "
                    f"same configuration: leave one of them out"
                )
        seen.append((values, each))


def _configured(composed: Composed) -> Config:
    """The configuration of a job; in a sweep, with a name of its own, in one group of the tracker, and with
    what it sets as tags.
    """
    if composed.sweep is not None:
        with open_dict(composed.config):
            run, tracking = composed.config.run, composed.config.tracking
            if not any(override.startswith("run.name=") for override in composed.sets):
                run.name = f"{run.name}-{composed.number}"
            if tracking.group is None:
                tracking.group = "-".join(composed.sweep.parts[-2:])
            tracking.tags = [*tracking.tags, *composed.sets]
    return to_config(composed.config)


def _continued(folder: RunFolder, spec: "RunSpec") -> tuple[int, int, int | None]:
    """Return the step after which a run folder is continued, 0 for a new one, its position in the stream, and
    its train.steps until now, None if that is not known. A folder of another run, and one that has done more
    steps than it is to, are refused before anything is written to it.
    """
    from infra.checkpoint import CheckpointError, newest
    from infra.last_checkpoint import check_last
    from omni.training.fingerprint import check_fingerprint, fingerprint
    from omni.training.storage import storage_of

    storage = storage_of(spec.config, folder)
    try:
        manifest, _ = newest(storage)  # what is damaged is told by the rank that sets it aside
        if manifest is None:
            check_last(folder, storage)
            return 0, 0, None
        _check_owner(folder, spec.config.train.checkpoint_dir)
        check_fingerprint(manifest, fingerprint(spec), storage)
        if manifest["step"] > spec.config.train.steps:
            raise ConfigError(
                f"train.steps={spec.config.train.steps}: the run has done {manifest['step']} steps: give at "
                f"least so many, or begin a stage with a checkpoint: omni resume {folder.path} --fork FOLDER"
            )
    except (CheckpointError, OSError) as error:
        raise ConfigError(str(error)) from error
    with suppress(ConfigError):  # it may be of an older version, or gone
        return manifest["step"], manifest["cursor"], load_config(folder.config).train.steps
    return manifest["step"], manifest["cursor"], None


def _check_owner(folder: RunFolder, kept_at: str | None) -> None:
    """Refuse to take the checkpoints that are kept apart from run folders for those of a folder that is
    new.
    """
    if kept_at is not None and not folder.config.exists():
        raise ConfigError(
            f"train.checkpoint_dir={kept_at} holds checkpoints of another run, and run.dir={folder.path} is "
            f"new: go on with that run by `omni resume` and its folder, begin a stage with its weights by "
            f"--fork {folder.path}, or give this run a train.checkpoint_dir of its own, such as "
            f"'{kept_at}/${{run.name}}'"
        )

"""A stage of its own: a run that begins with the weights of another run's checkpoint. No torch here."""

from dataclasses import replace

from omni.config import Config, StartConfig
from omni.planning.mixture import flattened_at

STREAM = ("sources", "mixture", "window_groups")  # of data: with the seed, they decide which sample is where


def as_stage(config: Config, checkpoint: str, optimizer: bool, step: int) -> Config:
    """Return a run's configuration as one that begins with a checkpoint, given by its path or URL, of `step`,
    and draws as the phase of the mixture does that the run was in. Where it begins in the stream of samples
    is left open, for `with_cursor` or a user to say.
    """
    start = StartConfig(checkpoint, optimizer, cursor=None)
    return replace(config, start=start, data=flattened_at(config.data, step))


def with_cursor(stage: Config, parent: Config, cursor: int) -> Config:
    """Let a stage that draws samples as its parent did, which had no mixture, go on at the parent's `cursor`
    in the stream, and any other at its beginning, unless its configuration says where.
    """
    if stage.start.cursor is not None:
        return stage
    same = stage.train.seed == parent.train.seed and all(
        getattr(stage.data, key) == getattr(parent.data, key) for key in STREAM
    )
    return replace(stage, start=replace(stage.start, cursor=cursor if same else 0))

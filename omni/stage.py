"""A stage of its own: a run that begins with the weights of another run's checkpoint. No torch here."""

from dataclasses import replace

from omni.config import Config, StartConfig

STREAM = ("sources", "window_groups")  # of data: with the seed, they decide which sample is where


def as_stage(config: Config, checkpoint: str, optimizer: bool) -> Config:
    """Return a run's configuration as one that begins with a checkpoint, given by its path or URL.
    Where it begins in the stream of samples is left open, for `with_cursor` or a user to say.
    """
    return replace(config, start=StartConfig(checkpoint, optimizer, cursor=None))


def with_cursor(stage: Config, parent: Config, cursor: int) -> Config:
    """Let a stage that draws samples as its parent did go on at the parent's `cursor` in the stream, and any
    other at its beginning, unless its configuration says where.
    """
    if stage.start.cursor is not None:
        return stage
    same = stage.train.seed == parent.train.seed and all(
        getattr(stage.data, key) == getattr(parent.data, key) for key in STREAM
    )
    return replace(stage, start=replace(stage.start, cursor=cursor if same else 0))

"""Loading a checkpoint on all ranks together: what the first one reads is told to all, and so is what any of
them finds wrong.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from dataloader.storage import Storage
from infra.checkpoint import (
    CheckpointError,
    DamagedError,
    attempt,
    file_of,
    first_problem,
    folder_of,
    open_shard,
)
from omni.rank.build import Rank
from omni.rank.optimizer import ComponentOptimizer
from omni.rank.state import read_state, spread_weights
from parallel.control import Control

T = TypeVar("T")


def from_first(control: Control, make: Callable[[], T]) -> T:
    """Return on all ranks what `make` returns on the first one: plain values, of lists rather than tuples.

    Raises:
        CheckpointError: on every rank, if it fails there.
    """
    made: list[T] = []
    problem = attempt(lambda: made.append(make())) if control.rank == 0 else None
    made, problem = control.broadcast("loading", (made, problem))
    if problem is not None:
        raise CheckpointError(problem)
    (result,) = made
    return result


def load(
    storage: Storage,
    manifest: Mapping[str, Any],
    rank: Rank,
    control: Control,
    components: Mapping[str, ComponentOptimizer],
    moments: bool = True,
    drawn: Collection[str] = (),
) -> str | None:
    """Load this rank's part of `components` from a checkpoint, without `moments` weights alone; of those
    `drawn` the adapters stay as they are.

    Returns on all ranks what the first of them that finds damage says of it, None if all is sound.

    Raises:
        CheckpointError: on every rank, if the checkpoint does not fit, or cannot be read.
    """
    damage, refusal = None, None
    read = partial(_read, storage, manifest)
    try:
        read_state(manifest["index"], read, components, rank.names, rank.stage, rank.rank, moments, drawn)
    except DamagedError as error:
        damage = str(error)
    except (CheckpointError, OSError) as error:
        refusal = str(error)
    refusal = first_problem(refusal, control, "loading")
    if refusal is not None:
        raise CheckpointError(f"{folder_of(manifest['step'])} cannot be loaded: {refusal}")
    damage = first_problem(damage, control, "loading")
    if damage is None:
        spread_weights(components)
    return damage


def _read(
    storage: Storage, manifest: Mapping[str, Any], rank: int, ranges: Sequence[tuple[str, int, int]]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield verified ranges of the file of a rank, as `read_state` asks for them."""
    name = file_of(rank)
    try:
        with storage.open(f"{folder_of(manifest['step'])}/{name}") as file:
            yield from open_shard(manifest, file, name).read(ranges)
    except FileNotFoundError as error:
        raise DamagedError(f"{folder_of(manifest['step'])}/{name} is missing") from error

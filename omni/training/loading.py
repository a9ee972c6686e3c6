"""Loading a checkpoint on all ranks together: what the first one reads is told to all, and so is what any of
them finds wrong.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from infra.checkpoint import (
    CheckpointError,
    DamagedError,
    attempt,
    file_of,
    first_problem,
    folder_of,
    open_shard,
    told_by_first,
)
from infra.storage import Storage
from omni.rank.build import Rank
from omni.rank.optimizer import ComponentOptimizer
from omni.rank.state import read_state, spread_weights

T = TypeVar("T")


def from_first(rank: Rank, make: Callable[[], T]) -> T:
    """Return on all ranks what `make` returns on the first one.

    Raises:
        CheckpointError: on every rank, if it fails there.
    """
    made: list[T] = []
    problem = attempt(lambda: made.append(make())) if rank.is_first else None
    made, problem = told_by_first((made, problem), rank.groups.control)
    if problem is not None:
        raise CheckpointError(problem)
    (result,) = made
    return result


def load(
    storage: Storage,
    manifest: Mapping[str, Any],
    rank: Rank,
    components: Mapping[str, ComponentOptimizer],
    moments: bool = True,
) -> str | None:
    """Load this rank's part of `components` from a checkpoint, without `moments` weights alone.

    Returns on all ranks what the first of them that finds damage says of it, None if all is sound.

    Raises:
        CheckpointError: on every rank, if the checkpoint does not fit, or cannot be read.
    """
    control, damage, refusal = rank.groups.control, None, None
    read = partial(_read, storage, manifest)
    try:
        read_state(manifest["index"], read, components, rank.names, rank.stage, rank.rank, moments)
    except DamagedError as error:
        damage = str(error)
    except (CheckpointError, OSError) as error:
        refusal = str(error)
    refusal = first_problem(refusal, control)
    if refusal is not None:
        raise CheckpointError(f"{folder_of(manifest['step'])} cannot be loaded: {refusal}")
    damage = first_problem(damage, control)
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

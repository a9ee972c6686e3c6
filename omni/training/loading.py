"""Loading a checkpoint on all ranks together: what the first one reads is told to all, and so is what any of
them finds wrong.
"""

import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
Asked = tuple[int, Sequence[tuple[str, int, int]]]
"""What was read of a checkpoint: the rank whose file it is, and the ranges."""


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

    Returns on all ranks what the first of them that finds damage says of it, None if all is sound. Only what
    another rank reads in the same way is damage: see `_witnessed`.

    Raises:
        CheckpointError: on every rank, if the checkpoint does not fit, or a rank cannot read it or reads
            something else than the others.
    """
    damage, refusal = None, None
    asked: Asked = (0, ())

    def read(holder: int, ranges: Sequence[tuple[str, int, int]]) -> Iterator[tuple[int, np.ndarray]]:
        nonlocal asked
        asked = (holder, ranges)
        for piece in _read(storage, manifest, asked):
            control.coming("loading")  # a store may be slow to one rank: the others wait while it reads on
            yield piece

    try:
        read_state(manifest["index"], read, components, rank.names, rank.stage, rank.rank, moments, drawn)
    except DamagedError as error:
        damage = str(error)
    except (CheckpointError, OSError) as error:
        refusal = str(error)
    refusal = first_problem(refusal, control, "loading")
    if refusal is None:
        damage, refusal = _witnessed(damage, asked, storage, manifest, control)
    if refusal is not None:
        raise CheckpointError(f"{folder_of(manifest['step'])} cannot be loaded: {refusal}")
    if damage is None:
        spread_weights(components)
    return damage


def _witnessed(
    damage: str | None, asked: Asked, storage: Storage, manifest: Mapping[str, Any], control: Control
) -> tuple[str | None, str | None]:
    """Have another rank read what the first that found damage had asked for. Returns on all ranks the damage
    that both find, and a refusal where it is the reading of a rank that differs, not the checkpoint.
    """
    host = socket.gethostname()
    found = control.share("loading", {} if damage is None else {str(control.rank): [host, damage]})
    if not found:
        return None, None
    finder = min(map(int, found))
    where, damage = found[str(finder)]
    asked = control.broadcast("loading", asked, source=finder)
    witness, refusal = _witness_of(finder, control), None
    if control.rank == witness:
        try:
            for _ in _read(storage, manifest, asked):
                control.coming("loading")
            refusal = (
                f"rank {witness} on {host} has read the same, and it is as it was written. Look at the "
                f"memory and the file system of {where}"
            )
        except DamagedError:
            pass
        except (CheckpointError, OSError) as error:
            refusal = f"rank {witness} on {host} cannot read the same ({error}). Mend that"
    refusal = control.broadcast("loading", refusal, source=witness)
    if refusal is None:
        return f"rank {finder}: {damage}", None
    return None, f"rank {finder}: {damage} as {where} reads it. {refusal}, and resume. Nothing was set aside."


def _witness_of(finder: int, control: Control) -> int:
    """Return the rank that reads again what a rank found damaged: one of another node, if there is one, since
    ranks of a node share the memory that files are read through.
    """
    tree = control.tree
    if finder >= tree.per_node:
        return 0
    return tree.per_node if tree.per_node < tree.world else (finder + 1) % tree.world


def _read(storage: Storage, manifest: Mapping[str, Any], asked: Asked) -> Iterator[tuple[int, np.ndarray]]:
    """Yield verified ranges of the file of a rank, as `read_state` asks for them.

    Raises:
        CheckpointError: naming this host, if the file is not there: the first rank has seen it.
    """
    holder, ranges = asked
    name, host = file_of(holder), socket.gethostname()
    path = f"{folder_of(manifest['step'])}/{name}"
    try:
        with storage.open(path) as file:
            yield from open_shard(manifest, file, name).read(ranges)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} is not there on {host}, and was seen by rank 0. Is {storage} mounted on {host}? Make it "
            f"so, and resume. Nothing was set aside. (A run that trains meanwhile removes what it need not "
            f"keep: train.keep_checkpoints.)"
        ) from error

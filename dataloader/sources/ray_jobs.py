"""Work on many files as tasks of a Ray cluster, whose nodes share the folder that it writes to."""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from dataloader.format import DataError

T = TypeVar("T")


def each_on_ray(
    ray: Any, folder: Path, work: Callable[[T], None], pieces: Sequence[T], jobs: int
) -> Iterator[int]:
    """Do `work` for all pieces, as `jobs.each` does, by at most `jobs` tasks at a time, of a CPU each; `ray`
    is connected to the cluster. A task whose node is lost is done again elsewhere.

    What `work` raises is raised; DataError if a node does not see what this machine writes to `folder`.
    """
    seen = folder / f"seen-by-{socket.gethostname()}-{os.getpid()}"
    seen.touch()
    task = ray.remote(num_cpus=1)(done_there)
    left = iter(pieces)
    running = {task.remote(work, piece, seen) for piece in islice(left, jobs)}
    count = 0
    try:
        while running:
            done, rest = ray.wait(list(running), num_returns=1)
            running = set(rest)
            for one in done:
                _result(ray, one)
                count += 1
                yield count
            running |= {task.remote(work, piece, seen) for piece in islice(left, len(done))}
    finally:
        for one in running:
            ray.cancel(one, force=True)
        seen.unlink(missing_ok=True)


def done_there(work: Callable[[T], None], piece: T, seen: Path) -> None:
    """Do a piece of work on a node that shares a file with the one that asks for it."""
    if not seen.exists():
        raise DataError(
            f"node {socket.gethostname()} does not see {seen.parent}: put --out where all nodes of the "
            "cluster see it"
        )
    work(piece)


def _result(ray: Any, task: Any) -> None:
    try:
        ray.get(task)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None

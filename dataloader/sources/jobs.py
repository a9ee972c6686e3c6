"""Work on many files, in processes of this machine, in any order."""

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing.connection import wait as wait_for
from typing import Protocol, TypeVar

from dataloader.format import DataError

T = TypeVar("T")


class Each(Protocol):
    """Does work for all pieces, by so many jobs at a time, and yields how many are done whenever one is."""

    def __call__(self, work: Callable[[T], None], pieces: Sequence[T], jobs: int) -> Iterator[int]:
        """As `each`."""


_AHEAD = 4  # pieces of work that wait for each process


def each(work: Callable[[T], None], pieces: Sequence[T], jobs: int) -> Iterator[int]:
    """Do `work` for all pieces by so many processes, and yield how many are done whenever one is.

    What `work` raises is raised, and DataError if a process is killed. Processes end with the one that began
    them, however it ends.
    """
    if jobs == 1:
        for number, piece in enumerate(pieces, start=1):
            work(piece)
            yield number
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(pieces)), context, _end_with_parent) as pool:
        try:
            yield from _done(work, pieces, pool, _AHEAD * jobs)
        except BrokenProcessPool as error:
            raise DataError(
                f"one of {jobs} processes was killed in the midst of its work (out of memory, if nobody did "
                f"it): start it again, where it goes on, with fewer jobs if need be"
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _done(
    work: Callable[[T], None], pieces: Iterable[T], pool: ProcessPoolExecutor, most: int
) -> Iterator[int]:
    left = iter(pieces)
    running: set[Future[None]] = {pool.submit(work, piece) for piece in islice(left, most)}
    count = 0
    while running:
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()
            count += 1
            yield count
        running |= {pool.submit(work, piece) for piece in islice(left, len(done))}


def _end_with_parent() -> None:
    """End this process when the one that began it does: a pool's process waits for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch(sentinel: int) -> None:
        wait_for([sentinel])
        os._exit(1)

    threading.Thread(target=watch, args=(parent.sentinel,), daemon=True).start()

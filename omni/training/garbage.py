"""Garbage collection between steps: no rank holds up its peers by collecting while they compute together."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

WHOLE_EVERY = 20  # steps from one look through everything to the next; the others look at what is young


@contextmanager
def held_in(step: int) -> Iterator[None]:
    """Collect nothing in this block, and right after it on all ranks alike: what is young, and everything
    after every WHOLE_EVERY-th step. Where collections were off before, they stay off.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
            gc.collect(1 if step % WHOLE_EVERY else 2)

"""Waiting for a call that may never return, such as one of a file system or of another's library."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, act: Callable[[], T]) -> T:
    """Call `act` on a thread and return what it returns; it is left alone there if it is not done in time,
    and its thread ends with the process.

    Raises:
        TimeoutError: in that case; else what `act` raises.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(act())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="within", daemon=True)
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not returned:
        raise TimeoutError(f"no answer in {seconds:g} s")
    return returned[0]

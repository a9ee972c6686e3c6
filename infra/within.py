"""Waiting for a call that may never return, such as one of a file system or of another's library."""

import threading
from collections.abc import Callable


def within(seconds: float, act: Callable[[], None]) -> None:
    """Call `act` on a thread, and leave it alone there if it is not done in time.

    Raises:
        TimeoutError: in that case; else what `act` raises.
    """
    raised: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="within", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"it is not done after {seconds:g} s")
    if raised:
        raise raised[0]

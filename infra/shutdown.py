"""Stop at the end of a step when the cluster asks: SIGTERM, or SIGUSR1 (Slurm, before preemption)."""

import signal
import threading
from types import FrameType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopFlag:
    """Remembers that a stop was asked for; the trainer polls `requested` after each step, saves and leaves.

    A context manager: entering installs the handlers, leaving restores those that were there. Python runs
    signal handlers in the main thread only, so entering anywhere else raises ValueError.
    """

    def __init__(self) -> None:
        self.signal_name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a stop was asked for."""
        return self.signal_name is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "StopFlag needs the main thread, where Python runs signal handlers: enter it there"
            )
        self._before = {number: signal.signal(number, self._remember) for number in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            # None: the handler was not installed by Python and cannot be put back through it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        # Nothing else is safe here: the signal may have interrupted a collective or a save.
        self.signal_name = signal.Signals(number).name

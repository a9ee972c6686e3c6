"""Processes that tests start."""

import signal


def heed_signals() -> None:
    """For `preexec_fn`: heed what may be ignored where tests run: nohup ignores SIGHUP, a shell has what runs
    in the background ignore SIGINT.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)

"""Processes that work on many files: one that is killed is named, with what to do."""

import os
import signal

import pytest

from dataloader.format import DataError
from dataloader.sources.jobs import each


def killed_at_five(piece: int) -> None:
    if piece == 5:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_named_with_a_remedy() -> None:
    with pytest.raises(DataError, match=r"one of 2 processes was killed .*out of memory.* fewer jobs"):
        list(each(killed_at_five, range(8), 2))

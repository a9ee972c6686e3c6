"""A real stall is broken with a report; a real signal is remembered until the end of the step."""

import fcntl
import io
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import ClassVar

import pytest

from infra.shutdown import StopFlag
from infra.watchdog import EXIT_CODE, Watchdog


def run(code, timeout=30):
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=timeout)


STALL = """
import threading
from infra.watchdog import Watchdog

def stuck_in_a_collective(lock):
    lock.acquire()

lock = threading.Lock()
lock.acquire()
threading.Thread(target=stuck_in_a_collective, args=(lock,), daemon=True).start()
with Watchdog(0.5, {describe}):
    stuck_in_a_collective(lock)
"""


def test_a_stall_ends_the_process_with_the_state_and_every_stack():
    done = run(STALL.format(describe="lambda: 'rank 3 in all_to_all, waits for rank 1'"))
    assert done.returncode == EXIT_CODE
    assert "no progress for 0.5 s: rank 3 in all_to_all, waits for rank 1" in done.stderr
    assert done.stderr.count("in stuck_in_a_collective") == 2


def test_a_silent_process_says_where_it_stands_long_before_it_is_ended():
    done = run(STALL.replace("Watchdog(0.5, {describe})", "Watchdog(2.0, lambda: 'rank 3', report_s=0.4)"))
    assert done.returncode == EXIT_CODE
    early, late = (line for line in done.stderr.splitlines() if line.startswith("watchdog: "))
    assert early == "watchdog: no progress for 0.4 s (waits for 2 s): rank 3"
    assert late == "watchdog: no progress for 2 s: rank 3"
    assert done.stderr.count("in stuck_in_a_collective") == 4


def test_what_a_rank_says_takes_the_place_of_the_bar_of_another_in_one_piece():
    class Terminal(io.StringIO):
        written: ClassVar[list[str]] = []

        def isatty(self):
            return True

        def write(self, text):
            self.written.append(text)

    ended = threading.Event()
    watchdog = Watchdog(0.1, lambda: "rank 3", out=Terminal())
    watchdog.exit_process = lambda code: ended.set()
    with watchdog:
        assert ended.wait(10)
    (text,) = Terminal.written
    assert text.startswith("\r\x1b[2Kwatchdog: no progress for 0.1 s: rank 3\nThread ")
    assert "in test_what_a_rank_says" in text
    assert text.endswith("\n")


@pytest.mark.parametrize(
    ("describe", "words"),
    [("lambda: lock.acquire()", "describing the state hung too"), ("lambda: 1 / 0", "ZeroDivisionError")],
)
def test_a_description_that_hangs_or_fails_does_not_save_the_process(describe, words):
    done = run(STALL.format(describe=describe))
    assert done.returncode == EXIT_CODE
    assert words in done.stderr


def test_a_screen_that_takes_no_more_saves_no_process(monkeypatch):
    monkeypatch.setattr("infra.watchdog.SAY_S", 0.3)
    readable, writable = os.pipe()
    size = fcntl.fcntl(writable, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writable, b"x" * size)
    nobody_reads, ended = os.fdopen(writable, "w"), threading.Event()
    watchdog = Watchdog(0.2, str, out=nobody_reads, report_s=0.1)
    watchdog.exit_process = lambda code: ended.set()
    watchdog.start()
    came = ended.wait(10)
    os.close(readable)  # whoever still writes goes on
    watchdog.stop()
    with suppress(BrokenPipeError):
        nobody_reads.close()
    assert came


BEATS = """
import time
from infra.watchdog import Watchdog
with Watchdog(0.6, str) as watchdog:
    for _ in range(8):
        time.sleep(0.2)
        watchdog.beat()
time.sleep(1.0)  # stopped: silence is allowed
"""


def test_beats_keep_it_quiet_and_stop_ends_it():
    done = run(BEATS)
    assert done.returncode == 0, done.stderr


HEEDING = """
import time
from infra.watchdog import Watchdog
came_at = [0.0]
with Watchdog(1.0, str, heeds=lambda: came_at[0]):
    for _ in range(8):
        time.sleep(0.2)
        came_at[0] = time.monotonic()
    print("over", flush=True)
    time.sleep(20)
"""


def test_another_value_of_what_it_heeds_is_a_beat():
    process = subprocess.Popen([sys.executable, "-c", HEEDING], stdout=subprocess.PIPE, text=True)
    assert process.communicate(timeout=30) == ("over\n", None)
    assert process.returncode == EXIT_CODE


SUSPENDED = """
import time
from infra.watchdog import Watchdog
with Watchdog(1.0, str) as watchdog:
    print("ready", flush=True)
    time.sleep(0.5)
"""


def test_the_time_a_process_is_suspended_does_not_count():
    process = subprocess.Popen([sys.executable, "-c", SUSPENDED], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGSTOP)
    time.sleep(2.0)
    process.send_signal(signal.SIGCONT)
    assert process.wait(timeout=20) == 0
    process.stdout.close()


def test_a_timeout_that_is_not_positive_is_refused():
    with pytest.raises(ValueError, match="timeout_s=0"):
        Watchdog(0, str)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stop_signal_sets_the_flag_and_handlers_are_restored(number):
    before = signal.getsignal(number)
    with StopFlag() as stop:
        assert not stop.requested
        assert stop.signal_name is None
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.signal_name == number.name
    assert signal.getsignal(number) is before


def test_the_flag_is_refused_outside_the_main_thread():
    errors = []

    def enter():
        try:
            with StopFlag():
                pass
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "main thread" in errors[0]

"""What is asked of the machine."""

import ctypes
import gc

import psutil
import pytest

from infra.machine import oom_kills, release_memory


def _is_glibc() -> bool:
    try:
        return hasattr(ctypes.CDLL("libc.so.6"), "malloc_trim")
    except OSError:
        return False


@pytest.mark.skipif(not _is_glibc(), reason="another C library")
def test_freed_memory_that_lies_between_what_is_in_use_is_given_back():
    process, block = psutil.Process(), 100_000
    blocks = [b"x" * block for _ in range(2000)]
    kept = blocks[::20]
    del blocks
    gc.collect()
    before = process.memory_info().rss
    release_memory()
    freed = before - process.memory_info().rss
    assert freed > 1500 * block
    assert all(of == b"x" * block for of in kept)


@pytest.mark.parametrize(
    ("own", "counter", "text"),
    [
        ("0::/job/step\n", "job/step/memory.events", "low 0\noom 9\noom_kill 3\n"),
        ("0::/of/the/host\n", "memory.events", "oom 9\noom_kill 3\n"),
        ("2:cpu:/job\n4:memory:/job\n0::/\n", "memory/job/memory.oom_control", "under_oom 0\noom_kill 3\n"),
    ],
)
def test_the_kernel_counts_whom_it_kills_for_want_of_memory(tmp_path, own, counter, text):
    groups, root = tmp_path / "cgroup", tmp_path / "fs"
    assert oom_kills(groups, root) == 0, "nobody counts"
    groups.write_text(own)
    assert oom_kills(groups, root) == 0
    (root / counter).parent.mkdir(parents=True)
    (root / counter).write_text(text)
    assert oom_kills(groups, root) == 3

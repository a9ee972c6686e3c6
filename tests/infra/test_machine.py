"""What is asked of the machine."""

import ctypes
import gc

import psutil
import pytest

from infra.machine import release_memory


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

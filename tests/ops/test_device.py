"""What a rank holds on its device."""

import subprocess
import sys

import pytest
import torch

SIZES = """
import psutil, torch
from ops.device import select_device

device = select_device()
rows = torch.zeros(600, 512, device=device)
torch.nn.functional.gelu(rows)
before = psutil.Process().memory_info().rss
for count in range(100, 400):
    torch.nn.functional.gelu(rows[:count])
print((psutil.Process().memory_info().rss - before) // 2**20)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="of the CPU's kernels")
def test_kernels_for_many_sizes_are_not_kept():
    """oneDNN by itself keeps all of these, about 180 MB."""
    done = subprocess.run([sys.executable, "-c", SIZES], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 60

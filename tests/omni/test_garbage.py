"""A rank's garbage is found while it trains, however much was built before."""

import subprocess
import sys

PROGRAM = """
import gc, weakref
from omni.training.worker import freeze

class Node:
    pass

built = [[] for _ in range(2_000_000)]
freeze()
node = Node()
node.own = node
left = weakref.ref(node)
gc.collect(1)
del node  # garbage of the oldest generation now
made = 0
kept = []
while left() is not None and made < 200_000:
    kept.append([])
    made += 1
print(made)
"""


def test_what_steps_leave_is_found_soon_after_ranks_are_built() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert int(found.stdout) < 200_000

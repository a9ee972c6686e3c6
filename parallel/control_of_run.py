"""The control plane of the ranks that torch.distributed has been initialised for."""

import os

from torch.distributed import PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from parallel.control import Control
from parallel.control_links import own_address
from parallel.control_tree import Tree
from parallel.handshake import secret_of_run


def connected(rank: int, world: int, timeout_s: float) -> Control:
    """Connect this rank with those next to it in the tree; all ranks of the world call it.

    Raises:
        ValueError: if the run has no secret.
        StallError: naming the ranks that did not come in time.
    """
    tree = Tree(world, min(world, int(os.environ.get("LOCAL_WORLD_SIZE", world))))
    secret = secret_of_run() if world > 1 else b""
    return Control(rank, tree, PrefixStore("control", _get_default_store()), secret, timeout_s, own_address())

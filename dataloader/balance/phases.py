"""The two phases of a step, that of the encoders and that of the LLM: each waits for its slowest rank."""

import numpy as np

from dataloader.balance.costs import SampleCosts
from ops.ints import Ints


def phases_ns(samples: SampleCosts) -> Ints:
    """Nanoseconds [n, 2] of each sample on a replica: of the LLM, and of all encoders."""
    return np.stack([samples.ns[:, 0], samples.ns[:, 1:].sum(1)], 1)


def floors_ns(samples: SampleCosts, width: int) -> list[int]:
    """Nanoseconds that some bin's sum of replicas takes of each phase at least, whatever is decided: a bin of
    `width` replicas waits for what cannot be split.
    """
    if not len(samples):
        return [0, 0]
    longest = samples.unsplit_ns.max(0)
    return [int(longest[0]) * width, int(longest[1:].max(initial=0)) * width]

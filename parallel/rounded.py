"""Sums over ranks of numbers in fp32 that travel in bf16.

Each rank rounds its numbers once and sends each rank that one's share; whoever has the shares of all adds
them up in fp32. So a sum is off by the rounding of its addends alone: by at most 2⁻⁸ of the sum of their
magnitudes, whatever the number of ranks, as bf16 keeps eight bits (Higham, 2002, section 2.2). In a ring of
bf16, as communication libraries reduce, every hop rounds the partial sum again. The price: what a rank sends
goes over its own link, also where a ring leaves a node once for all of its ranks.

Example: of 2 ranks the first has 1 + 2⁻⁹ and 3, the second 1 and 5. They send 1 and 3, 1 and 5; the first
gets 1 + 1 = 2, the second 3 + 5 = 8.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from parallel.collectives import Handle

ROUNDED = torch.bfloat16


@dataclass(frozen=True)
class RoundedSum:
    """A sum on its way: what to wait for, what arrives [ranks, share], and where the sum goes [share]."""

    work: Handle
    arriving: torch.Tensor
    own: torch.Tensor

    def wait(self) -> None:
        """Wait for what arrives and add it up."""
        self.work.wait()
        # Its place overlaps with what arrives.
        self.own.copy_(self.arriving.sum(0, dtype=torch.float32))


def rounded_sum(numbers: torch.Tensor, group: dist.ProcessGroup) -> RoundedSum:
    """Start to sum `numbers` [ranks · share], contiguous and in fp32, over the ranks of a group, each of
    which gets its share of the sum in its place. All else of `numbers` is lost: half of their memory holds
    what leaves and half what arrives, so nothing is held beside them meanwhile.
    """
    leaving, arriving = numbers.view(ROUNDED).chunk(2)
    leaving.copy_(numbers.to(ROUNDED))
    work = dist.all_to_all_single(arriving, leaving, group=group, async_op=True)
    return RoundedSum(work, arriving.view(group.size(), -1), numbers.chunk(group.size())[group.rank()])

"""Packs of which the first few grow, so that a pipeline fills and empties with little to wait for.

With a budget of 1,000 tokens these have at most 150, 250, 420 and 700, each about 0.6 of the next; all others
have 1,000. A stage of a pipeline waits for the first pack to pass those before it, and for the last one to
come back: it waits as long as these packs take. Where all are of one size, as in GPipe (Huang et al., arXiv
1811.06965, section 2.3), smaller ones are more, and each costs its overhead. Which pack passes when is up to
pairing: `alike` has the smallest at both ends.
"""

from dataloader.balance import SampleCosts
from dataloader.packing.first_fit import pack
from dataloader.packing.policy import PackingPolicy, Packs

SHARES = (0.15, 0.25, 0.42, 0.7)
"""Of the budget, that the first packs have at most."""


def pack_graded(samples: SampleCosts, budget: int) -> Packs:
    """A few packs that grow, of the longest samples that still find room in each, and of what is left as few
    as first-fit-decreasing makes. A small pack that no sample fits is left out, and all of them are where
    less would be left than they hold.
    """
    tokens = samples.tokens.tolist()
    if sum(size for size in tokens if size <= budget) < 2 * sum(SHARES) * budget:
        return pack(tokens, budget)
    left = sorted(range(len(tokens)), key=lambda i: (-tokens[i], i))
    small = list[tuple[int, ...]]()
    for share in SHARES:
        room, members = int(share * budget), set[int]()
        for i in left:
            if tokens[i] <= room:
                members.add(i)
                room -= tokens[i]
        if members:
            small.append(tuple(sorted(members)))
            left = [i for i in left if i not in members]
    left.sort()
    others = pack([tokens[i] for i in left], budget)
    return (*small, *(tuple(left[i] for i in members) for members in others))


GRADED = PackingPolicy("graded", pack_graded)

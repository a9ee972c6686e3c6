"""Which ranks of a pool hold which tokens: policies of sequence sharding, from lengths to a layout.

All are pure and integer, with ties to the smaller number. Who attends to what follows from the layout
(`parallel.schemes.choose_tiles`).

Invariant: cuts are multiples of the pool's unit, and no rank holds more tokens than the pool allows.
"""

from parallel.policies.pool import Pool, make_pool
from parallel.policies.sharing import SharingPolicy

__all__ = ["Pool", "SharingPolicy", "make_pool"]

"""Policies of balance that look at one number of a sample, or at none."""

from dataloader.balance.costs import Bins, SampleCosts
from dataloader.balance.easing import ease, steady
from dataloader.balance.policy import BalancePolicy
from parallel.least_loaded import longest_first


def assign_none(samples: SampleCosts, bins: Bins) -> list[int]:
    """Round robin: sample i goes to bin i % count, whatever it costs."""
    return [i % bins.count for i in range(len(samples))]


def assign_lpt(samples: SampleCosts, bins: Bins) -> list[int]:
    """Longest processing time first (Graham, 1969) over the sum of all components: each sample, from the
    costliest, to the bin with the least so far. Then a few changes where a phase is worse than in turn
    (`ease`), which Graham's rule has not.

    The largest sum is at most 4/3 - 1/(3 count) of the best possible. O(n log count).
    """
    chosen, _ = longest_first(samples.total_ns, bins.count)
    return ease(samples, bins, chosen, steady(samples.total_ns, chosen, bins))


NONE = BalancePolicy("none", assign_none)
LPT = BalancePolicy("lpt", assign_lpt)

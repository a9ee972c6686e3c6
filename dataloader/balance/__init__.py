"""Who takes which samples of a step: policies of balance, over vectors of integer costs.

All are pure and integer, with ties to the smaller number, and none changes what is trained on.
"""

from dataloader.balance.costs import Bins, SampleCosts
from dataloader.balance.policy import BalancePolicy

__all__ = ["BalancePolicy", "Bins", "SampleCosts"]

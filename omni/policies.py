"""Everything that a package with policies of its own imports: the kinds, and what their functions are given.

What stands here is kept stable; docs/policies.md explains it.
"""

from dataloader.balance import BalancePolicy, Bins, SampleCosts
from dataloader.dealing import DealPolicy
from dataloader.packing import PackingPolicy
from dataloader.pairing import PairingPolicy
from parallel.cluster import Link, Links
from parallel.placements import DomainSizes, PlacementPolicy
from parallel.policies import Pool, SharingPolicy
from parallel.policy import Policy, PolicyError
from parallel.sequence import SequenceLayout, Shard
from parallel.transport_policies import TransportPolicy
from parallel.work import Grad
from pipeline.builders import Facts, SchedulePolicy
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Kind, Op

__all__ = [
    "BalancePolicy",
    "Bins",
    "DealPolicy",
    "DomainPlan",
    "DomainSizes",
    "Facts",
    "Grad",
    "Kind",
    "Link",
    "Links",
    "Op",
    "PackingPolicy",
    "PairingPolicy",
    "PlacementPolicy",
    "Policy",
    "PolicyError",
    "Pool",
    "SampleCosts",
    "SchedulePolicy",
    "SequenceLayout",
    "Shard",
    "SharingPolicy",
    "TransportPolicy",
]

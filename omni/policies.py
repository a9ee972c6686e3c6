"""Everything that a package with policies of its own imports: the kinds, what their functions are given, and
what ours are made of.

What stands here is kept stable; docs/policies.md explains it. `KINDS` is the table of which section of the
configuration chooses which kind.
"""

from typing import NamedTuple

from dataloader.balance import BalancePolicy, Bins, SampleCosts
from dataloader.balance.easing import ease, steady
from dataloader.balance.search import Limits
from dataloader.dealing import DealPolicy
from dataloader.packing import PackingPolicy
from dataloader.packing.first_fit import pack as first_fit_decreasing
from dataloader.pairing import PairingPolicy
from parallel.cluster import Link, Links
from parallel.least_loaded import longest_first, longest_first_within
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
    "KINDS",
    "BalancePolicy",
    "Bins",
    "DealPolicy",
    "DomainPlan",
    "DomainSizes",
    "Facts",
    "Grad",
    "Kind",
    "Limits",
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
    "ease",
    "first_fit_decreasing",
    "longest_first",
    "longest_first_within",
    "steady",
]


class Section(NamedTuple):
    """A section of the configuration, the kind of policy that its key `policy` names, and what of a plan that
    policy decides, as a difference between two plans names it.
    """

    name: str
    kind: type[Policy]
    decides: tuple[str, ...]


KINDS = (
    Section("placement", PlacementPolicy, ("domain.homes",)),
    Section("encoder_sp", SharingPolicy, ("domain.encoder_batches",)),
    Section("llm_sp", SharingPolicy, ("domain.microbatches",)),
    Section("boundary", TransportPolicy, ("domain.routes",)),
    Section("deal", DealPolicy, ("group", "domain.samples")),
    Section("balance", BalancePolicy, ("group", "domain.samples")),
    Section("packing", PackingPolicy, ("domain.microbatches", "domain.items", "domain.encoder_batches")),
    Section("pairing", PairingPolicy, ("domain.microbatches", "domain.items")),
    Section(
        "pipeline",
        SchedulePolicy,
        ("domain.encoder_batches", "domain.bounds", "domain.ops", "domain.schedule"),
    ),
)
"""Every decision that a user may choose a policy for. `Config` has a section for each."""

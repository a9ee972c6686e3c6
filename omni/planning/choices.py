"""The policies that a configuration chooses, as objects."""

from dataclasses import dataclass

from dataloader.balance import BalancePolicy
from dataloader.dealing import DealPolicy
from dataloader.packing import PackingPolicy
from dataloader.pairing import PairingPolicy
from omni.config import Config, ConfigError
from parallel.placements import PlacementPolicy
from parallel.policies import SharingPolicy
from parallel.policy import find
from parallel.transport_policies import TransportPolicy
from pipeline.builders import SchedulePolicy


@dataclass(frozen=True)
class Chosen:
    """The policy of each section of the configuration that names one."""

    placement: PlacementPolicy
    encoder_sp: SharingPolicy
    llm_sp: SharingPolicy
    boundary: TransportPolicy
    deal: DealPolicy
    balance: BalancePolicy
    packing: PackingPolicy
    pairing: PairingPolicy
    pipeline: SchedulePolicy

    def describe(self) -> str:
        """Return all choices in one line, such as "placement=colocated, encoder_sp=none"."""
        return ", ".join(f"{section}={policy.name}" for section, policy in vars(self).items())

    def behind(self, difference: str) -> list[str]:
        """Return the policies that decide what a difference between plans begins with, such as
        "plan.domain.microbatches[0]: ...", as "packing=wlb".
        """
        sections = next((names for path, names in DECIDED_BY.items() if difference.startswith(path)), ())
        return [f"{section}={vars(self)[section].name}" for section in sections]


DECIDED_BY = {
    "plan.group": ("deal", "balance"),
    "plan.domain.samples": ("deal", "balance"),
    "plan.domain.microbatches": ("packing", "pairing", "llm_sp"),
    "plan.domain.items": ("packing", "pairing"),
    "plan.domain.chunks": ("encoder_sp", "packing", "pipeline"),
    "plan.domain.routes": ("boundary",),
    "plan.domain.homes": ("placement",),
    "plan.domain.bounds": ("pipeline",),
    "plan.domain.ops": ("pipeline",),
    "plan.domain.schedule": ("pipeline",),
}
"""The sections of the policies that decide a part of a plan, by where it stands."""


def chosen_policies(config: Config) -> Chosen:
    """Find every policy that a configuration names.

    Raises:
        PolicyError: for the first that is not registered, or is none of its kind.
        ConfigError: if packing and pairing do not go together.
    """
    chosen = Chosen(
        placement=chosen_placement(config),
        encoder_sp=find(SharingPolicy, config.encoder_sp.policy, "encoder_sp.policy"),
        llm_sp=find(SharingPolicy, config.llm_sp.policy, "llm_sp.policy"),
        boundary=find(TransportPolicy, config.boundary.transport, "boundary.transport"),
        deal=find(DealPolicy, config.deal.policy, "deal.policy"),
        balance=find(BalancePolicy, config.balance.policy, "balance.policy"),
        packing=find(PackingPolicy, config.packing.policy, "packing.policy"),
        pairing=find(PairingPolicy, config.pairing.policy, "pairing.policy"),
        pipeline=find(SchedulePolicy, config.pipeline.schedule, "pipeline.schedule"),
    )
    if chosen.packing.encode is not None and not chosen.pairing.in_order:
        # Items would be encoded with whichever pack comes first, and encoders' work be as uneven as ever.
        raise ConfigError(
            f"packing.policy={chosen.packing.name} has items encoded with earlier packs than their sample's, "
            f"and pairing.policy={chosen.pairing.name} lets packs change their order: choose a pairing that "
            "keeps it, such as pairing=in_order, or another packing"
        )
    return chosen


def chosen_placement(config: Config) -> PlacementPolicy:
    """Find the placement alone: what a layout needs.

    Raises:
        PolicyError: if it is not registered, or is none.
    """
    return find(PlacementPolicy, config.placement.policy, "placement.policy")

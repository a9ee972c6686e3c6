"""The policies that a configuration chooses, as objects."""

from collections.abc import Mapping
from typing import Any

from dataloader.packing import PackingPolicy
from omni.config import Config, ConfigError
from omni.planning.choice import AUTO, PACKING, PAIRING, POLICIES, value_of, with_keys
from omni.policies import KINDS
from parallel.policy import find


class Chosen(dict[str, Any]):
    """The policy of each section of the configuration that names one, each of the kind that `KINDS` says."""

    def describe(self) -> str:
        """Return all choices in one line, such as "placement=colocated, encoder_sp=none"."""
        return ", ".join(f"{section}={policy.name}" for section, policy in self.items())

    def behind(self, difference: str) -> list[str]:
        """Return the policies that decide what a difference between plans begins with, such as
        "plan.domain.microbatches[0]: ...", as "packing=entrain".
        """
        return [
            f"{section.name}={self[section.name].name}"
            for section in KINDS
            if any(difference.startswith(f"plan.{part}") for part in section.decides)
        ]


def with_pairing(config: Config) -> Config:
    """Return a configuration whose pairing, if it is open, is one that its packing goes with.

    Raises:
        PolicyError: for a packing that is not registered.
    """
    if config.packing.policy == AUTO:
        return config
    needs_order = find(PackingPolicy, config.packing.policy, PACKING).encode is not None
    if value_of(config, PAIRING) != AUTO or not needs_order:
        return config
    return with_keys(config, {PAIRING: POLICIES[PAIRING][1]})


def chosen_policies(names: Mapping[str, str]) -> Chosen:
    """Find the policy that each section names: `Config.policies`.

    Raises:
        PolicyError: for the first that is not registered, or is none of its kind.
        ConfigError: if packing and pairing do not go together.
    """
    chosen = Chosen({name: find(kind, names[name], f"{name}.policy") for name, kind, _ in KINDS})
    packing, pairing = chosen["packing"], chosen["pairing"]
    if packing.encode is not None and not pairing.in_order:
        # Items would be encoded with whichever pack comes first, and encoders' work be as uneven as ever.
        raise ConfigError(
            f"packing.policy={packing.name} has items encoded with earlier packs than their sample's, "
            f"and pairing.policy={pairing.name} lets packs change their order: choose a pairing that "
            "keeps it, such as pairing=in_order, or another packing"
        )
    return chosen

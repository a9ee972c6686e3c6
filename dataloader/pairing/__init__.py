"""Which packs of a domain's replicas pass together, and in which order: policies of pairing."""

from dataloader.pairing.policy import PairingPolicy, Pairs

__all__ = ["PairingPolicy", "Pairs"]

"""Which samples of a replica share a microbatch: policies of packing, without padding."""

from dataloader.packing.policy import PackingPolicy, Packs

__all__ = ["PackingPolicy", "Packs"]

"""Arithmetic on one rank's tensors, with its FLOPs and bytes beside it."""

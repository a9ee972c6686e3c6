"""Dry runs of a rank on fake tensors, and a model in integers of what they find."""

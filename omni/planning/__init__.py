"""Composing plans: a run resolved from its configuration, and its planner; no tensors of a rank."""

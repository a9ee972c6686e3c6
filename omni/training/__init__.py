"""Planner, trainer, optimizer, evaluation, parity."""

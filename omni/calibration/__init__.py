"""Measuring a machine: what `omni calibrate` writes into a cluster file."""

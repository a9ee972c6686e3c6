"""Is this machine, and are its ranks together, ready for a run? What `omni doctor` has ranks find."""

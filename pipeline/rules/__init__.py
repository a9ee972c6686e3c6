"""The rules that a plan must pass, one file for each kind: see `pipeline/verifier.py`."""

"""The run: trainer, evaluation, parity, and what is reported."""

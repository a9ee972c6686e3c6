"""Names of what there is here, for configurations to choose from: no torch is needed to know them."""

NORMS = ("RMSNorm", "LayerNorm")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "quick_gelu")
PRECISIONS = ("auto", "fp32", "bf16")
REDUCED = ("fp32", "bf16")
LOWER = ("fp8", "mxfp8", "nvfp4")
"""Precisions that matrices are multiplied in; what is kept stays bf16."""

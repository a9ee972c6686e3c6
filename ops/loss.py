"""Cross entropy of next tokens.

megatron-core's fused cross entropy casts its gradient to bfloat16 whatever the model's precision, which costs
an fp32 run three digits; ours keeps the logits' gradient in fp32.

Shapes: T tokens, V vocabulary.
"""

import torch
import torch.nn.functional as F


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """logits [T, V], labels [T] → the loss of each token [T], in fp32 (fp64 for fp64 logits)."""
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(exact, labels, reduction="none")

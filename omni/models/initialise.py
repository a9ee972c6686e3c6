"""Weights that depend on the seed and on a parameter's name, not on the layout.

Each parameter is drawn whole from a generator of its own, keyed by (seed, component, canonical name), and a
rank keeps its part. So a model starts from the same weights on one rank and on thousands, whichever rank
holds which part of which layer: the ground that every parity check stands on.
"""

import hashlib
import math
import re

import torch

from omni.models.regions import Numbering, named_parameters

# The layers whose output is added to the residual stream.
_RESIDUAL = re.compile(r"(linear_proj|linear_fc2)\.weight$")


@torch.no_grad()
def initialise(
    module: torch.nn.Module, *, seed: int, component: str, num_layers: int, numbering: Numbering
) -> None:
    """Draw all weights of `module` in fp32 on the CPU and copy them to where they live.

    Matrices are normal with standard deviation 0.8/√fan-in, divided by √(2·layers) where they write to
    the residual stream; embeddings 0.02; norms multiply by one; biases and sinks are zero.
    """
    offset = float(getattr(getattr(module, "config", None), "layernorm_zero_centered_gamma", False))
    for named in named_parameters(module, numbering):
        name, parameter, shape = named.name, named.parameter, named.region.shape
        if parameter.dim() < 2:
            parameter.fill_(1.0 - offset if "norm" in name and name.endswith("weight") else 0.0)
            continue
        std = 0.02 if "embedding" in name else 0.8 / math.sqrt(math.prod(shape[1:]))
        if _RESIDUAL.search(name):
            std /= math.sqrt(2 * num_layers)
        generator = torch.Generator().manual_seed(_seed(seed, component, name))
        drawn = torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
        parameter.copy_(named.region.cut(drawn))


def _seed(seed: int, component: str, name: str) -> int:
    code = hashlib.blake2b(f"{seed}/{component}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(code, "big") >> 1

"""Weights that depend on the seed and on a parameter's name, not on the layout.

Each parameter is drawn whole from a generator of its own, keyed by (seed, component, canonical name), and a
rank keeps its part. So a model starts from the same weights on one rank and on thousands, whichever rank
holds which part of which layer: the ground that every parity check stands on.
"""

import hashlib
import math
import re

import torch

from omni.models.adapters import A, B
from omni.models.regions import Numbering, named_parameters

# The layers whose output is added to the residual stream.
_RESIDUAL = re.compile(r"(linear_proj|linear_fc2)\.weight$")
_NORMS = (
    torch.nn.LayerNorm,
    torch.nn.RMSNorm,
    torch.nn.GroupNorm,
    torch.nn.modules.batchnorm._NormBase,
)


@torch.no_grad()
def initialise(
    module: torch.nn.Module, *, seed: int, component: str, num_layers: int, numbering: Numbering
) -> None:
    """Draw all weights of `module` in fp32 on the CPU and copy them to where they live.

    Matrices are normal with standard deviation 0.8/√fan-in, divided by √(2·layers) where they write to
    the residual stream; embeddings 0.02; norms, by name or torch's, multiply by one; biases and sinks are
    zero; decays of delta nets are as `_decays` says. Of an adapter A is uniform within 1/√fan-in and B zero,
    so that it begins as nothing. A module with `draw(seed)` draws weights itself, whole on every rank, and
    returns their names.
    """
    draw = getattr(module, "draw", None)
    drawn_by_itself = draw(_seed(seed, component, "draw")) if draw else frozenset()
    of_norms = {own.weight for own in module.modules() if isinstance(own, _NORMS)}
    offset = float(getattr(getattr(module, "config", None), "layernorm_zero_centered_gamma", False))
    for named in named_parameters(module, numbering):
        name, own, shape = named.name, named.own, named.region.shape
        if name in drawn_by_itself:
            continue
        if name.endswith((".A_log", ".dt_bias")):
            drawn = _decays(name, shape, torch.Generator().manual_seed(_seed(seed, component, name)))
            own.copy_(named.cut(drawn))
            continue
        if name.endswith((A, B)):
            most = 0.0 if name.endswith(B) else shape[1] ** -0.5
            generator = torch.Generator().manual_seed(_seed(seed, component, name))
            own.copy_(named.cut(torch.empty(shape).uniform_(-most, most, generator=generator)))
            continue
        if own.dim() < 2:
            # The norm of a delta net's heads multiplies by its weight, whatever the others do.
            one = 1.0 if name.endswith(".self_attention.norm.weight") else 1.0 - offset
            if "norm" in name and name.endswith("weight"):
                own.fill_(one)
            else:
                own.fill_(float(named.parameter in of_norms))
            continue
        std = 0.02 if "embedding" in name else 0.8 / math.sqrt(math.prod(shape[1:]))
        if _RESIDUAL.search(name):
            std /= math.sqrt(2 * num_layers)
        generator = torch.Generator().manual_seed(_seed(seed, component, name))
        drawn = torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
        own.copy_(named.cut(drawn))


def _decays(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Rates of decay uniform between 1 and 16, and biases that make a step of a token between 0.001 and 0.1,
    uniform by its logarithm (Dao and Gu, Mamba-2, 2024): a head forgets within one to a thousand tokens.
    """
    drawn = torch.rand(shape, generator=generator)
    if name.endswith(".A_log"):
        return (1 + 15 * drawn).log()
    step = (math.log(0.001) + drawn * math.log(100)).exp()
    return step + (-torch.expm1(-step)).log()  # softplus of it is the step


def _seed(seed: int, component: str, name: str) -> int:
    code = hashlib.blake2b(f"{seed}/{component}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(code, "big") >> 1

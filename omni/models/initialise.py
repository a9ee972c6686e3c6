"""Weights that depend on the seed and on a parameter's name, not on the layout.

Each parameter is drawn from a generator of its own, keyed by (seed, component, canonical name). So a model
starts from the same weights on one rank and on thousands, whichever rank holds which layer: the ground that
every parity check stands on.
"""

import hashlib
import math
import re
from collections.abc import Iterator

import torch

# The layers whose output is added to the residual stream.
_RESIDUAL = re.compile(r"(linear_proj|linear_fc2)\.weight$")
_LAYER = re.compile(r"(?<=layers\.)(\d+)")


def canonical_parameters(
    module: torch.nn.Module, first_layer: int = 0, tied: bool = False
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield parameters by names that do not depend on the pipeline stage.

    Layers are counted from the start of the model; a tied output layer is the word embedding it copies.
    """
    for name, parameter in module.named_parameters():
        name = _LAYER.sub(lambda match: str(int(match[0]) + first_layer), name)
        if tied and name == "output_layer.weight":
            name = "embedding.word_embeddings.weight"
        yield name, parameter


@torch.no_grad()
def initialise(
    module: torch.nn.Module,
    *,
    seed: int,
    component: str,
    num_layers: int,
    first_layer: int = 0,
    tied: bool = False,
) -> None:
    """Draw all weights of `module` in fp32 on the CPU and copy them to where they live.

    Matrices are normal with standard deviation 0.8/√fan-in, divided by √(2·layers) where they write to
    the residual stream; embeddings 0.02; norms one and biases zero.
    """
    for name, parameter in canonical_parameters(module, first_layer, tied):
        if parameter.dim() < 2:
            parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            continue
        std = 0.02 if "embedding" in name else 0.8 / math.sqrt(parameter[0].numel())
        if _RESIDUAL.search(name):
            std /= math.sqrt(2 * num_layers)
        generator = torch.Generator().manual_seed(_seed(seed, component, name))
        drawn = torch.empty(parameter.shape, dtype=torch.float32).normal_(0.0, std, generator=generator)
        parameter.copy_(drawn)


def _seed(seed: int, component: str, name: str) -> int:
    code = hashlib.blake2b(f"{seed}/{component}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(code, "big") >> 1

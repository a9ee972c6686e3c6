"""Tokens in the order of the experts that they go to, without the host waiting for the device.

How many rows there are is known: each token goes to as many experts. megatron-core selects rows by a mask and
so asks the device for their number, twice a layer.

Shapes: T tokens, D width, E experts, R rows, one for each expert of a token.
"""

import torch


def permute(
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor | None = None,
    num_out_tokens: int | None = None,
    fused: bool = False,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """tokens [T, D], routing map [T, E] (True where a token goes), probabilities [T, E] → rows [R, D], their
    probabilities [R], None if there are none, and the tokens [R] that they are of: expert by expert, and
    tokens in their order. R is `num_out_tokens`, the number of places in the map that are True.

    It is called as megatron-core's own, of which it takes the place; tokens are neither dropped nor padded.
    """
    assert num_out_tokens is not None, "rows are counted ahead"
    assert not fused, "a kernel of Transformer Engine"
    assert not drop_and_pad, "tokens are neither dropped nor padded"
    by_expert = routing_map.bool().T.reshape(-1)
    places = torch.nonzero_static(by_expert, size=num_out_tokens).squeeze(1)
    of = places % max(1, len(tokens))
    chosen = None if probs is None else probs.T.reshape(-1).index_select(0, places)
    return tokens.index_select(0, of), chosen, of

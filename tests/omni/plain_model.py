"""The models as their equations say, in plain torch and fp64: an oracle for one rank.

Nothing is packed, shared or fused, and nothing of the product is imported: a sample is a sequence of its own,
an expert is asked token by token, gradients are autograd's. Weights go by the names of checkpoints.

Shapes: T tokens, D width, N heads, K key/value heads, H head size, E experts, P values of a patch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import torch

EPS = 1e-5  # of the norms of encoders
Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Document:
    """A sample as the model sees it: `ids`, `labels` and `counts` (whether the label carries loss) [T];
    `rows` [T] marks where rows of images stand; `images` are (patches [T, P], row and column [T, 2]).
    """

    source: str
    ids: torch.Tensor
    labels: torch.Tensor
    counts: torch.Tensor
    rows: torch.Tensor
    images: tuple[tuple[torch.Tensor, torch.Tensor], ...]


def norm(x: torch.Tensor, weights: Weights, name: str, eps: float) -> torch.Tensor:
    """RMSNorm (Zhang & Sennrich, 2019), or LayerNorm where there is a shift as well."""
    shift = weights.get(f"{name}.bias")
    if shift is not None:
        x = x - x.mean(-1, keepdim=True)
    scaled = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]
    return scaled if shift is None else scaled + shift


def linear(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    """x Wᵀ, and a bias where there is one."""
    out = x @ weights[f"{name}.weight"].T
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def rotated(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """Turn each pair (x[i], x[i + H/2]) of [T, N, H] by position times frequency. The frequencies are divided
    among the axes of `positions` [T, A], and fall from 1 by powers of `base` on each.
    """
    axes = positions.shape[1]
    each = x.shape[-1] // 2 // axes
    angles = torch.cat(
        [
            positions[:, [axis]].double() * base ** (-number / each)
            for axis in range(axes)
            for number in range(each)
        ],
        dim=1,
    )
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def attention(
    x: torch.Tensor, weights: Weights, name: str, sizes: SimpleNamespace, positions: torch.Tensor
) -> torch.Tensor:
    """Softmax attention of one sequence [T, D]. The projection holds, for each key/value head, its queries,
    then its key, then its value. Where there are such norms, each head of queries and keys is normed.
    """
    size, queries = sizes.head_dim or sizes.hidden // sizes.heads, sizes.heads // sizes.kv_heads
    qkv = linear(x, weights, f"{name}.linear_qkv").view(len(x), sizes.kv_heads, queries + 2, size)
    hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1) & sizes.causal
    heads = []
    for group in qkv.unbind(1):
        found, key = group[:, :-2], group[:, -2:-1]
        if sizes.qk_norm:
            found = norm(found, weights, f"{name}.q_layernorm", sizes.norm_eps)
            key = norm(key, weights, f"{name}.k_layernorm", sizes.norm_eps)
        *found, key = rotated(torch.cat([found, key], 1), positions, sizes.rotary_base).unbind(1)
        for query in found:
            scores = (query @ key.T / math.sqrt(size)).masked_fill(hidden, -math.inf)
            heads.append(scores.softmax(-1) @ group[:, -1])
    return linear(torch.cat(heads, -1), weights, f"{name}.linear_proj")


def swiglu(x: torch.Tensor, weights: Weights, name: str) -> torch.Tensor:
    """silu(gate) · up, and down (Shazeer, 2020); gate and up are one matrix."""
    gate, up = linear(x, weights, f"{name}.linear_fc1").chunk(2, -1)
    return linear(gate * gate.sigmoid() * up, weights, f"{name}.linear_fc2")


def gelu(x: torch.Tensor) -> torch.Tensor:
    """The exact one: x times the share of a normal distribution below it."""
    return x * (1 + torch.erf(x / math.sqrt(2))) / 2


def mlp(x: torch.Tensor, weights: Weights, name: str, gated: bool) -> torch.Tensor:
    """The MLP of a layer without experts."""
    if gated:
        return swiglu(x, weights, name)
    return linear(gelu(linear(x, weights, f"{name}.linear_fc1")), weights, f"{name}.linear_fc2")


def experts(
    x: torch.Tensor, weights: Weights, name: str, moe: SimpleNamespace, chosen: torch.Tensor
) -> torch.Tensor:
    """The `topk` experts of each token, weighted by their sigmoids or softmax, over the sum of these if they
    are normalised, and the shared one, which a sigmoid of the token may gate.

    A bias decides who is chosen, and nothing else, and so do groups: the best by their highest scores are
    kept (DeepSeek-V3, section 2.1.2). Tokens of each expert are added to `chosen` [E].
    """
    logits = linear(x, weights, f"{name}.router")
    scores = logits.sigmoid() if moe.score == "sigmoid" else logits.softmax(-1)
    bias = weights.get(f"{name}.router.expert_bias", torch.zeros(moe.experts))
    out = []
    for token, score in zip(x, scores, strict=True):
        choice = (score.detach() + bias).view(moe.groups, -1)
        kept = choice.topk(moe.topk // moe.group_topk).values.sum(-1).topk(moe.group_topk).indices
        choice = torch.full_like(choice, -math.inf).index_copy(0, kept, choice[kept])
        best = choice.flatten().topk(moe.topk).indices
        chosen[best] += 1
        shares = score[best] / score[best].sum() if moe.normalise else score[best]
        of_each = [swiglu(token, weights, f"{name}.experts.{e}") for e in best.tolist()]
        out.append(moe.scale * shares @ torch.stack(of_each))
    shared = swiglu(x, weights, f"{name}.shared_experts")
    if moe.shared_gate:
        shared = shared * (x @ weights[f"{name}.shared_experts.gate_weight"].T).sigmoid()
    return torch.stack(out) + shared


def encode(weights: Weights, sizes: SimpleNamespace, patches: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """One image → the rows of its windows, once for the embedding and once for each tap, [1 + taps, R, D]."""
    x = linear(patches, weights, "patch_linear")
    x = x + weights["row_embedding.weight"][at[:, 0]] + weights["column_embedding.weight"][at[:, 1]]
    # Layers are counted from the last tap.
    blocks = ["block", *(f"tapped.{i}" for i in range(len(sizes.taps)))]
    ends = [(f"tap_projectors.{i}.", "norm", "linear_in", "linear_out") for i in range(len(sizes.taps))]
    ends.append(("", "final_norm", "projector_in", "projector_out"))
    rows = []
    for block, (first, stop), end in zip(blocks, pairwise([0, *sizes.taps, sizes.layers]), ends, strict=True):
        for number in range(stop - first):
            layer = f"{block}.layers.{number}"
            seen = norm(x, weights, f"{layer}.input_layernorm", EPS)
            x = x + attention(seen, weights, f"{layer}.self_attention", sizes, at)
            seen = norm(x, weights, f"{layer}.pre_mlp_layernorm", EPS)
            x = x + mlp(seen, weights, f"{layer}.mlp", sizes.gated)
        prefix, of_norm, linear_in, linear_out = end
        windows = norm(x, weights, prefix + of_norm, EPS).reshape(-1, sizes.hidden * sizes.merge**2)
        rows.append(linear(gelu(linear(windows, weights, prefix + linear_in)), weights, prefix + linear_out))
    return torch.stack([rows[-1], *rows[:-1]])


def losses(
    weights: Weights,
    sizes: SimpleNamespace,
    document: Document,
    rows: torch.Tensor | None,
    chosen: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Cross entropies of a document's labels that carry loss. `rows` [1 + taps, R, D] take the places of
    embeddings; those of tap n are added to what enters layer n. `chosen` counts tokens by layer and expert.
    """
    embedding = weights["embedding.word_embeddings.weight"]
    x = embedding[document.ids]
    if rows is not None:
        x = x.clone()
        x[document.rows] = rows[0]
    positions = torch.arange(len(x))[:, None]
    for number in range(sizes.layers):
        layer = f"decoder.layers.{number}"
        if rows is not None and 0 < number < len(rows):
            x = x.clone()
            x[document.rows] += rows[number]
        seen = norm(x, weights, f"{layer}.input_layernorm", sizes.norm_eps)
        x = x + attention(seen, weights, f"{layer}.self_attention", sizes, positions)
        seen = norm(x, weights, f"{layer}.pre_mlp_layernorm", sizes.norm_eps)
        if f"{layer}.mlp" in chosen:
            x = x + experts(seen, weights, f"{layer}.mlp", sizes.moe, chosen[f"{layer}.mlp"])
        else:
            x = x + mlp(seen, weights, f"{layer}.mlp", sizes.gated)
    x = norm(x, weights, "decoder.final_layernorm", sizes.norm_eps)
    logits = x @ weights.get("output_layer.weight", embedding).T
    own = logits.gather(1, document.labels[:, None])[:, 0]
    return (logits.logsumexp(-1) - own)[document.counts]

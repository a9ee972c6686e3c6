"""Keys of layers: what is stated of each is what its modules have."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

from omni.llm_config import LLMConfig
from omni.llm_sections import MoEConfig
from omni.models.layer_sizes import llm_layers
from omni.models.layers import transformer_config
from omni.models.llm import llm_work
from omni.models.llm_stage import LLMStage
from omni.models.moe import CountingRouter, moe_settings
from ops.heads import rotated
from ops.rotary import Scaling, rotary_table
from parallel.layout import Layout
from parallel.megatron import ProcessGroupCollection, model_parallel_cuda_manual_seed

LLM = LLMConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, tied=False)
MOE = MoEConfig(experts=4, topk=2, ffn=24, dense_layers=1)
GROUPS = (
    *("tp", "cp", "pp", "dp", "dp_cp", "tp_cp", "tp_dp_cp"),
    *("ep", "tp_ep", "expt_tp", "expt_dp", "embd", "pos_embd", "pool"),
)
BIASES = {"qkv_bias": True, "output_bias": True}
CASES = {
    "sinks": replace(LLM, sinks=True),
    "biases of attention": replace(LLM, **BIASES),
    "biases": replace(LLM, **BIASES, ffn_bias=True),
    "biases of experts": replace(LLM, **BIASES, ffn_bias=True, moe=MOE),
    "norms of all heads together": replace(LLM, qk_norm=True, qk_norm_over="all"),
    "norms around": replace(LLM, norms="around"),
    "norms after": replace(LLM, norms="after", moe=MOE),
    "a gate of the shared expert": replace(LLM, moe=replace(MOE, shared_ffn=16, shared_gate=True)),
}


def shapes(rank: int, config: LLMConfig) -> list[int]:
    groups = made_groups()
    sizes = {"vocab_size": 260, "num_sources": 1, "dtype": torch.float32, "device": torch.device("cpu")}
    stage = LLMStage(config, Layout(), groups=groups, **sizes)
    return [parameter.numel() for parameter in stage.models.parameters()]


def made_groups() -> ProcessGroupCollection:
    model_parallel_cuda_manual_seed(0, tp_rank=0, ep_rank=0, etp_rank=0)
    groups = ProcessGroupCollection()
    for name in GROUPS:
        setattr(groups, name, dist.group.WORLD)
    return groups


def routed(rank: int, moe: MoEConfig, scores: torch.Tensor) -> torch.Tensor:
    sizes = llm_layers(replace(LLM, moe=moe))
    settings = moe_settings(moe, 1, torch.float64)
    config = transformer_config(sizes, torch.float64, more=settings)
    router = CountingRouter(config, made_groups(), balanced=False)
    weights, _ = router.routing(scores.unsqueeze(1))
    return weights


def weights_of(scores: torch.Tensor, moe: MoEConfig) -> torch.Tensor:
    """Weights of the experts of each token, from the words of `MoEConfig` alone."""
    found = torch.zeros_like(scores)
    for token, own in enumerate(scores):
        values = own.sigmoid() if moe.score == "sigmoid" else own.softmax(0) if not moe.normalise else own
        groups = values.view(moe.groups, -1)
        best = groups.topk(moe.topk // moe.group_topk, dim=1).values.sum(1)
        kept = set(best.topk(moe.group_topk).indices.tolist())
        size = groups.shape[1]
        order = sorted(range(len(own)), key=lambda at: -float(values[at]))
        chosen = [at for at in order if at // size in kept][: moe.topk]
        if moe.score == "sigmoid":
            weights = values[chosen] / values[chosen].sum()
        else:
            weights = values[chosen].softmax(0) if moe.normalise else values[chosen]
        found[token, chosen] = weights * moe.scale
    return found


ROUTED = MoEConfig(experts=8, topk=4, ffn=8, bias_update_rate=0.0)


@pytest.mark.parametrize(
    "moe",
    [
        replace(ROUTED, scale=2.5, groups=4, group_topk=2),
        replace(ROUTED, score="softmax", scale=2.5),
        replace(ROUTED, score="softmax", normalise=False, scale=1.5, groups=2, group_topk=1),
    ],
)
def test_experts_are_weighed_as_the_keys_say_and_each_key_counts(ranks: RankPool, moe):
    scores = torch.randn(64, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = ranks.run(1, routed, moe, scores)[0].double()
    assert float((found - weights_of(scores, moe)).abs().max()) < 1e-6
    plain = {"scale": 1.0, "normalise": True}
    if moe.groups > 1:
        plain["group_topk"] = moe.groups
    for key, value in plain.items():
        if getattr(moe, key) != value:
            other = weights_of(scores, replace(moe, **{key: value}))
            assert float((found - other).abs().max()) > 1e-2, key


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_part_of_a_head_is_rotated_and_the_rest_passes(share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 3, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    positions, size = torch.arange(5, 12), int(16 * share)
    out, _ = rotated(x, x, rotary_table(positions, 16, 100.0, torch.float64, Scaling(share=share)))
    half = size // 2
    angles = positions[:, None] * 100.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    low, high = x[..., :half], x[..., half:size]
    plain = torch.cat([low * cos - high * sin, high * cos + low * sin, x[..., size:]], -1)
    weight = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    gradients = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (out, plain)]
    assert torch.allclose(out, plain, rtol=0, atol=1e-12)
    assert torch.allclose(*gradients, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_stated_weights_are_those_of_the_modules_in_their_order(ranks: RankPool, name):
    (part,) = llm_work(CASES[name], 260, Layout(), 4)
    assert [weight.elements for weight in part.weights()] == ranks.run(1, shapes, CASES[name])[0]

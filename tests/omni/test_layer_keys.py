"""Keys of layers: what is stated of each is what its modules have."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool

from omni.config import LLMConfig, MoEConfig
from omni.models.llm import llm_work
from omni.models.llm_stage import LLMStage
from parallel.layout import Layout
from parallel.megatron import ProcessGroupCollection, model_parallel_cuda_manual_seed

LLM = LLMConfig(layers=2, hidden=32, heads=4, kv_heads=2, ffn=48, tied=False)
MOE = MoEConfig(experts=4, topk=2, ffn=24, dense_layers=1)
GROUPS = (
    *("tp", "cp", "pp", "dp", "dp_cp", "tp_cp", "tp_dp_cp", "mp", "ep", "tp_ep", "tp_ep_pp", "expt_tp"),
    *("expt_dp", "intra_dp_cp", "intra_expt_dp", "embd", "pos_embd", "pool", "intra_dist_opt"),
)
BIASES = {"qkv_bias": True, "output_bias": True}
CASES = {
    "sinks": replace(LLM, sinks=True),
    "biases of attention": replace(LLM, **BIASES),
    "biases": replace(LLM, **BIASES, ffn_bias=True),
    "biases of experts": replace(LLM, **BIASES, ffn_bias=True, moe=MOE),
    "norms around": replace(LLM, norms="around"),
    "norms after": replace(LLM, norms="after", moe=MOE),
    "a gate of the shared expert": replace(LLM, moe=replace(MOE, shared_ffn=16, shared_gate=True)),
}


def shapes(rank: int, config: LLMConfig) -> list[int]:
    model_parallel_cuda_manual_seed(0, tp_rank=0, ep_rank=0, etp_rank=0)
    groups = ProcessGroupCollection()
    for name in GROUPS:
        setattr(groups, name, dist.group.WORLD)
    sizes = {"vocab_size": 260, "num_sources": 1, "dtype": torch.float32, "device": torch.device("cpu")}
    stage = LLMStage(config, Layout(), groups=groups, **sizes)
    return [parameter.numel() for parameter in stage.models.parameters()]


@pytest.mark.parametrize("name", CASES)
def test_stated_weights_are_those_of_the_modules_in_their_order(ranks: RankPool, name):
    (part,) = llm_work(CASES[name], 260, Layout(), 4)
    assert [weight.elements for weight in part.weights()] == ranks.run(1, shapes, CASES[name])[0]

"""Mixture-of-experts layers: megatron-core's MoELayer in place of a dense layer's MLP.

A router sends every token to `topk` of `experts`; the experts are split `ep` ways over the tp·cp·dp ranks of
a stage, whole (no tensor parallelism inside an expert), and tokens travel to them and back by an uneven
all-to-all. No token is dropped. There is no auxiliary loss: a bias added to the scores, for the choice alone,
moves once a step against each expert's share of the tokens (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).

Invariant: what a token gets and every gradient are those of one rank, whichever rank holds an expert. So the
choice must not hang on rounding (`routing_margins` measures by how much it does not), and tokens are counted
once: not in evaluation, not again in recomputation, and not at all where they only fill a rank's tail.

Shapes: T tokens of this rank, D width, E experts.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from infra.checkpoint import CheckpointError
from omni.llm_sections import MoEConfig
from omni.models.dispatch import Dispatcher
from omni.models.experts import Experts
from omni.models.feed_forward import SharedExpert
from ops.routing import RowOrder, expert_numbers, order_rows
from parallel.megatron import (
    ColumnParallelLinear,
    MLPSubmodules,
    ModuleSpec,
    MoELayer,
    MoESubmodules,
    ProcessGroupCollection,
    RouterGatingLinearFunction,
    RowParallelLinear,
    TopKRouter,
    TransformerConfig,
    group_limited_topk,
)

_LAYER = re.compile(r"(?<=layers\.)\d+")
_EXPERTS = re.compile(r"(?<=\.experts\.)(?=linear_fc[12]\.)")


def moe_settings(moe: MoEConfig, ep: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return what a model with experts adds to its TransformerConfig.

    The dispatcher, "alltoall", is the same for dense models and not repeated here.
    """
    return {
        "num_moe_experts": moe.experts,
        "moe_router_topk": moe.topk,
        "moe_ffn_hidden_size": moe.ffn,
        "moe_shared_expert_intermediate_size": moe.shared_ffn or None,
        "moe_router_score_function": moe.score,
        "moe_router_pre_softmax": moe.score == "softmax" and (moe.topk == 1 or not moe.normalise),
        "moe_router_topk_scaling_factor": None if moe.scale == 1.0 else moe.scale,
        "moe_router_num_groups": moe.groups if moe.groups > 1 else None,
        "moe_router_group_topk": moe.group_topk if moe.groups > 1 else None,
        "moe_shared_expert_gate": moe.shared_gate,
        "moe_router_dtype": "fp64" if dtype == torch.float64 else "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_z_loss_coeff": None,
        # The bias is ours: megatron's would be updated by every finalisation, over global process groups.
        "moe_router_enable_expert_bias": False,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": 1,
    }


def experts_spec(moe: MoEConfig, groups: ProcessGroupCollection) -> ModuleSpec:
    """Specify router, experts and shared expert: what takes the place of a dense layer's MLP."""
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return ModuleSpec(
        module=ExpertLayer,
        params={"pg_collection": groups},  # megatron hands them to its own modules alone
        submodules=MoESubmodules(
            experts=ModuleSpec(module=Experts),
            shared_experts=ModuleSpec(module=SharedExpert, submodules=linears),
            router=partial(CountingRouter, balanced=moe.bias_update_rate > 0),
        ),
    )


class ExpertLayer(MoELayer):
    """megatron's, with our dispatcher."""

    def __init__(
        self, config: TransformerConfig, submodules: MoESubmodules, pg_collection: ProcessGroupCollection
    ) -> None:
        super().__init__(config, submodules, pg_collection=pg_collection)
        self.token_dispatcher = Dispatcher(config.num_moe_experts, pg_collection.ep)


class _Gate(RouterGatingLinearFunction):
    """megatron's, whose forward casts what it multiplies: a GPU adds up in single precision without."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        if bias is not None or not hidden.is_cuda or hidden.dtype == dtype:
            logits: torch.Tensor = RouterGatingLinearFunction.forward(ctx, hidden, weight, bias, dtype)
            return logits
        ctx.save_for_backward(hidden, weight, bias)
        ctx.router_dtype, ctx.input_dtype, ctx.weight_dtype = dtype, hidden.dtype, weight.dtype
        return torch.mm(hidden.flatten(0, -2), weight.t(), out_dtype=dtype).view(*hidden.shape[:-1], -1)


class CountingRouter(TopKRouter):
    """megatron's router, which orders the rows of tokens by the experts that they choose, with rows of each
    expert counted and a bias for `update_expert_bias` to move.

    Tokens under `padding_mask` [T], True for the tail, are routed but not counted. Counting is left out
    without gradients, hence in evaluation and in the first of the two passes of a recomputed layer. The mask
    is an argument of every pass and not a state: recomputation comes after the passes of later microbatches.
    """

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        balanced: bool,
    ) -> None:
        super().__init__(config=config, pg_collection=pg_collection)
        experts = config.num_moe_experts
        self.register_buffer("numbers", expert_numbers(experts), persistent=False)
        # Of each expert and those before it together, as a pass has them at hand.
        self.register_buffer("counted", torch.zeros(experts, dtype=torch.int64), persistent=False)
        if balanced:
            del self.expert_bias  # None, in the place of the buffer
            self.register_buffer("expert_bias", torch.zeros(experts, dtype=torch.float32))

    def forward(
        self, hidden: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, RowOrder]:
        """hidden [T, 1, D] → probabilities [T, k] of the experts of each token, and the order of rows."""
        probs, chosen = self._choose(self.gating(hidden).flatten(0, -2))
        order = order_rows(chosen, self.numbers)
        if torch.is_grad_enabled():
            self._count(order, padding_mask)
        return probs, order

    def gating(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [..., D] → logits [..., E], in single precision at least."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logits: torch.Tensor = _Gate.apply(hidden, self.weight, self.bias, dtype)
        return logits

    def _choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [T, E] → probabilities and numbers [T, k] of the experts of each token: as megatron chooses,
        without a map of all experts.
        """
        config = self.config
        if self.score_function == "sigmoid":
            scores = logits.sigmoid()
            biased = scores if self.expert_bias is None else scores + self.expert_bias
            chosen = self.best(biased)[1]
            probs = scores.gather(1, chosen)
            if self.topk > 1:
                probs = probs / (probs.sum(-1, keepdim=True) + 1e-20)
        elif config.moe_router_pre_softmax:
            probs, chosen = self.best(logits.softmax(-1))
        else:
            best, chosen = self.best(logits)
            probs = best.softmax(-1)
        factor = config.moe_router_topk_scaling_factor
        return (probs * factor if factor else probs), chosen

    def best(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The highest of the scores [T, E] of each token, and the experts that they are of, both [T, k]."""
        config, groups = self.config, self.config.moe_router_group_topk
        if not groups:
            return scores.topk(self.topk, dim=1)
        sizes = len(scores), config.num_moe_experts, config.moe_router_num_groups
        best: tuple[torch.Tensor, torch.Tensor] = group_limited_topk(scores, self.topk, *sizes, groups)
        return best

    @torch.no_grad()
    def _count(self, order: RowOrder, padding_mask: torch.Tensor | None) -> None:
        ends = order.ends
        if padding_mask is not None:
            real = (~padding_mask.reshape(-1)).index_select(0, order.tokens)
            ends = F.pad(real.cumsum(0), (1, 0)).index_select(0, ends)
        self.counted += ends

    @property
    def tokens_per_expert(self) -> torch.Tensor:
        """Tokens that each expert had since the last update of the bias, [E]."""
        return self.counted.diff(prepend=self.counted.new_zeros(1))


def tail_mask(tokens: int, real: int, tp_rank: int, tp: int) -> torch.Tensor | None:
    """Mark the tail in this rank's slice of a pack of `tokens`, the first `real` of which are not tail.

    Give it to the transformer block as `padding_mask`: [1, tokens / tp], True for tail tokens. None if the
    pack has no tail.
    """
    assert tokens % tp == 0, f"{tokens} tokens over tp={tp}"
    if real == tokens:
        return None
    share = tokens // tp
    return (torch.arange(tp_rank * share, (tp_rank + 1) * share) >= real).unsqueeze(0)


def routers(model: torch.nn.Module) -> dict[str, CountingRouter]:
    """Return the routers of this stage by the name they have in it, in the order of layers."""
    return {name: m for name, m in model.named_modules() if isinstance(m, CountingRouter)}


@torch.no_grad()
def update_expert_bias(
    model: torch.nn.Module, groups: ProcessGroupCollection, rate: float | torch.Tensor
) -> torch.Tensor:
    """Move each expert's bias by `rate` towards an equal share of the tokens counted since the last call.

    Counts are summed over the tp·cp·dp ranks of the stage, which all call this, and start again from 0.
    A bias grows if its expert had less than the mean and shrinks if it had more (DeepSeek-V3, section 2.1.2);
    the comparison is of integers, so all ranks agree. A rate of 0, a number or [] on the device, only counts.

    Returns:
        For each layer with experts on this stage, the tokens of the busiest expert over the mean, 0 if there
        were none: float32, on the device.
    """
    found = list(routers(model).values())
    if not found:
        return torch.zeros(0, device=next(model.parameters()).device)
    counted = torch.stack([router.counted for router in found])
    dist.all_reduce(counted, group=groups.tp_dp_cp)
    counts = counted.diff(dim=1, prepend=counted.new_zeros(len(found), 1))
    totals, num_experts = counts.sum(1), counts.shape[1]
    directions = torch.sign(totals.unsqueeze(1) - counts * num_experts)
    for router, direction in zip(found, directions, strict=True):
        router.counted.zero_()
        if router.expert_bias is not None:
            router.expert_bias.add_(direction * rate)
    return counts.amax(1) * num_experts / totals.clamp(min=1)


def expert_biases(model: torch.nn.Module, first_layer: int) -> dict[str, torch.Tensor]:
    """Return the biases of this stage, live, by names that count layers from the start of the model.

    They are the same on all tp·cp·dp ranks of the stage.
    """
    return {
        _LAYER.sub(lambda match: str(int(match[0]) + first_layer), f"{name}.expert_bias"): router.expert_bias
        for name, router in routers(model).items()
        if router.expert_bias is not None
    }


@torch.no_grad()
def load_expert_biases(model: torch.nn.Module, first_layer: int, saved: Mapping[str, torch.Tensor]) -> None:
    """Copy this stage's biases from all those of a checkpoint.

    Raises:
        CheckpointError: if one is missing, or is for another number of experts.
    """
    for name, bias in expert_biases(model, first_layer).items():
        if name not in saved or saved[name].shape != bias.shape:
            found = f"has {len(saved[name])} experts" if name in saved else "is not in the checkpoint"
            raise CheckpointError(f"{name} {found}, the model has {len(bias)}")
        bias.copy_(saved[name])


def first_expert(num_experts: int, groups: ProcessGroupCollection) -> int:
    """Return the number of the first expert that this rank holds."""
    return groups.ep.rank() * (num_experts // groups.ep.size())


def expert_name(name: str, number: int) -> str:
    """Name what expert `number` of the model has of a parameter of several; other names stay.

    Weights of expert 5 are "….experts.5.linear_fc1.weight".
    """
    return _EXPERTS.sub(f"{number}.", name)


@contextmanager
def routing_margins(model: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """Collect the narrowest choice of every pass through every router, tail aside.

    It is the least distance, over tokens, between the last score that was chosen and the first that was not:
    rounding below it cannot send a token to another expert.
    """
    margins: list[torch.Tensor] = []

    @torch.no_grad()
    def watch(router: CountingRouter, inputs: tuple[Any, ...], output: Any) -> None:
        hidden, padding_mask = inputs
        scores = router.gating(hidden).flatten(0, -2)
        if router.score_function == "sigmoid":
            scores = scores.sigmoid()
        if router.expert_bias is not None:
            scores = scores + router.expert_bias
        if padding_mask is not None:
            scores = scores[~padding_mask.reshape(-1)]
        if router.topk < scores.shape[1] and len(scores):
            top = scores.topk(router.topk + 1).values
            margins.append((top[:, -2] - top[:, -1]).min())

    hooks = [router.register_forward_hook(watch) for router in routers(model).values()]
    try:
        yield margins
    finally:
        for hook in hooks:
            hook.remove()

"""Backward passes that put weight gradients off, against those that do not."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from ranks import RankPool
from test_moe_layers import MOE, PACKS, Case, build, forward, make_pack

from omni.models.layer_sizes import TransformerEncoderConfig, encoder_layers
from omni.models.layers import layer_submodules, transformer_config
from omni.models.weight_gradients import Deferral, put_off_in
from omni.optim_config import OptimConfig
from omni.rank.optimizer import ComponentOptimizer
from parallel.layout import Layout
from parallel.megatron import ColumnParallelLinear, RowParallelLinear, TransformerBlock

Gradients = dict[str, torch.Tensor]
DENSE = replace(MOE, dense_layers=99)


@dataclass(frozen=True)
class Run:
    """Gradients of inputs, those of weights before and after the pending ones are made, and how many of these
    each pass left and each run did.
    """

    inputs: list[torch.Tensor]
    early: Gradients
    late: Gradients
    pending: list[int] = field(default_factory=list)
    left: list[int] = field(default_factory=list)


def run(rank: int, case: Case, later: bool, frozen: bool = False) -> Run:
    """Forward passes of all packs, backward passes, and then the weight gradients that were put off."""
    block, groups, _ = build(case)
    deferral = Deferral()
    put_off_in(block, deferral)
    component = ComponentOptimizer("llm", {0: block}, groups, OptimConfig(lr=0.01))
    component.clear()
    component.set_trainable(not frozen)
    packs = [make_pack(number, groups) for number in range(groups.dp.rank(), len(PACKS), groups.dp.size())]
    outputs = [(forward(block, pack) * pack.weights).sum() for pack in packs]
    pending = []
    for output in outputs:
        if later:
            with deferral.weights_later() as waiting:
                torch.autograd.backward(output)
            pending.append(waiting)
        else:
            torch.autograd.backward(output)
    early = gradients(block)
    counts = [len(waiting) for waiting in pending]
    for waiting in pending:
        waiting.run()
    left = [len(waiting) for waiting in pending]
    return Run([pack.hidden.grad for pack in packs], early, gradients(block), counts, left)


def gradients(module: torch.nn.Module) -> Gradients:
    return {name: vars(p)["main_grad"].clone() for name, p in module.named_parameters()}


CASES = {
    "one rank": (1, Case(moe=DENSE)),
    "one rank, recomputed": (1, Case(moe=DENSE, recompute="full")),
    "experts": (1, Case()),
    "tp": (2, Case(Layout(tp=2), DENSE)),
    "tp, attention recomputed": (2, Case(Layout(tp=2), DENSE, "selective")),
    "tp, recomputed": (2, Case(Layout(tp=2), DENSE, "full")),
    "ep": (2, Case(Layout(dp=2, ep=2))),
    "ep and tp, recomputed": (2, Case(Layout(tp=2, ep=2), recompute="full")),
}


@pytest.mark.parametrize("name", CASES)
def test_gradients_that_wait_are_those_of_one_pass(ranks: RankPool, name: str) -> None:
    world, case = CASES[name]
    # Each pass adds to what the passes before it left, so even the order of additions is the same.
    for now, later in zip(ranks.run(world, run, case, False), ranks.run(world, run, case, True), strict=True):
        for a, b in zip(now.inputs, later.inputs, strict=True):
            assert torch.equal(a, b)
        for weight, gradient in now.late.items():
            assert torch.equal(gradient, later.late[weight]), weight
        linears = {weight for weight in now.late if "linear" in weight and weight.endswith("weight")}
        assert linears, "no linear in the model"
        for weight in now.late:
            if weight in linears and "norm" not in weight:
                assert not later.early[weight].any(), f"{weight} did not wait"
            else:
                assert torch.equal(later.early[weight], now.late[weight]), weight
        # Recomputed or not, every linear waits once in each pass.
        assert set(later.pending) == {len(linears)}
        assert set(later.left) == {0}


def test_frozen_weights_have_nothing_to_put_off(ranks: RankPool) -> None:
    (result,) = ranks.run(1, run, Case(), True, True)
    assert set(result.pending) == {0}
    assert not any(gradient.any() for gradient in result.late.values())
    (reference,) = ranks.run(1, run, Case(), False, True)
    for a, b in zip(reference.inputs, result.inputs, strict=True):
        assert torch.equal(a, b)


ENCODER = TransformerEncoderConfig(hidden=32, ffn=48, norm="LayerNorm")


def encode(rank: int, later: bool) -> tuple[torch.Tensor, Gradients, int]:
    """Layers as encoders have them, shared by two ranks that see all tokens."""
    _, groups, _ = build(Case(Layout(tp=2), DENSE))
    block = TransformerBlock(
        transformer_config(encoder_layers(ENCODER), torch.float32, tp=2),
        layer_submodules(ENCODER.layers, ENCODER.norm, causal=False),
        pg_collection=groups,
    )
    generator = torch.Generator().manual_seed(rank)
    for parameter in block.parameters():
        parameter.data.normal_(0.0, 0.2, generator=generator)
        parameter.main_grad = torch.zeros_like(parameter)
    deferral = Deferral()
    put_off_in(block, deferral)
    pack = make_pack(0, groups)
    hidden = torch.randn(pack.packed.tokens, 1, ENCODER.hidden, generator=torch.Generator().manual_seed(7))
    hidden.requires_grad_()
    out = block(hidden * 1.0, None, packed_seq_params=pack.packed).square().sum()
    count = 0
    if later:
        with deferral.weights_later() as pending:
            out.backward()
        count = len(pending)
        pending.run()
    else:
        out.backward()
    assert hidden.grad is not None
    found = {
        name: vars(p)["main_grad"] + (0 if p.grad is None else p.grad) for name, p in block.named_parameters()
    }
    return hidden.grad, found, count


def test_layers_of_encoders_put_off_too(ranks: RankPool) -> None:
    for now, later in zip(ranks.run(2, encode, False), ranks.run(2, encode, True), strict=True):
        assert torch.equal(now[0], later[0])
        assert later[2] == 4 * ENCODER.layers
        assert {name for name in now[1] if not torch.equal(now[1][name], later[1][name])} == set()


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_a_linear_that_waits_is_torch_s_linear(ranks: RankPool, kind: type[torch.nn.Module]) -> None:
    for mine, reference in ranks.run(1, compare, kind.__name__)[0]:
        torch.testing.assert_close(mine, reference, rtol=1e-7, atol=1e-7)


def compare(rank: int, kind: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients of input, weight and bias beside those of torch."""
    block, _, _ = build(Case(moe=DENSE))
    layer = block.layers[0]
    linear = layer.mlp.linear_fc1 if kind == "ColumnParallelLinear" else layer.mlp.linear_fc2
    deferral = Deferral()
    put_off_in(linear, deferral)
    weight = linear.weight.detach().clone().requires_grad_()
    linear.weight.main_grad = torch.zeros_like(weight)
    inputs = torch.randn(6, 2, weight.shape[1], generator=torch.Generator().manual_seed(1))
    mine, plain = (inputs.clone().requires_grad_() for _ in range(2))
    with deferral.weights_later() as pending:
        linear(mine)[0].square().sum().backward()
    pending.run()
    torch.nn.functional.linear(plain, weight).square().sum().backward()
    assert mine.grad is not None
    assert plain.grad is not None
    assert weight.grad is not None
    return [(mine.grad, plain.grad), (linear.weight.main_grad, weight.grad)]


@pytest.mark.parametrize(("tp", "regions"), [(1, 0), (2, 2 * ENCODER.layers)])
def test_a_rank_that_holds_linears_whole_starts_nothing_around_them(
    ranks: RankPool, tp: int, regions: int
) -> None:
    assert ranks.run(tp, regions_of_a_pass, tp) == [regions] * tp


def regions_of_a_pass(rank: int, tp: int) -> int:
    """How often a pass of an encoder's layers copies to, or reduces from, tensor-parallel ranks."""
    _, groups, _ = build(Case(Layout(tp=tp), DENSE))
    block = TransformerBlock(
        transformer_config(encoder_layers(ENCODER), torch.float32, tp=tp),
        layer_submodules(ENCODER.layers, ENCODER.norm, causal=False),
        pg_collection=groups,
    )
    put_off_in(block, Deferral())
    pack = make_pack(0, groups)
    hidden = torch.randn(pack.packed.tokens, 1, ENCODER.hidden, requires_grad=True)
    seen, ahead = set[object](), [block(hidden, None, packed_seq_params=pack.packed).grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in seen:
            seen.add(node)
            ahead += [before for before, _ in node.next_functions]
    return sum("ModelParallelRegion" in type(node).__name__ for node in seen)


def test_a_pass_inside_another_is_refused() -> None:
    deferral = Deferral()
    with (
        deferral.weights_later(),
        pytest.raises(AssertionError, match="inside another"),
        deferral.weights_later(),
    ):
        pass

"""Layers with experts on several ranks against one rank: outputs, every gradient, and what balances them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import RankPool
from torch.utils.flop_counter import FlopCounterMode

from infra.checkpoint import CheckpointError
from omni.config import ConfigError
from omni.keys import check_keys
from omni.llm_config import LLMConfig
from omni.llm_sections import MoEConfig
from omni.models.expert_stack import ExpertStack
from omni.models.initialise import initialise
from omni.models.layer_sizes import LayerSizes, check_experts, llm_layers
from omni.models.layers import layer_submodules, transformer_config
from omni.models.llm_specs import layer_specs
from omni.models.moe import (
    expert_biases,
    expert_name,
    first_expert,
    load_expert_biases,
    moe_settings,
    routers,
    routing_margins,
    tail_mask,
    update_expert_bias,
)
from omni.models.regions import Numbering, mark_parallel
from omni.models.stack import Stack
from omni.optim_config import OptimConfig
from omni.rank.optimizer import ComponentOptimizer
from omni.rank.state import Owned, owned
from parallel.groups import make_groups
from parallel.layout import Layout, Staged, arrange, split_evenly
from parallel.megatron import (
    MoELayer,
    ProcessGroupCollection,
    TransformerBlock,
    model_parallel_cuda_manual_seed,
)
from parallel.packed import PackedTokens, Sharding, pack_tokens
from parallel.placements import COLOCATED
from parallel.sequence import SequenceLayout
from parallel.work import Grad, even_load

EVERYTHING = Staged("llm", tied=True, experts=True)

CPU = torch.device("cpu")
TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 1e-4
WIDTH, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS = 32, 4, 2, 8, 48, 3
MOE = MoEConfig(experts=8, topk=2, ffn=24, shared_ffn=16, dense_layers=1)
# Lengths of the sequences of each pack. Pack i is of replica i % dp: with two, one has few tokens; with four,
# all have few at times, one has none, and some ranks compute for no token.
PACKS = ((7, 5, 9), (1,), (4, 6), (2, 1), (1,), (), (11,), (2,))
TOKENS = sum(map(sum, PACKS))


@dataclass(frozen=True)
class Case:
    layout: Layout = field(default_factory=Layout)
    moe: MoEConfig = field(default_factory=lambda: MOE)
    recompute: str = "none"


SOFTMAX = replace(MOE, score="softmax", bias_update_rate=0.0, shared_ffn=0)
CASES = {
    "dp2": Case(Layout(dp=2)),
    "ep2": Case(Layout(dp=2, ep=2)),
    "ep4": Case(Layout(dp=4, ep=4)),
    "ep2 edp2": Case(Layout(dp=4, ep=2)),
    "ep2 tp2": Case(Layout(tp=2, ep=2)),
    "ep1 tp2": Case(Layout(tp=2)),
    "ep2 tp2 edp2": Case(Layout(tp=2, dp=2, ep=2)),
    "ep4 tp2 dp2": Case(Layout(tp=2, dp=2, ep=4)),
    "ep4 tp2 dp2 recompute": Case(Layout(tp=2, dp=2, ep=4), recompute="full"),
    "ep2 selective": Case(Layout(dp=2, ep=2), recompute="selective"),
    "ep4 one each": Case(Layout(dp=4, ep=4), replace(MOE, experts=4)),
    "ep2 softmax": Case(Layout(dp=2, ep=2), SOFTMAX),
    "ep2 top 1": Case(Layout(dp=2, ep=2), replace(SOFTMAX, topk=1)),
}


def layers(number: int, recompute: str) -> LayerSizes:
    """So many layers, as the LLM has them."""
    sizes = {"hidden": WIDTH, "heads": HEADS, "kv_heads": KV_HEADS, "ffn": FFN}
    return llm_layers(LLMConfig(layers=number, recompute=recompute, **sizes))


def build(case: Case) -> tuple[TransformerBlock, ProcessGroupCollection, Numbering]:
    """This rank's layers, as LLMStage makes them, with biases that are not 0."""
    made = make_groups(arrange(case.layout, {}, COLOCATED, 0), EVERYTHING, timedelta(seconds=60))
    groups = made.components["llm"]
    groups.embd = None  # a block has no embedding
    tp, ep, stage = groups.tp, groups.ep, groups.pp.rank()
    model_parallel_cuda_manual_seed(1, tp_rank=tp.rank(), ep_rank=ep.rank(), etp_rank=0, force_reset_rng=True)
    config = transformer_config(
        layers(LAYERS, case.recompute),
        torch.float32,
        tp=tp.size(),
        sequence_parallel=True,
        more=moe_settings(case.moe, ep.size(), torch.float32),
    )
    llm = LLMConfig(LAYERS * case.layout.pp, WIDTH, 1, 1, 1, moe=case.moe)
    numbers = range(LAYERS * stage, LAYERS * (stage + 1))
    specs = partial(layer_specs, config=llm, layers=numbers, groups=groups)
    block = TransformerBlock(
        config, layer_submodules(LAYERS, "RMSNorm", causal=True, specs=specs), pg_collection=groups
    )
    mark_parallel(block)
    numbering = Numbering(
        first_layer=LAYERS * stage,
        first_expert=first_expert(case.moe.experts, groups),
        tp_rank=tp.rank(),
        tp_size=tp.size(),
    )
    initialise(block, seed=3, component="llm", num_layers=LAYERS, numbering=numbering)
    for bias in expert_biases(block, numbering.first_layer).values():
        bias.copy_(first_biases(len(bias)))
    return block, groups, numbering


def first_biases(experts: int) -> torch.Tensor:
    return 0.2 * torch.arange(experts).cos()


@dataclass
class Pack:
    """One pack on one rank: its slice of tokens and of the weights of the loss."""

    number: int
    hidden: torch.Tensor
    weights: torch.Tensor
    packed: PackedTokens
    padding: torch.Tensor | None


def make_pack(number: int, groups: ProcessGroupCollection) -> Pack:
    tp, rank, lengths = groups.tp.size(), groups.tp.rank(), PACKS[number]
    layout = SequenceLayout.whole(lengths, [0] * len(lengths), 1)
    real, total = sum(lengths), layout.padded_tokens(0, tp)
    generator = torch.Generator().manual_seed(number)
    hidden, weights, tail = (torch.randn(n, WIDTH, generator=generator) for n in (real, real, total - real))
    # The tail holds something, as embeddings of any id would be, but its loss does not count.
    hidden, weights = torch.cat([hidden, tail]), torch.cat([weights, torch.zeros_like(tail)])
    packed = pack_tokens(
        Sharding(layout, ((),) * len(lengths), 0, total - real, tp),
        torch.cat([torch.arange(n) for n in (*lengths, total - real)]),
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rotary_base=10000.0,
        causal=True,
        dtype=torch.float32,
        device=CPU,
    )
    hidden, weights = (x.chunk(tp)[rank].clone() for x in (hidden, weights))
    return Pack(number, hidden.requires_grad_(), weights, packed, tail_mask(total, real, rank, tp))


def forward(block: TransformerBlock, pack: Pack) -> torch.Tensor:
    # Not a leaf, as embeddings are none.
    hidden = (pack.hidden * 1.0).unsqueeze(1)
    return block(hidden, None, packed_seq_params=pack.packed, padding_mask=pack.padding).squeeze(1)


def step(rank: int, case: Case, masks: bool = True) -> dict[str, Any]:
    """One step: forwards up to two ahead of backwards, then what training does with gradients."""
    block, groups, numbering = build(case)
    component = ComponentOptimizer("llm", {0: block}, groups, OptimConfig(lr=0.01, eps=1e-4))
    component.clear()
    received: list[int] = []
    for layer in block.layers:
        if isinstance(layer.mlp, MoELayer):
            layer.mlp.experts.register_forward_pre_hook(lambda _, inputs: received.append(len(inputs[0])))
    packs = [make_pack(number, groups) for number in range(groups.dp.rank(), len(PACKS), groups.dp.size())]
    waiting: list[tuple[Pack, torch.Tensor]] = []
    outputs: dict[int, torch.Tensor] = {}

    def backward() -> None:
        pack, out = waiting.pop(0)
        (out * pack.weights).sum().backward()

    with routing_margins(block) as margins:
        for pack in packs:
            pack.padding = pack.padding if masks else None
            waiting.append((pack, forward(block, pack)))
            outputs[pack.number] = waiting[-1][1].detach().clone()
            if len(waiting) == 3:
                backward()
        while waiting:
            backward()
    with torch.no_grad():
        forward(block, packs[0])  # an evaluation, which must not count
    counts = [router.tokens_per_expert.clone() for router in routers(block).values()]
    component.reduce(0)()
    busiest = update_expert_bias(block, groups, case.moe.bias_update_rate)
    squares = sum(float(g.double().square().sum()) for g in component.gradients())
    gradients = [placed(shard, shard.grad) for shard in owned(component, {0: numbering})]
    component.update(0.01, torch.ones(()), torch.ones(()))
    component.arrive()
    weights = [placed(shard, shard.main) for shard in owned(component, {0: numbering})]
    return {
        "at": (groups.dp.rank(), groups.tp.rank()),
        "outputs": outputs,
        "inputs": {pack.number: pack.hidden.grad for pack in packs},
        "gradients": gradients,
        "weights": weights,
        "squares": squares,
        "received": received,
        "counts": counts,
        "busiest": busiest,
        "left": sum(int(router.tokens_per_expert.sum()) for router in routers(block).values()),
        "biases": {name: bias.clone() for name, bias in expert_biases(block, 0).items()},
        "margin": float(torch.stack(margins).min()),
    }


def placed(shard: Owned, values: torch.Tensor) -> tuple[Any, ...]:
    return shard.name, shard.copy != (0, 0), shard.region.shape, shard.places(), values.detach().clone()


def assembled(results: list[dict[str, Any]], kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Full tensors from the shards of all ranks, and again from those that other tp ranks hold copies of."""
    for copies in (False, True):
        found: dict[str, tuple[tuple[int, ...], torch.Tensor]] = {}
        for result in results:
            for name, is_copy, shape, places, flat in result[kind]:
                if is_copy == copies:
                    empty = torch.full((math.prod(shape),), math.nan)
                    _, full = found.setdefault(name, (shape, empty))
                    for here, there, length in zip(*places, strict=True):
                        assert full[there : there + length].isnan().all(), f"{name} has two owners"
                        full[there : there + length] = flat.view(-1)[here : here + length]
        yield from ((name, full.view(shape)) for name, (shape, full) in found.items())


def assert_close(
    name: str, actual: torch.Tensor, expected: torch.Tensor, floor: float, tolerance: float = TOLERANCE
) -> None:
    distance = float((actual.double() - expected.double()).norm())
    relative = distance / max(float(expected.double().norm()), floor)
    assert relative <= tolerance, f"{name}: {relative:.2e}"


_steps: dict[str, list[dict[str, Any]]] = {}


def both(ranks: RankPool, case: Case) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The step on one rank and on the ranks of the case, each made once."""
    one = Case(moe=case.moe)
    for made in (one, case):
        if str(made) not in _steps:
            _steps[str(made)] = ranks.run(made.layout.world, step, made)
    return _steps[str(one)][0], _steps[str(case)]


@pytest.mark.parametrize("case", CASES)
def test_every_layout_equals_one_rank(ranks: RankPool, case: str) -> None:
    expected, results = both(ranks, CASES[case])
    assert expected["margin"] > 1e-5, "a choice of experts hangs on rounding"
    for kind in ("outputs", "inputs"):
        for number, lengths in enumerate(PACKS):
            holders = sorted((r["at"], r[kind][number]) for r in results if number in r[kind])
            assert len(holders) == CASES[case].layout.tp
            whole = torch.cat([part for _, part in holders])[: sum(lengths)]
            wanted = expected[kind][number][: sum(lengths)]
            assert_close(f"{kind} of pack {number}", whole, wanted, floor=1e-6)
    full = dict(assembled([expected], "gradients"))
    moe = CASES[case].moe
    assert sum(".experts." in name for name in full) == 2 * moe.experts * (LAYERS - moe.dense_layers)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in full.values()))
    assert sum(r["squares"] for r in results) == pytest.approx(norm**2, rel=1e-5)
    assert {name for name, _ in assembled(results, "gradients")} == set(full)
    for name, gradient in assembled(results, "gradients"):
        assert_close(name, gradient, full[name], floor=1e-6 * norm)
    wanted = dict(assembled([expected], "weights"))
    for name, weight in assembled(results, "weights"):
        assert_close(name, weight, wanted[name], floor=1e-6, tolerance=WEIGHT_TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_counted_once_and_the_bias_follows(ranks: RankPool, case: str) -> None:
    moe = CASES[case].moe
    expected, results = both(ranks, CASES[case])
    counts = [sum(r["counts"][layer] for r in results) for layer in range(LAYERS - moe.dense_layers)]
    assigned = TOKENS * moe.topk
    for count, wanted in zip(counts, expected["counts"], strict=True):
        assert count.tolist() == wanted.tolist()
        assert int(count.sum()) == assigned
    loads = [int(count.max()) * moe.experts / assigned for count in counts]
    for result in results:
        assert result["left"] == 0
        assert result["busiest"].tolist() == pytest.approx(loads)
        assert len(result["biases"]) == (len(counts) if moe.bias_update_rate else 0)
        for (name, bias), count in zip(result["biases"].items(), counts, strict=False):
            signs = [(n * moe.experts < assigned) - (n * moe.experts > assigned) for n in count.tolist()]
            moved = first_biases(moe.experts) + moe.bias_update_rate * torch.tensor(signs)
            torch.testing.assert_close(bias, moved, rtol=0, atol=1e-7)
            assert torch.equal(bias, expected["biases"][name])


def test_without_masks_the_tail_is_counted(ranks: RankPool) -> None:
    results = ranks.run(2, step, CASES["ep2 tp2"], False)
    padded = sum(max(2, -(-sum(lengths) // 2) * 2) for lengths in PACKS)
    assert sum(int(r["counts"][0].sum()) for r in results) == padded * MOE.topk > TOKENS * MOE.topk


def test_some_ranks_compute_for_no_token(ranks: RankPool) -> None:
    _, results = both(ranks, CASES["ep4 tp2 dp2"])
    assert any(0 in result["received"] for result in results)
    assert all(max(result["received"]) > 0 for result in results)


def two_stages(rank: int) -> dict[str, Any]:
    """Two stages, of which the first has no layer with experts."""
    block, groups, numbering = build(Case(Layout(pp=2), replace(MOE, dense_layers=LAYERS + 1)))
    component = ComponentOptimizer("llm", {0: block}, groups, OptimConfig(lr=0.1))
    before = {name: parameter.detach().clone() for name, parameter in block.named_parameters()}
    pack = make_pack(0, groups)
    component.clear()
    (forward(block, pack) * pack.weights).sum().backward()
    component.reduce(0)()
    busiest = update_expert_bias(block, groups, 1.0)
    component.gradients()
    component.update(0.1, torch.ones(()), torch.ones(()))
    component.arrive()
    return {
        "moved": all(not torch.equal(before[name], p) for name, p in block.named_parameters()),
        "busiest": busiest,
        "biases": list(expert_biases(block, numbering.first_layer)),
        "held": len([name for name in before if ".experts." in name]),
    }


def test_a_stage_may_have_no_experts(ranks: RankPool) -> None:
    dense, mixed = ranks.run(2, two_stages)
    assert dense["moved"]
    assert mixed["moved"]
    assert (dense["held"], mixed["held"]) == (0, 2 * 2)  # both weights of all experts, of two layers
    assert (len(dense["busiest"]), len(mixed["busiest"])) == (0, 2)
    assert dense["biases"] == []
    # What a stage without experts reports joins the others' in one reduction: it must be on their device.
    meta = update_expert_bias(torch.nn.Linear(2, 2, device="meta"), ProcessGroupCollection(), 1.0)
    assert (meta.shape, meta.device.type) == ((0,), "meta")
    assert mixed["biases"] == [f"layers.{layer}.mlp.router.expert_bias" for layer in (4, 5)]


def sizes_of_layers(rank: int, layout: Layout) -> list[int]:
    block, *_ = build(Case(layout))
    return [sum(p.numel() for p in layer.parameters() if p.dim() > 1) for layer in block.layers]


def one_rank(rank: int) -> dict[str, Any]:
    """What can be seen on one rank: FLOPs, margins, and biases that come back from a checkpoint."""
    block, groups, _ = build(Case())
    pack = make_pack(0, groups)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        forward(block, pack)
    saved = {name: bias.clone() for name, bias in expert_biases(block, first_layer=7).items()}
    first, margins = routers(block)["layers.1.mlp.router"], []
    with torch.no_grad():
        first.weight.zero_()
        for gap in (0.0, 0.01):
            first.expert_bias.copy_(gap * torch.arange(MOE.experts))
            with routing_margins(block) as of_pass:
                forward(block, pack)
            margins.append([float(margin) for margin in of_pass])
    load_expert_biases(block, 7, saved)
    loaded, refused = expert_biases(block, first_layer=7), []
    for first_layer, wrong in ((6, saved), (7, {name: bias[:3] for name, bias in saved.items()})):
        with pytest.raises(CheckpointError) as error:
            load_expert_biases(block, first_layer, wrong)
        refused.append(str(error.value))
    counts = counter.get_flop_counts()["Global"]
    flops = counts[torch.ops.aten.mm] + counts[torch.ops.omni.grouped_mm]
    return {"flops": flops, "margins": margins, "saved": saved, "loaded": loaded, "refused": refused}


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> dict[str, Any]:
    return ranks.run(1, one_rank)[0]


def test_biases_are_saved_by_the_layers_of_the_model(alone: dict[str, Any]) -> None:
    saved, loaded = alone["saved"], alone["loaded"]
    assert list(saved) == ["layers.8.mlp.router.expert_bias", "layers.9.mlp.router.expert_bias"]
    assert all(bias.any() and torch.equal(loaded[name], bias) for name, bias in saved.items())
    assert alone["refused"] == [
        "layers.7.mlp.router.expert_bias is not in the checkpoint, the model has 8",
        "layers.8.mlp.router.expert_bias has 3 experts, the model has 8",
    ]


def test_margins_are_between_the_scores_that_choose(alone: dict[str, Any]) -> None:
    (tie, distinct), (apart, _) = alone["margins"]
    assert tie == 0
    assert distinct > 0
    assert apart == pytest.approx(0.01, rel=1e-4)


def stacks(layout: Layout, moe: MoEConfig, element: int) -> tuple[Stack, ExpertStack]:
    """One dense layer, and one with experts."""
    dense = Stack.of(layers(1, "none"), element, layout.tp, layout.tp > 1)
    sizes = {"experts": moe.experts, "topk": moe.topk, "ffn": moe.ffn, "sigmoid": moe.score == "sigmoid"}
    return dense, ExpertStack(dense=replace(dense, ffn=moe.shared_ffn), ep=layout.ep, **sizes)


def test_work_is_what_the_layers_do(ranks: RankPool, alone: dict[str, Any]) -> None:
    tokens, nothing, square = even_load(sum(PACKS[0])), even_load(0), even_load(0, 64)
    dense, mixed = stacks(Layout(), MOE, element=1)
    of_layers = dense.forward(tokens).flops + 2 * mixed.forward(tokens).flops
    assert alone["flops"] == of_layers
    for layout in (Layout(), Layout(dp=2, ep=2), Layout(tp=2), Layout(tp=2, ep=2)):
        held = ranks.run(layout.world, sizes_of_layers, layout)[-1]
        _, stack = stacks(layout, MOE, element=2)
        assert [2 * n for n in held[1:]] == [stack.forward(nothing).bytes] * 2
        assert stack.forward(even_load(128)).flops * layout.tp == mixed.forward(even_load(128)).flops
    # One expert that every token goes to is a dense layer with a router, to which rows are moved five times.
    dense, single = stacks(Layout(), MoEConfig(experts=1, topk=1, ffn=FFN), element=4)
    moved = [stack.forward(even_load(1)).bytes - stack.forward(nothing).bytes for stack in (single, dense)]
    assert moved[0] - moved[1] == 4 * (WIDTH + 1) + 4 * 5 * WIDTH
    assert single.forward(square).flops == dense.forward(square).flops
    for stack in (dense, mixed):
        halves = (stack.backward(tokens, half).flops for half in (Grad.INPUT, Grad.WEIGHT))
        assert sum(halves) == stack.backward(tokens, Grad.BOTH).flops == 2 * stack.forward(tokens).flops


def test_every_row_that_is_sent_to_experts_arrives() -> None:
    """Whatever ranks send, summed over the group, is what they receive, and the way back is its transpose."""
    routed = (7, 12, 1, 30)
    _, stack = stacks(Layout(tp=2, ep=4, dp=2), MOE, element=2)
    sent = []
    for rank in range(4):
        load = replace(even_load(2 * routed[rank], routed=routed), router=rank)
        rows, _, back = (c for c in stack.forward(load).collectives if c.kind == "all_to_all")
        sent.append((rows.to, back.to))
        shares, local = split_evenly(routed[rank] * MOE.topk, MOE.experts), MOE.experts // 4
        to = [sum(shares[peer * local : (peer + 1) * local]) * (peer != rank) for peer in range(4)]
        assert rows.to == tuple(count * WIDTH * 2 for count in to)
    for rank in range(4):
        for peer in range(4):
            assert sent[rank][0][peer] == sent[peer][1][rank]


@given(st.integers(1, 8), st.integers(1, 8), st.data())
def test_the_tail_is_marked_where_it_lies(tp: int, share: int, data: st.DataObject) -> None:
    tokens = tp * share
    real = data.draw(st.integers(max(0, tokens - tp), tokens))
    masks = [tail_mask(tokens, real, rank, tp) for rank in range(tp)]
    if real == tokens:
        assert masks == [None] * tp
    else:
        assert all(mask.shape == (1, share) for mask in masks)
        assert torch.cat(masks, 1)[0].tolist() == [token >= real for token in range(tokens)]


@given(st.integers(1, 64), st.data())
def test_experts_are_numbered_from_the_first_of_the_model(local: int, data: st.DataObject) -> None:
    rank, index = data.draw(st.integers(0, 9)), data.draw(st.integers(0, local - 1))
    number = rank * local + index
    for linear in ("linear_fc1.weight", "linear_fc2.weight", "linear_fc1.bias"):
        prefix = f"decoder.layers.{index}.mlp.experts."
        assert expert_name(prefix + linear, number) == f"{prefix}{number}.{linear}"
    for name in ("layers.1.mlp.shared_experts.linear_fc1.weight", "layers.1.mlp.router.weight"):
        assert expert_name(name, number) == name


def check(moe: MoEConfig, tp: int, ep: int) -> None:
    """Check experts as those of a run are: by themselves, then with the layout."""
    sizes = {"layers": LAYERS, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 64}
    check_keys("model.llm", LLMConfig(**sizes, moe=moe))
    check_experts("model.llm.moe", moe, tp=tp, ep=ep)


@pytest.mark.parametrize(
    "change, layout, words",
    [
        ({"topk": 9}, {}, "model.llm.moe.topk=9: must be at most experts=8"),
        ({"topk": 0}, {}, "model.llm.moe.topk=0"),
        ({"shared_ffn": -1}, {}, "model.llm.moe.shared_ffn=-1"),
        ({"score": "tanh"}, {}, "model.llm.moe.score=tanh: choose one of softmax, sigmoid"),
        ({"score": "softmax"}, {}, "bias_update_rate=0.001: needs score=sigmoid"),
        ({"bias_update_rate": -1.0}, {}, "bias_update_rate=-1"),
        ({"dense_layers": 3}, {}, "dense_layers=3: leaves none of 3 layers to experts"),
        ({}, {"ep": 3}, "layout.llm.ep=3 does not divide model.llm.moe.experts=8"),
        ({}, {"tp": 3}, "model.llm.moe.shared_ffn=16 does not divide among layout.llm.tp=3"),
    ],
)
def test_experts_that_do_not_fit_are_refused(
    change: dict[str, Any], layout: dict[str, int], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check(replace(MOE, **change), **{"tp": 1, "ep": 1, **layout})


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_sizes_that_fit_pass(ep: int) -> None:
    check(MOE, tp=2, ep=ep)

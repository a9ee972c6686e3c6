"""An LLM in several virtual stages on a rank against the same LLM whole: one step, and checkpoints between
layouts.

The virtual stages are chained here by hand, one microbatch after the other, without plan and engine.
"""

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from saved import load_components, save_components
from test_moe_layers import assembled, assert_close, placed

from omni.config import ConfigError
from omni.llm_config import LLMConfig
from omni.llm_sections import MoEConfig
from omni.models.initialise import initialise
from omni.models.llm import attach_points, llm_work, virtual_stage_layers
from omni.models.llm_pack import pack_llm
from omni.models.llm_stage import LLMStage, MicrobatchInputs
from omni.optim_config import OptimConfig
from omni.rank.optimizer import ComponentOptimizer
from omni.rank.state import owned
from parallel.groups import make_groups
from parallel.layout import Layout, LayoutError, Staged, arrange
from parallel.megatron import ProcessGroupCollection, model_parallel_cuda_manual_seed
from parallel.packed import Sharding
from parallel.placements import COLOCATED
from parallel.sequence import SequenceLayout
from parallel.work import even_load

EVERYTHING = Staged("llm", tied=True, experts=True)

CPU = torch.device("cpu")
LLM = LLMConfig(layers=5, hidden=32, heads=4, kv_heads=2, ffn=48, vocab_multiple=8)
UNTIED = replace(LLM, tied=False)
MOE = MoEConfig(experts=8, topk=2, ffn=24, shared_ffn=16, dense_layers=1)
EXPERTS = replace(LLM, moe=MOE)
VOCABULARY = 60
PACKS = ((7, 5, 4), (12,), (4, 4), (9, 3))  # every number of tokens is a multiple of 4
TAPS = (1, 3, 4)  # layers before which rows enter


@dataclass(frozen=True)
class Case:
    """A model and its layout; `later` puts weight gradients off to the end of the step."""

    llm: LLMConfig
    layout: Layout = field(default_factory=Layout)
    later: bool = False


CASES = {
    "tied": Case(LLM, Layout(vpp=2)),
    "untied": Case(UNTIED, Layout(vpp=2)),
    "a layer each, recomputed, later": Case(replace(LLM, recompute="full"), Layout(vpp=5), later=True),
    "untied, recomputed": Case(replace(UNTIED, recompute="full"), Layout(vpp=3)),
    "experts": Case(EXPERTS, Layout(vpp=3)),
    "dp": Case(LLM, Layout(dp=2, vpp=2)),
    "tp, later": Case(replace(LLM, recompute="selective"), Layout(tp=2, vpp=3), later=True),
    "pp": Case(LLM, Layout(pp=2, vpp=2)),
    "pp, untied, later": Case(UNTIED, Layout(pp=2, vpp=2), later=True),
    "pp, one virtual stage": Case(LLM, Layout(pp=2)),
    "pp and dp": Case(LLM, Layout(dp=2, pp=2, vpp=2)),
    "pp, tp, experts, later": Case(
        replace(EXPERTS, recompute="full"), Layout(tp=2, pp=2, ep=2, vpp=2), later=True
    ),
}


@dataclass(frozen=True)
class Built:
    """A rank's virtual stages of the LLM with their optimizer."""

    stage: LLMStage
    component: ComponentOptimizer
    groups: ProcessGroupCollection

    @property
    def names(self) -> dict[str, Any]:
        return {"llm": {number: own.numbering for number, own in self.stage.virtual_stages.items()}}


def build(case: Case, seed: int) -> Built:
    made = make_groups(arrange(case.layout, {}, COLOCATED, 0), EVERYTHING, timedelta(seconds=60))
    groups = made.components["llm"]
    tp, ep = groups.tp.rank(), groups.ep.rank()
    model_parallel_cuda_manual_seed(1, tp_rank=tp, ep_rank=ep, etp_rank=0, force_reset_rng=True)
    stage = LLMStage(
        case.llm,
        case.layout,
        vocab_size=VOCABULARY,
        num_sources=1,
        dtype=torch.float32,
        device=CPU,
        groups=groups,
        attach_layers=TAPS,
    )
    for virtual_stage in stage.virtual_stages.values():
        initialise(
            virtual_stage.model,
            seed=seed,
            component="llm",
            num_layers=case.llm.layers,
            numbering=virtual_stage.numbering,
        )
    modules = {number: virtual_stage.model for number, virtual_stage in stage.virtual_stages.items()}
    return Built(stage, ComponentOptimizer("llm", modules, groups, OptimConfig(lr=0.01, eps=1e-4)), groups)


@dataclass
class Pack:
    """A microbatch on a rank: its inputs, and the rows that enter before the layers of `TAPS`."""

    number: int
    inputs: MicrobatchInputs
    rows: dict[int, torch.Tensor]


def make_pack(number: int, groups: ProcessGroupCollection) -> Pack:
    tp, rank, lengths = groups.tp.size(), groups.tp.rank(), PACKS[number]
    total = sum(lengths)
    generator = torch.Generator().manual_seed(number)
    ids, labels = (torch.randint(0, VOCABULARY, (total,), generator=generator) for _ in range(2))
    rows = {layer: torch.randn(total, LLM.hidden, generator=generator).chunk(tp)[rank][::2] for layer in TAPS}
    layout = SequenceLayout.whole(lengths, [0] * len(lengths), 1)
    packed = pack_llm(
        LLM,
        Sharding(layout, ((),) * len(lengths), 0, 0, tp),
        torch.cat([torch.arange(n) for n in lengths]),
        dtype=torch.float32,
        device=CPU,
    )
    inputs = MicrobatchInputs(
        packed,
        ids=ids.unsqueeze(0),
        wanted=torch.arange(total // tp),
        labels=labels,
        weights=torch.ones(total),
        sources=torch.zeros(total, dtype=torch.int64),
        sequences=torch.zeros(total, dtype=torch.int64),
    )
    return Pack(number, inputs, {layer: own.clone().requires_grad_() for layer, own in rows.items()})


class Chain:
    """Passes of one microbatch through all virtual stages, wherever they are."""

    def __init__(self, built: Built, case: Case, pack: Pack) -> None:
        self.stage, self.layout, self.pack = built.stage, case.layout, pack
        self.pp = built.groups.pp
        self.later = case.later
        self.passes: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}
        self.sums = torch.zeros(2, dtype=torch.float64)
        self.pending: list[Any] = []

    def forward(self) -> None:
        tokens = self.pack.inputs.packed.tokens // self.stage.tp_group.size()
        handed = None
        for number, virtual_stage in self.stage.virtual_stages.items():
            received = None if virtual_stage.is_first else self._take(handed, (tokens, LLM.hidden), -1)
            hidden = self.stage.embed(self.pack.inputs) if received is None else received
            first, at = virtual_stage.numbering.first_layer, torch.arange(0, tokens, 2)
            entering = {
                f"llm.layers.{layer}": (at, rows)
                for layer, rows in self.pack.rows.items()
                if first <= layer < first + len(virtual_stage.model.decoder.layers)
            }
            output = self.stage.forward(number, self.pack.inputs, hidden, entering)
            if virtual_stage.is_last:
                output, self.sums = self.stage.loss(self.pack.inputs, output)
            else:
                handed = self._give(output.detach(), 1)
            self.passes[number] = received, output

    def backward(self) -> None:
        handed = None
        for number, virtual_stage in reversed(self.stage.virtual_stages.items()):
            received, output = self.passes[number]
            grad = None if virtual_stage.is_last else self._take(handed, output.shape, 1)
            with self.stage.weights_later() if self.later else nullcontext() as pending:
                torch.autograd.backward(output, None if grad is None else grad.detach())
            self.pending.append(pending)
            if received is not None:
                assert received.grad is not None
                handed = self._give(received.grad, -1)

    def _give(self, tensor: torch.Tensor, step: int) -> torch.Tensor | None:
        """Hand on to the stage `step` further, which is this one if there is only one."""
        if self.pp.size() == 1:
            return tensor
        peer = dist.get_global_rank(self.pp, (self.pp.rank() + step) % self.pp.size())
        dist.send(tensor.contiguous(), peer)
        return None

    def _take(self, handed: torch.Tensor | None, shape: tuple[int, ...], step: int) -> torch.Tensor:
        if self.pp.size() == 1:
            assert handed is not None
            return handed.clone().requires_grad_()
        tensor = torch.empty(shape)
        dist.recv(tensor, dist.get_global_rank(self.pp, (self.pp.rank() + step) % self.pp.size()))
        return tensor.requires_grad_()


def train(rank: int, case: Case, folder: str) -> dict[str, Any]:
    """One step; its checkpoint goes into `folder`."""
    built = build(case, seed=3)
    stage, component, groups = built.stage, built.component, built.groups
    component.clear()
    chains = []
    for number in range(groups.dp.rank(), len(PACKS), groups.dp.size()):
        chains.append(Chain(built, case, make_pack(number, groups)))
        chains[-1].forward()
        chains[-1].backward()
    if case.later:
        for chain in chains:
            for pending in chain.pending:
                pending.run()
    for number in stage.virtual_stages:
        component.reduce(number)()
    component.tie()
    squares = sum(float(g.double().square().sum()) for g in component.gradients())
    gradients = [placed(shard, shard.grad) for shard in owned(component, built.names["llm"])]
    component.update(0.01, torch.ones(()), torch.ones(()))
    component.arrive()
    stage.balance_experts(True)
    save_components(Path(folder), {"llm": component}, built.names, stage)
    return {
        "gradients": gradients,
        "squares": squares,
        "sums": sum(chain.sums for chain in chains),
        "rows": {
            (chain.pack.number, layer, groups.tp.rank()): rows.grad
            for chain in chains
            for layer, rows in chain.pack.rows.items()
            if rows.grad is not None
        },
        "load": stage.expert_load,
        **state(built),
    }


def restore(rank: int, case: Case, folder: str) -> dict[str, Any]:
    """Load what `train` has saved under any layout into other weights."""
    built = build(case, seed=4)
    load_components(Path(folder), {"llm": built.component}, built.names, built.stage)
    return state(built)


def state(built: Built) -> dict[str, Any]:
    own = list(owned(built.component, built.names["llm"]))
    return {
        "weights": [placed(shard, shard.main) for shard in own],
        "moments": [placed(shard, shard.adam["exp_avg"]) for shard in own],
        "buffers": {name: bias.clone() for name, bias in built.stage.buffers().items()},
        "parameters": [name for shard in own for name in [shard.name] if not any(shard.copy)],
    }


def buffers(results: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {name: bias for result in results for name, bias in result["buffers"].items()}


_made: dict[str, tuple[list[dict[str, Any]], Path]] = {}


@pytest.fixture(scope="module")
def runs(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The step of a case, made once, and the folder of its checkpoint."""

    def run(case: Case) -> tuple[list[dict[str, Any]], Path]:
        if str(case) not in _made:
            folder = tmp_path_factory.mktemp("checkpoint")
            _made[str(case)] = ranks.run(case.layout.world, train, case, str(folder)), folder
        return _made[str(case)]

    yield run
    _made.clear()


@pytest.mark.parametrize("name", CASES)
def test_virtual_stages_equal_the_whole(runs: Any, name: str) -> None:
    case = CASES[name]
    (expected,), _ = runs(Case(replace(case.llm, recompute="none")))
    results, _ = runs(case)
    total = sum(result["sums"] for result in results)
    torch.testing.assert_close(total, expected["sums"], rtol=1e-6, atol=0)
    full = dict(assembled([expected], "gradients"))
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in full.values()))
    assert sum(result["squares"] for result in results) == pytest.approx(norm**2, rel=1e-5)
    for kind, tolerance in (("gradients", 1e-5), ("weights", 1e-4), ("moments", 1e-5)):
        wanted = dict(assembled([expected], kind))
        found = list(assembled(results, kind))
        assert {name for name, _ in found} == set(wanted)
        for name, tensor in found:
            assert not tensor.isnan().any(), f"{kind} of {name} have no owner"
            floor = 1e-6 * norm if kind == "gradients" else 1e-6
            assert_close(f"{kind} of {name}", tensor, wanted[name], floor, tolerance)
    assert buffers(results).keys() == buffers([expected]).keys()
    for name, bias in buffers(results).items():
        assert torch.equal(bias, buffers([expected])[name])
    load = sum(result["load"] for result in results)
    torch.testing.assert_close(load, expected["load"])


@pytest.mark.parametrize("name", CASES)
def test_rows_enter_the_virtual_stage_of_their_layer(runs: Any, name: str) -> None:
    case = CASES[name]
    (expected,), _ = runs(Case(replace(case.llm, recompute="none")))
    rows = {key: grad for result in runs(case)[0] for key, grad in result["rows"].items()}
    for number, _ in enumerate(PACKS):
        for layer in TAPS:
            found = torch.cat([rows[number, layer, rank] for rank in range(case.layout.tp)])
            assert found.any()
            assert_close(f"rows of {layer}", found, expected["rows"][number, layer, 0], floor=1e-6)


def test_a_rank_with_both_ends_holds_a_tied_embedding_once(runs: Any) -> None:
    for name in ("tied", "a layer each, recomputed, later"):
        (result,), _ = runs(CASES[name])
        assert len(result["parameters"]) == len(set(result["parameters"]))
        assert result["parameters"].count("embedding.word_embeddings.weight") == 1
        assert "output_layer.weight" not in result["parameters"]
    (result,), _ = runs(CASES["untied"])
    assert "output_layer.weight" in result["parameters"]


MOVES = (
    ("tied", Case(LLM)),
    ("pp and dp", CASES["a layer each, recomputed, later"]),
    ("a layer each, recomputed, later", CASES["pp"]),
    ("pp, untied, later", CASES["untied"]),
    ("experts", CASES["pp, tp, experts, later"]),
    ("pp, tp, experts, later", Case(EXPERTS, Layout(dp=2, vpp=2))),
)


@pytest.mark.parametrize(("written", "case"), MOVES, ids=[written for written, _ in MOVES])
def test_checkpoints_move_between_virtual_stages(
    ranks: RankPool, runs: Any, written: str, case: Case
) -> None:
    saved, folder = runs(CASES[written])
    loaded = ranks.run(case.layout.world, restore, case, str(folder))
    for kind in ("weights", "moments"):
        wanted = dict(assembled(saved, kind))
        found = list(assembled(loaded, kind))
        assert {name for name, _ in found} == set(wanted)
        for name, tensor in found:
            assert torch.equal(tensor, wanted[name]), f"{kind} of {name}"
    assert buffers(loaded).keys() == buffers(saved).keys()
    for name, bias in buffers(loaded).items():
        assert torch.equal(bias, buffers(saved)[name])


def test_virtual_stages_go_round_the_stages_and_divide_the_layers() -> None:
    layout = Layout(pp=2, vpp=3)
    assert [list(layout.holds(stage)) for stage in range(2)] == [[0, 2, 4], [1, 3, 5]]
    assert layout.num_virtual_stages == 6
    assert layout.world == 2
    assert layout.describe() == "pp2·vpp3"
    llm = replace(LLM, layers=12)
    layers = virtual_stage_layers(llm, VOCABULARY, layout)
    assert len(layers) == 6
    assert sum(layers) == 12
    works = llm_work(llm, VOCABULARY, layout, 4)
    assert [work.layers for work in works] == list(layers)
    whole = llm_work(llm, VOCABULARY, Layout(), 4)[0]
    load = even_load(64, targets=64)
    assert sum(work.forward(load).flops for work in works) == whole.forward(load).flops
    points = attach_points(["llm.layers.0", f"llm.layers.{sum(layers[:4])}"], layers)
    assert [(point.virtual_stage, point.place) for point in points.values()] == [(0, 0), (0, 1), (4, 0)]


def test_layers_are_divided_for_sequences_as_long_as_the_context() -> None:
    """Llama 3 8B over four stages: its output is worth 2.2 layers for tokens of short sequences, 0.9 for
    those of long ones.
    """
    llm = LLMConfig(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128_256, tied=False)
    divided = [
        virtual_stage_layers(llm, 128_256, Layout(pp=4, context=tokens)) for tokens in (1, 4096, 32_768)
    ]
    assert divided == [(9, 9, 8, 6), (9, 9, 8, 6), (9, 8, 8, 7)]
    assert Layout(pp=4, context=7).describe() == "pp4"


def test_virtual_stages_that_cannot_be_are_refused() -> None:
    with pytest.raises(LayoutError, match=r"layout\.llm\.vpp=0: a stage .* holds at least one virtual stage"):
        Layout(vpp=0)
    words = (
        r"layout\.llm\.pp=2 with vpp=3 leaves a virtual stage without a layer: model\.llm\.layers=5; "
        r"choose pp·vpp"
    )
    with pytest.raises(LayoutError, match=words):
        virtual_stage_layers(LLM, VOCABULARY, Layout(pp=2, vpp=3))
    with pytest.raises(ConfigError, match=r"llm\.layers\.5"):
        attach_points(["llm.layers.5"], [3, 2])

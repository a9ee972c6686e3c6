"""Dry runs against real ranks, and the models of memory and bytes against dry runs."""

import contextlib
import gc
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import RankPool
from small import overrides, write_mixed
from torch._subclasses.fake_tensor import FakeTensorMode

from infra.run_folder import RunFolder
from omni.__main__ import main
from omni.commands.plan import plan_of_step
from omni.commands.rehearse import off_lines
from omni.compose import compose_config
from omni.config import ConfigError
from omni.models.dispatch import Dispatcher
from omni.models.encoders.vit import ViTConfig, ViTEncoder
from omni.models.llm import virtual_stage_layers
from omni.models.llm_statement import llm_virtual_stage
from omni.models.moe import CountingRouter, routers
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.rehearsal.footprint import Footprint, Sent, Traffic
from omni.rehearsal.footprint_model import model_footprint
from omni.rehearsal.meter import Meter
from omni.rehearsal.rehearse import classify, group_labels, owned_parameters, rehearse
from omni.rehearsal.stand_in_data import use_trace
from omni.training.trainer import Trainer
from parallel import plain
from parallel.layout import Layout
from parallel.megatron import get_global_memory_buffer
from parallel.transports import node_map
from parallel.work import Grad, Load, Part, Work
from pipeline.rules.lists import ENCODES

CPU = torch.device("cpu")
# What the host exchanges to agree and to learn losses is not rehearsed.
MORE = [
    "+layout.encoders.image.tp=2",
    "model.llm.tied=false",
    "model.llm.qkv_bias=true",
    "model.llm.loss_chunk=16",
]
# Few ranks have tokens that divide among so many.
EXPERTS = "model.llm.moe={experts: 12, topk: 2, ffn: 32, shared_ffn: 32, dense_layers: 1}"
SOFTMAX = [EXPERTS, "model.llm.moe.score=softmax", "model.llm.moe.bias_update_rate=0"]

HEADS = ["model.llm.head_dim=32", "model.llm.qk_norm=true"]
GATES = ["model.llm.gated=false", "+model.encoders.image.gated=true"]


def recomputed(how: str) -> list[str]:
    return [f"model.llm.recompute={how}", f"model.encoders.image.recompute={how}"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rehearsal") / "mixed"
    write_mixed(path)
    return path


def small_job(data: Path, world: int, *more: str) -> RunSpec:
    few = ["model.llm.layers=2", "train.precision=bf16", "cluster.ranks_per_node=2"]
    line = overrides(data, data / "run", *few, *more)
    return prepare_run(compose_config(line), world)


# The meter, on real ranks.


def known_collectives(rank: int) -> tuple[Traffic, dict[str, int], int]:
    first = dist.new_group([0, 1])
    meter = Meter(node_map(range(3), 2))
    with meter:
        assert dist.group.WORLD is not None
        labels = {dist.group.WORLD.group_name: "all"}
        meter.start(labels | ({first.group_name: "pair"} if rank < 2 else {}))
        # Named, so that they stay: a thread of gloo may let go of an output only after its collective.
        x, gathered, reduced, spread = (torch.zeros(rows, 5) for rows in (12, 36, 4, 3 * (rank + 1)))
        dist.all_reduce(x)
        dist.all_gather_into_tensor(gathered, x)
        dist.reduce_scatter_tensor(reduced, x)
        dist.all_to_all_single(spread, x[:6], [rank + 1] * 3, [1, 2, 3])
        if rank < 2:
            other = dist.isend(x, 1, group=first) if rank == 0 else dist.irecv(x, 0, group=first)
            assert other is not None
            other.wait()
        before = meter.total
        kept = torch.ones(100, dtype=torch.float64)
        view, brief = kept[3:], kept.float() + 1
        del brief
    assert view.numel() == 97
    return meter.traffic(), meter.peak, meter.total - before


def test_the_meter_counts_what_real_ranks_send_and_hold(ranks: RankPool) -> None:
    for rank, (traffic, peak, held) in enumerate(ranks.run(3, known_collectives)):
        following = (rank + 1) % 3
        near = following // 2 == rank // 2  # ranks 0 and 1 share a node

        def ring(size: int, near: bool = near) -> Sent:
            return Sent(1, size if near else 0, 0 if near else size)

        assert traffic["all", "all_reduce"] == ring(2 * 2 * 240 // 3)
        assert traffic["all", "all_gather"] == ring(2 * 240)
        assert traffic["all", "reduce_scatter"] == ring(2 * 80)
        to = {peer: (peer + 1) * 20 for peer in range(3) if peer != rank}
        inside = sum(size for peer, size in to.items() if peer // 2 == rank // 2)
        assert traffic["all", "all_to_all"] == Sent(1, inside, sum(to.values()) - inside)
        assert traffic.get(("pair", "send")) == (Sent(1, 240, 0) if rank == 0 else None)
        assert held == 800
        # Beside 800 bytes of doubles two floats of 400 lived at once.
        assert peak["buffers"] >= 1600


def test_the_backward_of_a_selection_holds_as_much_on_fake_tensors() -> None:
    """torch adds its gradient in place, unless tensors are of a subclass."""
    most = []
    for mode in (contextlib.nullcontext(), FakeTensorMode()):
        with mode:
            x, index = torch.zeros(1000, 8, requires_grad=True), torch.arange(900)
            with Meter([0]) as meter:
                x.index_select(0, index).sum().backward()
        most.append(meter.most)
    assert most[0] == most[1] > 4 * 8 * 1000


# A rehearsal against a real run.


class PatientMeter(Meter):
    """Gives gloo's threads time before it notes a peak.

    They let go of what they sent only after they have told that it is sent, and need Python's lock for it.
    """

    def _hold(self, storage: torch.UntypedStorage, kind: str) -> None:
        if self.total + storage.nbytes() > self.most:
            time.sleep(0.01)
        super()._hold(storage, kind)


def in_turn(router: CountingRouter, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens take all experts in turn, whatever their scores."""
    tokens, experts = scores.shape
    turns = (torch.arange(tokens * router.topk) % experts).view(tokens, router.topk)
    # To gather them would keep the scores, which topk does not.
    return (scores + torch.zeros_like(scores).scatter(1, turns, 100.0)).topk(router.topk, dim=1)


def real_step(rank: int, line: list[str], world: int) -> tuple[Traffic, int, dict[str, int]]:
    """Train two steps and measure the second."""
    spec = prepare_run(compose_config(line), world)
    get_global_memory_buffer().buffer.clear()
    trainer = Trainer(spec, RunFolder.create(Path(spec.config.run.dir)), rank, CPU)
    for router in routers(trainer.rank.stage.models).values():
        router.best = partial(in_turn, router)
    meter = PatientMeter(node_map(range(world), spec.cluster.ranks_per_node))
    gc.disable()
    with trainer.ahead() as ahead:
        for step in (1, 2):
            prepared = trainer.begin(ahead, step)
            with meter if step == 2 else contextlib.nullcontext():
                if step == 2:
                    classify(trainer.rank, prepared.inputs, meter)
                    meter.adopt(get_global_memory_buffer().buffer.values(), "buffers")
                    meter.start(group_labels(trainer.rank.groups))
                trainer.update(trainer.run_step(prepared))
    gc.enable()
    parameters = {
        name: sum(parameter.numel() for parameter in component.parameters)
        for name, component in trainer.rank.components.items()
    }
    return meter.traffic(), meter.most, parameters


@pytest.mark.parametrize(
    ("world", "more"),
    [
        (4, ["layout.llm.tp=2", "layout.llm.pp=2", "+layout.encoders.image.tp=2"]),
        pytest.param(
            4,
            ["layout.llm.cp=2", "model.llm.recompute=selective", "boundary.policy=reduce_scatter"],
            marks=pytest.mark.slow,
        ),
        pytest.param(4, ["layout.llm.ep=2", EXPERTS], marks=pytest.mark.slow),
        (4, ["layout.llm.ep=4", "layout.llm.tp=2", "model.llm.recompute=full", *SOFTMAX]),
    ],
)
def test_a_rehearsal_equals_a_real_run(
    ranks: RankPool, data: Path, tmp_path: Path, world: int, more: list[str]
) -> None:
    # Norms of which CPU and GPU keep the same, and single precision, where attention is the CPU's own.
    norms = ["model.llm.norm=LayerNorm", "model.encoders.image.norm=LayerNorm"]
    line = overrides(data, tmp_path / "run", "model.llm.layers=2", "cluster.ranks_per_node=2", *norms, *more)
    spec = prepare_run(compose_config(line), world)
    for rank, (traffic, held, parameters) in enumerate(ranks.run(world, real_step, line, world)):
        plan = plan_of_step(spec, 2, spec.arrangement.domain(rank))
        found = rehearse(spec, plan, rank).footprint
        assert found.traffic == {key: sent for key, sent in traffic.items() if key[0] != "world"}
        assert found.parameters == parameters
        # With a reduce-scatter two of four real ranks hold 6 kB more than a rehearsal, the size of 48 rows.
        # Why is not known; the input of a collective that is under way would be of that size.
        unknown = 48 * 32 * 4 if any("reduce_scatter" in key for key in more) else 0
        assert found.bytes == pytest.approx(held, rel=1e-3, abs=unknown)


# Every rank of a world.


def test_experts_are_owned_once(data: Path) -> None:
    spec = small_job(data, 4, EXPERTS, "layout.llm.tp=2", "layout.llm.ep=2")
    whole = owned_parameters(small_job(data, 1, EXPERTS), 0)
    owned = [owned_parameters(spec, rank) for rank in range(4)]
    assert {name: sum(of.get(name, 0) for of in owned) for name in whole} == whole
    # The second of two layers has 12 experts, a shared one and a router in place of an MLP.
    dense = owned_parameters(small_job(data, 1), 0)
    experts = 3 * 64 * 32 * (12 + 1) + 64 * 12
    assert whole["llm"] == dense["llm"] + experts - 3 * 64 * 96


def test_the_ranks_of_a_world_hold_the_model_once_and_send_what_is_planned(data: Path) -> None:
    spec = small_job(data, 8, "layout.llm.tp=2", "layout.llm.pp=2")
    whole = owned_parameters(small_job(data, 1), 0)
    owned = [owned_parameters(spec, rank) for rank in range(8)]
    assert {name: sum(of.get(name, 0) for of in owned) for name in whole} == whole
    for rank in range(8):
        plan = plan_of_step(spec, 1, spec.arrangement.domain(rank))
        found = rehearse(spec, plan, rank).footprint
        modelled = model_footprint(spec, plan, rank)
        assert found.parameters == modelled.parameters
        assert found.traffic == modelled.traffic
        # Padding and weights divide over ranks unevenly, so the shards differ.
        assert modelled.peak["optimizer"] == pytest.approx(found.peak["optimizer"], rel=1e-3)
        domain, ranks = plan.domain, spec.arrangement.global_ranks(plan.number)
        domain_rank = ranks.index(rank)
        layouts = [batch.layout for batch in domain.microbatches]
        tokens = sum(layout.padded_tokens(domain.cp_rank(domain_rank), 2) for layout in layouts)
        # tp 2 halves the tokens between layers, of width 64, two bytes each; nodes hold two ranks.
        sent = Sent(len(layouts), 0, tokens // 2 * 64 * 2)
        assert found.traffic.get(("forward", "send")) == (sent if domain.is_first(domain_rank) else None)
        assert found.traffic.get(("backward", "send")) == (None if domain.is_first(domain_rank) else sent)
        shipped = sum(
            rows
            for route in domain.routes
            if route is not None and not route.is_local
            for (source, to), rows in route.traffic().items()
            if source == domain_rank != to
        )
        assert found.traffic.get(("ship", "all_to_all"), Sent(0, 0, 0)).total == shipped * 64 * 2


# The models against rehearsals.


@pytest.mark.parametrize(
    ("world", "ranks", "more"),
    [
        (1, [0], []),
        (6, [5], ["layout.llm.cp=3", "layout.llm.pp=2"]),
        (4, [3], ["layout.llm.cp=2", "layout.llm.tp=2"]),
        (2, [0], ["encoder_sp=long_short", "llm_sp=dynamic", "layout.domain=2"]),
        (2, [1], ["encoder_sp=all", "layout.llm.pp=2"]),
        (2, [1], ["layout.llm.pp=2", "+model.encoders.image.taps=[1]"]),
        (5, [0, 4], ["placement=disaggregated", "placement.ranks=3", "pipeline=one_f_one_b"]),
        (4, [2], ["layout.llm.pp=4", "model.llm.layers=4", "boundary.policy=two_level"]),
        (4, [0, 3], ["system=megatron", "layout=pp2", *recomputed("full")]),
        (4, [2], ["layout.llm.tp=2", "layout.llm.pp=2", *recomputed("selective"), *MORE]),
        (2, [0, 1], ["+optim.components={image: {frozen: [[1, 3]]}}", "layout.llm.pp=2"]),
        (1, [0], [EXPERTS]),
        (2, [0], [EXPERTS, "layout.llm.ep=2", *HEADS, *GATES]),
        (4, [3], ["layout.llm.ep=4", "layout.llm.tp=2", *recomputed("full"), *SOFTMAX]),
        (8, [6], ["layout.llm.ep=2", "layout.llm.tp=2", "layout.llm.pp=2", EXPERTS]),
        (
            4,
            [0, 3],
            ["layout.llm.cp=2", "layout.llm.pp=2", "layout.llm.ep=2", *recomputed("selective"), EXPERTS],
        ),
    ],
)
def test_modelled_memory_is_near_and_modelled_bytes_are_equal(
    data: Path, world: int, ranks: list[int], more: list[str]
) -> None:
    spec = small_job(data, world, *more, "cluster.queues=one")
    for rank in ranks:
        plan = plan_of_step(spec, 1, spec.arrangement.domain(rank))
        found, modelled = rehearse(spec, plan, rank).footprint, model_footprint(spec, plan, rank)
        assert modelled.traffic == found.traffic
        assert modelled.parameters == found.parameters
        assert modelled.bytes == pytest.approx(found.bytes, rel=0.025)
        for kind in ("weights", "gradients", "optimizer"):
            assert modelled.peak[kind] == pytest.approx(found.peak[kind], rel=1e-3)


@pytest.mark.parametrize(
    ("world", "more"),
    [
        (1, [*HEADS, *GATES]),
        (2, ["layout.llm.cp=2", *HEADS]),
        (2, ["layout.llm.tp=2", *recomputed("selective"), *HEADS, *GATES]),
    ],
)
def test_heads_of_their_own_size_norms_and_gates_keep_what_is_stated(
    data: Path, world: int, more: list[str]
) -> None:
    spec = small_job(data, world, *more, "model.llm.layers=4", "cluster.queues=one")
    plan = plan_of_step(spec, 1)
    found, modelled = rehearse(spec, plan, 0).footprint, model_footprint(spec, plan, 0)
    assert modelled.traffic == found.traffic
    assert modelled.parameters == found.parameters
    # Together: logits are kept, and their gradient may be there instead when a rank holds most.
    passes = [of.peak["activations"] + of.peak["workspace"] for of in (modelled, found)]
    assert passes[0] == pytest.approx(passes[1], rel=0.01)


@pytest.mark.parametrize("schedule", ["encode_first", "zero_bubble_h1"])
def test_the_backward_of_a_frozen_llm_sends_what_gradients_of_its_inputs_take(
    data: Path, schedule: str
) -> None:
    more = ["layout.llm.tp=2", "layout.llm.pp=2", "model.llm.layers=4"]
    more += ["+optim.components={llm: {frozen: [[1, 3]]}}"]
    spec = small_job(data, 4, *more, f"pipeline={schedule}", "cluster.queues=one")
    plan = plan_of_step(spec, 1)
    found, modelled = rehearse(spec, plan, 3).footprint, model_footprint(spec, plan, 3)
    assert modelled.traffic == found.traffic
    assert modelled.bytes == pytest.approx(found.bytes, rel=0.03)


def test_a_rank_of_a_70b_model_at_real_shapes(tmp_path: Path) -> None:
    cut = ["model.llm.layers=8", "model.encoders.image.layers=2", "data.step_tokens=65536"]
    cut += ["train.seed=1"]  # in this step the largest microbatch is the one in flight at the fullest moment
    config = compose_config(["experiment=llama3_70b", "system=multiplexed", f"run.dir={tmp_path}", *cut])
    use_trace(config, "longtail", tmp_path / "trace")
    spec = prepare_run(config, 128)
    for rank in (5, 101):
        plan = plan_of_step(spec, 1, spec.arrangement.domain(rank))
        found, modelled = rehearse(spec, plan, rank).footprint, model_footprint(spec, plan, rank)
        assert modelled.traffic == found.traffic
        assert modelled.bytes == pytest.approx(found.bytes, rel=1e-3)
        for kind, size in found.peak.items():
            assert modelled.peak[kind] == pytest.approx(size, rel=0.02)
    # Of the 4 B parameters, each of the 32 ranks of a replica holds its part, and the encoder's beside it.
    assert found.parameters["llm"] == 238_313_472


def test_the_published_models_have_their_sizes(tmp_path: Path) -> None:
    model = compose_config(["experiment=llama3_70b", f"run.dir={tmp_path}"]).model
    layers = virtual_stage_layers(model.llm, 260, Layout(pp=4))
    stages = [llm_virtual_stage(model.llm, 128_256, layers, stage, Layout(), element=2) for stage in range(4)]
    assert sum(weight.elements for stage in stages for weight in stage.weights()) == 70_553_706_496
    options = {key: value for key, value in model.encoders["image"].items() if key != "name"}
    encoder = ViTEncoder(ViTConfig(**options)).work(model.llm.hidden, element=2)
    assert sum(weight.elements for weight in encoder.stack.layer_weights()) * 48 == 2_417_197_056


# Where it ends.


def test_nothing_is_left_behind(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = small_job(data, 2, "layout.llm.tp=2")
    plan = plan_of_step(spec, 1)

    def replaced() -> list[object]:
        return [
            Dispatcher.host_counts,
            dist.new_group,
            plain.gather_plain,
            torch.nn.Module.to,
            F.rms_norm,
            gc.isenabled(),
        ]

    before = replaced()

    def fails(*args: object) -> None:
        raise RuntimeError("broken on purpose")

    rehearse(spec, plan, 1)
    monkeypatch.setattr("omni.rehearsal.rehearse.classify", fails)
    with pytest.raises(RuntimeError, match="on purpose"):
        rehearse(spec, plan, 1)
    assert replaced() == before
    assert not dist.is_initialized()
    assert all(type(x) is torch.Tensor for x in get_global_memory_buffer().buffer.values())
    assert torch.equal(F.rms_norm(torch.ones(2, 4), (4,)).round(), torch.ones(2, 4))


def test_what_cannot_be_rehearsed_is_refused(data: Path, tmp_path: Path) -> None:
    spec = small_job(data, 2)
    plan = plan_of_step(spec, 1)
    with pytest.raises(ConfigError, match="there are ranks 0 to 1"):
        rehearse(spec, plan, 2)
    config = compose_config(overrides(data, tmp_path))
    with pytest.raises(ValueError, match="trace other: there is no such file or folder"):
        use_trace(config, "other", tmp_path / "other")


def test_the_command_prints_what_a_rank_holds_and_sends(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    line = overrides(data, tmp_path, "train.precision=bf16", "layout.llm.pp=2")
    dry = ["rehearse", "--dry", "--rank"]
    assert main([*dry, "0,1", "--json", *line]) == 0
    one, other = (json.loads(text) for text in capsys.readouterr().out.splitlines())
    assert (one["rank"], other["rank"]) == (0, 1)
    assert one["peak_bytes"]["weights"] == pytest.approx(2 * sum(one["parameters"].values()), rel=0.01)
    assert {entry["group"] for entry in one["sent"]} >= {"forward", "ship"}
    sent = sum(entry["inside"] + entry["across"] for entry in one["sent"])
    assert one["modelled_sent_bytes"] == sent > 0
    sizes = ["model.encoders.image.patch=14", "data.on_long=truncate"]
    assert main([*dry, "1", "--trace", "balanced", *line, *sizes]) == 0
    text = capsys.readouterr().out
    assert "rank 1 of 2 (pp2): tp 0, cp 0, dp 0, pp 1" in text
    assert "modelled" in text
    auto = overrides(data, tmp_path, "train.precision=auto", "layout.llm.pp=2")
    assert main([*dry, "1", "--json", *auto]) == 0
    assert json.loads(capsys.readouterr().out)["peak_bytes"] == other["peak_bytes"], "GPUs compute in bf16"
    assert main([*dry, "two", *line]) == main([*dry, "2", *line]) == 2
    assert "there are ranks 0 to 1" in capsys.readouterr().err


def test_the_command_rehearses_experts_of_a_larger_world(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    split = [f"layout.llm.{axis}" for axis in ("tp=2", "cp=2", "pp=2", "ep=4")]
    line = overrides(data, tmp_path, "train.precision=bf16", "launch.ranks=16", *split)
    line += ["model.llm.layers=2", EXPERTS.replace("dense_layers: 1", "dense_layers: 0")]
    assert main(["rehearse", "--dry", "--rank", "0,15", "--json", *line]) == 0
    for text in capsys.readouterr().out.splitlines():
        figures = json.loads(text)
        sent = {(entry["group"], entry["collective"]): entry for entry in figures["sent"]}
        assert sent["llm ep", "all_to_all"]["inside"] > 0
        assert sent["llm expert_dp", "reduce_scatter"]["inside"] > 0
        assert "other" not in {group for group, _ in sent}
        assert figures["modelled_sent_bytes"] == sum(e["inside"] + e["across"] for e in figures["sent"])
        assert figures["build_cpu_s"] + figures["step_cpu_s"] < 60
    assert main(["rehearse", "--dry", *line]) == 0
    text, said = capsys.readouterr()
    spec = prepare_run(compose_config([*line, "cluster.queues=one"]), 16)
    plans = (plan_of_step(spec, 1, spec.arrangement.domain(rank)) for rank in range(16))
    held = [model_footprint(spec, plan, rank).bytes for rank, plan in enumerate(plans)]
    fullest = held.index(max(held))
    assert text.startswith(f"rank {fullest} of 16"), "no rank was asked for"
    assert f"rank {fullest} holds most" in said
    assert "llm expert_dp" in text
    assert "modelled" in text


def test_memory_that_a_statement_has_twice_is_noted() -> None:
    peak = {"weights": 40 << 20, "activations": 30 << 20, "workspace": 30 << 20}
    found = Footprint({}, peak, "encode_backward", {})
    assert not list(off_lines(found, found))
    doubled = replace(found, peak=peak | {"workspace": 60 << 20})
    (line,) = off_lines(found, doubled)
    assert "too much workspace, 30.0% of all" in line
    assert "work()" in line
    near = replace(found, peak=peak | {"workspace": 31 << 20})
    assert not list(off_lines(found, near)), "1 % of all that is held"


class Doubled:
    """A part whose statement has twice the workspace of its backward."""

    def __init__(self, part: Part) -> None:
        self.part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)

    def backward(self, load: Load, grad: Grad) -> Work:
        work = self.part.backward(load, grad)
        return replace(work, workspace=2 * work.workspace)


def test_a_workspace_stated_twice_is_noted_where_it_is_not_the_most_of_the_step(data: Path) -> None:
    spec = small_job(data, 1, "model.encoders.image.recompute=full", "cluster.queues=one")
    plan = plan_of_step(spec, 1)
    found, modelled = rehearse(spec, plan, 0).footprint, model_footprint(spec, plan, 0)
    encoding = {op for op in plan.domain.ops[0] if op.kind in ENCODES}
    assert found.encoding.keys() == modelled.encoding.keys() == encoding
    for op, size in found.encoding.items():
        assert modelled.encoding[op] == pytest.approx(size, abs=0.02 * found.bytes)
    assert not list(off_lines(found, modelled))
    wrong = replace(spec, work={**spec.work, "image": cast(Part, Doubled(spec.work["image"]))})
    doubled = model_footprint(wrong, plan, 0)
    assert doubled.peak == modelled.peak
    (line,) = off_lines(found, doubled)
    assert "too much during encode_backward" in line
    assert "`workspace`" in line

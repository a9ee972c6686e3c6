"""Inputs of layers on the host change nothing of a step; what it takes is stated, what cannot be, refused."""

import gc
import json
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_matrix import Case
from parity_runs import configure, measure, write_data
from ranks import RankPool
from small import overrides, with_values, write_mixed

from infra.run_folder import RunFolder
from omni.__main__ import main
from omni.commands.plan import plan_of_step
from omni.compose import compose_config
from omni.config import Config, ConfigError
from omni.models import kept_inputs
from omni.models.llm_stage import LLMStage
from omni.planning.fullest import check_first_steps, check_rank
from omni.planning.host_memory import on_host
from omni.planning.memory_advice import remedy
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.rehearsal.rehearse import rehearse
from omni.training.parity import Measurement
from omni.training.trainer import Trainer
from ops.on_host import host_buffer
from parallel.work import Grad
from pipeline.costs import simulate

FULL = {"recompute": "full", "schedule": "one_f_one_b"}
LAYERS = 4  # of a stage
IMAGE = "model.encoders.image.recompute=full"
KEYS = r"model\.llm\.offload=2 or model\.encoders\.image\.offload=1"
ON_TWO = ("layout.llm.pp=2", "pipeline=one_f_one_b", "model.llm.recompute=full", "model.llm.offload=1")
CASES = {
    "one rank": (2, Case(**FULL)),
    "dp, all but what arrives": (3, Case(**FULL, dp=2)),
    "tp": (1, Case(**FULL, tp=2)),
    "cp, shared": (2, Case(**FULL, cp=2, llm_sp="dynamic")),
    "pp": (2, Case(**FULL, pp=2)),
    "pp, all but what arrives": (3, Case(**FULL, pp=2)),
    "interleaved": (1, Case(recompute="full", pp=2, schedule="interleaved")),
    "zero bubble": (2, Case(recompute="full", pp=2, schedule="zero_bubble_h1", tp=2)),
    "experts": (2, Case(**FULL, model="experts", ep=2, dp=2)),
    "frozen in turn": (2, Case(**FULL, pp=2, frozen="in_turn")),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("offload")
    write_data(path)
    write_mixed(path / "small")
    return path


def offloaded(config: Config, count: int) -> Config:
    layers = LAYERS * config.layout.llm.pp
    keeps = {"model.llm.offload": count, "model.llm.keep_attention": count > 0}
    return with_values(config, {**keeps, "model.llm.layers": layers})


def measured(rank: int, config: Config, world: int) -> tuple[Measurement | None, int]:
    """Measure a rank, and count what went to its host, all of which came back."""
    sent, taken = [0], [0]
    send, take = kept_inputs._Input.send, kept_inputs._Input.take

    def sends(kept: kept_inputs._Input, part: torch.Tensor) -> None:
        sent[0] += 1
        send(kept, part)

    def takes(kept: kept_inputs._Input) -> torch.Tensor:
        taken[0] += bool(kept.blocks)
        return take(kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_inputs._Input, "send", sends)
        patch.setattr(kept_inputs._Input, "take", takes)
        measurement = measure(rank, config, world)
    assert sent == taken
    return measurement, sent[0]


_all_stays: dict[Case, list[tuple[Measurement | None, int]]] = {}


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_same_to_the_bit(ranks: RankPool, folder: Path, name: str) -> None:
    count, case = CASES[name]
    config = configure(case, folder)
    if case not in _all_stays:
        _all_stays[case] = ranks.run(case.world, measured, offloaded(config, 0), case.world)
    stay, go = _all_stays[case], ranks.run(case.world, measured, offloaded(config, count), case.world)
    assert [sent for _, sent in stay] == [0] * case.world
    assert all(sent and sent % count == 0 for _, sent in go)
    (reference, _), (candidate, _) = stay[0], go[0]
    assert reference is not None
    assert candidate is not None
    assert candidate.loss == reference.loss
    assert candidate.squares == reference.squares
    for of in ("gradients", "weights"):
        before, after = getattr(reference, of), getattr(candidate, of)
        assert before.keys() == after.keys()
        assert [key for key in before if not torch.equal(before[key], after[key])] == []


def test_rows_that_enter_at_a_layer_are_added_to_what_comes_back(ranks: RankPool, folder: Path) -> None:
    """They are added where the layer begins: what waits on the host is the stream without them."""
    config = with_values(configure(Case(**FULL), folder), {"model.encoders.image.taps": [1]})
    runs = (ranks.run(1, measured, offloaded(config, n), 1)[0] for n in (0, 1, 3))
    (stay, _), (_, first), (go, sent) = runs
    assert sent == 3 * first > 0
    assert stay is not None
    assert go is not None
    assert [key for key in stay.gradients if not torch.equal(stay.gradients[key], go.gradients[key])] == []


def small(folder: Path, *more: str) -> Config:
    return compose_config(overrides(folder / "small", folder / "run", "model.llm.layers=4", *more))


def failed(rank: int, config: Config) -> tuple[list[str], int]:
    """Say when buffers of the host were made, in an evaluation or in a step that fails behind its forward,
    and how many of them are left.
    """
    folder = RunFolder.create(Path(config.run.dir))
    trainer = Trainer(prepare_run(config, 1), folder, rank, torch.device("cpu"))
    held: list[weakref.ref[Any]] = []
    at: list[str] = []
    buffer = host_buffer

    def noted(like: torch.Tensor) -> torch.Tensor:
        made = buffer(like)
        held.append(weakref.ref(made.untyped_storage()))
        at.append(where[0])
        return made

    where, fails = ["evaluation"], [False]
    loss = LLMStage.loss

    def failing(*args: Any) -> Any:
        if fails[0]:
            raise MemoryError("planted")
        return loss(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ops.on_host.host_buffer", noted)
        patch.setattr(LLMStage, "loss", failing)
        assert trainer.evaluate(1)
        where[0], fails[0] = "a step", True
        with trainer.ahead() as ahead, pytest.raises(MemoryError, match="planted"):
            trainer.run_step(trainer.begin(ahead, 1))
        gc.collect()
        return at, sum(one() is not None for one in held)


def test_an_evaluation_sends_nothing_and_a_step_that_fails_lets_go(ranks: RankPool, folder: Path) -> None:
    held = f"+data.heldout.held.path={folder / 'small'}"
    config = small(folder, "model.llm.recompute=full", "model.llm.offload=3", "train.eval_every=1", held)
    assert ranks.run(1, failed, config) == [(["a step"] * 3, 0)]


def passes_of(folder: Path, count: int, link: int) -> tuple[list[int], int, RunSpec]:
    """Nanoseconds of a forward over 1,000 tokens, of a whole backward and of its halves; and of a step."""
    keys = ["model.llm.recompute=full", f"model.llm.offload={count}", "train.precision=fp32"]
    spec = prepare_run(small(folder, *keys, f"cluster.host_link_bytes_per_s={link}"), 1)
    cost = spec.table.parts["llm/0"]
    back = [cost.backward_ns(1000, 0, 0, grad) for grad in (Grad.BOTH, Grad.INPUT, Grad.WEIGHT)]
    step_ns = simulate(plan_of_step(spec, 1).domain, spec.table, False).makespan_ns
    return [cost.forward_ns(1000, 0), *back], step_ns, spec


def test_a_pass_of_an_encoder_takes_what_copies_take_longer_than_layers(folder: Path) -> None:
    """Two ranks keep half of each input; with three of four layers that of the last one is late."""

    def costs(count: int, link: int) -> tuple[list[int], int]:
        keys = [IMAGE, "model.encoders.image.layers=4", f"+model.encoders.image.offload={count}"]
        keys += ["layout.llm.tp=2", "+layout.encoders.image.tp=2", "train.precision=fp32"]
        spec = prepare_run(small(folder, *keys, f"cluster.host_link_bytes_per_s={link}"), 2)
        cost, width = spec.table.parts["image"], spec.config.model.encoders["image"]["hidden"]
        back = cost.backward_ns(1000, 0)
        return [cost.forward_ns(1000, 0), back], 1000 * width // 2 * 4 * 10**9 // link

    for count, late in ((0, 0), (2, 0), (3, 1)):
        (ahead, back), copy_ns = costs(count, 10**5)
        assert copy_ns > 10**8, "far longer than a layer"
        (freely, freely_back), _ = costs(count, 10**15)
        assert ahead - freely == pytest.approx(count * copy_ns, rel=0.05)
        assert back - freely_back == pytest.approx(count * copy_ns, rel=0.05)
        assert (freely, freely_back) == pytest.approx(costs(0, 10**15)[0], rel=1e-3)
        (_, hidden), copy_ns = costs(count, 10**9)
        assert hidden - costs(0, 10**9)[0][1] == pytest.approx(late * copy_ns, rel=1e-3)


@pytest.mark.parametrize("count", [2, 3])
def test_a_pass_takes_what_a_copy_takes_longer_than_a_layer(folder: Path, count: int) -> None:
    """With three of four layers the input of the last one, which has come last, goes back behind nothing."""
    before, before_step, spec = passes_of(folder, 0, 10**9)
    width, cost = spec.config.model.llm.hidden, spec.table.parts["llm/0"]
    late = int(count == 3)
    for link in (10**6, 3 * 10**7, 10**15):
        after, step, _ = passes_of(folder, count, link)
        copy_ns = 1000 * width * 4 * 10**9 // link
        computes = [cost.compute_ns(1000, 0, grad) for grad in (None, Grad.BOTH, Grad.INPUT)]
        more = [
            behind * copy_ns + (count - behind) * max(0, copy_ns - compute_ns // 4)
            for compute_ns, behind in zip(computes, (0, late, late), strict=True)
        ]
        found = [b - a for a, b in zip(before, after, strict=True)]
        assert found == pytest.approx([*more, 0], rel=1e-3, abs=10)
        if link == 10**15:
            assert step == pytest.approx(before_step, rel=1e-6)
        elif link == 10**6:
            assert step > before_step * 1.1


def test_a_plan_says_what_is_on_the_host(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = overrides(folder / "small", folder / "run", "model.llm.layers=4", "launch.ranks=2", *ON_TWO)
    assert main(["plan", "--json", *line]) == 0
    found = json.loads(capsys.readouterr().out)
    spec = prepare_run(compose_config(line), 2)
    rehearsed = [rehearse(spec, plan_of_step(spec, 1), rank).footprint.host for rank in (0, 1)]
    assert found["host_bytes"] == max(rehearsed) > min(rehearsed) > 0
    assert main(["plan", *line]) == 0
    said = capsys.readouterr().out
    assert "inputs on the host (model.llm.offload=1)" in said
    assert "of a node of 2 ranks, at most" in said


def test_refusals_name_key_value_and_remedy(folder: Path) -> None:
    for more, said in (
        (["model.llm.offload=1"], r"model\.llm\.offload=1: with recompute=none: .*set recompute=full"),
        (
            ["model.llm.offload=4", "model.llm.recompute=full"],
            r"model\.llm\.offload=4: .*leave a virtual stage of 4 layers: set at most 3",
        ),
        (
            ["model.llm.offload=2", "model.llm.recompute=full", "layout.llm.pp=2"],
            r"layout\.llm\.pp=2 vpp=1 leave a virtual stage of 2 layers: set at most 1",
        ),
        (
            ["model.llm.offload=1", "model.llm.recompute=full", "cluster.host_link_bytes_per_s=null"],
            r"model\.llm\.offload=1.*set cluster\.host_link_bytes_per_s",
        ),
        (
            ["model.llm.recompute_long=true", "model.llm.recompute=full"],
            r"model\.llm\.recompute_long=True: with recompute=full: .*or this to false",
        ),
        (
            ["model.llm.recompute_long=true", "layout.llm.zero=3", "layout.domain=2"],
            r"model\.llm\.recompute_long=true with layout\.llm\.zero=3: .*set zero=1, or recompute_long=f",
        ),
        (
            ["model.llm.keep_attention=true", "model.llm.recompute=selective"],
            r"model\.llm\.keep_attention=True: with recompute=selective and recompute_long=false: .*or this",
        ),
        (
            ["+model.encoders.image.keep_attention=true"],
            r"model\.encoders\.image\.keep_attention=True: with recompute=none: .*set recompute=full",
        ),
        (
            ["+model.encoders.image.offload=1"],
            r"model\.encoders\.image\.offload=1: with recompute=none: .*set recompute=full",
        ),
        (
            [IMAGE, "+model.encoders.image.offload=2"],
            r"model\.encoders\.image\.offload=2: .*there are 2 layers: set at most 1",
        ),
        (
            [IMAGE, "+model.encoders.image.offload=1", "cluster.host_link_bytes_per_s=null"],
            r"model\.encoders\.image\.offload=1, but .*set cluster\.host_link_bytes_per_s",
        ),
    ):
        with pytest.raises(ConfigError, match=said):
            prepare_run(small(folder, *more), 2)


def test_more_than_a_share_of_the_host_is_refused_before_ranks_start_and_by_each_rank(folder: Path) -> None:
    line = [IMAGE, "+model.encoders.image.offload=1", "model.llm.recompute=full", "model.llm.offload=2"]
    ample = prepare_run(small(folder, *line), 1)
    plan = plan_of_step(ample, 1)
    held = on_host(ample, plan, 0)
    assert held == rehearse(ample, plan, 0).footprint.host > 0
    for share, refused in ((held, False), (held - 1, True)):
        spec = prepare_run(small(folder, *line, f"cluster.host_memory_bytes={share}"), 1)
        assert (spec.planner.beyond(plan) > 0) == refused
        for check in (partial(check_first_steps, spec, 1, 0), partial(check_rank, spec, 0, plan)):
            if not refused:
                check()
                continue
            with pytest.raises(ConfigError, match=rf"cluster\.host_memory_bytes={share} .*lower {KEYS}, or"):
                check()


def test_what_would_hold_less_is_said_where_layers_are_made_anew(folder: Path) -> None:
    for count, says in ((0, True), (3, False)):
        spec = prepare_run(small(folder, "model.llm.recompute=full", f"model.llm.offload={count}"), 2)
        said = remedy(spec, {("activations", "llm"): 2}, 1)
        assert ("set model.llm.offload=3 (now 0)" in said) == says

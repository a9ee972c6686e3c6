"""The trainer on real ranks where things differ or go wrong between them."""

import contextlib
import math
import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import RankError, RankPool
from small import overrides, write_mixed

from dataloader.balance import BalancePolicy
from dataloader.format import Sample
from dataloader.packing import PackingPolicy
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from infra.run_folder import RunFolder, read_metrics, read_summary
from omni.compose import compose_config
from omni.config import Config
from omni.planning.prepare import prepare_run
from omni.training.evaluate import Evaluator, Transcription
from omni.training.progression import NoUpdateError
from omni.training.trainer import Trainer
from omni.training.worker import exit_with
from parallel.consensus import DivergenceError
from parallel.waiting import StallError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trainer") / "mixed"
    write_mixed(path)
    return path


def make_trainer(rank: int, config: Config, world: int) -> Trainer:
    spec = prepare_run(config, world)
    return Trainer(spec, RunFolder.create(Path(spec.config.run.dir)), rank, torch.device("cpu"))


def _fetched(rank: int, config: Config) -> tuple[list[tuple[str, int, int]], set[tuple[str, int, int]]]:
    """What a rank loads for a step, and of which items it has any tokens."""
    trainer = make_trainer(rank, config, 4)
    domain = trainer.spec.planner.next_step(1, 0, trainer.rank.domain).domain
    metas = trainer.spec.planner.metas_of(domain)
    held = {
        (domain.samples[item.sample].source, domain.samples[item.sample].id, item.index)
        for batch in domain.encoder_batches
        for item, shards in zip((domain.items[i] for i in batch.items), batch.layout.shards, strict=True)
        if any(batch.ranks[shard.cp_rank] == trainer.rank.domain_rank for shard in shards if shard.length)
    }
    return list(trainer.rank.assembler.fetch_of(domain, metas).items), held


def test_a_rank_loads_the_items_that_it_encodes_any_of_and_no_others(
    ranks: RankPool, data: Path, tmp_path: Path
) -> None:
    free = "cluster.node_link_latency_ns=0"  # some items are then worth sharing
    line = overrides(data, tmp_path, "layout.domain=4", "encoder_sp=dynamic", free)
    found = ranks.run(4, _fetched, compose_config(line))
    for items, held in found:
        assert len(items) == len(set(items))
        assert set(items) == held
    everything = set().union(*(held for _, held in found))
    assert all(held < everything for _, held in found)
    assert sum(len(held) for _, held in found) > len(everything), "some items are shared"


UNPICKLING = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")


def _train_alert(rank: int, config: Config) -> bool:
    """Train where torch's own ways to send an object fail: whoever receives one unpickles it."""
    with contextlib.ExitStack() as stack:
        for name in UNPICKLING:
            stack.enter_context(patch.object(dist, name, side_effect=AssertionError(name)))
        return make_trainer(rank, config, 3).run()


def test_no_rank_unpickles_what_another_sends(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    apart = ("placement=disaggregated", "placement.ranks=1", "layout.llm.pp=2")
    line = overrides(data, tmp_path, *apart, "train.steps=1", "train.eval_every=1")
    assert ranks.run(3, _train_alert, compose_config(line)) == [True] * 3


ALL_TO_ONE = BalancePolicy("all_to_one", lambda samples, bins: (bins.count - 1,) * len(samples))
ONE_EACH = PackingPolicy("one_each", lambda samples, budget: [[i] for i in range(len(samples))])


def _diverge(rank: int, config: Config, other: int, what: str) -> str:
    """Plan on 4 ranks, `other` differently, and return what is said of it."""
    trainer = make_trainer(rank, config, 4)
    planner = trainer.spec.planner
    if rank == other:
        if what == "cursor":
            trainer.progression.cursor = 1
        changed = {
            "cursor": planner,
            "frozen": replace(planner, frozen=lambda step: ("image",)),
            "balance": replace(planner, group=replace(planner.group, balance=ALL_TO_ONE)),
            "packing": replace(planner, domain=replace(planner.domain, packing=ONE_EACH)),
        }[what]
        trainer.spec = replace(trainer.spec, planner=changed)
    with trainer.ahead() as ahead:
        try:
            trainer.agree_on(trainer.begin(ahead, 1).plan)
        except DivergenceError as error:
            return str(error)
    return "agreed"


IN_PAIRS = ("balance.group=2",)  # groups of two of four domains
# Two domains of several samples each, with pp2 of ranks 0 and 2, 1 and 3.
TP2, PP2 = ("layout.llm.tp=2", "balance=none"), ("layout.llm.pp=2", "balance=none")


@pytest.mark.parametrize(
    ("more", "other", "what", "where", "first"),
    [
        (IN_PAIRS, 1, "cursor", "the world: 3 of 4", "0 against rank 1: plan.world.taken.cursor: 0 != 1"),
        (IN_PAIRS, 0, "cursor", "the world: 1 of 4", "0 against rank 1: plan.world.taken.cursor: 1 != 0"),
        (IN_PAIRS, 2, "frozen", "the world: 3 of 4", "0 against rank 2: plan.world.frozen: 0 entries != 1"),
        (IN_PAIRS, 1, "balance", "group 0: 1 of 2", "0 against rank 1: plan.group.replicas[0]"),
        (IN_PAIRS, 2, "balance", "group 1: 1 of 2", "2 against rank 3: plan.group.replicas[0]"),
        (TP2, 1, "packing", "domain 0: 1 of 2", "0 against rank 1: plan.domain.microbatches"),
        (TP2, 3, "packing", "domain 1: 1 of 2", "2 against rank 3: plan.domain.microbatches"),
        (PP2, 3, "packing", "domain 1: 1 of 2", "1 against rank 3: plan.domain.microbatches"),
    ],
)
def test_ranks_that_plan_differently_stop_with_the_level_and_the_first_difference(
    ranks: RankPool, data: Path, tmp_path: Path, more: tuple, other: int, what: str, where: str, first: str
) -> None:
    messages = ranks.run(4, _diverge, compose_config(overrides(data, tmp_path, *more)), other, what)
    assert messages == [messages[0]] * 4
    lines = messages[0].splitlines()
    assert lines[0] == "ranks planned step 1 differently; nothing of it has run."
    assert f"the plan of {where} ranks have that of rank" in lines[1]
    assert lines[1].endswith("there are 2 plans.")
    assert lines[2].strip().startswith(f"rank {first}")
    blamed = {"balance": "deal=by_", "packing": "packing=first_fit_decreasing, pairing="}.get(what, "")
    assert ("no policy that decides this is random" in lines[-1]) == bool(blamed)
    assert blamed in lines[-1]


def test_a_packing_of_its_own_is_no_divergence_where_a_domain_has_one_rank(
    ranks: RankPool, data: Path, tmp_path: Path
) -> None:
    """What a domain plans concerns its own ranks alone."""
    assert (
        ranks.run(4, _diverge, compose_config(overrides(data, tmp_path, *IN_PAIRS)), 2, "packing")
        == ["agreed"] * 4
    )


def _stall(rank: int, config: Config, at: str) -> str:
    """Leave rank 0 waiting for rank 1 at some place, and return what it says."""
    trainer, told = make_trainer(rank, config, 2), Path(config.run.dir) / "told"
    with trainer.ahead() as ahead:
        if rank == 1:
            if at == "update":
                trainer.run_step(trainer.begin(ahead, 1))
            elif at == "reductions":
                trainer.begin(ahead, 1)
            else:  # tells nothing of what it has lost
                ahead.take(1)
            until = time.monotonic() + 30
            while not told.exists() and time.monotonic() < until:
                time.sleep(0.05)
            return "waited"
        try:
            prepared = trainer.begin(ahead, 1)
            if at == "sharing":
                return str(trainer.lost_here(prepared.plan))
            done = trainer.run_step(prepared)
            if at == "update":
                trainer.update(done)
                trainer.end()
        except StallError as error:
            return str(error)
        finally:
            told.touch()
    return "ran"


@pytest.mark.parametrize(
    ("more", "at", "where"),
    [
        # It gets to its ops, though the other has not begun to share which items are bad.
        (["layout=pp2"], "ops", r"rank 0 waited at wait\(\w+ \d\) of step 1"),
        (["layout=pp2"], "sharing", "all ranks waited at step 0: plans and times"),
        ([], "reductions", "rank 0 waited at the gradients of llm"),
        ([], "update", "rank 0 waited at step 1: weights of the last update"),
    ],
)
def test_a_rank_that_waits_too_long_says_for_whom(
    ranks: RankPool, data: Path, tmp_path: Path, more: list[str], at: str, where: str
) -> None:
    timeout_s = 3 if at == "update" else 1  # there rank 1 has a step to run in it
    line = overrides(data, tmp_path, *more, f"train.timeout_s={timeout_s}")
    message = ranks.run(2, _stall, compose_config(line), at)[0]
    assert re.match(f"{where} for rank 1: ", message), message


def _misfit(rank: int, config: Config) -> str:
    """Update with state of which shapes do not fit."""
    trainer = make_trainer(rank, config, 2)
    with trainer.ahead() as ahead:
        done = trainer.run_step(trainer.begin(ahead, 1))
    component = next(iter(trainer.rank.components.values()))
    try:
        with pytest.MonkeyPatch.context() as patch:
            for shares in component.shares.values():
                patch.setattr(shares, "begin", lambda: torch.ones(3) + torch.ones(4))
            trainer.update(done)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "updated"


def test_an_error_inside_an_update_is_not_blamed_on_peers(
    ranks: RankPool, data: Path, tmp_path: Path
) -> None:
    for message in ranks.run(2, _misfit, compose_config(overrides(data, tmp_path))):
        assert message.startswith("RuntimeError: ")
        assert "waited" not in message


def _failing(config_path: Path) -> int:
    raise StallError(f"rank 0 waited, as {config_path} says")


def test_a_failure_told_without_a_traceback_keeps_it_in_the_run_folder(
    ranks: RankPool, tmp_path: Path
) -> None:
    for _ in range(2):
        with pytest.raises(RankError) as caught:
            ranks.apart(exit_with, _failing, tmp_path / "config.yaml")
        assert "exit code 1" in str(caught.value)
    kept = (tmp_path / "errors" / "rank-0.txt").read_text()
    assert kept.count("Traceback (most recent call last)") == 2
    assert "in _failing" in kept


LAYOUTS = (
    (2, []),
    (2, ["layout=pp2"]),
    (3, []),
    (2, ["layout.llm.cp=2"]),
    (3, ["placement=disaggregated"]),
    (4, ["layout.llm.tp=2", "layout.llm.pp=2", "+layout.encoders.image.tp=2"]),
    (4, ["layout.llm.tp=2", "llm_sp=dynamic", "encoder_sp=dynamic", "layout.domain=2"]),
)


def _transcribe(rank: int, config: Config, world: int) -> tuple[list[Transcription], float]:
    trainer = make_trainer(rank, config, world)
    return trainer.evaluator.transcribe(0, "mixed", 3, 8), trainer.evaluator.loss(0, "mixed", 8)


def test_evaluation_is_the_same_under_every_layout(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    line = overrides(data, tmp_path, f"+data.heldout.mixed.path={data}")
    expected, loss = ranks.run(1, _transcribe, compose_config(line), 1)[0]
    assert len(expected) == 3
    assert all(len(t.generated) > 0 for t in expected)
    for world, more in LAYOUTS:
        transcriptions, other = ranks.run(world, _transcribe, compose_config([*line, *more]), world)[0]
        assert sorted(map(str, transcriptions)) == sorted(map(str, expected))
        assert other == pytest.approx(loss, rel=1e-6)


def _leave_off_losses(rank: int, config: Config, world: int) -> tuple[Any, ...]:
    """Evaluate until the last rank, and it alone, has had enough, and once more."""
    trainer, beats, asked = make_trainer(rank, config, world), [], iter([False, rank == world - 1])
    trainer.watchdog.beat = lambda: beats.append(1)  # type: ignore[method-assign]
    with patch.object(Evaluator, "_tokens_at_once", lambda _: 1):  # a sample or a few in each plan
        cut = trainer.evaluator.loss(0, "mixed", 8, lambda: next(asked))
        whole = trainer.evaluate(config.train.steps)
        assert len(beats) > 2, "a long evaluation is no hang"
        trainer.stop.signal_name = "SIGTERM" if rank == 0 else None
        return cut, whole, trainer.evaluate(config.train.steps)


def test_ranks_leave_off_evaluating_together(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    small = [f"+data.heldout.mixed={{path: {data}, samples: 8}}"]
    line = overrides(data, tmp_path, "train.eval_every=1", *small)
    for cut, whole, signalled in ranks.run(2, _leave_off_losses, compose_config(line), 2):
        assert (cut, list(whole), signalled) == (None, ["loss/eval/mixed"], {})


def _leave_off(rank: int, config: Config, world: int) -> list[list[Transcription]]:
    """Generate for 8 samples until the last rank, and it alone, has had enough."""
    trainer = make_trainer(rank, config, world)
    asked = 0

    def stop(done: int, of: int) -> bool:
        nonlocal asked
        asked += 1
        return rank == world - 1 and asked > 10

    cut = trainer.evaluator.transcribe(0, "mixed", 8, 16, stop)
    return [cut, trainer.evaluator.transcribe(0, "mixed", 8, 16)]


@pytest.mark.parametrize(
    ("world", "more"), [(3, []), (3, ["placement=disaggregated"]), (2, ["layout=pp2"])], ids=str
)
def test_ranks_leave_off_generating_together(
    ranks: RankPool, data: Path, tmp_path: Path, world: int, more: list[str]
) -> None:
    # A few samples at once, so that some are done by then.
    small = [f"+data.heldout.mixed.path={data}", "data.microbatch_tokens=160", *more]
    found = ranks.run(world, _leave_off, compose_config(overrides(data, tmp_path, *small)), world)
    assert all(of_rank == found[0] for of_rank in found), "all ranks know the same"
    cut, whole = found[0]
    assert len(cut) < len(whole) == 8
    assert all(transcription in whole for transcription in cut)


def _signalled(rank: int, config: Config) -> bool:
    """Train; once generation goes on, a signal comes to this rank, if it is the last."""
    trainer = make_trainer(rank, config, 2)

    def wait_and_signal() -> None:
        while not trainer.where.startswith("generating"):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    if rank == 1:
        threading.Thread(target=wait_and_signal, daemon=True).start()
    return trainer.run()


@pytest.mark.parametrize("limit", ["signal", "time"])
def test_generation_heeds_a_signal_and_its_time(
    ranks: RankPool, data: Path, tmp_path: Path, limit: str
) -> None:
    line = overrides(data, tmp_path, f"+data.heldout.mixed.path={data}", "train.steps=1")
    line += ["+data.heldout.mixed.generate=8", "train.checkpoint_every=1"]
    if limit == "time":
        assert ranks.run(2, _train_to_its_end, compose_config([*line, "train.generate_s=1e-9"])) == [
            True,
            True,
        ]
    else:
        assert ranks.run(2, _signalled, compose_config(line)) == [True, True], "all steps are done"
    summary = read_summary(tmp_path / "summary.json")
    assert summary["eval/generated/mixed"] < 8
    assert (tmp_path / "checkpoints").exists()


def _train_to_its_end(rank: int, config: Config) -> bool:
    return make_trainer(rank, config, 2).run()


def _overfit(rank: int, config: Config) -> list[Transcription]:
    trainer = make_trainer(rank, config, 2)
    trainer.run()
    return trainer.evaluator.transcribe(trainer.step, "mixed", 8, 128)


@pytest.mark.slow
def test_a_model_that_has_learnt_its_data_generates_it(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    line = overrides(
        data,
        tmp_path,
        "train.steps=150",
        "optim.lr=4e-3",
        "optim.eps=1e-8",
        f"+data.heldout.mixed.path={data}",
    )
    line = [*line, "optim.weight_decay=0", "layout=pp2", "train.eval_every=75"]
    transcriptions = ranks.run(2, _overfit, compose_config(line))[0]
    assert sum(t.exact for t in transcriptions) >= 5, transcriptions
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert metrics[-1]["loss/train"] < 0.2 < 4 < metrics[0]["loss/train"]
    assert [m["progress/step"] for m in metrics if "loss/eval/mixed" in m] == [75, 150]
    assert metrics[-1]["loss/eval/mixed"] == pytest.approx(metrics[-1]["loss/train"], rel=0.3)


def _train(rank: int, config: Config, world: int) -> None:
    make_trainer(rank, config, world).run()


def test_a_step_without_targets_is_skipped_and_counted(ranks: RankPool, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "data", ByteTokenizer()) as writer:
        for i in range(4):
            writer.add(Sample(str(i), "nothing to learn", targets=()))
    line = overrides(tmp_path / "data", tmp_path / "run", "layout=pp2", samples=2)
    ranks.run(2, _train, compose_config(line), 2)
    metrics = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [m["optim/skipped_steps"] for m in metrics] == [1, 2, 3]
    assert all(math.isnan(m["loss/train"]) for m in metrics)


def _train_until_no_update(rank: int, config: Config, world: int, spoiled: str) -> tuple[int, str]:
    """Train with weights of one component that are not finite on any rank."""
    trainer = make_trainer(rank, config, world)
    if spoiled in trainer.rank.components:
        for parameter in trainer.rank.components[spoiled].parameters:
            parameter.data.fill_(math.nan)
    try:
        trainer.run()
    except NoUpdateError as error:
        return trainer.step, str(error)
    return trainer.step, ""


def test_steps_in_a_row_without_an_update_end_the_run_on_all_ranks(
    ranks: RankPool, data: Path, tmp_path: Path
) -> None:
    line = overrides(data, tmp_path, "layout=pp2", "system=megatron", "train.steps=9", "optim.max_skipped=4")
    found = ranks.run(2, _train_until_no_update, compose_config(line), 2, "image")
    assert [step for step, _ in found] == [4, 4]
    assert found[0] == found[1]
    for word in ("step 4", "optim.max_skipped=4", "image nan", "optim.lr", "metrics.jsonl"):
        assert word in found[0][1]
    # The last step is in the records too: they are what the message tells to look at.
    assert [m["optim/skipped_steps"] for m in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def _skips(rank: int, config: Config, updated: list[bool]) -> list[int]:
    trainer = make_trainer(rank, config, 1)
    out = []
    with trainer.ahead() as ahead:
        done = trainer.run_step(trainer.begin(ahead, 1))
        for each in updated:
            trainer.progression.advance(done.prepared.plan, done.totals, 0, 0, each, 1.0)
            trainer.progression.check_updates(done.totals, {}, trainer.config.optim.max_skipped)
            out.append(trainer.progression.skipped_in_a_row)
    return out


def test_an_update_between_them_begins_the_count_anew(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    line = overrides(data, tmp_path, "optim.max_skipped=3")
    updated = [False, False, True, False, False, True, False]
    assert ranks.run(1, _skips, compose_config(line), updated)[0] == [1, 2, 0, 1, 2, 0, 1]


def test_steps_without_targets_end_the_run_too(ranks: RankPool, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "data", ByteTokenizer()) as writer:
        for i in range(4):
            writer.add(Sample(str(i), "nothing to learn", targets=()))
    line = overrides(tmp_path / "data", tmp_path / "run", "optim.max_skipped=2", samples=2)
    ((step, message),) = ranks.run(1, _train_until_no_update, compose_config(line), 1, "none")
    assert step == 2
    assert "no target token" in message

"""Gradients that travel in bf16: each bucket is the sum of what its ranks had, rounded once; the rest of a
run is as with reductions in fp32.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from small import overrides, write_mixed
from test_trainer import make_trainer

from omni.compose import compose_config
from omni.config import Config
from omni.planning.prepare import prepare_run
from omni.rank.part_buckets import PartBuckets
from omni.rehearsal.footprint_model import model_footprint
from omni.rehearsal.rehearse import rehearse
from parallel import buckets
from parallel.rounded import rounded_sum

REDUCE = "train.mixed_precision_reduce=bf16"
UNIT = 2.0**-8  # half of what lies between 1 and the next number of bf16
MOE = "model.llm.moe={experts: 4, topk: 2, ffn: 48}"
LAYOUTS = {
    "dp2": (2, []),
    "dp3": (3, []),
    "dp2, pp2": (4, ["layout.llm.pp=2"]),
    "experts": (4, [MOE, "layout.llm.ep=2"]),
    "zero 3": (4, ["layout.domain=2", "layout.llm.zero=3"]),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reduced") / "mixed"
    write_mixed(path)
    return path


def _summed(rank: int, own: list[float]) -> list[float]:
    numbers = torch.tensor(own)
    rounded_sum(numbers, dist.group.WORLD).wait()
    return numbers.chunk(dist.get_world_size())[rank].tolist()


def test_numbers_are_rounded_once_and_summed_in_fp32(ranks: RankPool) -> None:
    """The sums of four addends: in bf16, 256 + 1 would stay 256 at every hop of a ring."""
    assert ranks.run(4, _summed, [1 + 2**-9, 3.0, 256.0, 1.0]) == [[4.0], [12.0], [1024.0], [4.0]]
    of_ranks = [[256.0] * 4, *[[1.0] * 4] * 3]
    assert ranks.run(4, _summed_of, of_ranks) == [[259.0]] * 4


def _summed_of(rank: int, of_ranks: list[list[float]]) -> list[float]:
    return _summed(rank, of_ranks[rank])


class Reduced(NamedTuple):
    """A bucket of one rank: its group, its gradients before and its share of the sum after."""

    ranks: tuple[int, ...]
    before: torch.Tensor
    after: torch.Tensor


def _reduce(rank: int, config: Config, world: int) -> list[Reduced]:
    """Run a step; every bucket of this rank, in the order in which they were reduced."""
    begun: list[tuple[Any, torch.Tensor]] = []
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(buckets, "LEAST", 400)
        trainer, start = make_trainer(rank, config, world), PartBuckets.reduce_behind

        def noting(own: PartBuckets, layer: int) -> None:
            for bucket in reversed([each for each in own.left if each.layer > layer]):
                begun.append((bucket.group, bucket.group.buckets[0].grad_data.clone()))
            start(own, layer)

        patched.setattr(PartBuckets, "reduce_behind", noting)
        with trainer.ahead() as ahead:
            trainer.run_step(trainer.begin(ahead, 1))
    found = []
    for group, before in begun:
        replicas = group.intra_distributed_optimizer_instance_group
        share = group.buckets[0].grad_data.chunk(replicas.size())[replicas.rank()]
        found.append(Reduced(tuple(dist.get_process_group_ranks(replicas)), before, share.clone()))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_buckets_are_sums_of_what_was_rounded(
    ranks: RankPool, data: Path, tmp_path: Path, layout: str
) -> None:
    world, keys = LAYOUTS[layout]
    runs = []
    for name, more in (("fp32", []), ("bf16", [REDUCE])):
        line = overrides(data, tmp_path / name, "model.llm.tied=false", *keys, *more)
        runs.append(ranks.run(world, _reduce, compose_config(line), world))
    several = changed = 0
    for rank, (exact, rounded) in enumerate(zip(*runs, strict=True)):
        assert len(exact) == len(rounded) > 2
        for number, (in_fp32, in_bf16) in enumerate(zip(exact, rounded, strict=True)):
            group = in_bf16.ranks
            assert torch.equal(in_fp32.before, in_bf16.before)
            place = group.index(rank)
            # The other ranks of a group reduce it as their bucket of the same place among those of the group.
            at = [each.ranks for each in rounded[:number]].count(group)
            peers = [[each for each in runs[1][peer] if each.ranks == group][at] for peer in group]
            shares = torch.stack([each.before.chunk(len(group))[place] for each in peers])
            by_hand = torch.zeros_like(shares[0])
            for share in shares:
                by_hand += share.bfloat16().float()
            magnitudes = shares.double().abs().sum(0)
            # The order in which ranks are added up is free: a rounding of fp32 an addend.
            slack = len(group) * 2.0**-24 * magnitudes
            assert bool(((in_bf16.after - by_hand).abs() <= slack).all())
            assert bool(
                ((in_bf16.after.double() - in_fp32.after).abs() <= UNIT * magnitudes + 2 * slack).all()
            )
            several += 1
            changed += not torch.equal(in_bf16.after, in_fp32.after)
    assert changed > several // 2


def _losses(rank: int, config: Config, world: int) -> list[float]:
    trainer, losses = make_trainer(rank, config, world), []
    update = trainer.update_weights
    trainer.update_weights = lambda done: (update(done), losses.append(float(done.totals.loss)))  # type: ignore[method-assign]
    trainer.run()
    return losses


def test_a_run_goes_on_under_the_other_choice(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    def losses(folder: str, steps: int, world: int, *more: str) -> list[float]:
        line = overrides(data, tmp_path / folder, f"train.steps={steps}", "optim.min_lr=1e-3", *more)
        of_ranks: list[list[float]] = ranks.run(world, _losses, compose_config(line), world)
        return of_ranks[0]

    exact = losses("fp32", 4, 2)
    began = losses("bf16", 2, 2, REDUCE)
    assert began[0] == exact[0]
    assert began[1] != exact[1]
    later = losses("bf16", 3, 4, "layout.llm.pp=2") + losses("bf16", 4, 2, REDUCE)
    assert [*began, *later] == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize(
    ("world", "keys"),
    [
        (4, ["layout.llm.pp=2", "model.llm.tied=true"]),
        (4, [MOE, "layout.llm.ep=2", "layout.llm.tp=2"]),
        (2, ["model.llm.hidden=512", "model.llm.recompute=full", "+optim.components.image.frozen=true"]),
    ],
)
def test_memory_and_bytes_are_those_rehearsed(
    data: Path, tmp_path: Path, world: int, keys: list[str]
) -> None:
    few = ("train.precision=bf16", "cluster.ranks_per_node=2", REDUCE)
    spec = prepare_run(compose_config(overrides(data, tmp_path / "run", *few, *keys)), world)
    for plan in spec.planner.all_domains(1, 0):
        for rank in spec.arrangement.global_ranks(plan.number):
            modelled, rehearsed = model_footprint(spec, plan, rank), rehearse(spec, plan, rank).footprint
            assert modelled.traffic == rehearsed.traffic
            assert any(collective == "all_to_all" for _, collective in modelled.traffic)
            assert modelled.bytes == pytest.approx(rehearsed.bytes, rel=5e-4)
            assert modelled.at == rehearsed.at
            # With little to keep for the backward, a bucket that is being rounded is the most that is held.
            assert (modelled.at == "reduce(0)") == ("model.llm.hidden=512" in keys)

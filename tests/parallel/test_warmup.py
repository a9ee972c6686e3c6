"""All communicators are used once before the first step: then a run makes no group and meets no new pair."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import RankPool
from small import overrides, write_mixed

from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.config import Config
from omni.planning.prepare import prepare_run
from omni.training.trainer import Trainer
from parallel.groups import Places
from parallel.warmup import messages

MOE = "model.llm.moe={experts: 4, topk: 2, ffn: 48}"
LAYOUTS = {
    "tp2 pp2": (4, ["layout.llm.tp=2", "layout.llm.pp=2", "+layout.encoders.image.tp=2"]),
    "cp2 dp2": (4, ["layout.llm.cp=2", "layout.domain=2", "encoder_sp=dynamic", "llm_sp=dynamic"]),
    "ep2 interleaved": (
        4,
        [MOE, "layout.llm.pp=2", "layout.llm.ep=2", "layout.llm.vpp=2", "pipeline=interleaved"],
    ),
    "disaggregated": (3, ["layout.llm.pp=2", "placement=disaggregated", "placement.ranks=1"]),
}
COLLECTIVES = (
    "all_reduce",
    "all_gather_into_tensor",
    "_all_gather_base",
    "reduce_scatter_tensor",
    "_reduce_scatter_base",
    "all_to_all_single",
    "broadcast",
    "all_gather",
    "all_gather_object",
)


class Noting:
    """Calls of torch.distributed, by group and, for messages, by source and target."""

    def __init__(self) -> None:
        self.groups: set[int] = set()
        self.pairs: set[tuple[int, int, int]] = set()
        self.made = 0
        for name in COLLECTIVES:
            setattr(dist, name, self.collective(getattr(dist, name)))
        dist.new_group = self.new(dist.new_group)
        dist.isend, dist.irecv = self.message(dist.isend, True), self.message(dist.irecv, False)

    def collective(self, function: Any) -> Any:
        def call(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            given = [a for a in (*args, group) if isinstance(a, dist.ProcessGroup)]
            self.groups.add(id(given[0] if given else dist.group.WORLD))
            return function(*args, group=group, **kwargs) if group is not None else function(*args, **kwargs)

        return call

    def new(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.made += 1
            return function(*args, **kwargs)

        return call

    def message(self, function: Any, sends: bool) -> Any:
        def call(tensor: Any, peer: int, group: Any) -> Any:
            self.pairs.add((id(group), peer, int(sends)))
            return function(tensor, peer, group=group)

        return call


def meets(rank: int, config: Config, world: int) -> tuple[int, int, int, int]:
    """What a run meets after its warm-up: groups made, groups used and pairs that are new; and steps."""
    before = {name: getattr(dist, name) for name in (*COLLECTIVES, "new_group", "isend", "irecv")}
    noting = Noting()
    try:
        folder = RunFolder.create(Path(config.run.dir))
        trainer = Trainer(prepare_run(config, world), folder, rank, torch.device("cpu"))
        made, groups, pairs = noting.made, set(noting.groups), set(noting.pairs)
        assert trainer.run()
        return (
            noting.made - made,
            len(noting.groups - groups),
            len(noting.pairs - pairs),
            trainer.step,
        )
    finally:
        for name, function in before.items():
            setattr(dist, name, function)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_makes_no_group_and_meets_no_new_pair(ranks: RankPool, tmp_path: Path, name: str) -> None:
    world, keys = LAYOUTS[name]
    write_mixed(tmp_path / "data")
    line = overrides(tmp_path / "data", tmp_path / "run", *keys, "train.steps=2", "train.checkpoint_every=1")
    assert ranks.run(world, meets, compose_config(line), world) == [(0, 0, 0, 2)] * world


def test_torch_refuses_to_send_anything_over_places() -> None:
    places = Places((1, 5, 9), 5)
    assert (places.size(), places.rank()) == (3, 1)
    with pytest.raises((AttributeError, RuntimeError, TypeError, ValueError)):
        dist.all_reduce(torch.ones(1), group=places)  # type: ignore[arg-type]


def test_stages_hand_on_in_turn() -> None:
    assert messages(3, forward=True, wraps=False) == [(0, 1), (1, 2)]
    assert messages(3, forward=True, wraps=True) == [(0, 1), (1, 2), (2, 0)]
    assert messages(3, forward=False, wraps=True) == [(1, 0), (2, 1), (0, 2)]
    assert messages(1, forward=True, wraps=True) == []

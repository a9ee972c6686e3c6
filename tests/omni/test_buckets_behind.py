"""Weights arrive behind the next step's forwards, gradients are reduced behind the last backwards: bucket by
bucket, none before or after its time.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ranks import RankPool
from small import overrides, write_mixed
from test_trainer import make_trainer

from omni.compose import compose_config
from omni.config import Config
from omni.planning import candidates
from omni.rank.part_buckets import FRONT, PartBuckets
from omni.training.trainer import Trainer
from parallel import buckets
from pipeline.builders.one_queue import serial
from pipeline.builders.one_queue.moves import Moves, Orders, reduced_amid
from pipeline.builders.one_queue.serial import ordered
from pipeline.engine import _RunningStep
from pipeline.ops import Kind, Op
from pipeline.simulator import ComputeCost, Timeline, nothing

FROZEN = "+optim.components.image.frozen=true"
STEPS = 2
APART = "train.overlap_buckets=false"
LAYOUTS = {
    "dp2": (2, []),
    "dp2, encoders frozen": (2, [FROZEN]),
    "recomputed": (2, [FROZEN, "model.llm.recompute=full"]),
    "pp2, two virtual stages a stage": (4, ["layout.llm.pp=2", "layout.llm.vpp=2", "pipeline=interleaved"]),
    "tp2": (4, [FROZEN, "layout.llm.tp=2"]),
    "shared": (4, [FROZEN, "layout.domain=2", "llm_sp=all"]),
    "experts": (4, [FROZEN, "model.llm.moe={experts: 4, topk: 2, ffn: 48}", "layout.llm.ep=2"]),
    "zero 2": (4, [FROZEN, "layout.domain=2", "layout.llm.zero=2"]),
    "tied": (2, [FROZEN, "model.llm.tied=true"]),
    "weights later": (4, ["layout.llm.pp=2", "pipeline=zero_bubble_h1"]),
    "weights later, recomputed, tp2": (
        4,
        ["layout.llm.tp=2", "pipeline=zero_bubble_h1", "model.llm.recompute=full"],
    ),
    "one queue": (4, ["layout.llm.tp=2", "layout.domain=2", "cluster.queues=one"]),
    "carried": (4, ["layout.llm.pp=2", "cluster.queues=one"]),
    "carried, tp2": (4, ["layout.llm.tp=2", "layout.domain=2", "cluster.queues=one"]),
}
# Which are compared with buckets that travel behind nothing, too: what is behind hangs on these.
COMPARED = ("dp2", "pp2, two virtual stages a stage", "tp2", "one queue", "carried, tp2")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("buckets") / "mixed"
    write_mixed(path)
    return path


class Watched:
    """What a rank's buckets do in a run: `held` are all parts, `after` those of which weights are under way
    after each update; `early` says which pass ran without weights; `behind` counts the buckets of each
    reduction of the LLM that began before its op, `behind_encoders` those of each of an encoder, and
    `carried` those of the LLM behind the backward of an encoder; `losses` are of each step.
    """

    def __init__(self, trainer: Trainer) -> None:
        components = trainer.rank.components
        self.held = {(name, part): own for name, of in components.items() for part, own in of.buckets.items()}
        self.after: list[set[tuple[str, int]]] = []
        self.early: list[str] = []
        self.behind: list[int] = []
        self.behind_encoders: list[int] = []
        self.carried: list[int] = []
        self.losses: list[float] = []
        self.hooks = [
            layer.register_forward_pre_hook(self._at(self.held["llm", part], at))
            for part, of in (trainer.rank.stage.virtual_stages.items() if trainer.rank.stage else ())
            for at, layer in enumerate(of.model.decoder.layers)
        ] + [
            layer.register_forward_pre_hook(self._at(self.held[name, 0], at))
            for name, component in components.items()
            if name != "llm"
            for at, layer in enumerate(component.modules[0].followed_layers)
        ]

    def _at(self, own: PartBuckets, layer: int) -> Any:
        def check(*unused: Any) -> None:
            if own.coming and (own.coming[0].layer <= layer or layer == own.last):
                self.early.append(f"layer {layer}")

        return check

    def doing(self, step: _RunningStep, op: Op) -> None:
        number, part = (
            step.held(op) if op.kind in (Kind.ENCODE, Kind.FORWARD) else (op.index, op.virtual_stage)
        )
        own = self.held.get((step.plan.components[number], part)) if op.kind in _WATCHED else None
        if own is not None and op.kind is Kind.REDUCE:
            behind = self.behind if number == step.domain.llm else self.behind_encoders
            behind.append(len(own.buckets) - len(own.left))
            carrying = (of for at, of in step.closing.items() if at.kind is Kind.ENCODE_BACKWARD)
            if number == step.domain.llm and any((number, part) in begins for begins in carrying):
                self.carried.append(behind[-1])
        elif own is not None and own.coming and own.coming[0].layer == FRONT:
            self.early.append(str(op))

    def updated(self, done: Any) -> None:
        self.after.append({at for at, own in self.held.items() if own.coming})
        self.losses.append(float(done.totals.loss))


_WATCHED = (Kind.ENCODE, Kind.FORWARD, Kind.REDUCE)


def _amid(timeline: Timeline, before_ns: ComputeCost = nothing) -> tuple[Sequence[Moves], Orders]:
    moves, orders = ordered(timeline, before_ns)
    return moves, reduced_amid(moves, orders) or orders


def _train(rank: int, config: Config, world: int, least: int, carried: bool) -> dict[str, Any]:
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(buckets, "LEAST", least)
        if carried:  # as if reducing took so long that the last backwards of the LLM hid little of it
            for module in (serial, candidates):
                patched.setattr(module, "ordered", _amid)
        trainer = make_trainer(rank, config, world)
        watched, update, do = Watched(trainer), trainer.update_weights, _RunningStep.do
        watching = lambda step, op, *messages: (watched.doing(step, op), do(step, op, *messages))  # noqa: E731
        patched.setattr(_RunningStep, "do", watching)
        patched.setattr(trainer, "update_weights", lambda done: (update(done), watched.updated(done)))
        trainer.run()
    for hook in watched.hooks:
        hook.remove()  # it holds the buckets, and a graph that lives for long may hold the layer
    frozen = trainer.rank.optimizer.frozen
    several = {at for at, own in watched.held.items() if own.buckets and at[0] not in frozen}
    left = [at for at, own in watched.held.items() if own.coming]
    counts = [len(own.buckets) for (name, _), own in watched.held.items() if name == "llm"]
    return {**vars(watched), "held": several, "left": left, "counts": counts, "hooks": None}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_buckets_travel_behind_passes_and_change_nothing(
    ranks: RankPool, data: Path, tmp_path: Path, layout: str
) -> None:
    world, keys = LAYOUTS[layout]
    found = {}
    ways = [("one", 40_000_000, []), ("many", 400, []), ("apart", 400, [APART])]
    for name, least, more in ways if layout in COMPARED else ways[:2]:
        config = compose_config(overrides(data, tmp_path / name, f"train.steps={STEPS}", *keys, *more))
        found[name] = ranks.run(world, _train, config, world, least, "carried" in layout)
    for one, many in zip(found["one"], found["many"], strict=True):
        assert many["losses"] == pytest.approx(one["losses"], rel=1e-6)
        assert many["after"] == [many["held"]] * STEPS
        assert not many["early"]
        assert not many["left"]
        assert min(many["counts"]) > max(one["counts"])
        # Virtual stages of one layer have little behind it.
        if "layout.llm.vpp=2" not in keys and "carried" not in layout:
            assert min(many["behind"]) > 0
    if layout not in COMPARED:
        return
    for apart, many in zip(found["apart"], found["many"], strict=True):
        assert apart["losses"] == many["losses"]
        assert apart["counts"] == many["counts"]
        assert not any((*apart["early"], *apart["left"], *apart["behind"], *apart["behind_encoders"]))
    if "carried" in layout:
        # Behind an encoder that the LLM's buckets fill, its own have to wait.
        carried = [count for many in found["many"] for count in many["carried"]]
        assert len(carried) >= STEPS * world // 2
        assert min(carried) > 0
    # Ranks that encode nothing in a step have nothing to reduce it behind.
    assert any(any(many["behind_encoders"]) for many in found["many"]) == (FROZEN not in keys)

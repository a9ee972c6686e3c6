"""What a plan can say beyond our own schedules, run and held against one rank: several parts of the LLM on a
rank, backward passes in two halves, early reductions, chunks of several microbatches.
"""

import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import schedules_by_hand as by_hand
import torch
from packages import write_package
from ranks import RankPool
from small import overrides, write_mixed

from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.config import Config, ConfigError
from omni.training import parity, planner
from omni.training.job import Job, prepare_job
from omni.training.parity import TOLERANCE, WEIGHT_TOLERANCE, Measurement, compare, compare_weights
from omni.training.sharing import make_chunks
from omni.training.trainer import Trainer
from pipeline import engine
from pipeline.plan import BACKWARDS, Chunk, Grad, Kind, Op
from pipeline.routes import outputs_of
from pipeline.verifier import PlanRefusedError

UNTIED = ("model.llm.tied=false",)
EXPERTS = ("model.llm.moe={experts: 4, topk: 2, ffn: 48, shared_ffn: 32, dense_layers: 1}",)
# Rows enter at the embedding, before layer 1 and before layer 2 of 4.
TAPS = ("model.encoders.image.layers=3", "+model.encoders.image.taps=[1,2]")
RECOMPUTE = ("model.llm.recompute=full", "model.encoders.image.recompute=full")
PP2 = ("layout.llm.pp=2", "layout.llm.parts=2")


@dataclass(frozen=True)
class Case:
    """A schedule by hand on `world` ranks, of a `model` that one rank has too. With `merged`, neighbouring
    chunks of a slot are one.
    """

    world: int
    schedule: str
    layout: tuple[str, ...]
    model: tuple[str, ...] = ()
    single_queue: bool = False
    merged: bool = False

    @property
    def line(self) -> tuple[str, ...]:
        return (*self.model, *self.layout, f"pipeline={by_hand.POLICIES[self.schedule].name}")


CASES = {
    "interleaved": Case(2, "INTERLEAVED", PP2),
    "split, recomputed, one queue": Case(2, "SPLIT", ("layout.llm.pp=2", *RECOMPUTE), single_queue=True),
    "both, early, untied": Case(2, "EARLY", PP2, UNTIED),
    "both, early, both ends on a rank": Case(2, "EARLY", ("layout.llm.parts=2", "layout.domain=2")),
    "both, merged, one queue": Case(2, "BOTH", PP2, single_queue=True, merged=True),
    "both, early, beside": Case(3, "EARLY", (*PP2, "placement=disaggregated"), merged=True),
    "both, tp2, taps, recomputed, one queue": Case(
        4,
        "BOTH",
        (*PP2, "layout.llm.tp=2", "+layout.encoders.image.tp=2", *RECOMPUTE),
        TAPS,
        single_queue=True,
    ),
    "both, early, experts, recomputed": Case(
        4, "EARLY", (*PP2, "layout.llm.dp=2", "layout.llm.ep=2", *RECOMPUTE), EXPERTS
    ),
    "both, two replicas, taps, merged": Case(
        4, "BOTH", (*PP2, "layout.llm.dp=2", "layout.domain=2"), TAPS, merged=True
    ),
    "split, pp4, taps, one queue": Case(4, "SPLIT", ("layout.llm.pp=4",), TAPS, single_queue=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Data, and a package that registers the schedules."""
    folder = tmp_path_factory.mktemp("by_hand")
    write_mixed(folder / "mixed")
    points = "\n".join(f"{p.name} = schedules_by_hand:{name}" for name, p in by_hand.POLICIES.items())
    write_package(folder / "package", "made_by_hand", "", {"omni.schedule": points})
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "package"))
        yield folder


def configure(folder: Path, *more: str) -> Config:
    return compose_config(overrides(folder / "mixed", folder / "run", "train.steps=2", *more, samples=16))


def prepare(case: Case, config: Config) -> Job:
    """The job of a case, where its package may not be on the path yet."""
    package = str(Path(config.run.dir).parent / "package")
    if package not in sys.path:
        sys.path.append(package)
    job = prepare_job(config, case.world)
    changes: dict[str, Any] = {"single_queue": case.single_queue}
    if case.merged:
        changes["chunking"] = merged_chunks
    return replace(job, planner=replace(job.planner, **changes))


def merged_chunks(items: Any, slots: Any, sharing: Any, cost_ns: Any) -> tuple[Chunk, ...]:
    """Two by two, the chunks that follow each other on a slot."""
    of_slot: dict[Any, list[Chunk]] = defaultdict(list)
    for chunk in make_chunks(items, slots, sharing, cost_ns):
        of_slot[chunk.component, chunk.ranks, chunk.layout.num_ranks].append(chunk)
    merged = []
    for chunks in of_slot.values():
        for first in range(0, len(chunks), 2):
            merged.append(merge(chunks[first : first + 2], items, sharing))
    return tuple(sorted(merged, key=lambda chunk: (chunk.microbatches, chunk.component, chunk.ranks)))


def merge(chunks: list[Chunk], items: Any, sharing: Any) -> Chunk:
    numbers = tuple(i for chunk in chunks for i in chunk.items)
    one = chunks[0]
    layout = replace(one.layout, shards=tuple(s for chunk in chunks for s in chunk.layout.shards))
    return replace(
        one,
        microbatches=tuple(sorted({items[i].microbatch for i in numbers})),
        items=numbers,
        layout=layout,
        tiles=tuple(t for chunk in chunks for t in chunk.tiles),
        outputs=outputs_of(numbers, items, layout, one.tp, sharing[one.component].num_points),
    )


def measure(rank: int, case: Case, config: Config) -> Measurement | None:
    job = prepare(case, config)
    folder = RunFolder.create(Path(config.run.dir))
    return parity.measure(job, folder, rank, torch.device("cpu"), steps=config.train.steps)


_references: dict[tuple[str, ...], Measurement] = {}


def reference(ranks: RankPool, folder: Path, model: tuple[str, ...]) -> Measurement:
    if model not in _references:
        _references[model] = ranks.run(1, measure, Case(1, "SPLIT", ()), configure(folder, *model))[0]
    return _references[model]


def worst(ranks: RankPool, folder: Path, case: Case, function: Any = measure) -> tuple[Any, Any]:
    """The worst differences of gradients and of weights from one rank under a schedule of ours."""
    expected = reference(ranks, folder, case.model)
    found = ranks.run(case.world, function, case, configure(folder, *case.line))[0]
    return compare(expected, found)[0], compare_weights(expected, found)[0]


@pytest.mark.parametrize("name", CASES)
def test_schedules_by_hand_equal_one_rank(ranks: RankPool, folder: Path, name: str) -> None:
    gradients, weights = worst(ranks, folder, CASES[name])
    assert gradients.relative <= TOLERANCE, gradients
    assert weights.relative <= WEIGHT_TOLERANCE, weights

"""What a plan can say beyond our own schedules, run and held against one rank: several virtual stages of the
LLM on a rank, backward passes in two halves, encoder batches of several microbatches.
"""

import os
import subprocess
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import schedules_by_hand as by_hand
import torch
from packages import write_package
from ranks import RankPool
from small import overrides, write_mixed
from test_audio_encoder import line_of, write_heard_and_seen

from infra.run_folder import RunFolder, read_metrics
from omni.compose import compose_config
from omni.config import Config, ConfigError
from omni.models.llm_stage import LLMStage
from omni.models.weight_gradients import PendingProducts
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.planning.sharing import make_encoder_batches
from omni.rank.step import execute
from omni.training import parity
from omni.training.parity import TOLERANCE, WEIGHT_TOLERANCE, Measurement, compare, compare_weights
from omni.training.trainer import Trainer
from parallel.work import Grad
from pipeline import engine
from pipeline.builders.passes import held_at_most
from pipeline.domain_plan import EncoderBatch
from pipeline.ops import BACKWARDS, Kind, Op
from pipeline.routes import outputs_of
from pipeline.verifier import PlanRefusedError

UNTIED = ("model.llm.tied=false",)
EXPERTS = ("model.llm.moe={experts: 4, topk: 2, ffn: 48, shared_ffn: 32, dense_layers: 1}",)
# Rows enter at the embedding, before layer 1 and before layer 2 of 4.
TAPS = ("model.encoders.image.layers=3", "+model.encoders.image.taps=[1,2]")
RECOMPUTE = ("model.llm.recompute=full", "model.encoders.image.recompute=full")
PP2 = ("layout.llm.pp=2", "layout.llm.vpp=2")


@dataclass(frozen=True)
class Case:
    """A schedule by hand on `world` ranks, of a `model` that one rank has too. With `merged`, neighbouring
    encoder batches of a tp group are one.
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
    "both, untied": Case(2, "BOTH", PP2, UNTIED),
    "both, both ends on a rank": Case(2, "BOTH", ("layout.llm.vpp=2", "layout.domain=2")),
    "both, merged, one queue": Case(2, "BOTH", PP2, single_queue=True, merged=True),
    "both, beside": Case(3, "BOTH", (*PP2, "placement=disaggregated"), merged=True),
    "both, tp2, taps, recomputed, one queue": Case(
        4,
        "BOTH",
        (*PP2, "layout.llm.tp=2", "+layout.encoders.image.tp=2", *RECOMPUTE),
        TAPS,
        single_queue=True,
    ),
    "both, experts, recomputed": Case(
        4, "BOTH", (*PP2, "layout.llm.dp=2", "layout.llm.ep=2", *RECOMPUTE), EXPERTS
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


def prepare(case: Case, config: Config) -> RunSpec:
    """The run of a case, where its package may not be on the path yet."""
    package = str(Path(config.run.dir).parent / "package")
    if package not in sys.path:
        sys.path.append(package)
    spec = prepare_run(config, case.world)
    changes: dict[str, Any] = {"single_queue": case.single_queue}
    if case.merged:
        changes["encoder_batching"] = merged_encoder_batches
    domain = replace(spec.planner.domain, **changes)
    return replace(spec, planner=replace(spec.planner, domain=domain))


def merged_encoder_batches(
    items: Any, tp_groups: Any, sharing: Any, costs: Any, waves: Any
) -> tuple[EncoderBatch, ...]:
    """Two by two, the image encoder batches that follow each other on a tp group; others as they are."""
    of_tp_group: dict[Any, list[EncoderBatch]] = defaultdict(list)
    for batch in make_encoder_batches(items, tp_groups, sharing, costs, waves):
        of_tp_group[batch.component, batch.ranks, batch.layout.num_cp_ranks].append(batch)
    merged = []
    for encoder_batches in of_tp_group.values():
        size = 2 if encoder_batches[0].component == "image" else 1
        for first in range(0, len(encoder_batches), size):
            merged.append(merge(encoder_batches[first : first + size], items, sharing))
    return tuple(sorted(merged, key=lambda batch: (batch.microbatches, batch.component, batch.ranks)))


def merge(encoder_batches: list[EncoderBatch], items: Any, sharing: Any) -> EncoderBatch:
    numbers = tuple(i for batch in encoder_batches for i in batch.items)
    one = encoder_batches[0]
    layout = replace(one.layout, shards=tuple(s for batch in encoder_batches for s in batch.layout.shards))
    return replace(
        one,
        microbatches=tuple(sorted({items[i].microbatch for i in numbers})),
        items=numbers,
        layout=layout,
        tiles=tuple(t for batch in encoder_batches for t in batch.tiles),
        outputs=outputs_of(numbers, items, layout, one.tp, sharing[one.component].num_points),
    )


def measure(rank: int, case: Case, config: Config) -> Measurement | None:
    spec = prepare(case, config)
    folder = RunFolder.create(Path(config.run.dir))
    return parity.measure(spec, folder, rank, torch.device("cpu"), steps=config.train.steps)


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


@pytest.mark.parametrize("name", CASES)
def test_plan_has_what_the_case_is_about(folder: Path, name: str) -> None:
    case = CASES[name]
    planner = prepare(case, configure(folder, *case.line)).planner
    plan = planner.next_step(1, 0, 0)
    planner.verify(plan)
    domain, backward = plan.domain, [op for ops in plan.domain.ops for op in ops if op.kind in BACKWARDS]
    several = [virtual_stages for virtual_stages in domain.holds if len(virtual_stages) > 1]
    assert bool(several) == (case.schedule != "SPLIT")
    grads = {op.grad for op in backward}
    assert grads == ({Grad.BOTH} if case.schedule == "INTERLEAVED" else {Grad.INPUT, Grad.WEIGHT})
    assert any(len(batch.microbatches) > 1 for batch in domain.encoder_batches) == case.merged
    for ops in domain.ops if not case.single_queue else ():  # there, what communicates comes first
        reduced = [at for at, op in enumerate(ops) if op.kind is Kind.REDUCE]
        after = [op for op in ops[reduced[0] :] if op.kind in BACKWARDS]
        # A rank beside the LLM has nothing but an encoder to reduce.
        assert bool(after) == (len(reduced) > 1)


@pytest.mark.parametrize("frozen", ["llm", "image"])
def test_frozen_components_need_no_schedule_of_their_own(ranks: RankPool, folder: Path, frozen: str) -> None:
    case = Case(2, "BOTH", PP2, (f"+optim.components={{{frozen}: {{frozen: [[1, 3]]}}}}",), merged=True)
    gradients, weights = worst(ranks, folder, case)
    assert gradients.relative <= TOLERANCE, gradients
    assert weights.relative <= WEIGHT_TOLERANCE, weights


def test_a_frozen_encoder_is_given_nothing_back(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    """Its encoder batch waits for a later microbatch when the rows of an earlier one return to another
    encoder.
    """
    data = write_heard_and_seen(tmp_path)
    more = ("+optim.components={image: {frozen: [[1, 3]]}}", "pipeline=one_f_one_b")
    config = compose_config(line_of(data, folder / "run", *more, "train.steps=1"))
    runs = [Case(1, "SPLIT", (), merged=merged) for merged in (False, True)]
    expected, found = (ranks.run(1, measure, case, config)[0] for case in runs)
    assert compare(expected, found)[0].relative <= TOLERANCE, compare(expected, found)[0]


# What a step holds.


class Kept:
    """A tensor that an autograd graph keeps, for as long as the graph lives."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def hold(
    rank: int, case: Case, config: Config
) -> tuple[Counter[int], Counter[int], dict[int, int], list[int], int, int]:
    """Run a step. Returns the passes of each virtual stage that live at once at most, as run, as planned and
    as the schedule says, how many gradients of weights each pass put off, and how many tensors graphs kept,
    and keep after the step.
    """
    run_folder = RunFolder.create(Path(config.run.dir))
    trainer = Trainer(prepare(case, config), run_folder, rank, torch.device("cpu"))
    graphs: weakref.WeakSet[Kept] = weakref.WeakSet()
    most: Counter[int] = Counter()
    later: list[int] = []
    made = 0
    do = engine._RunningStep.do

    def pack(tensor: torch.Tensor) -> Kept:
        nonlocal made
        made += 1
        graphs.add(kept := Kept(tensor))
        return kept

    def watched(step: Any, op: Op, *messages: Any) -> None:
        do(step, op, *messages)
        if op.kind in BACKWARDS and op.grad is Grad.INPUT:
            later.append(len(step.pending[op.kind, op.index, op.virtual_stage]))
        waiting = {(m, virtual_stage) for kind, m, virtual_stage in step.pending if kind is Kind.BACKWARD}
        live = Counter(virtual_stage for _, virtual_stage in waiting | step.passes.keys())
        for virtual_stage, number in live.items():
            most[virtual_stage] = max(most[virtual_stage], number)

    engine._RunningStep.do = watched
    try:
        with trainer.ahead() as ahead:
            prepared = trainer.begin(ahead, 1)
            trainer.agree_on(prepared.plan)
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
                execute(trainer.rank, prepared.plan, prepared.inputs)
    finally:
        engine._RunningStep.do = do
    domain = prepared.plan.domain
    planned = held_at_most(domain.ops_of(trainer.rank.domain_rank))
    bound = {virtual_stage: by_hand.BOTH.in_flight(domain, virtual_stage) for virtual_stage in planned}
    return most, planned, bound, later, made, len(graphs)


@pytest.mark.parametrize("recompute", [(), RECOMPUTE])
def test_a_step_holds_what_its_plan_says_and_leaves_nothing(
    ranks: RankPool, folder: Path, recompute: tuple[str, ...]
) -> None:
    case = Case(2, "BOTH", (*PP2, *recompute), TAPS, merged=True)
    results = ranks.run(2, hold, case, configure(folder, *case.line))
    for rank, (most, planned, bound, later, made, left) in enumerate(results):
        assert most == planned == bound
        assert sorted(most) == [rank, rank + 2]
        assert min(later) > 0
        assert made > 100
        assert left == 0


# What must not run.


def run_changed(rank: int, case: Case, config: Config, name: str) -> Measurement | None:
    """A measurement with an engine that does something wrong."""
    changed = CHANGES[name]
    owner, attribute = changed.owner, changed.attribute
    right = getattr(owner, attribute)
    setattr(owner, attribute, changed.wrong(right))
    try:
        return measure(rank, case, config)
    finally:
        setattr(owner, attribute, right)


@dataclass(frozen=True)
class Change:
    owner: Any
    attribute: str
    wrong: Any


def _forget_one(run: Any) -> Any:
    def forgetful(pending: Any) -> None:
        if pending._products:
            pending._products.pop()
        run(pending)

    return forgetful


def _same_virtual_stage(forward: Any) -> Any:
    return lambda stage, number, *inputs: forward(stage, 0 if number == 2 else number, *inputs)


CHANGES = {
    "a weight is forgotten": Change(PendingProducts, "run", _forget_one),
    "the wrong virtual stage runs": Change(LLMStage, "forward", _same_virtual_stage),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_goes_wrong_is_seen(ranks: RankPool, folder: Path, name: str) -> None:
    case = CASES["both, untied"]
    expected = reference(ranks, folder, case.model)
    found = ranks.run(case.world, run_changed, case, configure(folder, *case.line), name)[0]
    assert compare(expected, found)[0].relative > 100 * TOLERANCE


def test_a_shared_embedding_is_reduced_after_the_last_virtual_stage(folder: Path) -> None:
    case = CASES["both, both ends on a rank"]
    planner = prepare(case, configure(folder, *case.line)).planner
    plan = planner.next_step(1, 0, 0)
    domain = plan.domain
    assert domain.reductions == ((0, 1), (0, 0), (1, 0))
    last = len(domain.microbatches) - 1
    late = Op(Kind.BACKWARD, last, virtual_stage=1, grad=Grad.WEIGHT)
    reductions = [Op(Kind.REDUCE, 0), Op(Kind.REDUCE, 0, virtual_stage=1), Op(Kind.REDUCE, 1)]
    lists = []
    for ops in domain.ops:
        waits = [op for op in ops if op.on is Kind.REDUCE]
        rest = [op for op in ops if op not in (*reductions, *waits, late)]
        lists.append((*rest, reductions[0], late, *reductions[1:], *waits))
    domain = replace(domain, ops=tuple(lists), reductions=((0, 0), (0, 1), (1, 0)))
    words = r"R3: domain rank 0 must run backward\(2, virtual stage 1, weight\) before reduce\(0\)"
    with pytest.raises(PlanRefusedError, match=words):
        planner.verify(replace(plan, domain=domain))


def test_a_schedule_is_not_given_more_virtual_stages_than_it_orders(folder: Path) -> None:
    words = (
        r"layout\.llm\.vpp=2: pipeline\.policy=encode_first orders at most 1 on a rank: "
        r"set layout\.llm\.vpp=1, or choose one for several, such as interleaved"
    )
    with pytest.raises(ConfigError, match=words):
        prepare_run(configure(folder, "layout.llm.vpp=2"), 1)
    with pytest.raises(ConfigError, match=r"layout\.llm\.vpp=3: .*=by_hand_2 orders at most 2"):
        prepare_run(configure(folder, "layout.llm.vpp=3", "pipeline=by_hand_2"), 1)


@pytest.mark.slow
def test_the_command_line_trains_and_evaluates(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    case = CASES["both, untied"]
    line = overrides(
        folder / "mixed",
        tmp_path / "run",
        *case.line,
        "launch.ranks=2",
        "train.eval_every=1",
        f"+data.heldout.mixed.path={folder / 'mixed'}",
        "+data.heldout.mixed.samples=4",
        "+data.heldout.mixed.generate=1",
        samples=16,
    )
    path = os.pathsep.join(
        [str(folder / "package"), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-m", "omni", "train", *line, "train.steps=2"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=True, timeout=180)
    steps = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [step["progress/step"] for step in steps] == [1, 2]
    expected = reference(ranks, folder, case.model).loss
    assert steps[0]["loss/train"] == pytest.approx(expected, rel=TOLERANCE)
    assert all(step["loss/eval/mixed"] > 0 for step in steps)

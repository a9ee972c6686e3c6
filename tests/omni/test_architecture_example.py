"""The numbers of the example in docs/architecture.md, "One sample, from the index to the update"."""

from pathlib import Path

import numpy as np
import pytest
from small import image, overrides

from dataloader.format import PLACEHOLDER, Sample
from dataloader.reader import Reader
from dataloader.tokenizer import ByteTokenizer
from dataloader.tokens import tokenize
from dataloader.writer import DatasetWriter
from omni.compose import compose_config
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from pipeline.domain_plan import DomainPlan

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSpec, Path]:
    folder = tmp_path_factory.mktemp("example")
    rng = np.random.default_rng(0)
    with DatasetWriter(folder / "data", ByteTokenizer(), rows_per_group=4) as writer:
        images = image(rng, 8, 16), image(rng, 16, 24)
        writer.add(Sample("two", f"left {PLACEHOLDER} and right {PLACEHOLDER}.", images))
    layout = ("layout.llm.cp=2", "layout.llm.pp=2")
    line = overrides(folder / "data", folder / "run", *layout, samples=1)
    return prepare_run(compose_config(line), 4), folder / "data"


@pytest.fixture(scope="module")
def domain(run: tuple[RunSpec, Path]) -> DomainPlan:
    planner = run[0].planner
    plan = planner.next_step(1, 0, 0)
    planner.verify(plan)
    assert (plan.taken.cursor, plan.taken.next_cursor, plan.taken.lengths) == (0, 1, (52,))
    assert plan.group.replicas == (((0,),),)
    return plan.domain


def test_items_shards_and_tiles_are_as_told(domain):
    assert [(i.tokens, i.rows, i.start) for i in domain.items] == [(32, 8, 6), (96, 24, 26)]
    (batch,) = domain.microbatches
    assert [(s.cp_rank, s.start, s.length) for s in batch.layout.shards[0]] == [(0, 0, 26), (1, 26, 26)]
    assert [(t.cp_rank, t.row_start, t.row_count) for t in batch.tiles[0]] == [(0, 0, 37), (1, 37, 15)]
    causal = [sum(range(t.row_start + 1, t.row_start + t.row_count + 1)) for t in batch.tiles[0]]
    assert causal == [703, 675]


def test_encoder_batches_and_rows_go_where_they_are_told_to(domain):
    assert [(encoder_batch.ranks, encoder_batch.items) for encoder_batch in domain.encoder_batches] == [
        ((0,), (1,)),
        ((1,), (0,)),
    ]
    (route,) = domain.routes
    assert [(s.source, s.destination, s.destination_start, s.length) for s in route.segments] == [
        (1, 0, 6, 8),
        (0, 1, 0, 24),
    ]


def test_op_lists_are_those_of_the_page(domain):
    page = " ".join(PAGE.read_text().split())
    for rank in (0, 2):
        assert f"rank {rank}: " + " | ".join(map(str, domain.ops_of(rank))) in page
    of_twin = {"encode(0)": "encode(1)", "encode_backward(0)": "encode_backward(1)"}
    for rank in (1, 3):
        twin = map(str, domain.ops_of(rank - 1))
        assert list(map(str, domain.ops_of(rank))) == [of_twin.get(op, op) for op in twin]
    assert domain.reductions == ((0, 1), (0, 0), (1, 0))


def test_targets_fall_to_cp_ranks_as_told(run):
    spec, data = run
    counts = spec.encoders["image"].count
    meta = spec.indexes["mixed"].meta(0, "mixed", lambda _, size: counts(size))
    _, _, is_target = tokenize(Reader(data).read(0, text=True, items=False), meta, spec.tokenizer)
    assert (is_target[:26].sum(), is_target[26:].sum()) == (16, 2)

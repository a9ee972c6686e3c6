"""Literal tokens among the rows of items: where transformers has them, and the same in every layout."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import RankPool
from small import overrides, write_mixed
from test_attach_points import CHEAP_LINKS, measure
from test_grid_positions import theirs, transcribed
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from dataloader.loader import Fetched
from dataloader.reader import Reader
from dataloader.tokens import ItemMeta, SampleMeta, tokenize
from omni.compose import compose_config
from omni.config import ConfigError
from omni.models.encoders.vit import ViTConfig, ViTEncoder
from omni.models.grid_positions import GridRows, grid_positions, grids_in
from omni.models.item_layout import lines
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec, item_count, item_layout
from omni.rank.inputs import Assembler, Place
from omni.training.parity import TOLERANCE, Measurement, compare
from pipeline.domain_plan import PlannedItem, RowRuns

CPU = torch.device("cpu")
BREAK = 7
BREAKS = (f"+model.encoders.image.row_break={BREAK}",)
LAYOUTS = {
    "cp2 pp2": (4, ["layout.llm.cp=2", "layout.llm.pp=2"]),
    "tp2": (2, ["layout.llm.tp=2", "+layout.encoders.image.tp=2"]),
    "shared": (2, ["layout.domain=2", "llm_sp=dynamic", "encoder_sp=dynamic", *CHEAP_LINKS]),
    "beside pp2": (3, ["layout.llm.pp=2", "placement=disaggregated"]),
}


def test_lines_of_a_grid_have_a_token_between_them() -> None:
    assert lines((1, 2, 3), 12) == ((3, (12,)), (3, ()))
    assert lines((2, 1, 3), 12) == ((3, (12,)), (3, ()))
    assert lines((1, 1, 3), 12) == ((3, ()),)


@pytest.mark.parametrize("seed", range(20))
def test_rows_and_literals_fill_an_item_in_order(seed: int) -> None:
    draw = np.random.default_rng(seed)
    runs: RowRuns = tuple(
        (int(draw.integers(0, 4)), tuple(draw.integers(0, 99, draw.integers(0, 3)).tolist()))
        for _ in range(6)
    )
    tokens = [t for rows, after in runs for t in [*[-1] * rows, *after]]  # -1 for a row
    where = [5 + at for at, token in enumerate(tokens) if token == -1]
    item = PlannedItem("eye", 0, 0, 0, 4 * len(where), len(where), 5, (), runs)
    assert list(item.literals()) == [(5 + at, token) for at, token in enumerate(tokens) if token != -1]
    for first in range(len(where) + 1):
        for stop in range(first, len(where) + 1):
            found = [at + i for at, rows in item.places(first, stop - first) for i in range(rows)]
            assert found == where[first:stop]


def test_frames_between_timestamps_stand_where_qwen3_vl_has_them() -> None:
    """Qwen3-VL writes the time of each frame, in tokens, before its rows."""
    stamps, frames, high, wide = [(3, 4), (5, 6, 7), (8,)], 3, 2, 5
    runs: RowRuns = ((0, stamps[0]), (10, stamps[1]), (10, stamps[2]), (10, ()))
    item = PlannedItem("video", 0, 0, 0, 120, 30, 4, (frames, high, wide), runs)
    starts = [4 + 2, 4 + 2 + 10 + 3, 4 + 2 + 10 + 3 + 10 + 1]
    expected = [GridRows(start, (1, high, wide)) for start in starts]
    assert list(grids_in(item)) == expected
    found = grid_positions(60, grids_in(item))
    assert np.array_equal(found, theirs(qwen3_vl.Qwen3VLModel, 60, expected))
    inside = replace(item, runs=((15, (1,)), (15, ())))  # no frames: as text
    assert list(grids_in(inside)) == []


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures")
    write_mixed(path)
    return path


def of_pixtral(size: tuple[int, ...], spec: RunSpec) -> list[int]:
    """Tokens of a picture of windows of 4 x 4 pixels as Pixtral writes them: each line ends with a break, and
    the last with the end of the picture in its place.
    """
    written = ([spec.tokenizer.item] * (size[1] // 4) + [BREAK]) * (size[0] // 4)
    return [*written[:-1], spec.tokenizer.end_of_item]


def expected_ids(meta: SampleMeta, ids: np.ndarray, spec: RunSpec) -> list[int]:
    """The inputs of a sample, with the tokens of its items as Pixtral writes them."""
    found, at, seen = [spec.tokenizer.bos], 1, 0
    for item in meta.items:
        own = of_pixtral(item.size, spec)
        assert len(own) == item.rows + 1
        text = item.at - seen
        found += [*ids[at : at + text].tolist(), *own]
        at, seen = at + text + len(own), item.at
    return [*found, *ids[at:].tolist()]


@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
def test_ranks_embed_the_tokens_that_pixtral_writes(data, tmp_path: Path, layout: str) -> None:
    world, more = LAYOUTS.get(layout, (1, []))
    spec = prepare_run(compose_config(overrides(data, tmp_path, *BREAKS, *more)), world)
    reader, seen = Reader(data), 0
    for number in range(spec.arrangement.num_domains):
        domain = spec.planner.next_step(1, 0, number).domain
        metas = spec.planner.metas_of(domain)
        for position in range(domain.llm_size):
            place = Place(position, CPU, torch.float32)
            assembler = Assembler(spec.config.model.llm, spec.encoders, ("mixed",), place)
            texts = [
                tokenize(reader.read(metas[i].id, text=True, items=False), metas[i], spec.tokenizer)
                for i in assembler.texts(domain)
            ]
            given = dict(zip(assembler.texts(domain), texts, strict=True))
            items = [None for _ in assembler.items(domain)]
            inputs = assembler.assemble(domain, Fetched(texts, items, ()), predict=False)
            for batch, of in zip(domain.microbatches, inputs.microbatches, strict=True):
                at = 0
                for piece in assembler.pieces(domain, batch) if domain.is_first(position) else ():
                    own = expected_ids(metas[piece.sample], given[piece.sample][0], spec)
                    size = piece.stop - piece.start
                    assert of.ids is not None
                    assert of.ids[0, at : at + size].tolist() == own[piece.start : piece.stop]
                    at, seen = at + size, seen + own[piece.start : piece.stop].count(BREAK)
    assert seen, "no rank has a token between rows"


@pytest.fixture(scope="module")
def one(ranks: RankPool, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    line = overrides(data, tmp_path_factory.mktemp("one"), *BREAKS)
    return ranks.run(1, measure, compose_config(line), 1)[0]


@pytest.mark.parametrize(
    "layout",
    ["cp2 pp2", "shared", *(pytest.param(of, marks=pytest.mark.slow) for of in ("tp2", "beside pp2"))],
)
def test_layouts_equal_one_rank(ranks: RankPool, data, tmp_path: Path, one: Measurement, layout: str) -> None:
    world, more = LAYOUTS[layout]
    many = ranks.run(world, measure, compose_config(overrides(data, tmp_path, *BREAKS, *more)), world)[0]
    assert compare(one, many)[0].relative <= TOLERANCE, compare(one, many)[0]


def test_generation_goes_on_behind_literals(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    line = overrides(data, tmp_path, *BREAKS, f"+data.heldout.seen.path={data}")
    fast, slow = ranks.run(1, transcribed, compose_config(line), 1)[0]
    assert fast == slow
    assert sum(len(set(of.generated)) for of in fast) > 40, "texts that repeat a token tell little"


class Short(ViTEncoder):
    def row_layout(self, size: tuple[int, ...]) -> RowRuns:
        return ((1, (BREAK,)), (1, ()))


def test_layouts_that_cannot_be_are_refused_by_name() -> None:
    config = ViTConfig(layers=1, hidden=32, heads=2, ffn=32, patch=2, row_break=BREAK)
    eye, size = {"eye": ViTEncoder(config)}, (8, 12)
    assert item_count(eye, "image", size) == (24, 6 + 1)
    item = ItemMeta("image", 24, 7, 0, size)
    assert item_layout(eye, item, 272) == (6, (1, 2, 3), ((3, (BREAK,)), (3, ())))
    with pytest.raises(
        ConfigError, match=r"model.encoders.eye: row_layout\(\(8, 12\)\) tells runs of \[1, 1\]"
    ):
        item_layout({"eye": Short(config)}, item, 272)
    with pytest.raises(
        ConfigError, match=r"model.encoders.eye: row_layout\(\(8, 12\)\) has a token 7 between"
    ):
        item_layout(eye, item, 7)


@pytest.mark.parametrize(
    ("token", "words"),
    [
        (-1, r"row_break=-1: must be at least 0"),
        (260, r"has a token 260 between rows, and the tokenizer 260 tokens"),
    ],
)
def test_a_token_that_is_none_is_refused_before_ranks_start(data: Path, tmp_path, token, words) -> None:
    line = overrides(data, tmp_path, f"+model.encoders.image.row_break={token}")
    with pytest.raises(ConfigError, match=rf"model.encoders.image.*{words}"):
        prepare_run(compose_config(line), 1)

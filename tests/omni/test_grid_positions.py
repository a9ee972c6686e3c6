"""Positions in time, height and width: those of transformers, and the same on every rank of every layout."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from open_model_folders import DELTA, PLAIN, changed, make, transformers
from ranks import RankPool
from small import overrides, write_mixed
from test_attach_points import CHEAP_LINKS, measure
from test_open_model_keys import LENGTHS, logits
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2_vl
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3_vl

from dataloader.loader import Fetched
from dataloader.tokens import ItemMeta, item_row_offsets, length
from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.config import Config, ConfigError
from omni.keys import check_keys
from omni.llm_config import LLMConfig
from omni.llm_sections import RotaryConfig
from omni.models.encoders.vit import ViTConfig, ViTEncoder
from omni.models.grid_positions import GridRows, grid_positions
from omni.open_models.folder import open_folder
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import item_layout
from omni.rank.inputs import Assembler, Place
from omni.training.evaluate import Transcription
from omni.training.parity import TOLERANCE, Measurement, compare
from omni.training.trainer import Trainer
from ops.rotary import Scaling, rotary_table

CPU = torch.device("cpu")
SECTIONS = ("model.llm.heads=4", "model.llm.kv_heads=2", "model.llm.rotary.sections=[4,2,2]")
IN_TURN = ("model.llm.rotary.interleaved=true",)


def theirs(kind: type, length: int, items: list[GridRows], video: bool = False) -> np.ndarray:
    """Positions [length, 3] by transformers, of a sample whose items are pictures, or videos."""
    types, grids = torch.zeros(1, length, dtype=torch.int), []
    for start, grid in items:
        # Qwen3-VL's videos are pictures with text between, so that there is no other grid of several frames.
        types[0, start : start + int(np.prod(grid))] = 2 if video else 1
        grids.append((grid[0], 2 * grid[1], 2 * grid[2]))
    own = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    own.get_vision_position_ids = lambda *given, **more: kind.get_vision_position_ids(own, *given, **more)
    given = {"video_grid_thw" if video else "image_grid_thw": torch.tensor(grids)} if items else {}
    ids, _ = kind.get_rope_index(own, torch.zeros(1, length, dtype=torch.long), types, **given)
    return ids[:, 0].T.numpy()


def drawn(draw: np.random.Generator, video: bool = False) -> tuple[int, list[GridRows]]:
    """A sample: text, then items, each with text behind it but for the last, which may end the sample."""
    at, items = int(draw.integers(1, 9)), []
    for _ in range(draw.integers(1, 5)):
        rows, columns = draw.integers(1, 7, 2).tolist()
        grid = (int(draw.integers(1, max(rows, columns) + 1)) if video else 1, rows, columns)
        items.append(GridRows(at, grid))
        at += int(np.prod(grid)) + int(draw.integers(1, 9))
    return at - int(draw.integers(0, 2)), items


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("kind", [qwen2_vl.Qwen2VLModel, qwen3_vl.Qwen3VLModel])
def test_positions_are_those_of_transformers(kind, seed) -> None:
    size, items = drawn(np.random.default_rng(seed))
    assert np.array_equal(grid_positions(size, items), theirs(kind, size, items))
    text = grid_positions(size, [])
    assert np.array_equal(text, np.arange(size)[:, None].repeat(3, 1))


@pytest.mark.parametrize("seed", range(6))
def test_frames_of_a_video_count_in_time(seed) -> None:
    """No longer than it is high or wide: behind a longer one transformers 5 goes on below its last frame."""
    size, items = drawn(np.random.default_rng(seed), video=True)
    assert np.array_equal(grid_positions(size, items), theirs(qwen2_vl.Qwen2VLModel, size, items, video=True))


def test_text_goes_on_beyond_the_largest_position() -> None:
    found = grid_positions(9, [GridRows(1, (3, 1, 2))])
    assert found[:, 0].tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 5]
    assert found[:, 2].tolist() == [0, 1, 2, 1, 2, 1, 2, 4, 5]


@pytest.mark.parametrize(
    ("module", "head", "share", "sections", "interleaved"),
    [
        (qwen2_vl.Qwen2VLRotaryEmbedding, 128, 1.0, (16, 24, 24), False),
        (qwen3_vl.Qwen3VLTextRotaryEmbedding, 128, 1.0, (24, 20, 20), True),
        (qwen3_5.Qwen3_5TextRotaryEmbedding, 256, 0.25, (11, 11, 10), True),
    ],
)
def test_angles_are_those_of_transformers_and_of_text_as_without_sections(
    module, head, share, sections, interleaved
) -> None:
    told = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": list(sections)}
    told |= {"partial_rotary_factor": share}
    config = SimpleNamespace(
        max_position_embeddings=1000, head_dim=head, hidden_size=8 * head, num_attention_heads=8
    )
    config.rope_parameters = told
    size, items = drawn(np.random.default_rng(1))
    positions = torch.from_numpy(grid_positions(size, items))
    plain = module(config)(torch.zeros(1), positions.T[:, None])
    scaling = Scaling(share=share, sections=sections, interleaved=interleaved)
    for ours, of_theirs in zip(
        rotary_table(positions, head, 1e6, torch.float32, scaling), plain, strict=True
    ):
        half = ours.shape[-1]
        torch.testing.assert_close(ours[:, 0], of_theirs[0, :, :half], rtol=0, atol=2e-6)
    text = torch.arange(700)
    without = rotary_table(text, head, 1e6, torch.float32, Scaling(share=share))
    for given in (text, text[:, None].repeat(1, 3)):
        for ours, bare in zip(rotary_table(given, head, 1e6, torch.float32, scaling), without, strict=True):
            assert torch.equal(ours, bare)


def with_items(lengths: tuple[int, ...]) -> list[np.ndarray]:
    """Positions of sequences, of which the longer ones hold pictures."""
    grids = {37: [GridRows(3, (1, 2, 5)), GridRows(20, (1, 4, 3))], 90: [GridRows(1, (1, 6, 9))]}
    return [grid_positions(size, grids.get(size, [])) for size in lengths]


def of_text(family: str, folder: Path) -> tuple[torch.nn.Module, dict]:
    """A model of transformers whose text has three positions, its folder, and the keys that say so."""
    if family == "qwen3_5_text":
        rotation = {**DELTA["rope_parameters"], "partial_rotary_factor": 1.0}
        rotation |= {"mrope_section": [3, 3, 2], "mrope_interleaved": True}
        return make(family, folder, rope_parameters=rotation), {}
    sections = [3, 3, 2] if family == "qwen3" else [2, 1, 1]
    plain = make(family, folder, tie_word_embeddings=False)
    module, config = {
        "qwen2": (qwen2_vl.Qwen2VLTextModel, transformers.Qwen2VLTextConfig),
        "qwen3": (qwen3_vl.Qwen3VLTextModel, transformers.Qwen3VLTextConfig),
    }[family]
    said = {**PLAIN, "rope_parameters": {**PLAIN["rope_parameters"], "mrope_section": sections}}
    said |= {"head_dim": 16} if family == "qwen3" else {"use_sliding_window": False}
    own = module._from_config(config(**said), attn_implementation="eager")
    own.load_state_dict(plain.model.state_dict())
    plain.model = own
    return plain.eval(), {"rotary.sections": sections, "rotary.interleaved": family == "qwen3"}


SLOW = pytest.mark.slow


@pytest.mark.parametrize("family", ["qwen2", pytest.param("qwen3", marks=SLOW), "qwen3_5_text"])
def test_logits_of_a_pack_with_pictures_are_those_of_transformers(
    ranks: RankPool, tmp_path: Path, family: str
) -> None:
    folder = tmp_path / family
    model, keys = of_text(family, folder)
    ids = torch.randint(0, 272, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    positions = [torch.from_numpy(of) for of in with_items(LENGTHS)]
    with torch.no_grad():
        plain = torch.cat(
            [
                model.lm_head(model.model(part[None], position_ids=of.T[:, None]).last_hidden_state)[0]
                for part, of in zip(ids.split(LENGTHS), positions, strict=True)
            ]
        )

    def away(keys: dict, given: torch.Tensor | None) -> float:
        found = ranks.run(1, logits, str(folder), keys, ids, given)[0]
        return float((found - plain).abs().max() / plain.abs().max())

    pack = torch.cat(positions)
    stated = open_folder(str(folder)).keys | keys
    assert away(keys, pack) < TOLERANCE
    assert away(keys, None) > 10 * TOLERANCE, "positions of text alone"
    others: list[dict] = [{"rotary.sections": [1, 2, 1]}, {"rotary.sections": [1, 1, 2]}]
    if stated["rotary.interleaved"]:
        others = [{"rotary.sections": [4, 2, 2]}, {"rotary.interleaved": False}]
    for other in others:
        assert away(keys | other, pack) > 10 * TOLERANCE, other


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pictures")
    write_mixed(path)
    return path


LAYOUTS = {
    "one": (1, []),
    "cp2 pp2": (4, ["layout.llm.cp=2", "layout.llm.pp=2"]),
    "tp2": (2, ["layout.llm.tp=2", "+layout.encoders.image.tp=2"]),
    "shared": (2, ["layout.domain=2", "llm_sp=dynamic", "encoder_sp=dynamic", *CHEAP_LINKS]),
    "beside pp2": (3, ["layout.llm.pp=2", "placement=disaggregated"]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_rotates_its_tokens_by_the_positions_of_transformers(
    data: Path, tmp_path: Path, layout: str
) -> None:
    world, more = LAYOUTS[layout]
    config = compose_config(overrides(data, tmp_path, *SECTIONS, *IN_TURN, *more))
    spec, seen, llm = prepare_run(config, world), 0, config.model.llm
    scaling = Scaling(sections=(4, 2, 2), interleaved=True)
    for number in range(spec.arrangement.num_domains):
        domain = spec.planner.next_step(1, 0, number).domain
        metas = spec.planner.metas_of(domain)
        for position in range(domain.llm_size):
            assembler = Assembler(llm, spec.encoders, ("mixed",), Place(position, CPU, torch.float32))
            blank = [np.zeros(length(metas[i]), np.int64) for i in assembler.texts(domain)]
            texts = [(ids, ids, ids.astype(bool)) for ids in blank]
            items = [None for _ in assembler.items(domain)]
            inputs = assembler.assemble(domain, Fetched(texts, items, ()), predict=False)
            for batch, of in zip(domain.microbatches, inputs.microbatches, strict=True):
                pieces, at = assembler.pieces(domain, batch), 0
                for piece in pieces:
                    meta = metas[piece.sample]
                    grids = [(1, item.size[0] // 4, item.size[1] // 4) for item in meta.items]
                    rows = [GridRows(*of) for of in zip(item_row_offsets(meta), grids, strict=True)]
                    expected = theirs(qwen3_vl.Qwen3VLModel, length(meta), rows)[piece.start : piece.stop]
                    table = rotary_table(torch.from_numpy(expected), 16, 1e4, torch.float32, scaling)
                    size = piece.stop - piece.start
                    for ours, plain in zip(of.packed.rotary, table, strict=True):
                        assert torch.equal(ours[at : at + size], plain)
                    at += size
                    seen += size * bool(rows)
    assert seen, "no rank has a picture's rows"


@pytest.fixture(scope="module")
def one(ranks: RankPool, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Measurement:
    return ranks.run(
        1, measure, compose_config(overrides(data, tmp_path_factory.mktemp("one"), *SECTIONS)), 1
    )[0]


@pytest.mark.parametrize(
    "layout", ["cp2 pp2", "shared", *(pytest.param(of, marks=SLOW) for of in ("tp2", "beside pp2"))]
)
def test_layouts_equal_one_rank(
    ranks: RankPool, data: Path, tmp_path: Path, one: Measurement, layout: str
) -> None:
    world, more = LAYOUTS[layout]
    many = ranks.run(world, measure, compose_config(overrides(data, tmp_path, *SECTIONS, *more)), world)[0]
    assert compare(one, many)[0].relative <= TOLERANCE, compare(one, many)[0]


def test_sections_count(ranks: RankPool, data: Path, tmp_path: Path, one: Measurement) -> None:
    for number, keys in enumerate((SECTIONS[:2], (*SECTIONS[:2], "model.llm.rotary.sections=[8,0,0]"))):
        other = ranks.run(1, measure, compose_config(overrides(data, tmp_path / str(number), *keys)), 1)[0]
        assert compare(one, other)[0].relative > 10 * TOLERANCE, keys


def transcribed(rank: int, config: Config, world: int) -> list[list[Transcription]]:
    """What a run generates behind the last picture of each sample, with and without what passes keep."""
    spec = prepare_run(config, world)
    trainer = Trainer(spec, RunFolder.create(Path(spec.config.run.dir)), rank, CPU)
    assert trainer.rank.stage is not None
    with torch.no_grad():
        for model in trainer.rank.stage.models:
            for parameter in model.parameters():
                parameter.mul_(6 if parameter.dim() > 1 else 1)  # or texts would repeat one token
    transcribe = trainer.evaluator.transcribe
    found = [transcribe(0, "seen", 8, 24, cached=cached) for cached in (True, False)]
    trainer.close()
    return found


@pytest.mark.parametrize("layout", ["one", pytest.param("cp2 pp2", marks=SLOW)])
def test_generation_goes_on_at_the_position_behind_pictures(
    ranks: RankPool, data: Path, tmp_path: Path, layout: str
) -> None:
    world, more = LAYOUTS[layout]
    line = overrides(data, tmp_path, *SECTIONS, *IN_TURN, f"+data.heldout.seen.path={data}", *more)
    fast, slow = ranks.run(world, transcribed, compose_config(line), world)[0]
    assert fast == slow
    assert sum(of.sample.startswith(("strip", "two")) for of in fast) == 6
    assert sum(len(set(of.generated)) for of in fast) > 40, "texts that repeat a token tell little"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"sections": [4, 4]}, r"rotary.sections=\[4, 4\]: give three numbers"),
        ({"sections": [9, -1, 0]}, r"rotary.sections=\[9, -1, 0\]: give three numbers"),
        ({"sections": [4, 2, 1]}, r"rotary.sections=\[4, 2, 1\]: must sum to the number of frequencies"),
        ({"sections": [4, 2, 2], "share": 0.5}, "must sum to the number of frequencies"),
        ({"interleaved": True}, "rotary.interleaved=True: is of sections"),
        ({"sections": [2, 3, 3], "interleaved": True}, "every third frequency"),
    ],
)
def test_sections_that_cannot_be_are_refused_by_key(keys: dict, words: str) -> None:
    llm = LLMConfig(layers=1, hidden=64, heads=4, kv_heads=4, ffn=8, rotary=RotaryConfig(**keys))
    with pytest.raises(ConfigError, match=words):
        check_keys("model.llm", llm)


def test_a_folder_says_its_sections(tmp_path: Path) -> None:
    folder = tmp_path / "published"
    _, _ = of_text("qwen3_5_text", folder)
    keys = open_folder(str(folder)).keys
    assert (keys["rotary.sections"], keys["rotary.interleaved"]) == ([3, 3, 2], True)
    line = ["~experiment", f"start.weights={folder}", "train.steps=1", "optim.lr=1e-3"]
    line += ["data.microbatch_tokens=160", "+data.sources.texts.path=none"]
    assert compose_config(line).model.llm.rotary.sections == [3, 3, 2]
    with pytest.raises(ConfigError, match=r"rotary.sections=\[4, 2, 2\] contradicts"):
        compose_config([*line, "model.llm.rotary.sections=[4,2,2]"])
    rotation = {"rope_type": "default", "rope_theta": 30.0, "partial_rotary_factor": 1.0}
    changed(folder, rope_parameters=rotation | {"mrope_section": [3, 3, 3]})
    with pytest.raises(ConfigError, match=r"rotary.sections=\[3, 3, 3\]: must sum"):
        compose_config(line)
    changed(folder, rope_parameters=rotation | {"mrope_section": [3, "x", 2]})
    with pytest.raises(ConfigError, match=r"means model.llm.rotary.sections=\[3, 'x', 2\], which cannot be"):
        compose_config(line)
    changed(folder, rope_parameters=rotation | {"mrope_section": [3, 3, 2], "mrope_interleaved": False})
    with pytest.raises(ConfigError, match="mrope_interleaved=False is not trained"):
        open_folder(str(folder))


class Wrong(ViTEncoder):
    def row_grid(self, size: tuple[int, ...]) -> tuple[int, int, int]:
        return 1, 1, 1


def test_an_encoder_whose_grid_is_not_its_rows_is_refused_by_name() -> None:
    config = ViTConfig(layers=1, hidden=32, heads=2, ffn=32, patch=2)
    item = ItemMeta("image", 24, 6, 0, (8, 12))
    assert item_layout({"eye": ViTEncoder(config)}, item, 272).grid == (1, 2, 3)
    assert item_layout({"eye": ViTEncoder(config)}, replace(item, size=()), 272).grid == ()
    with pytest.raises(ConfigError, match=r"model.encoders.eye: row_grid\(\(8, 12\)\) tells \(1, 1, 1\)"):
        item_layout({"eye": Wrong(config)}, item, 272)

"""Behaviours that users of other systems asked for, and that failed there without a word."""

from pathlib import Path

import pytest
import torch
from ranks import RankError, RankPool
from small import overrides, write_mixed, write_one_item

from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.config import Config
from omni.models.encoders.transformer_module import TransformerModule
from omni.models.encoders.vit import ViTEncoder
from omni.planning.prepare import prepare_run
from omni.training import parity
from omni.training.parity import TOLERANCE, Measurement, compare
from pipeline.ops import Kind

HEADS = ("model.llm.heads=4", "model.llm.kv_heads=4")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("behaviours")
    write_mixed(path / "mixed")
    write_one_item(path / "one")
    return path


def measure(rank: int, config: Config, world: int) -> Measurement | None:
    spec = prepare_run(config, world)
    folder = RunFolder.create(Path(spec.config.run.dir))
    return parity.measure(spec, folder, rank, torch.device("cpu"), steps=1)


# One image among texts: the ranks' losses count very different numbers of targets, and all but one of the
# ranks have no target that an image could help.
@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (3, ["layout.llm.dp=3"]),
        (2, ["layout.llm.cp=2"]),
        (4, ["layout.llm.cp=2", "layout.llm.tp=2", "+layout.encoders.image.tp=2"]),
        (4, ["layout.llm.dp=2", "placement=disaggregated", "placement.ranks=2"]),
    ],
    ids=["dp3", "cp2", "tp2 cp2", "beside"],
)
def test_encoder_gradients_are_neither_dropped_nor_scaled(
    ranks: RankPool, data: Path, tmp_path: Path, world: int, layout: list[str]
) -> None:
    line = overrides(data / "one", tmp_path / "one", *HEADS, "balance=none", samples=3)
    one = ranks.run(1, measure, compose_config(line), 1)[0]
    line = overrides(data / "one", tmp_path / "many", *HEADS, "balance=none", *layout, samples=3)
    many = ranks.run(world, measure, compose_config(line), world)[0]
    encoder = [d for d in compare(one, many) if d.name.startswith("image/")]
    assert len(encoder) > 10
    assert encoder[0].relative <= TOLERANCE
    norms = [float(tensor.norm()) for name, tensor in many.gradients.items() if name.startswith("image/")]
    assert min(norms) > 0


@pytest.mark.parametrize("stages", [2, 4])
def test_a_frozen_encoder_runs_ahead_in_order_and_within_bounds(
    data: Path, tmp_path: Path, stages: int
) -> None:
    more = [
        f"layout.llm.pp={stages}",
        "pipeline=one_f_one_b",
        "+optim.components={image: {frozen: [[1, 9]]}}",
    ]
    spec = prepare_run(compose_config(overrides(data / "mixed", tmp_path, *more)), stages)
    domain = spec.planner.next_step(1, 0, 0).domain
    for stage, ops in enumerate(domain.ops):
        assert not any(op.kind is Kind.ENCODE_BACKWARD for op in ops)
        encoded = [domain.encoder_batches[op.index].microbatches[0] for op in ops if op.kind is Kind.ENCODE]
        assert encoded == sorted(encoded)
        passed = -1
        for op in ops:
            if op.kind is Kind.FORWARD:
                passed = op.index
            elif op.kind is Kind.ENCODE:
                assert domain.encoder_batches[op.index].microbatches[0] - passed <= stage + 1


def miscount(rank: int, config: Config, world: int) -> None:
    count, grid = ViTEncoder.count, ViTEncoder.row_grid
    ViTEncoder.count = lambda encoder, size: (count(encoder, size)[0] + 4, count(encoder, size)[1] + 1)
    ViTEncoder.row_grid = lambda encoder, size: (1, 1, count(encoder, size)[1] + 1)
    try:
        measure(rank, config, world)
    finally:
        ViTEncoder.count, ViTEncoder.row_grid = count, grid


def test_an_item_that_is_not_as_large_as_counted_is_named(
    ranks: RankPool, data: Path, tmp_path: Path
) -> None:
    words = r"mixed, sample \d+, item 0: image made \d+ tokens with \d+ positions of it, and its count\(\)"
    with pytest.raises(RankError, match=words):
        ranks.run(1, miscount, compose_config(overrides(data / "mixed", tmp_path)), 1)


def fail_in_encoder(rank: int, config: Config, world: int) -> None:
    if rank == 1:
        TransformerModule.forward = lambda *inputs: (_ for _ in ()).throw(RuntimeError("the producer failed"))
    measure(rank, config, world)


def test_an_encoder_that_fails_ends_the_run_with_its_error(
    ranks: RankPool, data: Path, tmp_path: Path
) -> None:
    more = ["layout=pp2", "train.timeout_s=5", "+optim.components={image: {frozen: [[1, 9]]}}"]
    line = overrides(data / "mixed", tmp_path, *more)
    with pytest.raises(RankError, match="the producer failed"):
        ranks.run(2, fail_in_encoder, compose_config(line), 2)

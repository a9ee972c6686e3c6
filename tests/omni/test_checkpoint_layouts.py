"""A checkpoint of one layout under every other: weights, Adam's state and the bias of experts to the bit,
nothing owned twice.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from ranks import RankPool
from saved import manifest_of, newest_folder, tensors_of
from small import overrides, write_mixed

from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.config import Config
from omni.models.moe import expert_biases
from omni.models.regions import all_parameters
from omni.planning.prepare import prepare_run
from omni.rank.state import MOMENTS, Owned
from omni.training.parity import collect
from omni.training.trainer import Trainer

ENCODER_TP2 = "+layout.encoders.image.tp=2"
Layout = tuple[int, list[str]]  # ranks, and how they are used
TP2_EP4 = (4, ["layout.llm.tp=2", "layout.llm.ep=4", ENCODER_TP2])  # and dp2
PP2_EP2 = (4, ["layout.llm.pp=2", "layout.llm.ep=2", "layout.domain=2"])  # and dp2
RECOMPUTED = [
    "layout.llm.pp=2",
    "model.llm.recompute=full",
    "model.encoders.image.recompute=selective",
    "model.llm.loss_chunk=16",
    "optim.max_skipped=3",
]
MOE = "model.llm.moe={experts: 4, topk: 2, ffn: 48, shared_ffn: 32, dense_layers: 1}"
HEADS = ("model.llm.head_dim=24", "model.llm.qk_norm=true", "model.llm.gated=false")


@dataclass(frozen=True)
class Model:
    """What a model adds to the command line, the layout that writes it and those that load it."""

    more: tuple[str, ...]
    written: Layout
    others: dict[str, Layout]


MODELS = {
    "dense": Model(
        (),
        (4, ["layout.llm.tp=2", ENCODER_TP2]),  # and dp2
        {
            "one rank": (1, []),
            "tp4": (4, ["layout.llm.tp=4"]),
            "zero3 tp2 dp2": (4, ["layout.llm.tp=2", "layout.domain=2", "layout.llm.zero=3"]),
            "pp2 tp2": (4, ["layout.llm.pp=2", "layout.llm.tp=2", ENCODER_TP2]),
            "cp2 tp2": (4, ["layout.llm.cp=2", "layout.llm.tp=2"]),
            "dp3": (3, []),
            "beside dp2+1": (3, ["placement=disaggregated"]),
            "beside pp2+2": (
                4,
                ["placement=disaggregated", "placement.ranks=2", "layout.llm.pp=2", ENCODER_TP2],
            ),
            "pp2 recomputed": (2, RECOMPUTED),
            "stage0 pp3": (3, ["layout.llm.pp=3", "system=megatron"]),
        },
    ),
    "untied": Model(
        ("model.llm.tied=false", "model.llm.qkv_bias=true", "model.llm.norm=LayerNorm", *HEADS),
        (2, ["layout.llm.pp=2"]),
        {"tp2": (2, ["layout.llm.tp=2"])},
    ),
    "experts": Model(
        (MOE,),
        TP2_EP4,
        {
            "one rank": (1, []),
            "tp4 ep2": (4, ["layout.llm.tp=4", "layout.llm.ep=2"]),
            "zero2 pp2 ep2": (4, ["layout.llm.zero=2", *PP2_EP2[1]]),
            "pp2 ep2": PP2_EP2,
        },
    ),
    "experts bf16": Model(
        (MOE, "train.precision=bf16"),
        PP2_EP2,
        {"tp2 ep4": TP2_EP4, "cp2 ep2": (2, ["layout.llm.cp=2", "layout.llm.ep=2"])},
    ),
    "moments bf16": Model(
        (MOE, "train.precision=bf16", "optim.moments_dtype=bf16"),
        PP2_EP2,
        {"tp2 ep4": TP2_EP4, "zero2 pp2 ep2": (4, ["layout.llm.zero=2", *PP2_EP2[1]])},
    ),
}
LONGER = {"tp4", "tp4 ep2", "cp2 tp2", "dp3", "beside pp2+2", "stage0 pp3", "pp2 recomputed"}
MOVES = [
    pytest.param(model, layout, marks=pytest.mark.slow if layout in LONGER else ())
    for model in MODELS
    for layout in MODELS[model].others
]
STATE = ("main", *MOMENTS)
Tensors = dict[str, dict[str, torch.Tensor]]


def line(data: Path, folder: Path, *more: str) -> list[str]:
    own = ["model.llm.kv_heads=4", "train.steps=2", "train.checkpoint_every=2", "train.eval_every=0"]
    return overrides(data, folder, *own, *more)


def make_trainer(rank: int, config: Config, world: int) -> Trainer:
    spec = prepare_run(config, world)
    return Trainer(spec, RunFolder.create(Path(spec.config.run.dir)), rank, torch.device("cpu"))


def _train(rank: int, config: Config, world: int) -> list[dict[str, torch.Tensor] | None]:
    """Train, and return on rank 0 what the ranks have of weights and each moment, past any checkpoint."""
    trainer = make_trainer(rank, config, world)
    trainer.run()

    def held(shard: Owned, key: str) -> torch.Tensor:
        return shard.main if key == "main" else shard.adam[key].float()

    return [collect(trainer, partial(held, key=key)) for key in STATE]


def _load_and_save(rank: int, config: Config, world: int, expected: Path) -> list[str]:
    """Load the folder's checkpoint, save it again, and name what is not as `expected` of this rank's weights,
    and of its biases of experts, which every rank of a stage holds and one of them saves.
    """
    trainer = make_trainer(rank, config, world)
    assert trainer.saving.restore() == 2
    full, biases = torch.load(expected, weights_only=True)
    wrong = []
    if (stage := trainer.rank.stage) is not None:
        for held in stage.virtual_stages.values():
            own = expert_biases(held.model, held.numbering.first_layer)
            wrong += [name for name, bias in own.items() if not torch.equal(bias, biases[name])]
    for component, optimizer in trainer.rank.components.items():
        for named in all_parameters(optimizer.modules, trainer.rank.names[component]):
            value = full[f"{component}/{named.name}"]["main"].reshape(named.region.shape)
            if not torch.equal(named.own, named.cut(value).to(named.own.dtype)):
                wrong.append(f"{component}/{named.name}")
    trainer.saving.save(trainer.reporter)
    trainer.saving.finish(trainer.reporter)
    return wrong


@dataclass(frozen=True)
class Saved:
    """What a run's last checkpoint holds: parameters put together, biases of experts, and how many elements
    of parameters its files hold.
    """

    full: Tensors
    biases: dict[str, torch.Tensor]
    held: int


def read(folder: Path) -> Saved:
    """Put together what a run's last checkpoint holds."""
    full: Tensors = {}
    biases: dict[str, torch.Tensor] = {}
    held = 0
    checkpoint = newest_folder(folder / "checkpoints")
    for rank, index in enumerate(manifest_of(checkpoint)["index"]):
        tensors = tensors_of(checkpoint / f"rank_{rank:05d}.safetensors")
        for name, piece in index["parameters"].items():
            shard = {key: tensors[f"{name}/{key}"] for key in (*STATE, "step")}
            held += shard["main"].numel()
            _place(full.setdefault(name, {}), shard, *piece[:4])
        assert not biases.keys() & index["buffers"].keys(), "saved twice"
        biases |= {name: tensors[f"buffers/{name}"] for name in index["buffers"]}
    return Saved(full, biases, held)


def _place(
    parameter: dict[str, torch.Tensor],
    shard: dict[str, torch.Tensor],
    shape: list[int],
    dim: int,
    intervals: list[list[int]],
    start: int,
) -> None:
    """Put a shard where it belongs, by indices that owe nothing to the code under test."""
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    runs = [torch.arange(first, first + length) for first, length in intervals]
    places = numbers.index_select(dim, torch.cat(runs)).flatten()
    places = places[start : start + shard["main"].numel()]
    for key in STATE:
        whole = parameter.setdefault(key, torch.full((numbers.numel(),), torch.nan))
        assert whole[places].isnan().all(), "saved twice"
        whole[places] = shard[key].flatten().float()
    step = parameter.setdefault("step", shard["step"])
    assert step == shard["step"] == 2.0


def assert_same(one: Saved, two: Saved) -> None:
    assert one.full.keys() == two.full.keys()
    for name, parameter in one.full.items():
        for key, value in parameter.items():
            assert not value.isnan().any(), f"{key} of {name} is not all saved"
            assert torch.equal(value, two.full[name][key]), f"{key} of {name}"
    assert one.biases.keys() == two.biases.keys()
    for name, bias in one.biases.items():
        assert torch.equal(bias, two.biases[name]), name
    assert one.held == two.held


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layouts") / "mixed"
    write_mixed(path)
    return path


@dataclass(frozen=True)
class Written:
    """A run whose checkpoint other layouts load: what its ranks had of weights and moments in the end, and
    `full`, a file with what is to be found in the checkpoint.
    """

    model: Model
    trained: list[dict[str, torch.Tensor]]
    folder: Path
    full: Path


@pytest.fixture(scope="module")
def write(ranks: RankPool, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    """The run of a model by its name, trained once for all tests."""

    @cache
    def write(name: str) -> Written:
        model, folder = MODELS[name], tmp_path_factory.mktemp("written")
        world, layout = model.written
        trained = ranks.run(world, _train, compose_config(line(data, folder, *model.more, *layout)), world)[0]
        saved = read(folder)
        torch.save((saved.full, saved.biases), folder / "full.pt")
        return Written(model, trained, folder, folder / "full.pt")

    return write


def moved(ranks: RankPool, data: Path, source: Path, target: Path, written: Written, layout: Layout) -> None:
    """Load the checkpoint of `source` under another layout and save it in `target`."""
    shutil.copytree(source / "checkpoints", target / "checkpoints")
    world, more = layout
    keys = line(data, target, *written.model.more, *more)
    wrong = ranks.run(world, _load_and_save, compose_config(keys), world, written.full)
    assert wrong == [[]] * world


@pytest.mark.parametrize("model", MODELS)
def test_every_element_is_saved_once_and_exactly(write: Callable[[str], Written], model: str) -> None:
    written = write(model)
    saved = read(written.folder)
    assert saved.held == sum(parameter["main"].numel() for parameter in saved.full.values())
    assert {name.partition("/")[0] for name in saved.full} == {"llm", "image"}
    assert all(parameter["exp_avg"].any() for parameter in saved.full.values())
    for key, tensors in zip(STATE, written.trained, strict=True):
        assert {name.partition("@")[0] for name in tensors} == saved.full.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, saved.full[name.partition("@")[0]][key]), f"{key} of {name}"
    with_experts = [1, 2, 3] if MOE in written.model.more else []
    assert sorted(saved.biases) == [f"decoder.layers.{n}.mlp.router.expert_bias" for n in with_experts]
    assert all(bias.any() for bias in saved.biases.values()), "no bias has moved"


@pytest.mark.parametrize(("model", "layout"), MOVES)
def test_it_loads_under_another_layout_and_back(
    ranks: RankPool, data: Path, write: Callable[[str], Written], tmp_path: Path, model: str, layout: str
) -> None:
    written = write(model)
    there, back = tmp_path / "there", tmp_path / "back"
    moved(ranks, data, written.folder, there, written, written.model.others[layout])
    assert_same(read(written.folder), read(there))
    moved(ranks, data, there, back, written, written.model.written)
    assert_same(read(written.folder), read(back))

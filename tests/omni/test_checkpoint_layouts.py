"""A checkpoint of one layout under every other: weights and Adam's state to the bit, nothing owned twice."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import RankPool
from small import overrides, write_mixed

from infra.checkpoint import latest_checkpoint
from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.models.regions import named_parameters
from omni.training.job import prepare_job
from omni.training.state import MOMENTS
from omni.training.trainer import Trainer

ENCODER_TP2 = "+layout.encoders.image.tp=2"
WRITTEN = (4, ["layout.llm.tp=2", ENCODER_TP2])  # and dp2
OTHERS = {
    "one rank": (1, []),
    "tp4": (4, ["layout.llm.tp=4"]),
    "pp2 tp2": (4, ["layout.llm.pp=2", "layout.llm.tp=2", ENCODER_TP2]),
    "dp3": (3, []),
    "beside dp2+1": (3, ["placement=disaggregated"]),
    "beside pp2+2": (4, ["placement=disaggregated", "placement.ranks=2", "layout.llm.pp=2", ENCODER_TP2]),
    "stage0 pp3": (3, ["layout.llm.pp=3", "system=stage0"]),
}
Tensors = dict[str, dict[str, torch.Tensor]]


def line(data: Path, folder: Path, more: list[str]) -> list[str]:
    own = ["model.llm.kv_heads=4", "train.steps=2", "train.checkpoint_every=2", "train.eval_every=0"]
    return overrides(data, folder, *own, *more)


def make_trainer(rank: int, keys: list[str], world: int) -> Trainer:
    job = prepare_job(compose_config(keys), world)
    return Trainer(job, RunFolder.create(Path(job.config.run.dir)), rank, torch.device("cpu"))


def _train(rank: int, keys: list[str], world: int) -> None:
    make_trainer(rank, keys, world).run()


def _load_and_save(rank: int, keys: list[str], world: int, expected: Path) -> list[str]:
    """Load the folder's checkpoint, save it again, and name the weights here that are not `expected`."""
    trainer = make_trainer(rank, keys, world)
    assert trainer.restore() == 2
    full = torch.load(expected, weights_only=True)
    wrong = []
    for component, optimizer in trainer.rank.components.items():
        for named in named_parameters(optimizer.module, trainer.rank.names[component]):
            value = full[f"{component}/{named.name}"]["main"].reshape(named.region.shape)
            if not torch.equal(named.parameter, named.region.cut(value)):
                wrong.append(f"{component}/{named.name}")
    trainer.save()
    return wrong


def read(folder: Path) -> tuple[Tensors, int]:
    """Assemble what a run's last checkpoint holds, and count the elements that its files hold."""
    full: Tensors = {}
    held = 0
    for file in sorted(latest_checkpoint(folder / "checkpoints").glob("rank_*.pt")):
        for shard in torch.load(file, weights_only=True)["shards"]:
            held += shard["main"].numel()
            _place(full.setdefault(f"{shard['component']}/{shard['name']}", {}), shard)
    return full, held


def _place(parameter: dict[str, torch.Tensor], shard: dict[str, Any]) -> None:
    """Put a shard where it belongs, by indices that owe nothing to the code under test."""
    numbers = torch.arange(torch.Size(shard["shape"]).numel()).reshape(shard["shape"])
    runs = [torch.arange(start, start + length) for start, length in shard["runs"]]
    places = numbers.index_select(shard["dim"], torch.cat(runs)).flatten()
    places = places[shard["start"] : shard["start"] + shard["main"].numel()]
    for key in ("main", *MOMENTS):
        whole = parameter.setdefault(key, torch.full((numbers.numel(),), torch.nan))
        assert whole[places].isnan().all(), "saved twice"
        whole[places] = shard[key].flatten()
    step = parameter.setdefault("step", torch.tensor(shard["step"]))
    assert float(step) == shard["step"] == 2.0


def assert_same(one: Tensors, two: Tensors) -> None:
    assert one.keys() == two.keys()
    for name, parameter in one.items():
        for key, value in parameter.items():
            assert not value.isnan().any(), f"{key} of {name} is not all saved"
            assert torch.equal(value, two[name][key]), f"{key} of {name}"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layouts") / "mixed"
    write_mixed(path)
    return path


@pytest.fixture(scope="module")
def written(ranks: RankPool, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run whose checkpoint the others load, with its tensors in one file beside it."""
    folder = tmp_path_factory.mktemp("written")
    world, more = WRITTEN
    ranks.run(world, _train, line(data, folder, more), world)
    torch.save(read(folder)[0], folder / "full.pt")
    return folder


def moved(
    ranks: RankPool, data: Path, source: Path, target: Path, world: int, more: list[str], full: Path
) -> None:
    """Load the checkpoint of `source` under another layout and save it in `target`."""
    shutil.copytree(source / "checkpoints", target / "checkpoints")
    wrong = ranks.run(world, _load_and_save, line(data, target, more), world, full)
    assert wrong == [[]] * world


def test_every_element_is_saved_once(written: Path) -> None:
    full, held = read(written)
    assert held == sum(parameter["main"].numel() for parameter in full.values())
    assert {name.partition("/")[0] for name in full} == {"llm", "image"}
    assert all(parameter["exp_avg"].any() for parameter in full.values())


@pytest.mark.parametrize("layout", OTHERS)
def test_it_loads_under_another_layout_and_back(
    ranks: RankPool, data: Path, written: Path, tmp_path: Path, layout: str
) -> None:
    world, more = OTHERS[layout]
    expected, elements = read(written)
    full = written / "full.pt"
    moved(ranks, data, written, tmp_path / "there", world, more, full)
    there, held = read(tmp_path / "there")
    assert_same(expected, there)
    assert held == elements
    moved(ranks, data, tmp_path / "there", tmp_path / "back", *WRITTEN, full)
    back, held = read(tmp_path / "back")
    assert_same(expected, back)
    assert held == elements

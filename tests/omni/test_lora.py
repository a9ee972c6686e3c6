"""Adapters: their gradients against transformers' model, any layout against one rank, merged on export."""

import hashlib
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from open_model_folders import make, transformers
from ranks import RankPool
from small import overrides, with_values
from test_open_models import LAYOUTS, TEXTS, configured, data

from dataloader.storage import Storage
from infra.checkpoint import complete, read_manifest
from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.config import Config, ConfigError
from omni.models.adapters import A, B
from omni.models.initialise import initialise
from omni.models.regions import Region, named_parameters
from omni.open_models.folder import open_folder
from omni.planning.prepare import prepare_run
from omni.rank import build
from omni.rank.state import pieces_of
from omni.training.export import readers, whole
from omni.training.export_folder import export_folder
from omni.training.parity import collect
from omni.training.trainer import Trainer

__all__ = ["data"]
TOLERANCE = 1e-5
CPU = torch.device("cpu")
RANK, ALPHA = 4, 6.0
ALL = "[linear_qkv, linear_proj, linear_fc1, linear_fc2]"
TARGETS = {"all": ALL, "some": "[linear_qkv, linear_fc2]"}


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> tuple[Path, torch.nn.Module]:
    folder = tmp_path_factory.mktemp("model") / "qwen2"
    return folder, make("qwen2", folder)


def adapted(data: Path, folder: Path, run: Path, *more: str, targets: str = ALL) -> Config:
    lora = f"model.llm.lora={{rank: {RANK}, alpha: {ALPHA}, targets: {targets}}}"
    return configured(data, folder, run, lora, "optim.eps=1e-4", *more)


def draw_all(module: torch.nn.Module, **of: Any) -> None:
    """Draw weights, and B too: with B = 0 the gradient of A is nothing."""
    initialise(module, **of)
    with torch.no_grad():
        for named in named_parameters(module, of["numbering"]):
            if named.name.endswith(B):
                seed = int.from_bytes(hashlib.sha256(named.name.encode()).digest()[:4], "big")
                drawn = torch.randn(named.region.shape, generator=torch.Generator().manual_seed(seed)) * 0.1
                named.own.copy_(named.cut(drawn))


def trained(
    rank: int, config: Config, world: int, steps: int = 1
) -> tuple[list[float], dict[str, torch.Tensor] | None, dict[str, torch.Tensor] | None]:
    """Train. Returns the losses, the gradients of the last step and the weights that it had."""
    build.initialise = draw_all
    try:
        trainer = Trainer(prepare_run(config, world), RunFolder.create(Path(config.run.dir)), rank, CPU)
        trainer.saving.restore()
    finally:
        build.initialise = initialise
    losses = []
    with trainer.ahead() as ahead:
        for step in range(trainer.step + 1, trainer.step + steps + 1):
            weights = collect(trainer, lambda own: own.main)
            done = trainer.run_step(trainer.begin(ahead, step))
            losses.append(done.totals.loss)
            gradients = collect(trainer, partial(_gradient, done.totals.num_targets))
            trainer.update(done)
    trainer.saving.save(trainer.reporter)
    trainer.saving.finish(trainer.reporter)
    trainer.control.barrier("the end")
    trainer.close()
    return losses, gradients, weights


def _gradient(targets: float, own: Any) -> torch.Tensor | None:
    return None if own.grad is None else own.grad / targets


class Plain:
    """transformers' model with adapters by hand: the equations, on weights as they lie in its files."""

    def __init__(self, folder: Path, model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> None:
        self.rules, self.model = open_folder(str(folder)).rules, model
        self.sides = {
            name: own.view(-1, RANK).clone() if name.endswith(B) else own.view(RANK, -1).clone()
            for name, own in weights.items()
            if name.endswith((A, B))
        }
        for own in self.sides.values():
            own.requires_grad_()

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """[T] → [T, V]: every product with an adapted matrix gets that of its adapter added."""
        hooks = []
        for name in {name.removesuffix(A) for name in self.sides if name.endswith(A)}:
            rule = self.rules[f"{name.removeprefix('llm/')}weight"]
            a, b = self.sides[f"{name}{A}"], self.sides[f"{name}{B}"]
            for theirs, runs in zip(rule.theirs, rule.runs, strict=True):
                own = Region((len(b), RANK), 0, runs).cut(b)
                linear = self.model.get_submodule(theirs.removesuffix(".weight"))
                hooks.append(linear.register_forward_hook(partial(_add, a, own)))
        try:
            return self.model(ids[None]).logits[0]
        finally:
            for hook in hooks:
                hook.remove()

    def loss(self) -> torch.Tensor:
        """The mean of all texts."""
        return mean_loss(self.logits)


def _add(a: torch.Tensor, b: torch.Tensor, linear: object, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    return output + ALPHA / RANK * (inputs[0] @ a.T) @ b.T


def mean_loss(logits: Any) -> torch.Tensor:
    every = [torch.tensor([256, *text.encode(), 257]) for text in TEXTS]
    total = sum(F.cross_entropy(logits(ids[:-1]), ids[1:], reduction="sum") for ids in every)
    return total / sum(len(ids) - 1 for ids in every)


@pytest.mark.parametrize("targets", TARGETS)
def test_loss_and_gradients_are_those_of_transformers_with_adapters_by_hand(
    ranks: RankPool, data, published, tmp_path, targets
):
    config = adapted(data, published[0], tmp_path / "run", targets=TARGETS[targets])
    (loss,), gradients, weights = ranks.run(1, trained, config, 1)[0]
    plain = Plain(*published, weights)
    expected = plain.loss()
    assert loss == pytest.approx(float(expected.detach()), rel=TOLERANCE)
    made = torch.autograd.grad(expected, list(plain.sides.values()))
    assert gradients.keys() == plain.sides.keys()
    for (name, _), own in zip(plain.sides.items(), made, strict=True):
        away = float((gradients[name].view_as(own) - own).norm()) / float(own.norm())
        assert away < TOLERANCE, f"{name}: {away:.1e}"


MORE = {
    "tp2 pp2 joint": {"layout.llm.tp": 2, "layout.llm.pp": 2, "pipeline.policy": "joint"},
    "tp2 full": {"layout.llm.tp": 2, "model.llm.recompute": "full"},
    "pp2 zero bubble": {"layout.llm.pp": 2, "pipeline.policy": "zero_bubble_h1"},
    "zero3 full": {"layout.domain": 2, "layout.llm.zero": 3, "model.llm.recompute": "full"},
    "tp2 chunks": {"layout.llm.tp": 2, "model.llm.loss_chunk": 16},
}


@pytest.fixture(scope="module")
def one(ranks: RankPool, data, published, tmp_path_factory):
    config = adapted(data, published[0], tmp_path_factory.mktemp("one") / "run", "train.steps=2")
    return ranks.run(1, trained, config, 1, 2)[0]


@pytest.mark.parametrize(
    "layout",
    [
        *("one", "tp2", "pp2", "cp2", "tp2 pp2 joint", "tp2 full", "zero3 full"),
        *(pytest.param(of, marks=pytest.mark.slow) for of in ("pp2 zero bubble", "tp2 chunks", "tp2 dp2")),
    ],
)
def test_any_layout_learns_as_one_rank_and_what_is_exported_is_that_model(
    ranks: RankPool, data, published, tmp_path, one, layout
):
    folder, model = published
    config = adapted(data, folder, tmp_path / "run", "train.steps=2")
    config = with_values(config, (LAYOUTS | MORE)[layout])
    world = {"one": 1, "tp2 pp2 joint": 4, "tp2 dp2": 4}.get(layout, 2)
    losses, gradients, _ = ranks.run(world, trained, config, world, 2)[0]
    assert losses == pytest.approx(one[0], rel=TOLERANCE)
    total = float(torch.stack([own.norm() for own in one[1].values()]).norm())
    found = {name.partition("@")[0]: own for name, own in gradients.items()}
    assert found.keys() == one[1].keys()
    for name, own in gradients.items():  # copies of what ranks hold alike, one by one
        expected = one[1][name.partition("@")[0]]
        assert float((own - expected).norm()) <= 1e-5 * max(float(expected.norm()), 1e-6 * total), name

    # The base is as it was, to the bit.
    storage = Storage.at(tmp_path / "run" / "checkpoints")
    manifest = read_manifest(storage, complete(storage)[-1])
    source, state = open_folder(str(folder)), model.state_dict()
    pieces = pieces_of(manifest["index"])
    held = {}
    with readers(storage, manifest) as reader:
        for name, rule in source.rules.items():
            flat = torch.from_numpy(whole(f"llm/{name}", pieces[f"llm/{name}"], reader)).view(rule.shape)
            for theirs, runs in zip(rule.theirs, rule.runs, strict=True):
                assert torch.equal(Region(rule.shape, 0, runs).cut(flat), state[theirs]), theirs
        for key, of in pieces.items():
            if key.endswith((A, B)):
                held[key] = torch.from_numpy(whole(key, of, reader))

    # Merged, in transformers, against adapters that are not.
    export_folder(storage, manifest, source, tmp_path / "out")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    plain = Plain(folder, model, held)
    ids = torch.tensor([256, *TEXTS[2].encode(), 257])
    with torch.no_grad():
        ours, theirs, base = plain.logits(ids), merged(ids[None]).logits[0], model(ids[None]).logits[0]
    assert float((ours - theirs).abs().max() / ours.abs().max()) < TOLERANCE
    assert float((ours - base).abs().max() / ours.abs().max()) > 1e-2


def test_a_run_goes_on_to_the_bit_and_under_another_layout(ranks: RankPool, data, published, tmp_path, one):
    config = adapted(data, published[0], tmp_path / "run", "train.steps=2")
    (first,), _, _ = ranks.run(1, trained, config, 1)[0]
    divided = with_values(config, LAYOUTS["tp2"] | {"run.dir": str(tmp_path / "divided")})
    ranks.run(2, trained, divided, 2)
    again, gradients, _ = ranks.run(1, trained, config, 1)[0]
    assert [first, *again] == one[0]
    assert all(torch.equal(own, one[1][name]) for name, own in gradients.items())
    back = with_values(divided, {"layout.llm.tp": 1})
    assert ranks.run(1, trained, back, 1)[0][0] == pytest.approx(again, rel=TOLERANCE)


def held(rank: int, config: Config) -> tuple[set[str], int, int]:
    """What of a rank in bf16 has gradients; the elements of its weights in fp32; and of the base."""
    trainer = Trainer(prepare_run(config, 1), RunFolder.create(Path(config.run.dir)), rank, CPU)
    own = trainer.rank.components["llm"]
    (module,) = own.modules.values()
    with_buffers = {name for name, parameter in module.named_parameters() if hasattr(parameter, "main_grad")}
    mains = sum(main.numel() for _, main in own.main_weights().values())
    base = [of for name, of in module.named_parameters() if not name.endswith((A, B))]
    assert {of.dtype for of in base} == {torch.bfloat16}
    storages = {of.untyped_storage().data_ptr(): of.untyped_storage().nbytes() for of in base}
    trainer.close()
    return with_buffers, mains, sum(storages.values()) - 2 * sum(of.numel() for of in base)


def test_a_base_in_bf16_is_held_once_without_gradients_or_a_copy_in_fp32(
    ranks: RankPool, data, published, tmp_path
):
    config = adapted(data, published[0], tmp_path / "run", "train.precision=bf16")
    with_buffers, mains, more = ranks.run(1, held, config)[0]
    assert with_buffers
    assert all(name.endswith((A, B)) for name in with_buffers)
    sides = 64 + 96, 64 + 64, 64 + 192, 96 + 64  # of the four linears: inputs and outputs
    assert mains == 4 * RANK * sum(sides)
    assert more == 0


LORA = "model.llm.lora={{rank: {}, targets: [{}]}}"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["model.llm.lora={rank: 0, targets: [linear_qkv]}"], "lora.rank=0: with targets"),
        (["model.llm.lora={rank: 4}"], "lora.targets=[]: nothing would learn"),
        ([LORA.format(4, "linear_qkv, linear_qkv")], "names a linear twice"),
        (
            [LORA.format(4, "q_proj")],
            "there is no linear q_proj that takes adapters; choose among linear_qkv",
        ),
        ([LORA.format(65, "linear_qkv")], "lora.rank=65: linear_qkv has 64 inputs"),
        (
            [LORA.format(4, "linear_qkv"), "+optim.components.llm.frozen=true"],
            "lora.rank=4, but optim.components.llm.frozen freezes adapters",
        ),
        (
            [
                LORA.format(4, "linear_qkv"),
                "+stages={all: {steps: 3, optim: {components: {llm: {frozen: true}}}}}",
            ],
            "lora.rank=4, but optim.components.llm.frozen freezes adapters",
        ),
        (
            [LORA.format(4, "linear_qkv"), "model.llm.moe={experts: 4, ffn: 48}"],
            "lora.rank=4 with model.llm.moe.experts=4: such layers take no adapters yet",
        ),
    ],
)
def test_adapters_that_cannot_be_are_refused_before_ranks_start(data, tmp_path, lines, words):
    with pytest.raises(ConfigError) as error:
        prepare_run(compose_config(overrides(data, tmp_path / "run", *lines)), 1)
    assert words in str(error.value)

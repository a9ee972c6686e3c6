"""Whole models with towers, from their folders and back: transformers computes the same of their chats."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from open_model_folders import make, transformers
from ranks import RankPool
from runs import Running
from safetensors.torch import load_file
from test_against import measured
from whole_folders import CHATS, WHOLE, batch_of, chats, make_whole, processor_of

from dataloader.index import Index
from dataloader.reader import Reader
from dataloader.recipes.from_messages import build_from_messages
from dataloader.tokenizer import get_tokenizer
from dataloader.tokens import item_row_offsets, tokenize
from infra.run_folder import RunFolder, read_metrics
from omni.__main__ import main
from omni.commands import parity
from omni.compose import compose_config
from omni.config import Config, ConfigError
from omni.models.grid_positions import GridRows, grid_positions
from omni.models.regions import Region
from omni.models.registry import make_encoder, published
from omni.models.towers.processors import open_processor
from omni.open_models.folder import open_folder
from omni.planning.prepare import prepare_run
from omni.training.against import Scored, compare
from omni.training.opening import opening
from omni.training.parity import collect
from omni.training.trainer import Trainer

TOLERANCE = 1e-5
CPU = torch.device("cpu")
DRAWN = "+model.encoders.image.weights=false"


class Referee:
    """A whole model of transformers in a folder, with chats."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.chats_in = name, folder / "model", folder / "chats"
        self.model = make_whole(name, self.folder)
        self.chats = chats(self.chats_in)
        self.processor = processor_of(name, self.folder)
        self.data = folder / "data"
        self.tokenizer = get_tokenizer({"name": "hf", "path": str(self.folder)})
        build_from_messages(self.chats_in / "chats.jsonl", self.data, self.tokenizer)
        self.batches = [batch_of(self.processor, chat, self.chats_in) for chat in self.chats]

    def targets(self, ids: torch.Tensor) -> torch.Tensor:
        """Which ids an assistant says, with the token that closes it, bool [T]."""
        begin, end = self.tokenizer.special["<|im_start|>"], self.tokenizer.special["<|im_end|>"]
        said = self.processor.tokenizer("assistant\n", add_special_tokens=False)["input_ids"]
        own, found = ids.tolist(), torch.zeros(len(ids), dtype=torch.bool)
        for at in range(len(own)):
            first = at + 1 + len(said)
            if own[at] == begin and own[at + 1 : first] == said:
                found[first : own.index(end, first) + 1] = True
        return found

    def loss(self, model: torch.nn.Module) -> torch.Tensor:
        """The mean loss of all targets, one sequence each."""
        losses = []
        for batch in self.batches:
            ids = batch["input_ids"][0]
            logits = model(**batch).logits[0, :-1]
            losses.append(F.cross_entropy(logits, ids[1:], reduction="none")[self.targets(ids)[1:]])
        return torch.cat(losses).mean()


@pytest.fixture(scope="module", params=WHOLE)
def referee(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Referee:
    return Referee(request.param, tmp_path_factory.mktemp("whole"))


def line(folder: Path, data: Path, run: Path) -> list[str]:
    """The command line of a small run of a folder."""
    given = [f"start.weights={folder}", "model=from_folder", f"+data.sources.chats.path={data}"]
    return [
        *("~experiment", "system=multiplexed", *given, "data.microbatch_tokens=160"),
        *(f"data.step_samples={len(CHATS)}", "train.steps=1", "train.precision=fp32", "train.timeout_s=60"),
        *("optim.lr=1e-3", "tracking=jsonl", f"run.dir={run}"),
    ]


def configured(referee: Referee, run: Path, *more: str) -> Config:
    return compose_config([*line(referee.folder, referee.data, run), *more])


def test_tokens_and_positions_are_those_of_transformers(referee: Referee, tmp_path: Path) -> None:
    spec = prepare_run(configured(referee, tmp_path), 1)
    encoder: Any = spec.encoders["image"]
    index, reader = Index.open(referee.data, spec.tokenizer), Reader(referee.data)
    for number, batch in enumerate(referee.batches):
        meta = index.meta(number, "chats", lambda kind, size: encoder.count(size))
        ids, labels, mask = tokenize(reader.read(number, text=True, items=False), meta, spec.tokenizer)
        theirs = batch["input_ids"][0]
        assert ids.tolist() == theirs.tolist()
        assert mask[:-1].tolist() == referee.targets(theirs)[1:].tolist()
        assert labels[:-1].tolist() == theirs[1:].tolist()
        if "image_grid_thw" not in batch:
            continue
        rows = [
            GridRows(start, encoder.row_grid(item.size))
            for start, item in zip(item_row_offsets(meta), meta.items, strict=True)
        ]
        grids = {key: of for key, of in batch.items() if key in ("image_grid_thw", "mm_token_type_ids")}
        wanted = referee.model.model.get_rope_index(batch["input_ids"], **grids)[0][:, 0].T
        assert grid_positions(len(ids), rows).tolist() == wanted.tolist()


def test_the_screen_says_whose_weights_a_tower_begins_with(referee: Referee, tmp_path: Path) -> None:
    given = f"  start     with the weights of {referee.folder}, image "
    for more, said in (((), f"with the weights of {referee.folder}, at"), ((DRAWN,), "drawn anew, at")):
        spec = prepare_run(configured(referee, tmp_path, *more), 1)
        lines = [*opening(spec, RunFolder(tmp_path), None, "nowhere")]
        assert sum(line.startswith(given + said) for line in lines) == 1, lines


def first_step(rank: int, config: Config, world: int) -> tuple[float, dict[str, torch.Tensor] | None]:
    """The loss and the gradients of a first step."""
    folder = RunFolder.create(Path(config.run.dir))
    trainer = Trainer(prepare_run(config, world), folder, rank, CPU)
    trainer.saving.restore()
    with trainer.ahead() as ahead:
        done = trainer.run_step(trainer.begin(ahead, 1))
        found = collect(trainer, lambda own: own.grad)
    trainer.control.barrier("the end")
    trainer.close()
    return done.totals.loss, found


def test_logits_with_pictures_are_those_of_transformers(ranks: RankPool, referee: Referee, tmp_path) -> None:
    """As `omni parity --against` measures them."""
    loss, scored = ranks.run(1, measured, configured(referee, tmp_path / "run"), 1)[0]
    processor = open_processor(str(referee.folder), audio=False, model=referee.model.config)

    def worst(scored: list[Scored]) -> float:
        return max(of.relative for of in compare(loss, scored, referee.model, processor))

    assert sum(len(of.pictures) for of in scored) == 6
    assert worst(scored) < TOLERANCE
    dark = [replace(of, pictures=tuple(0 * picture for picture in of.pictures)) for of in scored]
    assert worst(dark) > 10 * TOLERANCE


@pytest.mark.slow  # it starts a run
def test_the_command_holds_with_pictures(referee: Referee, tmp_path: Path, capsys) -> None:
    if referee.name != "Qwen3.5":
        pytest.skip("what families differ in, first losses and gradients say: of the command one is run")
    *keys, _ = line(referee.folder, referee.data, tmp_path)  # it has a run folder of its own
    assert main(["parity", "--against", str(referee.folder), *keys, "launch.ranks=2", "layout.llm.pp=2"]) == 0
    assert "parity holds" in capsys.readouterr().out


def test_a_token_between_rows_is_refused_before_ranks_start(
    referee: Referee, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers' model of none of these folders has one."""
    monkeypatch.setattr(parity, "run_to_end", lambda *unused: pytest.fail("ranks started"))
    *keys, _ = line(referee.folder, referee.data, tmp_path)
    keys.append("+model.encoders.image.row_break=7")
    assert main(["parity", "--against", str(referee.folder), *keys]) == 2
    said = capsys.readouterr().err
    assert "model.encoders.image.row_break=7" in said
    assert "leave it out, or set it to null" in said


def stem(name: str) -> str:
    """A name as it is in memory and on disk."""
    return re.sub(r"^((model|language_model)\.)+", "", name)


def by_their_names(config: Config, found: dict[str, torch.Tensor], folder: Path) -> dict[str, torch.Tensor]:
    """What is collected of parameters, by the names that these have in transformers."""
    tower = published("image", make_encoder("image", config.model.encoders["image"]))
    assert tower is not None
    theirs = {}
    for key, flat in found.items():
        component, _, name = key.partition("@")[0].partition("/")
        rule = (open_folder(str(folder)) if component == "llm" else tower).rules[name]
        for own, runs in zip(rule.theirs, rule.runs, strict=True):
            theirs[stem(own)] = Region(rule.shape, 0, runs).cut(flat.view(rule.shape))
    return theirs


def compared(referee: Referee, ranks: RankPool, config: Config, world: int) -> tuple[float, float, str]:
    """The difference of the first loss relative to it, the worst of gradients, and whose that is."""
    loss, found = ranks.run(world, first_step, config, world)[0]
    assert found is not None
    referee.model.zero_grad()
    wanted = referee.loss(referee.model)
    wanted.backward()
    targets = sum(int(referee.targets(batch["input_ids"][0]).sum()) for batch in referee.batches)
    ours = {key: of / targets for key, of in by_their_names(config, found, referee.folder).items()}
    by_name = {stem(own): p.grad for own, p in referee.model.named_parameters() if p.grad is not None}
    norm = torch.stack([grad.norm() for grad in by_name.values()]).norm()
    apart = {
        own: float((ours.get(own, torch.zeros_like(grad)) - grad).norm() / grad.norm().clamp(min=1e-6 * norm))
        for own, grad in by_name.items()
        if own in ours or grad.norm() > 1e-6 * norm  # what shifts all keys alike does not learn here
    }
    worst = max(apart, key=lambda own: apart[own])
    return abs(loss / float(wanted.detach()) - 1), apart[worst], worst


@pytest.mark.parametrize("world", [1, 2])
def test_the_first_loss_and_gradients_are_those_of_transformers(
    referee: Referee, ranks: RankPool, tmp_path: Path, world: int
) -> None:
    """Also on two ranks, which read text and tower together."""
    loss, gradient, name = compared(referee, ranks, configured(referee, tmp_path / "run"), world)
    assert loss <= 1e-6
    assert gradient <= TOLERANCE, name


def stepped(rank: int, config: Config) -> dict[str, torch.Tensor] | None:
    """Take a step and save. Return the weights."""
    folder = RunFolder.create(Path(config.run.dir))
    trainer = Trainer(prepare_run(config, 1), folder, rank, CPU)
    trainer.saving.restore()
    with trainer.ahead() as ahead:
        trainer.update(trainer.run_step(trainer.begin(ahead, 1)))
    found = collect(trainer, lambda own: own.main.detach())
    trainer.saving.save(trainer.reporter)
    trainer.saving.finish(trainer.reporter)
    trainer.close()
    return found


def test_an_export_holds_what_was_learnt_of_text_and_tower(
    referee: Referee, ranks: RankPool, tmp_path: Path
) -> None:
    """To the bit, in the folder's files with all that lies beside them."""
    run, out = tmp_path / "run", tmp_path / "out"
    config = configured(referee, run, "optim.min_lr=1e-3")
    found = ranks.run(1, stepped, config)[0]
    assert found is not None
    (run / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(config)))
    assert main(["checkpoint", "export", str(run), "--as", "hf", "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == {path.name for path in referee.folder.iterdir()}
    written = {
        stem(name): tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    ours = by_their_names(config, found, referee.folder)
    assert written.keys() == ours.keys()
    assert [
        name for name, own in ours.items() if not torch.equal(own.flatten(), written[name].flatten())
    ] == []
    before = dict(referee.model.named_parameters())
    assert not [name for name, own in before.items() if torch.equal(own, written[stem(name)])]


def rewritten(folder: Path, name: str, **values: object) -> None:
    """Change what a file of a folder says."""
    said = json.loads((folder / name).read_text()) | values
    (folder / name).write_text(json.dumps(said))


REFUSED = [
    ("InternVL", "config.json", {"image_seq_length": 5}, "image_seq_length=5, .* come 4 rows: take config"),
    ("InternVL", "config.json", {"vision_feature_layer": -2}, "vision_feature_layer=-2 is not trained"),
    (
        "InternVL",
        "config.json",
        {"image_token_id": 999},
        "image_token_id=999, and the tokenizer .* of one model",
    ),
    ("InternVL", "preprocessor_config.json", None, "no processor of images .*Fetch its preprocessor_config"),
    ("Qwen3-VL", "preprocessor_config.json", {"merge_size": 1}, "merges 1x1 .* merges 2x2: take"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_folders_whose_files_disagree_are_refused_before_ranks_start(number: int, tmp_path: Path) -> None:
    name, file, values, told = REFUSED[number]
    make_whole(name, tmp_path / "model")
    if values is None:
        (tmp_path / "model" / file).unlink()
    else:
        rewritten(tmp_path / "model", file, **values)
    keys = [*line(tmp_path / "model", tmp_path / "data", tmp_path / "run")]
    with pytest.raises(ConfigError, match=told):
        prepare_run(compose_config(keys), 1)


def as_published(name: str, said: dict[str, Any]) -> dict[str, Any]:
    """A configuration as the model's makers wrote it, before transformers 5: rotation in two keys and, of
    Qwen2.5-VL, the text at the top.
    """
    text = said["text_config"]
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope.pop("rope_theta")
    if "mrope_section" in rope:
        kind = "type" if name == "Qwen2.5-VL" else "rope_type"
        text["rope_scaling"] = {**rope, kind: "mrope" if name == "Qwen2.5-VL" else "default"}
    if name != "Qwen2.5-VL":
        return said
    del said["text_config"], text["model_type"]
    return {**text, **said, "vision_token_id": 7}


@pytest.mark.parametrize("name", ["Qwen2.5-VL", "Qwen3-VL", "InternVL"])
def test_configurations_in_their_first_form_mean_the_same(name: str, tmp_path: Path) -> None:
    make_whole(name, tmp_path)
    keys = open_folder(str(tmp_path)).keys
    said = as_published(name, json.loads((tmp_path / "config.json").read_text()))
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert open_folder(str(tmp_path)).keys == keys


def test_a_folder_of_text_alone_and_no_folder_are_refused(tmp_path: Path) -> None:
    make("qwen3", tmp_path / "text")
    with pytest.raises(ConfigError, match="holds a model of text alone: leave"):
        compose_config(line(tmp_path / "text", tmp_path, tmp_path))
    with pytest.raises(ConfigError, match=r"from_folder=true, and start\.weights is not set"):
        compose_config(["~experiment", "model=from_folder"])


def test_keys_of_the_encoder_and_the_tokenizer_may_be_overruled(tmp_path: Path) -> None:
    make_whole("Qwen3-VL", tmp_path)
    keys = line(tmp_path, tmp_path, tmp_path)
    config = compose_config(keys)
    assert config.model.encoders == {"image": {"name": "qwen_vit", "folder": str(tmp_path)}}
    assert config.data.tokenizer == {"name": "hf", "path": str(tmp_path)}
    other = compose_config(
        [*keys, "+model.encoders.image.weights=false", "data.tokenizer={name: hf, path: x}"]
    )
    assert other.model.encoders["image"] == config.model.encoders["image"] | {"weights": False}
    assert other.data.tokenizer == {"name": "hf", "path": "x"}
    drawn = compose_config([*keys, "+model.encoders.image.name=vit"])
    assert drawn.model.encoders == {"image": {"name": "vit"}}


STEPS = 30
RATES = dict.fromkeys(WHOLE, 1e-3) | {"Qwen3.5": 3e-4}
"""Learning rates. At 1e-3 Qwen3.5 is no referee: plain torch, begun with weights that are one rounding off,
is 1e-3 away from itself after 20 steps, and at 3e-4 within 1e-6 after 30.
"""
TOKENS, STEPS_TOLERANCE = 20, 1e-4
LAYOUTS = {
    "one": ("launch.ranks=1",),
    "tp2 pp2 joint": (
        "launch.ranks=4",
        "layout.llm.tp=2",
        "layout.llm.pp=2",
        "pipeline=joint",
        "+layout.encoders.image.tp=2",
    ),
}


def plain_losses(referee: Referee, model: torch.nn.Module) -> list[float]:
    """Losses of steps of AdamW in plain torch: with clipping, and decay of matrices alone."""
    matrices = [of for of in model.parameters() if of.dim() > 1]
    vectors = [of for of in model.parameters() if of.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATES[referee.name], betas=(0.9, 0.95), eps=1e-4)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = referee.loss(model)
        loss.backward()
        losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return losses


_LOADING = ("missing_keys", "unexpected_keys", "mismatched_keys")


@dataclass
class Tuned:
    """A run beside plain torch: the largest difference of a step's loss, and of that after the last; first
    and last loss; tensors that the exported folder lacks or that did not learn; answers to chats, here and
    in transformers.
    """

    steps: float
    after: float
    losses: tuple[float, float]
    lacking: list[str]
    still: list[str]
    ours: list[tuple[str, int]]
    theirs: list[tuple[str, int]]

    @property
    def holds(self) -> bool:
        """Whether all is as it should be."""
        learnt = self.losses[1] < self.losses[0] - 1
        same = self.ours == self.theirs and not self.lacking and not self.still
        return max(self.steps, self.after) < STEPS_TOLERANCE and learnt and same


def tuned(referee: Referee, layout: str, work: Path) -> Tuned:
    """Train a folder by the command, export it, ask both, and compare with plain torch."""
    run, out = work / "run", work / "out"
    keys = line(referee.folder, referee.data, run)
    rates = [f"optim.{key}={RATES[referee.name]}" for key in ("lr", "min_lr")]
    more = (f"train.steps={STEPS}", *rates, "optim.eps=1e-4", *LAYOUTS[layout])
    _command(work, "train", *keys, *more)
    found = [told["loss/train"] for told in read_metrics(run / "metrics.jsonl") if "loss/train" in told]
    model = _loaded(referee.folder)[0]
    plain = plain_losses(referee, model)
    _command(work, "checkpoint", "export", str(run), "--as", "hf", "--out", str(out))
    loaded, told = _loaded(out)
    with torch.no_grad():
        after = abs(float(referee.loss(loaded)) - float(referee.loss(model)))
    questions, answers = referee.chats_in / "questions.jsonl", work / "answers.jsonl"
    questions.write_text("".join(json.dumps({"messages": chat[:-1]}) + "\n" for chat in referee.chats))
    asked = ["--messages", str(questions), "--tokens", str(TOKENS), "--out", str(answers)]
    _command(work, "generate", str(run), *asked)
    before = dict(referee.model.named_parameters())
    return Tuned(
        steps=max(abs(own - of) for own, of in zip(found, plain, strict=True)),
        after=after,
        losses=(plain[0], plain[-1]),
        lacking=[
            name for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") for name in told[kind]
        ],
        still=[name for name, own in loaded.named_parameters() if torch.equal(own, before[name])],
        ours=[(told["answer"], told["tokens"]) for told in map(json.loads, answers.read_text().splitlines())],
        theirs=[generated(referee, loaded, chat[:-1]) for chat in referee.chats],
    )


def _command(work: Path, *words: str) -> None:
    done = Running(["-m", "omni", *words], work).finish()
    assert done.code == 0, done.err


def _loaded(folder: Path) -> tuple[Any, dict[str, Any]]:
    """transformers' model of a folder, and what it says of loading it."""
    model, told = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    return model.eval(), told


@pytest.mark.slow  # it starts runs
@pytest.mark.parametrize("layout", LAYOUTS)
def test_steps_lose_what_plain_torch_loses_and_the_folder_comes_back(
    referee: Referee, layout: str, tmp_path: Path
) -> None:
    if (layout == "one") == (referee.name == "Qwen3-VL"):
        pytest.skip("Qwen3-VL is run on several ranks, and each other one on one")
    found = tuned(referee, layout, tmp_path)
    assert found.holds, found


def generated(referee: Referee, model: Any, chat: list[dict[str, Any]]) -> tuple[str, int]:
    """What transformers answers, and in how many tokens."""
    batch = batch_of(referee.processor, chat, referee.chats_in, asks=True)
    end = referee.tokenizer.special["<|im_end|>"]
    more = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": end, "pad_token_id": 0}
    new = model.generate(**batch, **more)[0, batch["input_ids"].shape[1] :]
    return referee.processor.tokenizer.decode(new, skip_special_tokens=True), len(new)

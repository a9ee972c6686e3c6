"""The quickstarts that tune a published folder, as a user runs them: chats, and a whole model's pictures.

transformers loads what comes out, and answers as `omni generate` does.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from documented import pages, split
from PIL import Image
from runs import Running

from dataloader.recipes.quickstart_chat import draw_chats
from infra.run_folder import read_metrics, read_summary
from omni.__main__ import main
from omni.open_models.folder import open_folder

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
transformers = pytest.importorskip("transformers", reason="transformers, the referee, is not installed")

QUESTIONS = 20
LIMIT_S = 1500  # of minutes on a machine of its own
SOURCES, STEPS = {"chat": "chats", "open": "strips"}, {"chat": 320, "open": 150}


def commands(name: str) -> dict[str, tuple[str, ...]]:
    """What the page prints, in turn, and what is appended: fewer steps than by default, which suffice, and
    one evaluation, after the last, on a part of what is held out.
    """
    source, steps = SOURCES[name], STEPS[name]
    few, data = (
        [f"data.heldout.{source}.{key}=100" for key in ("samples", "generate")],
        f"data/quickstart_{name}",
    )
    return {
        f"omni data build --recipe quickstart_{name} --out {data}": (),
        f"omni train experiment=quickstart_{name} run.dir=runs/{name}": (
            "tracking=jsonl", f"train.steps={steps}", f"train.eval_every={steps}", *few,
        ),
        f"omni checkpoint export runs/{name} --as hf --out models/{name}": (),
        f"omni generate runs/{name} --messages {data}/questions.jsonl --out answers.jsonl": (),
    }  # fmt: skip


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def chat_answers(folder: Path, data: Path) -> list[str]:
    """What transformers answers, without any code of ours: files, template, tokens and passes are its own."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()

    def given(asked: list[dict[str, Any]]) -> Any:
        form = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        return tokenizer.apply_chat_template(asked, **form)

    return [answered(model, tokenizer, given(of["messages"])) for of in lines(data / "questions.jsonl")]


def open_answers(folder: Path, data: Path) -> list[str]:
    """The same for pictures, with its processor without videos, which ask for torchvision."""
    kind = transformers.Qwen3VLProcessor
    of_pictures = type(
        kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, *of: type(of[1])}
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pixels = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    processor = of_pictures(pixels, tokenizer, None, chat_template=tokenizer.chat_template)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()

    def given(asked: list[dict[str, Any]]) -> Any:
        picture = Image.open(data / asked[0]["content"][0]["image"]).convert("RGB")
        text = processor.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        return processor(images=[picture], text=[text], return_tensors="pt")

    return [answered(model, tokenizer, given(of["messages"])) for of in lines(data / "questions.jsonl")]


def answered(model: Any, tokenizer: Any, given: Any) -> str:
    with torch.no_grad():
        said = model.generate(**given, max_new_tokens=64, do_sample=False)
    return tokenizer.decode(said[0, given["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer samples, for commands that this process runs."""
    for module, what in (("quickstart_chat", ""), ("quickstart", "_STRIPS")):
        monkeypatch.setattr(f"dataloader.recipes.{module}.NUM_TRAIN{what}", 60)
        monkeypatch.setattr(f"dataloader.recipes.{module}.NUM_HELDOUT{what}", 30)


def build(name: str, *words: object) -> int:
    return main(["data", "build", "--recipe", f"quickstart_{name}", *map(str, words)])


def contents(folder: Path) -> dict[Path, bytes]:
    return {file.relative_to(folder): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("name", SOURCES)
def test_a_recipe_is_built_once_and_of_another_seed_refused(
    name: str, few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data"
    assert build(name, "--out", out) == 0
    assert capsys.readouterr().out.count(": built") == 3
    before = contents(out)
    assert build(name, "--out", out) == 0
    assert capsys.readouterr().out.count("is there and intact, nothing to do") == 3
    assert build(name, "--out", out, "--seed", 1) == 2
    assert "holds other chats" in capsys.readouterr().err
    assert contents(out) == before


def test_transformers_loads_the_model_of_chats(few: None, tmp_path: Path) -> None:
    out, again = tmp_path / "data", tmp_path / "again"
    assert build("chat", "--out", out) == build("chat", "--out", again) == 0
    assert contents(again) == contents(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "model")
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    held = {key: own.std() for key, own in model.named_parameters() if own.dim() > 1}
    assert all(0.07 < of < 0.09 for of in held.values()), held
    assert all(bool((own == 1).all()) for own in model.parameters() if own.dim() == 1)
    train, heldout = ({json.dumps(of) for of in part} for part in draw_chats(seed=0))
    assert (len(train), len(heldout), len(train & heldout)) == (60, 30, 0)


def test_transformers_loads_the_whole_model(few: None, tmp_path: Path) -> None:
    folder = tmp_path / "data/model"
    assert build("open", "--out", folder.parent) == 0
    _, told = transformers.AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert open_folder(str(folder)).family.encoders


def test_a_cut_model_is_made_anew_and_a_tokenizer_is_refused(
    few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data"
    assert build("chat", "--out", out) == 0
    weights = out / "model/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert build("chat", "--out", out) == 0
    assert weights.read_bytes() == whole
    assert build("chat", "--out", out, "--seed", 1, "--overwrite") == 0
    assert weights.read_bytes() != whole
    assert build("chat", "--out", out, "--tokenizer", "bytes2") == 2
    assert "leave it out" in capsys.readouterr().err


def tune(name: str, folder: Path, answers: Callable[[Path, Path], list[str]]) -> tuple[list[str], float]:
    """Run the page's commands. Returns answers, which transformers gives as well, and the share of what is
    held out that is exact.
    """
    printed = {command for found in pages().values() for command in found}
    for step, more in commands(name).items():
        assert step in printed
        done = Running(["-m", *split(step), *more], folder).finish(LIMIT_S)
        assert done.code == 0, f"{step}\n{done.out[-2000:]}\n{done.err[-4000:]}"
    run = folder / "runs" / name
    losses = [line["loss/train"] for line in read_metrics(run / "metrics.jsonl")]
    assert losses[-1] < losses[0] / 10
    found = lines(folder / "answers.jsonl")
    said = [answer["answer"] for answer in found]
    assert len(said) == QUESTIONS
    assert said == answers(folder / "models" / name, folder / f"data/quickstart_{name}")
    assert {answer["finish"] for answer in found} == {"stop"}
    return said, read_summary(run / "summary.json")[f"eval/exact_match/{SOURCES[name]}"]


@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.slow  # it trains for minutes
def test_a_tuned_folder_answers_in_transformers_as_it_does_here(tmp_path: Path) -> None:
    said, exact = tune("chat", tmp_path, chat_answers)
    assert exact > 0.8
    _, heldout = draw_chats(seed=0)
    right = [own == chat[-1]["content"] for own, chat in zip(said, heldout, strict=False)]
    assert sum(right) > 0.8 * QUESTIONS


@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.slow  # it trains for minutes
def test_a_tuned_whole_model_reads_pictures_in_transformers_as_it_does_here(tmp_path: Path) -> None:
    _, exact = tune("open", tmp_path, open_answers)
    assert exact > 0.5

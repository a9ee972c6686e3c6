"""The third quickstart as a user runs it: a folder of a whole model in, tuned on pictures, a folder out.

transformers loads what comes out, and answers as `omni generate` does.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from documented import pages, split
from PIL import Image
from runs import Running

from infra.run_folder import read_metrics, read_summary
from omni.__main__ import main
from omni.open_models.folder import open_folder

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
transformers = pytest.importorskip("transformers", reason="transformers, the referee, is not installed")

DATA, QUESTIONS = "data/quickstart_open", 20
LIMIT_S = 1500  # of minutes on a machine of its own
# Fewer steps than by default, which suffice; evaluated once, after the last, on a part of what is held out.
ASKED_ONCE = (
    "tracking=jsonl",
    "train.steps=300",
    "train.eval_every=300",
    "data.heldout.strips.samples=100",
    "data.heldout.strips.generate=100",
)
# As the page prints them.
STEPS = (
    f"omni data build --recipe quickstart_open --out {DATA}",
    "omni train experiment=quickstart_open run.dir=runs/open",
    "omni checkpoint export runs/open --as hf --out models/open",
    f"omni generate runs/open --messages {DATA}/questions.jsonl --out answers.jsonl",
)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def answers_of(folder: Path, data: Path) -> list[str]:
    """What transformers answers, without any code of ours: files, template, tokens, pixels and passes are its
    own. Its processor without videos, which ask for torchvision.
    """
    kind = transformers.Qwen3VLProcessor
    of_pictures = type(
        kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, *of: type(of[1])}
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pixels = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    processor = of_pictures(pixels, tokenizer, None, chat_template=tokenizer.chat_template)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    answers = []
    for question in lines(data / "questions.jsonl"):
        asked = question["messages"]
        picture = Image.open(data / asked[0]["content"][0]["image"]).convert("RGB")
        text = processor.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        given = processor(images=[picture], text=[text], return_tensors="pt")
        with torch.no_grad():
            said = model.generate(**given, max_new_tokens=64, do_sample=False)
        answers.append(tokenizer.decode(said[0, given["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


def test_the_recipe_is_built_once_and_transformers_loads_its_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dataloader.recipes.quickstart.NUM_TRAIN_STRIPS", 60)
    monkeypatch.setattr("dataloader.recipes.quickstart.NUM_HELDOUT_STRIPS", 30)
    build, out = ["data", "build", "--recipe", "quickstart_open", "--out"], tmp_path / "data"
    assert main([*build, str(out)]) == 0
    assert capsys.readouterr().out.count(": built") == 3
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    assert main([*build, str(out)]) == 0
    assert capsys.readouterr().out.count("is there and intact, nothing to do") == 3
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    _, told = transformers.AutoModelForImageTextToText.from_pretrained(
        out / "model", output_loading_info=True
    )
    assert not any(told[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert open_folder(str(out / "model")).family.encoders
    assert main([*build, str(out), "--seed", "1"]) == 1
    assert "holds other chats" in capsys.readouterr().err


@pytest.mark.slow  # it trains for minutes
def test_a_tuned_folder_reads_pictures_in_transformers_as_it_does_here(tmp_path: Path) -> None:
    printed = {command for found in pages().values() for command in found}
    for step in STEPS:
        assert step in printed
        more = ASKED_ONCE if step.startswith("omni train") else ()
        done = Running(["-m", *split(step), *more], tmp_path).finish(LIMIT_S)
        assert done.code == 0, f"{step}\n{done.out[-2000:]}\n{done.err[-4000:]}"
    losses = [line["loss/train"] for line in read_metrics(tmp_path / "runs/open/metrics.jsonl")]
    assert losses[-1] < losses[0] / 10
    assert read_summary(tmp_path / "runs/open/summary.json")["eval/exact_match/strips"] > 0.5
    found = lines(tmp_path / "answers.jsonl")
    said = [answer["answer"] for answer in found]
    assert len(said) == QUESTIONS
    assert said == answers_of(tmp_path / "models/open", tmp_path / DATA)
    assert {answer["finish"] for answer in found} == {"stop"}

"""The second quickstart as a user runs it: a published folder in, tuned on chats, a published folder out.

transformers loads what comes out, and answers as `omni generate` does.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from documented import pages, split
from runs import Running

from dataloader.recipes.quickstart_chat import draw_chats
from infra.run_folder import read_metrics, read_summary
from omni.__main__ import main

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
transformers = pytest.importorskip("transformers", reason="transformers, the referee, is not installed")

DATA, QUESTIONS = "data/quickstart_chat", 20
LIMIT_S = 1500  # of minutes on a machine of its own
# Fewer steps than by default, which suffice; evaluated once, after the last, on a part of what is held out.
ASKED_ONCE = (
    "tracking=jsonl",
    "train.steps=400",
    "train.eval_every=400",
    "data.heldout.chats.samples=100",
    "data.heldout.chats.generate=100",
)
# As the page prints them.
STEPS = (
    f"omni data build --recipe quickstart_chat --out {DATA}",
    "omni train experiment=quickstart_chat run.dir=runs/chat",
    "omni checkpoint export runs/chat --as hf --out models/chat",
    f"omni generate runs/chat --messages {DATA}/questions.jsonl --out answers.jsonl",
)


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def answers_of(folder: Path, questions: list[dict[str, Any]]) -> list[str]:
    """What transformers answers, without any code of ours: files, template, tokens and passes are its own."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    answers = []
    for question in questions:
        given = tokenizer.apply_chat_template(
            question["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        with torch.no_grad():
            said = model.generate(**given, max_new_tokens=64, do_sample=False)
        answers.append(tokenizer.decode(said[0, given["input_ids"].shape[1] :], skip_special_tokens=True))
    return answers


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer chats, for commands that this process runs."""
    monkeypatch.setattr("dataloader.recipes.quickstart_chat.NUM_TRAIN", 60)
    monkeypatch.setattr("dataloader.recipes.quickstart_chat.NUM_HELDOUT", 30)


def build(*words: object) -> int:
    return main(["data", "build", "--recipe", "quickstart_chat", *map(str, words)])


def test_the_recipe_is_built_once_and_transformers_loads_its_model(
    few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data"
    assert build("--out", out) == 0
    assert capsys.readouterr().out.count(": built") == 3
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    assert build("--out", out) == 0
    assert capsys.readouterr().out.count("is there and intact, nothing to do") == 3
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    assert build("--out", tmp_path / "again") == 0
    assert all((tmp_path / "again" / file.relative_to(out)).read_bytes() == of for file, of in before.items())
    model = transformers.AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "model")
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.config.vocab_size == len(tokenizer)
    held = {key: own.std() for key, own in model.named_parameters() if own.dim() > 1}
    assert all(0.07 < of < 0.09 for of in held.values()), held
    assert all(bool((own == 1).all()) for own in model.parameters() if own.dim() == 1)
    train, heldout = ({json.dumps(of) for of in part} for part in draw_chats(seed=0))
    assert (len(train), len(heldout), len(train & heldout)) == (60, 30, 0)


def test_what_is_there_and_another_is_refused_and_a_cut_model_is_made_anew(
    few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "data"
    assert build("--out", out) == 0
    weights = out / "model/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    assert build("--out", out) == 0
    assert weights.read_bytes() == whole
    assert build("--out", out, "--seed", 1) == 1
    assert "train.jsonl holds other chats" in capsys.readouterr().err
    assert weights.read_bytes() == whole
    assert build("--out", out, "--seed", 1, "--overwrite") == 0
    assert weights.read_bytes() != whole
    assert build("--out", out, "--tokenizer", "bytes2") == 1
    assert "leave it out" in capsys.readouterr().err


@pytest.mark.slow  # it trains for minutes
def test_a_tuned_folder_answers_in_transformers_as_it_does_here(tmp_path: Path) -> None:
    printed = {command for found in pages().values() for command in found}
    for step in STEPS:
        assert step in printed
        more = ASKED_ONCE if step.startswith("omni train") else ()
        done = Running(["-m", *split(step), *more], tmp_path).finish(LIMIT_S)
        assert done.code == 0, f"{step}\n{done.out[-2000:]}\n{done.err[-4000:]}"
    losses = [line["loss/train"] for line in read_metrics(tmp_path / "runs/chat/metrics.jsonl")]
    assert losses[-1] < losses[0] / 10
    assert read_summary(tmp_path / "runs/chat/summary.json")["eval/exact_match/chats"] > 0.8
    questions, found = lines(tmp_path / DATA / "questions.jsonl"), lines(tmp_path / "answers.jsonl")
    said = [answer["answer"] for answer in found]
    assert len(said) == len(questions) == QUESTIONS
    assert said == answers_of(tmp_path / "models/chat", questions)
    assert {answer["finish"] for answer in found} == {"stop"}
    _, heldout = draw_chats(seed=0)
    right = [own == chat[-1]["content"] for own, chat in zip(said, heldout, strict=False)]
    assert sum(right) > 0.8 * QUESTIONS

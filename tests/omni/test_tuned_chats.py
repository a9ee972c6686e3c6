"""A published folder, weights and tokenizer, trains on chats and answers them: the first loss and the answers
are transformers' own.
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import Running

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
import torch
import torch.nn.functional as F
from open_model_folders import make, transformers
from tiny_bpe import write_tokenizer

from dataloader.index import Index
from dataloader.reader import Reader
from dataloader.recipes.from_messages import build_from_messages
from dataloader.tokenizer import get_tokenizer
from dataloader.tokens import tokenize
from infra.run_folder import read_metrics
from omni.__main__ import main
from omni.training.evaluate import answer_of

TURN = "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
BEGUN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TEMPLATE = "{% for message in messages %}" + TURN + "{% endfor %}" + BEGUN
TOKENS = 24
CHATS = (("Two and two?", "two and two is four"), ("hello there", "how are you?"), ("the answer?", "four"))


def plain_loss(model: torch.nn.Module, folder: Path) -> float:
    """The mean loss of all that assistants say and of what closes it, without any code of ours."""
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    losses = []
    for asked, said in CHATS:
        lead = f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        text = f"{lead}{said}<|im_end|>\n"
        made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = torch.tensor(made["input_ids"])
        stop = len(lead) + len(said) + len("<|im_end|>")
        carry = torch.tensor([a < stop and len(lead) < b for a, b in made["offset_mapping"]])
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1]
        losses.append(F.cross_entropy(logits, ids[1:], reduction="none")[carry[1:]])
    return float(torch.cat(losses).mean())


def plain_answers(folder: Path) -> list[tuple[str, int]]:
    """What transformers answers to the questions, and in how many tokens, without any code of ours."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    file = str(folder / "tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=file, chat_template=TEMPLATE)
    ends = tokenizer.convert_tokens_to_ids(["</s>", "<|im_end|>"])
    answers = []
    for asked, _ in CHATS:
        turn = [{"role": "user", "content": asked}]
        text = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        more = {"max_new_tokens": TOKENS, "do_sample": False, "eos_token_id": ends, "pad_token_id": 0}
        new = model.generate(ids, **more)[0, ids.shape[1] :].tolist()
        answers.append((tokenizer.decode(new, skip_special_tokens=True), len(new)))
    return answers


@pytest.mark.parametrize("turns", [1, 2])
def test_the_last_answer_of_a_chat_is_asked_for_and_ends_where_it_is_closed(
    tmp_path: Path, turns: int
) -> None:
    write_tokenizer(tmp_path / "bpe", TEMPLATE)
    tokenizer = get_tokenizer({"name": "hf", "path": str(tmp_path / "bpe")})
    talk = []
    for asked, said in CHATS[:turns]:
        talk += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    build_from_messages(tmp_path / "chats.jsonl", tmp_path / "set", tokenizer)
    meta = Index.open(tmp_path / "set", tokenizer).meta(0, "s", lambda modality, size: (0, 0))
    sample = Reader(tmp_path / "set").read(0, text=True, items=False)
    answer = answer_of(sample, meta, tokenizer)
    assert (answer.text, answer.closing) == (said, tokenizer.special["<|im_end|>"])
    ids = tokenize(sample, meta, tokenizer)[0][: answer.begin]
    assert tokenizer.decode(ids).endswith(f"user\n{asked}\nassistant\n")


def run_omni(arguments: list[str], folder: Path) -> int:
    return Running(["-m", "omni", *arguments], folder).finish().code


@pytest.mark.slow  # it starts a run
def test_a_published_model_learns_chats_with_its_own_tokenizer(tmp_path: Path) -> None:
    folder, run = tmp_path / "published", tmp_path / "run"
    model = make("qwen2", folder, vocab_size=320, initializer_range=0.3)
    write_tokenizer(folder, TEMPLATE)
    turns = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in CHATS]
    chats = tmp_path / "chats.jsonl"
    chats.write_text("".join(json.dumps({"messages": of}) + "\n" for of in turns))
    tokenizer = f"{{name: hf, path: {folder}}}"
    build = ["data", "build", "--from-messages", str(chats), "--out", str(tmp_path / "data")]
    assert main([*build, "--tokenizer", tokenizer]) == 0
    keys = [f"start.weights={folder}", f"data.tokenizer={tokenizer}", f"run.dir={run}"]
    keys += [f"+data.sources.chats.path={tmp_path / 'data'}", f"data.step_samples={len(CHATS)}"]
    keys += ["data.microbatch_tokens=64", "train.steps=3", "optim.lr=1e-3", "tracking=jsonl"]
    train = ["train", "~experiment", "system=multiplexed", *keys, "layout.llm.tp=2", "launch.ranks=2"]
    assert run_omni(train, tmp_path) == 0
    losses = [line["loss/train"] for line in read_metrics(run / "metrics.jsonl")]
    assert losses[0] == pytest.approx(plain_loss(model, folder), rel=1e-5)
    assert losses[-1] < losses[0]
    out = tmp_path / "out"
    assert main(["checkpoint", "export", str(run), "--as", "hf", "--out", str(out)]) == 0
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert (out / "chat_template.jinja").read_text() == TEMPLATE

    questions, found = tmp_path / "questions.jsonl", tmp_path / "answers.jsonl"
    questions.write_text("".join(json.dumps({"messages": of[:1]}) + "\n" for of in turns))
    generate = ["generate", str(run), "--messages", str(questions), "--tokens", str(TOKENS)]
    assert run_omni([*generate, "--out", str(found), "layout.llm.tp=1", "layout.llm.pp=2"], tmp_path) == 0
    answers = [json.loads(line) for line in found.read_text().splitlines()]
    expected = plain_answers(out)
    assert [(of["answer"], of["tokens"]) for of in answers] == expected
    assert len({text for text, _ in expected}) == len(CHATS)
    # Too little time is told by the exit code, and a signal is heeded.
    assert run_omni([*generate, "train.generate_s=1e-9"], tmp_path) == 1
    questions.write_text(questions.read_text() * 200)
    command = [sys.executable, "-m", "omni", *generate, "launch.ranks=1", "layout.llm.tp=1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            assert any("generating texts" in line for line in running.stdout)
            running.send_signal(signal.SIGTERM)
            said, _ = running.communicate(timeout=120)
        finally:
            running.kill()
    assert running.returncode == 128 + signal.SIGTERM
    assert "of 600 of answers: SIGTERM" in said

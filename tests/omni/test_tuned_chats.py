"""A published folder, weights and tokenizer, trains on chats: the first loss is transformers' own."""

import json
from pathlib import Path

import pytest

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
import torch
import torch.nn.functional as F
from open_model_folders import make, transformers
from tiny_bpe import write_tokenizer

from infra.run_folder import read_metrics
from omni.__main__ import main

TURN = "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
TEMPLATE = "{% for message in messages %}" + TURN + "{% endfor %}"
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


@pytest.mark.slow  # it starts a run
def test_a_published_model_learns_chats_with_its_own_tokenizer(tmp_path: Path) -> None:
    folder, run = tmp_path / "published", tmp_path / "run"
    model = make("qwen2", folder, vocab_size=320)
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
    assert main(["train", "~experiment", *keys, "layout.llm.tp=2", "launch.ranks=2"]) == 0
    losses = [line["loss/train"] for line in read_metrics(run / "metrics.jsonl")]
    assert losses[0] == pytest.approx(plain_loss(model, folder), rel=1e-5)
    assert losses[-1] < losses[0]
    out = tmp_path / "out"
    assert main(["checkpoint", "export", str(run), "--as", "hf", "--out", str(out)]) == 0
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert (out / "chat_template.jinja").read_text() == TEMPLATE

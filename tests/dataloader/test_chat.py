import argparse
import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from tiny_bpe import write_tokenizer

from dataloader.chat import ChatTemplate, ends_of_turns
from dataloader.format import DataError
from dataloader.index import Index
from dataloader.item_counts import RememberedCounts
from dataloader.reader import Reader
from dataloader.recipes.from_messages import build_from_messages
from dataloader.tokenizer import get_tokenizer
from dataloader.tokens import fit, length, tokenize
from dataloader.verify import verify_dataset
from omni.commands import data

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLOCKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}"
)
TALK = [
    {"role": "user", "content": "two and two?"},
    {"role": "assistant", "content": " is four.\n"},
    {"role": "user", "content": "is four."},
    {"role": "assistant", "content": "quite"},
]
SPECIAL = ("<|im_start|>", "<|im_end|>")
COUNTS = RememberedCounts(lambda modality, size: (0, 0))


def said(template, talk=TALK):
    text, spans = ChatTemplate(template, {}).targets(talk, SPECIAL)
    return [text[start:stop] for start, stop in spans]


def test_marks_find_what_blocks_say():
    # trim_blocks takes the line break after a block of the one, not of the other.
    assert said(CHATML) == said(BLOCKS) == [" is four.\n<|im_end|>", "quite<|im_end|>"]


def test_contents_that_a_template_strips_are_found_within_their_white_space():
    assert said(CHATML.replace("m.content", "m.content | trim")) == ["is four.<|im_end|>", "quite<|im_end|>"]


@pytest.mark.parametrize(
    "template, talk, message",
    [
        (CHATML, TALK[:1], r"no message is an assistant's \(there are \['user'\]\)"),
        (CHATML.replace("m.content", "m.content[:3]"), TALK, "cuts what an assistant says"),
        (CHATML.replace("m.content", "m.content[1:-1]"), TALK, "otherwise than they are given"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", TALK[3:], "all of the text is in targets"),
        ("{% generation %}{% endgeneration %}x", TALK, "hold nothing"),
        ("{{ raise_exception('roles must alternate') }}", TALK, "raised ValueError: roles must alternate"),
        ("{{ messages.append(1) }}", TALK, "raised SecurityError"),
        ("{{ ''.__class__.__mro__ }}", TALK, "raised SecurityError"),
        ("{% for %}", TALK, "is not valid"),
        (CHATML, [TALK[0], {**TALK[1], "tool_calls": [{}]}], r"\['tool_calls'\].*generation blocks"),
        (CHATML, [{"role": "user", "content": "\ue000"}, TALK[1]], "U\\+E000"),
    ],
)  # fmt: skip
def test_what_has_no_sound_mask_is_refused(template, talk, message):
    with pytest.raises(DataError, match=message):
        ChatTemplate(template, {}).targets(talk, SPECIAL)


TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize(
    "template, asked",
    [
        (CHATML, "<|im_start|>user\ntwo and two?<|im_end|>\n<|im_start|>assistant\n"),
        # What a model for prompts is given may be other than what it learns from.
        (
            TURNS + "{% if add_generation_prompt %}[assistant] <think>{% endif %}",
            "[user] two and two?<|im_end|>\n[assistant] <think>",
        ),
        (BLOCKS, "<|im_start|>user\ntwo and two?<|im_end|><|im_start|>assistant\n"),
        (TURNS, "[user] two and two?<|im_end|>\n[assistant] "),
        # White space alone begins no turn: a word and the space before it are one token.
        (
            "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %}"
            " {{ m.content }}<|im_end|>{% endif %}{% endfor %}",
            "[INST] two and two? [/INST]",
        ),
    ],
    ids=["prompts", "other prompts", "blocks", "no prompts", "white space"],
)  # fmt: skip
def test_a_prompt_ends_where_the_model_goes_on(template, asked):
    chat = ChatTemplate(template, {})
    assert chat.prompt(TALK[:1]) == asked
    assert chat.closing(TALK[:1], SPECIAL) == "<|im_end|>"
    assert chat.closing(TALK[:1], ()) is None


def test_what_templates_expect_is_there():
    template = "{{ strftime_now('%d %b %Y') }} {{ messages[0] | tojson }} {{ bos_token }}{% break %}"
    template = "{% for m in messages %}" + template + "{% endfor %}"
    text, _ = ChatTemplate(template, {"bos_token": "<s>"}, "2024-07-26").render([{"content": "<é>"}])
    assert text == '26 Jul 2024 {"content": "<é>"} <s>'


def hf(folder):
    return get_tokenizer({"name": "hf", "path": str(folder)})


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_both_forms_of_messages_become_the_same_samples(tmp_path):
    tokenizer = hf(write_tokenizer(tmp_path / "bpe", CHATML))
    shared = [{"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]} for m in TALK]
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in TALK]
    lines = [{"messages": TALK}, {"id": "b", "conversations": shared}, {"messages": parts}]
    file = write(tmp_path / "chats.jsonl", *lines)
    assert build_from_messages(file, tmp_path / "set", tokenizer)
    assert not build_from_messages(file, tmp_path / "set", tokenizer)
    index, reader = Index.open(tmp_path / "set", tokenizer), Reader(tmp_path / "set")
    samples = [reader.read(i, text=True, items=False) for i in range(3)]
    assert len({(s.text, s.targets) for s in samples}) == 1
    assert [s.id for s in samples] == ["1", "b", "3"]
    ids, labels, mask = tokenize(samples[0], index.meta(0, "s", lambda modality, size: (0, 0)), tokenizer)
    assert ids.tolist() == tokenizer.encode(samples[0].text).ids.tolist()
    end = tokenizer.special["<|im_end|>"]
    assert tokenizer.decode(labels[mask]) == " is four.\nquite"
    assert [int(i) for i in labels[mask]].count(end) == 2
    assert not mask[-1]  # the eos, which the template did not write


def test_a_run_with_another_template_is_refused(tmp_path):
    folder = write_tokenizer(tmp_path / "bpe", CHATML)
    file = write(tmp_path / "chats.jsonl", {"messages": TALK})
    build_from_messages(file, tmp_path / "set", hf(folder))
    (folder / "chat_template.jinja").write_text(BLOCKS)
    with pytest.raises(DataError, match=r"written by a chat template of digest .* the tokenizer's is"):
        Index.open(tmp_path / "set", hf(folder))


def test_bad_lines_are_named(tmp_path):
    tokenizer = hf(write_tokenizer(tmp_path / "bpe", CHATML))
    lines = ['{"messages": [', {"messages": [{"role": "boss", "content": "x"}]}, {"messages": []},
             {"messages": TALK, "score": 1}]  # fmt: skip
    lines.append({"messages": [{"role": "user", "content": [{"type": "image"}]}]})
    # What would be left out without a word: of a message, a picture and what says that nobody learns it.
    lines.append({"messages": [{**TALK[0], "images": ["a.png"]}, *TALK[1:]]})
    lines.append({"messages": [*TALK[:-1], {**TALK[-1], "weight": 0, "name": "mine", "tool_calls": []}]})
    lines.append({"messages": [{**TALK[0], "content": "\ud800"}, *TALK[1:]]})
    with pytest.raises(DataError) as error:
        build_from_messages(write(tmp_path / "bad.jsonl", *lines), tmp_path / "set", tokenizer)
    said = ["Expecting value", "'boss'", "not empty", "score", "items of image"]
    said += [r"has \['images'\] of its own", r"have \['weight'\], of which", "not valid Unicode"]
    for number, what in enumerate(said, start=1):
        assert re.search(rf"bad.jsonl:{number}: .*{what}", str(error.value))
    with pytest.raises(DataError, match="tokenizer bytes has no chat template"):
        build_from_messages(tmp_path / "bad.jsonl", tmp_path / "set", get_tokenizer("bytes"))


def test_a_template_that_raises_is_named_with_its_chat(tmp_path):
    template = "{{ raise_exception('roles must alternate') }}"
    tokenizer = hf(write_tokenizer(tmp_path / "bpe", template))
    with pytest.raises(DataError, match=r"bad.jsonl:1: the chat template raised .*alternate"):
        build_from_messages(write(tmp_path / "bad.jsonl", {"messages": TALK}), tmp_path / "set", tokenizer)
    assert not (tmp_path / "set").exists()


FOUND = importlib.util.find_spec("trl")
PUBLISHED = Path(FOUND.origin).parent / "chat_templates" if FOUND and FOUND.origin else Path("none")


@pytest.mark.skipif(
    not PUBLISHED.exists(), reason="the package trl, which carries templates, is not installed"
)
def test_marks_lie_in_the_blocks_of_published_twins():
    names = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
    compared = 0
    for twin in sorted(PUBLISHED.glob("*_training.jinja")):
        stock = twin.with_name(twin.name.replace("_training", ""))
        try:
            blocks = ChatTemplate(twin.read_text(), names, "2024-07-26").render(TALK)
            text, spans = ChatTemplate(stock.read_text(), names, "2024-07-26").targets(TALK, ())
        except DataError:
            continue
        if text == blocks[0] and len(spans) == len(blocks[1]):
            compared += 1
            assert all(a <= x < y <= b for (a, b), (x, y) in zip(blocks[1], spans, strict=True)), stock.name
    assert compared > 0


def test_show_colours_what_carries_loss(tmp_path, monkeypatch, capsys):
    folder = write_tokenizer(tmp_path / "bpe", CHATML)
    file = write(tmp_path / "chats.jsonl", {"id": "a", "messages": TALK})
    build_from_messages(file, tmp_path / "set", hf(folder))
    monkeypatch.setenv("FORCE_COLOR", "1")
    parser = argparse.ArgumentParser()
    data.add_arguments(parser)
    chosen = f"{{name: hf, path: {folder}}}"
    args = parser.parse_args(["show", str(tmp_path / "set"), "--mask", "--tokenizer", chosen])
    assert data.run(args) == 0
    coloured = re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", capsys.readouterr().out, re.DOTALL)
    assert "".join(coloured) == " is four.<|im_end|>quite<|im_end|>"  # line breaks have no colour


def test_a_chat_that_is_too_long_keeps_whole_turns(tmp_path):
    tokenizer = hf(write_tokenizer(tmp_path / "bpe", CHATML))
    file = write(tmp_path / "chats.jsonl", {"messages": TALK}, {"messages": TALK[:2]})
    build_from_messages(file, tmp_path / "set", tokenizer)
    index, reader = Index.open(tmp_path / "set", tokenizer), Reader(tmp_path / "set")
    whole, first = (index.meta(i, "s", lambda modality, size: (0, 0)) for i in range(2))
    sample = reader.read(0, text=True, items=False)
    closed = sample.text.index("<|im_end|>", sample.text.index("assistant")) + len("<|im_end|>")
    least = len(tokenizer.encode(sample.text[:closed]).ids)
    assert whole.turns == (least, length(whole) - 1)  # a line break comes after the last
    assert first.turns == whole.turns[:1]
    for budget in range(1, length(whole)):
        kept = fit(whole, budget, "truncate")
        if budget < least:
            assert kept is None
            continue
        ids, labels, mask = tokenize(sample, kept, tokenizer)
        assert len(ids) == max(turn for turn in whole.turns if turn <= budget)
        assert ids[-1] == labels[-2] == tokenizer.special["<|im_end|>"]
        assert mask[-2:].tolist() == [True, False]
    lengths = index.lengths(np.array([0, 1, 0]), COUNTS, least, "truncate")
    assert lengths.tolist() == [least, least, least]
    assert index.lengths(np.array([0, 1]), COUNTS, least - 1, "truncate").tolist() == [0, 0]
    report = verify_dataset(tmp_path / "set", tokenizer, {})
    assert not report.problems


def test_turns_are_told_apart_where_each_has_a_block_with_its_words():
    text = "qA.qB."
    talk = [{"role": "assistant", "content": content} for content in ("A", "B")]
    assert ends_of_turns(talk, text, ((1, 3), (4, 6))) == (3, 6)
    assert ends_of_turns(talk, text, ((1, 2), (2, 3), (4, 6))) == (6,)  # a turn in two blocks
    assert ends_of_turns(talk, text, ((1, 3), (3, 4))) == (4,)  # one in none


def test_what_is_said_in_two_blocks_that_touch_is_one_span():
    two = BLOCKS.replace("<|im_end|>{% end", "{% endgeneration %}{% generation %}<|im_end|>{% end", 1)
    text, spans = ChatTemplate(two, {}).targets(TALK, SPECIAL)
    assert said(two) == said(BLOCKS)
    assert ends_of_turns(TALK, text, spans) == tuple(stop for _, stop in spans)

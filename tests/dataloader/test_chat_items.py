import io
import json
import re

import pytest
from PIL import Image
from tiny_bpe import write_tokenizer

from dataloader.chat import ChatTemplate
from dataloader.chat_items import targets_with_items
from dataloader.format import PLACEHOLDER, DataError, SampleError
from dataloader.index import Index
from dataloader.prompts import PromptItems, of_messages
from dataloader.reader import Reader
from dataloader.recipes.from_messages import build_from_messages
from dataloader.recipes.messages import messages_of
from dataloader.tokenizer import get_tokenizer
from dataloader.tokens import fit, length, tokenize
from dataloader.verify import verify_dataset

TEXTS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}(see)<image>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
ONLY_PARTS = re.sub(r"{% if m.content is string %}.*?{% else %}", "", PARTS).replace("{% endif %}<", "<")
ROWS = 3


def part(kind, **more):
    return {"type": kind, **more}


TWO, IMAGE = part("text", text="two "), part("image", image="a.png")
IN_PARTS = [
    {"role": "user", "content": [TWO, part("image", image="a.png"), part("text", text="or four?")]},
    {"role": "assistant", "content": "four"},
    {"role": "user", "content": [part("image", image="b.png"), part("text", text="and?")]},
    {"role": "assistant", "content": [part("text", text="two")]},
]  # fmt: skip
TAGGED = [
    ("user", "two <image>or four?"),
    ("assistant", "four"),
    ("user", "<image>and?"),
    ("assistant", "two"),
]
FORMS = {
    "parts": {"messages": IN_PARTS},
    "parts by path": json.loads(json.dumps({"messages": IN_PARTS}).replace('"image": "', '"path": "')),
    "OpenAI's": json.loads(
        re.sub(
            r'"type": "image", "image": ("\w.png")',
            r'"type": "image_url", "image_url": {"url": \1}',
            json.dumps({"messages": IN_PARTS}),
        )
    ),
    "parts and a list": json.loads(
        re.sub(r', "image": "\w.png"', "", json.dumps({"messages": IN_PARTS, "images": ["a.png", "b.png"]}))
    ),
    "tags": {"messages": [{"role": r, "content": c} for r, c in TAGGED], "images": ["a.png", "b.png"]},
    "ShareGPT's": {
        "conversations": [{"from": {"user": "human", "assistant": "gpt"}[r], "value": c} for r, c in TAGGED],
        "images": ["a.png", "b.png"],
    },
}


@pytest.fixture
def folder(tmp_path):
    for name, width in (("a", 8), ("b", 16)):
        buffer = io.BytesIO()
        Image.new("L", (width, 8)).save(buffer, "PNG")
        (tmp_path / f"{name}.png").write_bytes(buffer.getvalue())
    return tmp_path


def written(folder, template, *lines, **keys):
    bpe = write_tokenizer(folder / "bpe", template)
    tokenizer = get_tokenizer({"name": "hf", "path": str(bpe), **keys})
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps({"id": str(n), **line}) + "\n" for n, line in enumerate(lines)))
    build_from_messages(file, folder / "set", tokenizer)
    return tokenizer


@pytest.mark.parametrize(
    "template, before",
    [(TEXTS, ""), (PARTS, "(see)"), (ONLY_PARTS, "(see)")],
    ids=["texts", "parts", "only parts"],
)
def test_all_forms_give_the_same_samples_with_items_where_the_template_puts_them(folder, template, before):
    tokenizer = written(folder, template, *FORMS.values(), item="<image>")
    index, reader = Index.open(folder / "set", tokenizer), Reader(folder / "set")
    samples = [reader.read(n, text=True, items=True) for n in range(len(FORMS))]
    assert len({(of.text, of.targets, of.turns, of.items) for of in samples}) == 1
    sample, image = samples[0], before + PLACEHOLDER
    assert sample.text == (
        f"<|im_start|>user\ntwo {image}or four?<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n"
        f"<|im_start|>user\n{image}and?<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n"
    )
    assert [sample.text[a:b] for a, b in sample.targets] == ["four<|im_end|>", "two<|im_end|>"]
    assert sample.turns == tuple(stop for _, stop in sample.targets)
    assert [item.size for item in sample.items] == [(8, 8), (8, 16)]
    meta = index.meta(0, "s", lambda modality, size: (4, ROWS))
    ids, labels, mask = tokenize(sample, meta, tokenizer)
    assert tokenizer.decode(labels[mask]) == "fourtwo"
    rows = [t for t, token in enumerate(ids) if token == tokenizer.special["<image>"]]
    assert len(rows) == 2 * ROWS
    kept = fit(meta, length(meta) - 2, "truncate")
    assert [item.size for item in kept.items] == [(8, 8)]
    assert tokenize(sample, kept, tokenizer)[0][-1] == tokenizer.special["<|im_end|>"]
    assert not verify_dataset(folder / "set", tokenizer, {}).problems


def test_a_template_that_takes_parts_alone_is_given_texts_in_parts():
    talk = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "four"}]
    found = [ChatTemplate(template, {}) for template in (TEXTS, PARTS, ONLY_PARTS)]
    assert [(of.takes_parts, of.needs_parts) for of in found] == [(False, False), (True, False), (True, True)]
    assert len({of.targets(talk, ("<|im_end|>",)) for of in found}) == 1
    json_of = TEXTS.replace("m.content", "m.content | tojson if m.content is not string else m.content")
    assert not ChatTemplate(json_of, {}).takes_parts


def test_a_tag_is_text_where_a_line_lists_no_items():
    line = {"messages": [{"role": "user", "content": "what is <image> in HTML?"}]}
    assert messages_of(line) == line["messages"]


ONE = {"role": "assistant", "content": "four"}


@pytest.mark.parametrize(
    "template, content, more, message",
    [
        (TEXTS, [part("image", image="c.png")], {}, "c.png: No such file"),
        (TEXTS, [part("image", image="../a.png")], {}, "a.png.*(lies outside|No such file)"),
        (TEXTS, [part("image", image="https://a.png")], {}, "'https://a.png': name a file"),
        (TEXTS, [part("image_url", image_url={"url": "data:image/png;base64,xx"})], {}, "name a file"),
        (TEXTS, [part("image")], {}, 'more items of image than "images" lists'),
        (TEXTS, "<image> and <image>", {"images": ["a.png"]}, 'more items of image than "images" lists'),
        (TEXTS, "<image>", {"images": ["a.png", "b.png"]}, r"\['b.png'\] besides"),
        (TEXTS, "<image>", {"images": "a.png"}, "must be a list of paths"),
        (TEXTS, [part("video", video="a.mp4")], {}, "parts are text, image and audio"),
        (TEXTS, f"one {PLACEHOLDER}", {}, "1 placeholders .* and 0 items"),
        (PARTS, [IMAGE], {}, "writes of its own for an image: name the token"),
        (PARTS.replace("<image>", "<image>" * 2), [IMAGE], {"item": "<image>"}, "one mark each"),
        (PARTS, [part("text", text="<image>"), IMAGE], {"item": "<image>"}, "spells '<image>'"),
        (PARTS.replace("<image>", "<img>"), [IMAGE], {"item": "<image>"}, "which has no <image>"),
    ],
)  # fmt: skip
def test_what_has_no_sound_place_is_refused_by_name(folder, template, content, more, message):
    line = {"messages": [{"role": "user", "content": content}, ONE], **more}
    keys = {"item": line.pop("item")} if "item" in line else {}
    with pytest.raises(DataError, match=message) as error:
        written(folder, template, line, **keys)
    assert "chats.jsonl:1: " in str(error.value)


def test_marks_of_modalities_are_told_apart_by_the_names_in_the_files(tmp_path):
    template = ChatTemplate(
        PARTS.replace("{% else %}{{ p.text", "{% elif p.type == 'audio' %}<|im_hear|>{% else %}{{ p.text"), {}
    )
    content = [part("audio", audio="a"), part("image", image="b"), part("text", text="?")]
    talk = [{"role": "user", "content": content}, ONE]
    marks = {"image": "<image>", "audio": "<|im_hear|>"}
    text, _ = targets_with_items(template, talk, (), marks)
    assert text.count(PLACEHOLDER) == 2
    swapped = {"image": "<|im_hear|>", "audio": "<image>"}
    with pytest.raises(DataError, match=r"marks of \['image', 'audio'\] for items \['audio', 'image'\]"):
        targets_with_items(template, talk, (), swapped)
    folder = write_tokenizer(tmp_path / "bpe")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"image_token": "<image>", "extra_special_tokens": {"audio_token": "<|im_hear|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = get_tokenizer({"name": "hf", "path": str(folder)})
    assert tokenizer.marks == marks
    assert get_tokenizer({"name": "hf", "path": str(folder), "item": "<s>"}).marks == dict.fromkeys(
        marks, "<s>"
    )


def test_an_item_of_a_prompt_stands_where_it_stands_in_training(folder):
    """Rows, too; and items that no encoder takes, or that lie elsewhere, are refused by name."""
    tokenizer = written(folder, TEXTS, FORMS["tags"])
    turns = [{"messages": IN_PARTS[:1]}]
    (folder / "asked.jsonl").write_text(json.dumps(turns[0]) + "\n")
    (asked,) = of_messages(folder / "asked.jsonl", tokenizer, lambda modality, size: (4, 3))
    (item,) = asked.items
    assert [item.rows, len(asked.files)] == [3, 1]
    rows = [place for place, token in enumerate(asked.ids) if token == tokenizer.item]
    assert rows == [item.at, item.at + 1, item.at + 2]
    assert asked.meta(5).text_tokens == len(asked.ids) - 3
    read = PromptItems([[("image", asked.files[0])]]).read(0, text=False, items=[0])
    assert read.items[0].size == item.size

    def refuse(modality, size):
        raise SampleError(f"no encoder takes an {modality}")

    with pytest.raises(DataError, match=r"asked.jsonl:1: .*no encoder takes an image"):
        of_messages(folder / "asked.jsonl", tokenizer, refuse)
    (folder / "deeper").mkdir()
    outside = json.dumps(turns[0]).replace("a.png", "../a.png")
    (folder / "deeper/asked.jsonl").write_text(outside + "\n")
    with pytest.raises(DataError, match=r"asked.jsonl:1: .*lies outside"):
        of_messages(folder / "deeper/asked.jsonl", tokenizer, lambda modality, size: (4, 3))

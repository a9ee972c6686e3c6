import json

import numpy as np
import pytest
from tiny_bpe import write_tokenizer
from tokenizers import Tokenizer, processors

from dataloader.format import PLACEHOLDER, DataError, Item, Sample
from dataloader.index import Index
from dataloader.item_counts import RememberedCounts
from dataloader.reader import Reader
from dataloader.tokenizer import get_tokenizer
from dataloader.tokens import length, text_tokens, tokenize
from dataloader.writer import DatasetWriter, is_intact


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("bpe"), begins=True)


def hf(folder, **keys):
    return get_tokenizer({"name": "hf", "path": str(folder), **keys})


def test_it_gives_the_ids_of_the_whole_text_and_maps_targets_by_offsets(folder):
    tokenizer = hf(folder)
    text = "hello there, two é and <|im_end|>four"
    reading = Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole = reading.encode(text, add_special_tokens=False)
    spans = ((6, 8), (17, 18))  # begins inside of " there"; one character of two bytes
    found = text_tokens(Sample("s", text, (), spans), tokenizer)
    assert found.ids.tolist() == whole.ids
    expected = [any(a < stop and start < b for a, b in spans) for start, stop in whole.offsets]
    assert found.targets.tolist() == expected
    assert 0 < sum(expected) < len(expected)
    assert tokenizer.decode(whole.ids) == text.replace("<|im_end|>", "")


def test_items_cut_the_text_and_the_frame_is_the_tokenizers(folder, tmp_path):
    sample = Sample("s", f"two {PLACEHOLDER}and two", (Item("image", "png", (8, 8), b"x"),))
    for keys, lead, after in (({}, 1, 0), ({"end_of_item": "</s>", "item": "<image>"}, 1, 1)):
        tokenizer = hf(folder, eos="</s>", **keys)
        path = tmp_path / f"set{after}"
        with DatasetWriter(path, tokenizer) as writer:
            writer.add(sample)
        meta = Index.open(path, tokenizer).meta(0, "s", lambda modality, size: (4, 3))
        ids, labels, mask = tokenize(Reader(path).read(0, text=True, items=False), meta, tokenizer)
        before, behind = (tokenizer.encode(part).ids.tolist() for part in ("two ", "and two"))
        rows = [tokenizer.item] * 3 + [tokenizer.end_of_item] * after
        assert ids.tolist() == [tokenizer.bos] * lead + before + rows + behind
        assert (len(ids), labels[-1], mask[-1]) == (length(meta), tokenizer.eos, True)
        assert mask.sum() == len(before) + len(behind) + 1


def test_one_that_begins_no_text_has_no_start_token(tmp_path):
    tokenizer = hf(write_tokenizer(tmp_path / "bpe"))
    assert tokenizer.bos is None
    with DatasetWriter(tmp_path / "set", tokenizer) as writer:
        writer.add(Sample("s", "the answer"))
    meta = Index.open(tmp_path / "set", tokenizer).meta(0, "s", lambda modality, size: (0, 0))
    ids, labels, mask = tokenize(Sample("s", "the answer"), meta, tokenizer)
    whole = tokenizer.encode("the answer").ids.tolist()
    assert (ids.tolist(), labels.tolist()) == (whole, [*whole[1:], tokenizer.eos])
    assert mask.tolist() == [True] * (len(whole) - 1) + [False]  # nor does it end one
    index = Index.open(tmp_path / "set")
    counts = RememberedCounts(lambda modality, size: (0, 0))
    assert index.lengths(np.array([0]), counts, 99, "drop").tolist() == [len(whole)]


def test_a_dataset_of_another_tokenizer_of_the_same_name_is_refused(folder, tmp_path):
    with DatasetWriter(tmp_path / "set", hf(folder), recipe="r") as writer:
        writer.add(Sample("s", "two"))
    Index.open(tmp_path / "set", hf(folder))
    with pytest.raises(DataError, match=r"tokenizer 'hf' of digest .* the model's has"):
        Index.open(tmp_path / "set", hf(folder, eos="<|im_end|>"))
    with pytest.raises(DataError, match="another dataset"):
        is_intact(tmp_path / "set", "r", hf(folder, eos="<|im_end|>"))


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"path": "nowhere"}, "path=nowhere: nowhere: No such file.*tokenizer.json"),
        ({}, "missing a required argument: 'path'.*its keys are path, template"),
        ({"path": "FOLDER", "speed": 1}, "unexpected keyword argument 'speed'"),
        ({"path": "FOLDER", "item": "<img>"}, "item=<img>: the tokenizer has no such token"),
        ({"path": "FOLDER", "template": "no.jinja"}, "template=no.jinja: no.jinja: No such file"),
        ({"path": "FOLDER/tokenizer_config.json"}, "is no tokenizer .*save it anew"),
    ],
)
def test_what_cannot_be_is_refused(folder, keys, message):
    keys = {
        key: value.replace("FOLDER", str(folder)) if key == "path" else value for key, value in keys.items()
    }
    with pytest.raises(ValueError, match=message):
        get_tokenizer({"name": "hf", **keys})


FRAMED = {
    "nothing": ({}, None),
    "both": ({}, "<s> $A </s>"),
    "bos": ({}, "<s> $A"),
    "eos": ({}, "$A </s>"),
    "another eos than it names": ({}, "$A <|im_end|>"),
    "bos said elsewhere": ({"add_bos_token": True}, None),
    "eos said elsewhere": ({"add_bos_token": False, "add_eos_token": True}, "<s> $A"),
}


@pytest.mark.parametrize("said, template", FRAMED.values(), ids=FRAMED)
def test_a_text_begins_and_ends_as_transformers_has_it(tmp_path, said, template):
    transformers = pytest.importorskip("transformers", reason="transformers, the referee, is not installed")
    folder = write_tokenizer(tmp_path / "bpe")
    frame(folder, said, template)
    referee, tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder), hf(folder)
    with DatasetWriter(tmp_path / "set", tokenizer) as writer:
        for number, text in enumerate(TEXTS):
            writer.add(Sample(str(number), text))
    index, reader = Index.open(tmp_path / "set", tokenizer), Reader(tmp_path / "set")
    for number, text in enumerate(TEXTS):
        meta = index.meta(number, "s", lambda modality, size: (0, 0))
        ids, labels, mask = tokenize(reader.read(number, text=True, items=False), meta, tokenizer)
        assert mask[:-1].all()
        assert [*ids.tolist(), *labels[-1:][mask[-1:]].tolist()] == referee(text)["input_ids"]
    assert referee.eos_token_id in (tokenizer.eos, tokenizer.special["</s>"])
    assert is_intact(tmp_path / "set", "", tokenizer)
    if not tokenizer.ends_texts:
        assert labels[-1] == referee.eos_token_id  # where generation stops
        with pytest.raises(DataError, match=r"another dataset .*eos=False.*eos=True"):
            is_intact(tmp_path / "set", "", hf(folder, eos="</s>"))


TEXTS = ("two", "the answer is two\n\nand é", "  indented <|im_end|>four ")


def frame(folder, said, template):
    """Have a tokenizer's files say what it puts around a text."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "</s>"} | said))
    if template is not None:
        file = str(folder / "tokenizer.json")
        reading = Tokenizer.from_file(file)
        tokens = [(token, reading.token_to_id(token)) for token in template.split() if token != "$A"]
        reading.post_processor = processors.TemplateProcessing(single=template, special_tokens=tokens)
        reading.save(file)


def test_several_tokens_at_an_edge_are_refused_until_one_is_named(tmp_path):
    folder = write_tokenizer(tmp_path / "bpe")
    frame(folder, {}, "<|im_start|> <s> $A")
    with pytest.raises(
        ValueError, match=r"bos: the tokenizer puts \['<\|im_start\|>', '<s>'\].*such as bos: '<s>'"
    ):
        hf(folder)
    assert hf(folder, bos="<s>").bos == hf(folder, bos="<s>").special["<s>"]

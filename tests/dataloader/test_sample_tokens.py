from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloader.format import PLACEHOLDER, DataError, Item, Sample, SampleError, validate_sample
from dataloader.index import Index
from dataloader.manifest import PLAIN, Frame
from dataloader.tokenizer import ByteTokenizer, Encoding, get_tokenizer
from dataloader.tokens import (
    ItemMeta,
    SampleMeta,
    fit,
    fit_lengths,
    item_row_offsets,
    length,
    target_runs,
    text_tokens,
    tokenize,
)
from dataloader.tokens_together import tokenize_all
from dataloader.writer import DatasetWriter

BYTES = ByteTokenizer()


class PairTokenizer(ByteTokenizer):
    """Two bytes a token where possible: like a BPE, its tokens straddle the edges of targets."""

    name = "pairs"
    vocab_size = 65_536 + 260

    def encode(self, text):
        whole = super().encode(text)
        ids, starts, stops = (column.tolist() for column in whole)
        out, i = [], 0
        while i < len(ids):
            pair = ids[i] < 256 and i + 1 < len(ids) and ids[i + 1] < 256
            token = 260 + ids[i] * 256 + ids[i + 1] if pair else ids[i]
            out.append((token, starts[i], stops[i + pair]))
            i += 1 + pair
        return Encoding(*np.array(out, dtype=np.int64).reshape(-1, 3).T)


def meta_of(sample, rows, tokenizer=BYTES):
    text = text_tokens(sample, tokenizer)
    items = tuple(
        ItemMeta(item.modality, 4 * r, r, at, item.size)
        for item, r, at in zip(sample.items, rows, text.items, strict=True)
    )
    return SampleMeta(7, "source", len(text.ids), items, 0)


@st.composite
def samples(draw):
    pieces = draw(st.lists(st.text(st.sampled_from("ab é漢\n"), max_size=6), min_size=1, max_size=5))
    text = PLACEHOLDER.join(pieces) or "x"
    items = tuple(Item("image", "png", (8, 8), b"x") for _ in range(text.count(PLACEHOLDER)))
    edges = sorted(draw(st.sets(st.integers(0, len(text)), max_size=6)))
    targets = draw(st.sampled_from([None, tuple(zip(edges[::2], edges[1::2], strict=False))]))
    if draw(st.booleans()) and len(edges) > 2:
        targets = tuple(pairwise(edges))  # adjacent spans
    rows = draw(st.lists(st.integers(1, 5), min_size=len(items), max_size=len(items)))
    return Sample("s", text, items, targets), rows


def reference(sample, rows, tokenizer):
    """The definition, token by token: (id, is target) of the whole sequence."""
    spans = [(0, len(sample.text))] if sample.targets is None else sample.targets
    remaining = list(rows)
    out = [(tokenizer.bos, False)]
    for token, start, stop in zip(*tokenizer.encode(sample.text), strict=True):
        if sample.text[start] == PLACEHOLDER:
            out += [(tokenizer.item, False)] * remaining.pop(0) + [(tokenizer.end_of_item, False)]
        else:
            out.append((token, any(a < stop and start < b for a, b in spans)))
    ends = sample.targets is None or any(b == len(sample.text) for _, b in sample.targets)
    return [*out, (tokenizer.eos, ends)]


@settings(deadline=None)
@given(samples(), st.sampled_from([BYTES, PairTokenizer()]))
def test_metadata_and_payload_agree(drawn, tokenizer):
    sample, rows = drawn
    validate_sample(sample)
    meta = meta_of(sample, rows, tokenizer)
    ids, labels, mask = tokenize(sample, meta, tokenizer)
    expected = reference(sample, rows, tokenizer)
    assert [*ids.tolist(), labels[-1]] == [i for i, _ in expected]
    assert labels[:-1].tolist() == ids[1:].tolist()
    assert mask.tolist() == [target for _, target in expected[1:]]
    assert (ids.dtype, labels.dtype, mask.dtype) == (np.int64, np.int64, np.bool_)
    assert len(ids) == len(labels) == len(mask) == length(meta)
    for item, offset in zip(meta.items, item_row_offsets(meta), strict=True):
        assert ids[offset - 1] != BYTES.item
        assert (ids[offset : offset + item.rows] == BYTES.item).all()
        assert ids[offset + item.rows] == BYTES.end_of_item


@settings(deadline=None)
@given(samples(), st.integers(1, 40))
def test_truncation_keeps_the_longest_prefix_without_a_cut_item(drawn, budget):
    sample, rows = drawn
    meta = meta_of(sample, rows)
    whole = [i for i, _ in reference(sample, rows, BYTES)][:-1]
    kept = fit(meta, budget, "truncate")
    if length(meta) <= budget:
        assert kept is meta
        return
    best = max(
        n
        for n in range(1, budget + 1)
        # a prefix is allowed if the next token does not continue an item
        if whole[n - 1] != BYTES.item and not (n < len(whole) and whole[n] == BYTES.end_of_item)
    )
    if best == 1:
        assert kept is None
        return
    assert kept is not None
    assert kept.truncated
    assert length(kept) == best
    ids, labels, mask = tokenize(sample, kept, BYTES)
    assert ids.tolist() == whole[:best]
    assert labels.tolist() == [*whole[1:best], BYTES.eos]
    full_mask = tokenize(sample, meta, BYTES)[2]
    assert mask.tolist() == [*full_mask[: best - 1].tolist(), False]


@settings(deadline=None)
@given(samples(), st.integers(1, 40), st.builds(Frame, st.booleans(), st.booleans(), st.booleans()))
def test_targets_are_known_from_metadata_where_all_text_is_target_text(drawn, budget, frame):
    sample, rows = replace(drawn[0], targets=None), drawn[1]
    kept = fit(replace(meta_of(sample, rows), frame=frame), budget, "truncate")
    if kept is not None:
        mask = tokenize(sample, kept, BYTES)[2]
        runs = target_runs(kept)
        assert [t for start, stop in runs for t in range(start, stop)] == np.flatnonzero(mask).tolist()


TURNS = Frame(bos=False, end_of_item=False, eos=False, turns=True)


@settings(deadline=None)
@given(samples(), st.data(), st.integers(1, 40), st.sampled_from([BYTES, PairTokenizer()]))
def test_truncation_keeps_whole_turns(drawn, data, budget, tokenizer):
    sample, rows = drawn
    texts = [at for at, character in enumerate(sample.text, 1) if character != PLACEHOLDER]
    ends = data.draw(st.sets(st.sampled_from(texts), max_size=4)) if texts else ()
    sample = replace(sample, turns=tuple(sorted(ends)))
    validate_sample(sample)
    turns = text_tokens(sample, tokenizer).turns
    meta = replace(meta_of(sample, rows, tokenizer), frame=TURNS, turns=turns)
    # By its definition: each token, and each row, with the character that it begins with.
    remaining, whole = list(rows), []
    for token, start, _ in zip(*tokenizer.encode(sample.text), strict=True):
        item = sample.text[start] == PLACEHOLDER
        whole += [(tokenizer.item if item else token, start)] * (remaining.pop(0) if item else 1)
    fitting = [[token for token, start in whole if start < end] for end in sample.turns]
    fitting = [ids for ids in fitting if ids and len(ids) <= budget]
    kept = fit(meta, budget, "truncate")
    if len(whole) <= budget:
        assert kept is meta
    elif not fitting:
        assert kept is None
    else:
        ids, labels, mask = tokenize(sample, kept, tokenizer)
        assert ids.tolist() == fitting[-1]
        assert (labels[-1], mask[-1]) == (tokenizer.eos, False)


@st.composite
def metas(draw, frame=PLAIN):
    text = draw(st.integers(0, 12))
    ats = sorted(draw(st.lists(st.integers(0, text), max_size=4)))
    item = st.tuples(st.integers(1, 5), st.sampled_from([False, False, False, True]))
    items = [
        ItemMeta("image", 0, 0, at, (), "too wide") if refused else ItemMeta("image", 4 * rows, rows, at, ())
        for at, (rows, refused) in ((at, draw(item)) for at in ats)
    ]
    # Often where items stand, too.
    places = [*range(1, text + 1), *(at for at in ats * 3 if at)]
    turns = sorted(draw(st.sets(st.sampled_from(places), max_size=4))) if places and frame.turns else ()
    return SampleMeta(0, "s", text, tuple(items), 0, frame=frame, turns=tuple(turns))


@settings(deadline=None)
@given(
    st.sampled_from([PLAIN, TURNS, replace(PLAIN, turns=True)]).flatmap(
        lambda frame: st.tuples(st.just(frame), st.lists(metas(frame), max_size=8))
    ),
    st.integers(1, 30),
    st.sampled_from(["drop", "truncate", "truncate", "error"]),
)
def test_lengths_of_many_samples_are_those_of_what_is_kept_of_each(framed, budget, policy):
    frame, drawn = framed
    items = [item for meta in drawn for item in meta.items]
    lengths = fit_lengths(
        np.array([meta.text_tokens for meta in drawn], dtype=np.int64),
        np.array([len(meta.items) for meta in drawn], dtype=np.int64),
        np.array([item.at for item in items], dtype=np.int64),
        np.array([item.rows for item in items], dtype=np.int64),
        np.array([item.refused != "" for item in items], dtype=np.bool_),
        budget,
        policy,
        frame,
        np.array([len(meta.turns) for meta in drawn], dtype=np.int64),
        np.array([turn for meta in drawn for turn in meta.turns], dtype=np.int64),
    )
    assert lengths.dtype == np.int64
    kept = [fit(meta, budget, "drop" if policy == "error" else policy) for meta in drawn]
    assert lengths.tolist() == [length(meta) if meta else 0 for meta in kept]


def test_long_samples_by_policy():
    meta = SampleMeta(3, "docs", 20, (), 20)
    assert fit(meta, 21, "error") is meta
    assert fit(meta, 20, "drop") is None
    with pytest.raises(DataError, match=r"sample 3 of source 'docs' has 21 tokens, the budget is 20"):
        fit(meta, 20, "error")
    with pytest.raises(ValueError, match=r"unknown policy 'split'.*truncate"):
        fit(meta, 20, "split")
    with pytest.raises(ValueError, match="budget is 0"):
        fit(meta, 0, "drop")
    none = np.empty(0, dtype=np.int64)
    with pytest.raises(ValueError, match=r"unknown policy 'split'.*truncate"):
        fit_lengths(none, none, none, none, none.astype(bool), 20, "split")


def test_truncation_drops_the_cut_item_and_all_after_it():
    items = (ItemMeta("image", 8, 4, 2, ()), ItemMeta("image", 8, 4, 5, ()))
    meta = SampleMeta(0, "s", 9, items, 0)
    assert length(meta) == 20
    kept = fit(meta, 15, "truncate")  # bos, 2 text, 5 item, 3 text, and 4 of the second item's 5
    assert kept == replace(meta, text_tokens=5, items=items[:1], truncated=True)
    kept = fit(meta, 16, "truncate")
    assert kept == replace(meta, text_tokens=5, items=items, truncated=True)


def test_an_index_that_disagrees_is_an_error_with_a_name():
    sample = Sample("mine", f"ab{PLACEHOLDER}cd", (Item("image", "png", (8, 8), b"x"),))
    meta = meta_of(sample, [3])
    for wrong in (
        replace(meta, text_tokens=3),
        replace(meta, text_tokens=5),
        replace(meta, items=()),
        replace(meta, items=meta.items * 2),
        replace(meta, items=(replace(meta.items[0], at=1),)),
    ):
        with pytest.raises(DataError, match="sample 'mine'"):
            tokenize(sample, wrong, BYTES)


def test_byte_tokenizer():
    ids = BYTES.encode("né\n").ids
    assert BYTES.decode([BYTES.bos, *ids, BYTES.item, BYTES.end_of_item, BYTES.eos]) == "né\n"
    assert BYTES.decode([0xC3]) == "\ufffd"
    assert get_tokenizer("bytes").vocab_size == 260
    with pytest.raises(ValueError, match=r"unknown tokenizer 'gpt'.*bytes"):
        get_tokenizer("gpt")


REFUSED = (
    ItemMeta("image", 8, 4, 2, ()),
    ItemMeta("image", 0, 0, 5, (), "too wide: raise max_side"),
    ItemMeta("image", 8, 4, 5, ()),
)


def test_a_sample_with_an_item_that_its_encoder_cannot_take_counts_as_too_long():
    meta = SampleMeta(3, "photos", 9, REFUSED, 0)
    with pytest.raises(
        DataError, match=r"sample 3 of source 'photos', item 1: too wide: raise max_side.*on_long"
    ):
        fit(meta, 1000, "error")
    assert fit(meta, 1000, "drop") is None
    cut = fit(meta, 1000, "truncate")
    assert cut == replace(meta, text_tokens=5, items=REFUSED[:1], truncated=True)
    # The budget still holds for what stays before it.
    assert fit(meta, 4, "truncate") == replace(meta, text_tokens=2, items=(), truncated=True)
    first = SampleMeta(3, "photos", 9, (replace(REFUSED[1], at=0),), 0)
    assert fit(first, 1000, "truncate") is None


def test_the_index_keeps_what_the_encoder_says_of_an_item_that_it_cannot_take(tmp_path):
    def counts(modality, size):
        if size[1] > 8:
            raise SampleError("too wide")
        return 4, 1

    sample = Sample("s", PLACEHOLDER * 2, tuple(Item("image", "png", (8, width), b"x") for width in (8, 16)))
    with DatasetWriter(tmp_path / "set", ByteTokenizer()) as writer:
        writer.add(sample)
    items = Index.open(tmp_path / "set").meta(0, "s", counts).items
    assert [(item.tokens, item.rows, item.refused) for item in items] == [(4, 1, ""), (0, 0, "too wide")]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_tokens_of_several_samples_are_those_of_each(data):
    tokenizer = data.draw(st.sampled_from([BYTES, PairTokenizer()]))
    found, metas = [], []
    for _ in range(data.draw(st.integers(0, 6))):
        sample, rows = data.draw(samples())
        meta = meta_of(sample, rows, tokenizer)
        frame = data.draw(st.sampled_from([PLAIN, PLAIN, Frame(bos=False, end_of_item=False, eos=False)]))
        meta = replace(meta, frame=frame)
        if data.draw(st.booleans()):
            meta = fit(meta, data.draw(st.integers(1, 30)), "truncate")
        if meta is not None:
            found.append(sample)
            metas.append(meta)
    together = tokenize_all(found, metas, tokenizer)
    assert len(together) == len(found)
    for arrays, sample, meta in zip(together, found, metas, strict=True):
        for array, alone in zip(arrays, tokenize(sample, meta, tokenizer), strict=True):
            assert array.dtype == alone.dtype
            np.testing.assert_array_equal(array, alone)
        arrays[1][:] = 0  # labels are no inputs
        np.testing.assert_array_equal(arrays[0], tokenize(sample, meta, tokenizer)[0])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"text_tokens": 4}, "the text has 3 tokens, not 4"),
        ({"items": ()}, "the text has 1 placeholders, not 0"),
        ({"items": (ItemMeta("image", 4, 1, 2, (8, 8)),)}, "item 0 stands after 1 text tokens, not 2"),
    ],
)
def test_among_several_samples_the_one_is_named_that_is_not_as_the_index_says(wrong, words):
    several = [Sample(name, f"a{PLACEHOLDER}bc", (Item("image", "png", (8, 8), b"x"),)) for name in "xyz"]
    metas = [meta_of(sample, [2]) for sample in several]
    metas[1] = replace(metas[1], **wrong)
    with pytest.raises(DataError, match=rf"sample 'y' .*{words}"):
        tokenize_all(several, metas, BYTES)

"""The tokens of several samples at once: for short texts that takes a fifth of one by one.

Two samples, `\\ufffcit` with 3 rows for its image and `no`, are runs of one token each, and of text (-1):

    values     256  258  259   -1  257  256   -1  257
    lengths      1    3    1    2    1    1    2    1

The tokens of both texts, one after the other, then take the places of the text.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dataloader.format import Sample
from dataloader.tokenizer import ByteTokenizer, Tokenizer, placeholders_of
from dataloader.tokens import SampleMeta, TextArrays, length, tokenize

_TEXT = -1


def tokenize_all(
    samples: Sequence[Sample], metas: Sequence[SampleMeta], tokenizer: Tokenizer
) -> list[TextArrays]:
    """What `tokenize` returns for each sample, and raises for the first that it refuses. Samples that are
    whole, and of which all text is target text, are made together.
    """
    plain = [
        number
        for number, (sample, meta) in enumerate(zip(samples, metas, strict=True))
        if sample.targets is None and not meta.truncated and meta.frame == metas[0].frame
    ]
    made = _together([samples[n].text for n in plain], [metas[n] for n in plain], tokenizer) if plain else []
    found = dict(zip(plain, made, strict=False))
    return [
        found[number] if number in found else tokenize(sample, meta, tokenizer)
        for number, (sample, meta) in enumerate(zip(samples, metas, strict=True))
    ]


def _together(texts: list[str], metas: list[SampleMeta], tokenizer: Tokenizer) -> list[TextArrays]:
    """The arrays of samples of one frame, nothing if one of the texts is not what its metadata say."""
    frame = metas[0].frame
    kinds: list[bool] = []  # of runs of the texts' tokens: whether they are placeholders
    counts: list[int] = []
    values: list[int | None] = []  # of runs of the sequences' tokens
    lengths: list[int] = []
    for meta in metas:
        seen = 0
        values += (tokenizer.bos,) * frame.bos
        lengths += (1,) * frame.bos
        for item in meta.items:
            kinds += (False, True)
            counts += (item.at - seen, 1)
            values += (_TEXT, tokenizer.item, tokenizer.end_of_item)[: 2 + frame.end_of_item]
            lengths += (item.at - seen, item.rows, 1)[: 2 + frame.end_of_item]
            seen = item.at
        kinds.append(False)
        counts.append(meta.text_tokens - seen)
        values += (_TEXT, tokenizer.eos)
        lengths += (meta.text_tokens - seen, 1)
    ids, of_item, ends = _encoded(texts, tokenizer)
    stated = np.cumsum([meta.text_tokens + len(meta.items) for meta in metas])
    if min(counts) < 0 or not np.array_equal(ends, stated) or (of_item != np.repeat(kinds, counts)).any():
        return []
    inputs = np.repeat(np.array(values, np.int64), lengths)
    target = inputs == _TEXT
    inputs[target] = ids[~of_item]
    stops = np.cumsum([length(meta) + 1 for meta in metas])
    target[stops - 1] = frame.eos
    labels = inputs.copy()
    edges = [0, *stops.tolist()]
    return [
        (inputs[start : stop - 1], labels[start + 1 : stop], target[start + 1 : stop])
        for start, stop in pairwise(edges)
    ]


def _encoded(
    texts: list[str], tokenizer: Tokenizer
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """The tokens of texts, which of them are placeholders, and where each text's tokens end."""
    if (
        type(tokenizer) is ByteTokenizer
    ):  # of a text that is put together it makes what it makes of the pieces
        text = "".join(texts)
        ids, starts, _ = tokenizer.encode(text)
        return ids, placeholders_of(text)[starts], np.searchsorted(starts, np.cumsum([*map(len, texts)]))
    found = [tokenizer.encode(text) for text in texts]
    of_item = [placeholders_of(text)[one.starts] for text, one in zip(texts, found, strict=True)]
    ids = np.concatenate([one.ids for one in found])
    return ids, np.concatenate(of_item), np.cumsum([len(one.ids) for one in found])

"""Datasets as one HTML page that needs nothing beside it: totals, lengths, drops, and samples with items.

What carries loss is marked. All that data says is escaped, and the page forbids a browser to run or to fetch
anything, so that a sample can show itself and do no more.
"""

import base64
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dataloader.format import PLACEHOLDER, Item, Sample
from dataloader.index import Index
from dataloader.sources.reader import open_reader
from dataloader.tokenizer import Tokenizer
from dataloader.tokens import text_tokens
from dataloader.visible import visible
from omni.commands._datasets import left_out_of
from pipeline.histograms import svg

Histograms = Sequence[tuple[str, Sequence[int]]]
"""Titled values, of which `svg` draws how they are spread."""

_TYPES = {
    "jpeg": "image/jpeg", "png": "image/png", "webp": "image/webp",
    "wav": "audio/wav", "flac": "audio/flac", "mp3": "audio/mpeg", "ogg": "audio/ogg",
}  # fmt: skip
_HEAD = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'">
<title>Datasets</title>
<style>
body { font-family: sans-serif; margin: 2em auto; max-width: 60em; padding: 0 1em; }
article { border-top: 1px solid #ccc; padding: 1em 0; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f6; padding: 0.6em; }
mark { background: #bfe8bf; }
b { background: #fff; border: 1px solid #999; padding: 0 0.3em; font-weight: normal; }
figure { display: inline-block; margin: 0.5em 1em 0 0; vertical-align: top; }
td, th { text-align: left; padding: 0 1em 0 0; vertical-align: top; }
figcaption { color: #555; font-size: 0.85em; }
img { max-width: 28em; max-height: 28em; image-rendering: auto; border: 1px solid #ddd; }
</style></head><body>
"""
_FOOT = "</body></html>\n"


def page(datasets: Sequence[tuple[Path, Tokenizer, Histograms]], samples: int) -> str:
    """The page of datasets, each with the tokenizer that it was built with and histograms to draw below its
    own, and of so many samples of each, spread evenly. Raises DataError for what is no dataset or cannot be
    read.
    """
    return _HEAD + "".join(part for of in datasets for part in _dataset(*of, samples)) + _FOOT


def characters_with_loss(sample: Sample, tokenizer: Tokenizer) -> tuple[npt.NDArray[np.bool_], int, int]:
    """For each character of the text whether its token carries loss; how many tokens do, and how many there
    are.
    """
    tokens = text_tokens(sample, tokenizer)
    loss = np.zeros(len(sample.text), dtype=np.bool_)
    _, starts, stops = tokenizer.encode(sample.text)
    text = np.array([sample.text[start] != PLACEHOLDER for start in starts], dtype=np.bool_)
    for start, stop in zip(starts[text][tokens.targets], stops[text][tokens.targets], strict=True):
        loss[start:stop] = True
    return loss, int(tokens.targets.sum()), len(tokens.ids)


def _dataset(path: Path, tokenizer: Tokenizer, more: Histograms, samples: int) -> Iterator[str]:
    index, reader = Index.open(path, tokenizer), open_reader(path, tokenizer=tokenizer)
    totals = index.manifest.totals
    said = [
        f"{len(index):,} samples",
        f"{totals.text_tokens:,} text tokens ({index.manifest.tokenizer})",
        *(f"{count:,} {modality}" for modality, count in totals.items.items()),
        f"{totals.bytes:,} bytes",
        f"recipe {index.manifest.recipe or 'not named'}",
    ]
    yield f"<h1>{_text(str(path))}</h1><p>{_text(', '.join(said))}</p>\n"
    yield _left_out(path)
    metas = [index.meta(i, "", lambda modality, size: (0, 0)) for i in range(len(index))]
    histograms = [("text tokens of a sample", [meta.text_tokens for meta in metas])]
    for modality in totals.items:
        sizes = [item.size for meta in metas for item in meta.items if item.modality == modality]
        histograms.append((f"{modality}: size, the largest side of an item", [max(of) for of in sizes if of]))
    yield svg([*histograms, *more])
    count = min(samples, len(index))
    numbers = [number * len(index) // count for number in range(count)]
    drawn = [reader.read(i, text=True, items=True) for i in numbers]
    payload = sum(metas[i].bytes for i in numbers)
    if drawn:
        yield f"<p>{_text(_told(drawn, tokenizer, reader.files.bytes_read, payload))}</p>\n"
    for i, sample in zip(numbers, drawn, strict=True):
        yield from _sample(i, sample, tokenizer)
    reader.files.close()


def _left_out(path: Path) -> str:
    rows = "".join(
        f"<tr><td>{_text(reason)}</td><td>{count:,}</td><td>{_text(first)}</td></tr>\n"
        for reason, count, first in left_out_of(path)
    )
    return f"<table><tr><th>left out</th><th>times</th><th>the first</th></tr>\n{rows}</table>\n" * bool(rows)


def _told(drawn: Sequence[Sample], tokenizer: Tokenizer, read: int, payload: int) -> str:
    """What carries loss of samples that were drawn, and what was read for their texts and items."""
    marked = [characters_with_loss(sample, tokenizer)[1:] for sample in drawn]
    loss, tokens = (sum(of) for of in zip(*marked, strict=True))
    return (
        f"{len(drawn)} samples, drawn evenly: {loss:,} of {tokens:,} tokens carry loss "
        f"({loss / max(1, tokens):.1%}); {read:,} bytes were read for {payload:,} of their texts and items "
        f"({read / max(1, payload):.2f} times)"
    )


def _sample(i: int, sample: Sample, tokenizer: Tokenizer) -> Iterator[str]:
    loss, tokens, all_tokens = characters_with_loss(sample, tokenizer)
    yield f"<article><h2>{_text(sample.id)}</h2><p>sample {i}: {tokens} of {all_tokens} tokens carry loss</p>"
    item = 0
    pieces = []
    pairs = zip(loss, sample.text, strict=True)
    for (carries, is_item), run in groupby(pairs, key=lambda pair: (bool(pair[0]), pair[1] == PLACEHOLDER)):
        characters = [character for _, character in run]
        if is_item:
            pieces += [f"<b>item {item + n}</b>" for n in range(len(characters))]
            item += len(characters)
        else:
            shown = _text("".join(characters))
            pieces.append(f"<mark>{shown}</mark>" if carries else shown)
    yield f"<pre>{''.join(pieces)}</pre>\n"
    for number, own in enumerate(sample.items):
        size = " × ".join(map(str, own.size))
        caption = f"item {number}: {own.modality}, {own.format}, {size}, {len(own.data):,} bytes"
        yield f"<figure>{_shown(own)}<figcaption>{_text(caption)}</figcaption></figure>\n"
    yield "</article>\n"


def _shown(item: Item) -> str:
    """An item as a browser shows it, if it can."""
    kind = _TYPES.get(item.format, "")
    source = f"data:{kind};base64,{base64.b64encode(item.data).decode()}"
    if kind.startswith("image/"):
        return f'<img alt="" src="{source}">'
    return f'<audio controls src="{source}"></audio>' if kind else ""


def _text(text: str) -> str:
    return escape(visible(text))

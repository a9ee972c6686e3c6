"""Traces: sample metadata without payload, for planners, the simulator and benchmarks.

The generators cite published totals where there are any. Every distribution's shape, every mixture share and
every number said to be a guess is ours: the traces span regimes, they do not reproduce a data set.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import exp, sqrt
from typing import Any

import numpy as np

from dataloader.tokens import ItemMeta, SampleMeta, length
from dataloader.trace_file import TOKENS_PER_ROW


def describe(trace: Sequence[SampleMeta]) -> dict[str, Any]:
    """Counts, quantiles of lengths, and each modality's share of the LLM tokens.

    `length` and `text_tokens` are LLM tokens per sample; for each modality there are the quantiles of items
    per sample that has any, of encoder tokens and of LLM rows per item.
    """
    modalities: dict[str, Any] = {}
    total = sum(length(meta) for meta in trace)
    for modality in sorted({item.modality for meta in trace for item in meta.items}):
        items = [item for meta in trace for item in meta.items if item.modality == modality]
        counts = [sum(item.modality == modality for item in meta.items) for meta in trace]
        modalities[modality] = {
            "items": len(items),
            "items_per_sample": _quantiles([count for count in counts if count]),
            "encoder_tokens": _quantiles([item.tokens for item in items]),
            "rows": _quantiles([item.rows for item in items]),
            "share": sum(item.rows for item in items) / total,
        }
    return {
        "samples": len(trace),
        "length": _quantiles([length(meta) for meta in trace]),
        "text_tokens": _quantiles([meta.text_tokens for meta in trace]),
        "text_share": sum(meta.text_tokens for meta in trace) / total if trace else 0.0,
        "modalities": modalities,
        "sources": dict(sorted(Counter(meta.source for meta in trace).items())),
        "phases": dict(sorted(Counter(meta.phase for meta in trace).items())),
        "bytes": sum(meta.bytes for meta in trace),
    }


def all_as(modality: str, trace: Sequence[SampleMeta]) -> list[SampleMeta]:
    """A trace whose items are all of one modality: for a model whose one encoder takes them all alike."""
    return [
        replace(meta, items=tuple(replace(item, modality=modality) for item in meta.items)) for meta in trace
    ]


def _quantiles(values: Sequence[int]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    at = {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (10, 50, 90, 99)}
    return {"mean": sum(ordered) / len(ordered), "min": ordered[0], **at, "max": ordered[-1]}


# --- Generators. A source draws (text tokens, [(modality, encoder tokens, LLM rows, place in 0..1)]). ---

_Drawn = tuple[float, list[tuple[str, int, int, float]]]
_AUDIO_ROWS_PER_S = 12.5
_TOKENS_PER_WORD = 1.3


def generate(name: str, num_samples: int, seed: int, max_tokens: int = 131_072) -> list[SampleMeta]:
    """A synthetic trace of samples of at most `max_tokens` LLM tokens, the same on every machine.

    `balanced`: every sample one image of 576 encoder tokens and a text of similar length: nothing to balance.
    `longtail`: interleaved documents, clips, long videos, speech and plain text with heavy tails.
    `shift`: plain text and documents first; from sample num_samples // 2 on (phase 1) mostly video.
    """
    if name not in TRACES:
        raise ValueError(f"unknown trace {name!r}: known are {', '.join(TRACES)}")
    if num_samples < 1 or max_tokens < 16:
        raise ValueError(
            f"num_samples {num_samples} must be positive and max_tokens {max_tokens} at least 16"
        )
    rng = np.random.Generator(np.random.Philox(seed))
    phases = TRACES[name]
    ids: Counter[str] = Counter()
    trace = []
    for i in range(num_samples):
        phase = i * len(phases) // num_samples
        sources = list(phases[phase])
        weights = [phases[phase][source] for source in sources]
        source = sources[int(np.searchsorted(np.cumsum(weights), rng.random() * sum(weights), side="right"))]
        trace.append(_meta(ids[source], source, phase, _SOURCES[source](rng), max_tokens))
        ids[source] += 1
    return trace


def _meta(number: int, source: str, phase: int, drawn: _Drawn, max_tokens: int) -> SampleMeta:
    """A drawn sample cut to `max_tokens`: beside items a text keeps at most a quarter; items beyond go."""
    text, items = drawn
    text_tokens = max(1, min(round(text), max_tokens // 4 if items else max_tokens - 1))
    free = max_tokens - 1 - text_tokens
    kept = []
    for modality, tokens, rows, place in sorted(items, key=lambda item: item[3]):
        most = free - 1  # the end_of_item
        if rows > most and modality == "video":  # a long video is sampled more coarsely instead
            rows, tokens = most, most * TOKENS_PER_ROW
        if 0 < rows <= most:
            kept.append(ItemMeta(modality, tokens, rows, int(place * text_tokens), ()))
            free -= rows + 1
    payload = 4 * text_tokens + sum(_BYTES_PER_ROW[item.modality] * item.rows for item in kept)
    return SampleMeta(number, source, text_tokens, tuple(kept), payload, phase)


_BYTES_PER_ROW = {"image": 200, "audio": 1_000, "video": 50}  # guesses: JPEG, compressed speech, H.264


def _lognormal(rng: np.random.Generator, mu: float, sigma: float, z: float | None = None) -> float:
    return exp(mu + sigma * (float(rng.standard_normal()) if z is None else z))


def _image(height: float, width: float, place: float) -> tuple[str, int, int, float]:
    rows = max(1, round(height / 28)) * max(1, round(width / 28))
    return "image", rows * TOKENS_PER_ROW, rows, place


def _chat(rng: np.random.Generator) -> _Drawn:
    """One image of fixed size and a short conversation. A guess: text around 245 tokens, little spread."""
    return _lognormal(rng, 5.5, 0.3), [("image", 576, 144, 0.0)]


def _document(rng: np.random.Generator) -> _Drawn:
    """Interleaved web documents.

    OBELICS publishes 141M documents with 353M images and 115B text tokens: 2.5 images and 816 tokens per
    document, which are the means here. The shapes (geometric, lognormal with σ = 1) and the sizes of images
    (median smaller side 300 px, σ = 0.82; at most 2,048 px) are guesses.
    """
    count = min(30, int(rng.geometric(0.4)))
    items = []
    for _ in range(count):
        side = min(2_048.0, _lognormal(rng, 5.70, 0.82))
        items.append(_image(side, min(2_048.0, side * _lognormal(rng, 0.0, 0.35)), float(rng.random())))
    return _lognormal(rng, 6.2, 1.0), items


def _clip(rng: np.random.Generator) -> _Drawn:
    """Captioned clips.

    InternVid publishes 234M clips from 760K hours and 4.1B caption words: 11.7 s and 17.5 words per clip on
    average, which are the means here. Shapes and one merged pair of 360p frames a second are guesses.
    """
    return _video(rng, _lognormal(rng, 2.0, 0.95), float(rng.standard_normal()), 13 * 23)


def _long_video(rng: np.random.Generator) -> _Drawn:
    """Whole videos.

    InternVid publishes a mean of 352 s, about half of the videos at most 5 minutes. Here a lognormal with a
    median of 305 s cut at 30 minutes; captions correlate with duration (0.3). Shape, correlation and 64
    rows a second (sampled more coarsely than clips) are guesses.
    """
    z = float(rng.standard_normal())
    caption = 0.3 * z + sqrt(1 - 0.3**2) * float(rng.standard_normal())
    return _video(rng, min(1_800.0, _lognormal(rng, 5.72, 1.0, z)), caption, 64)


def _video(rng: np.random.Generator, seconds: float, caption: float, rows_per_s: int) -> _Drawn:
    rows = max(1, round(seconds)) * rows_per_s
    words = _lognormal(rng, 2.8, 0.4, caption)
    return words * _TOKENS_PER_WORD, [("video", rows * TOKENS_PER_ROW, rows, 0.0)]


def _speech(rng: np.random.Generator) -> _Drawn:
    """Read speech with its transcript: mostly 14 s utterances, some evenly shorter. All guesses."""
    long = rng.random() < 0.75
    seconds = 14.2 + 1.6 * float(rng.standard_normal()) if long else 1.5 + 11.5 * float(rng.random())
    rows = round(min(35.0, max(1.3, seconds)) * _AUDIO_ROWS_PER_S)
    return 2.7 * seconds * _TOKENS_PER_WORD, [("audio", rows * TOKENS_PER_ROW, rows, 0.0)]


def _text(rng: np.random.Generator) -> _Drawn:
    """Plain text with a long-context tail: median 1,480 tokens, 1 % from 65,536 on. All guesses."""
    if rng.random() < 0.01:
        return min(2.0**31 - 1, 65_536 * float(1 - rng.random()) ** (-1 / 1.05)), []
    return _lognormal(rng, 7.3, 1.1), []


_SOURCES: Mapping[str, Callable[[np.random.Generator], _Drawn]] = {
    "chat": _chat,
    "clip": _clip,
    "document": _document,
    "long_video": _long_video,
    "speech": _speech,
    "text": _text,
}

# Shares of samples by phase; the phases of a trace are of equal length. Guesses.
TRACES: Mapping[str, tuple[Mapping[str, int], ...]] = {
    "balanced": ({"chat": 1},),
    "longtail": ({"document": 35, "clip": 20, "long_video": 5, "speech": 15, "text": 25},),
    "shift": ({"text": 70, "document": 30}, {"clip": 50, "long_video": 10, "document": 20, "text": 20}),
}

"""Freely generated transcriptions, summed up for the screen and for summary.json."""

from collections.abc import Iterator, Sequence

from dataloader.visible import visible
from omni.training.evaluate import Transcription

NUM_EXAMPLES = 8


def summed_up(source: str, results: Sequence[Transcription]) -> dict[str, object]:
    """Return the shares of exact transcriptions of a source, in all and by number of words, and examples."""
    words = sorted({len(t.expected.split()) for t in results})
    by_length = {n: [t.exact for t in results if len(t.expected.split()) == n] for n in words}
    return {
        f"eval/exact_match/{source}": _share([t.exact for t in results]),
        f"eval/generated/{source}": len(results),
        f"eval/exact_match_by_words/{source}": {str(n): _share(exact) for n, exact in by_length.items()},
        f"eval/examples/{source}": [
            {"sample": t.sample, "expected": t.expected, "generated": t.generated} for t in _examples(results)
        ],
    }


def lines_of(source: str, results: Sequence[Transcription]) -> Iterator[str]:
    """Yield what the screen says of a source: the share of exact transcriptions, and examples."""
    exact = [t.exact for t in results]
    yield (
        f"held-out {source}: {sum(exact)} of {len(results)} freely generated transcriptions are exact "
        f"({_share(exact):.1%})"
    )
    for example in _examples(results):
        mark = "=" if example.exact else "x"
        yield f"  {mark} expected   {visible(example.expected)}\n    generated  {visible(example.generated)}"


def _share(exact: Sequence[bool]) -> float:
    return sum(exact) / max(1, len(exact))


def _examples(results: Sequence[Transcription]) -> Sequence[Transcription]:
    """Examples of every length, mistakes first: they teach more."""
    ordered = sorted(results, key=lambda t: (t.exact, len(t.expected), t.sample))
    return ordered[:: max(1, len(ordered) // NUM_EXAMPLES)][:NUM_EXAMPLES]

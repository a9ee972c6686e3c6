"""Traces to compare systems on: counted by a model's encoders, mixed of samples with and without items."""

from collections.abc import Mapping, Sequence

from dataloader.tokens import SampleMeta
from omni.config import ConfigError
from omni.models.registry import Encoder
from omni.planning.traces import for_encoders, open_trace, with_sizes

Weights = tuple[int, int]
"""Of so many samples with items, and without."""


def counted_trace(
    name: str, num_samples: int, seed: int, encoders: Mapping[str, Encoder]
) -> tuple[list[SampleMeta], list[str]]:
    """A trace as `omni plan --trace` has it: without items that no encoder takes, the others with the tokens
    that their encoder makes; and what a user must know of that.

    Raises:
        DataError: for a trace that is not there or cannot be used.
    """
    taken, left_out = for_encoders(open_trace(name, num_samples, seed), encoders)
    sized, recounted = with_sizes(taken, encoders)
    counted, _ = for_encoders(sized, encoders)
    return counted, [f"trace {name}: {note}" for note in (*left_out, *recounted)]


def read_mixtures(text: str) -> dict[str, tuple[Weights, ...]]:
    """Read "1:9,9:1,1:9-9:1": mixtures by name, of which the last is 9:1 under what was chosen for 1:9. The
    one that counts comes last.

    Raises:
        ConfigError: for what is none.
    """
    found = {name: tuple(map(_weights, name.split("-"))) for name in text.split(",")}
    long = next((name for name, of in found.items() if len(of) > 2), None)
    if long:
        raise ConfigError(f"--mixtures {long!r}: a mixture jumps once: write 1:9-9:1")
    return found


def _weights(text: str) -> Weights:
    with_items, mark, without = text.partition(":")
    if not (mark and with_items.isdecimal() and without.isdecimal() and int(with_items) + int(without)):
        raise ConfigError(
            f"--mixtures {text!r}: say how many samples with items to how many without, such as 1:9,9:1, "
            "and 1:9-9:1 for a jump"
        )
    return int(with_items), int(without)


def mixed(trace: Sequence[SampleMeta], weights: Weights) -> list[SampleMeta]:
    """As many samples as a trace has, so many with items to so many without, evenly spread; of each kind in
    the order of the trace, over and over.

    Raises:
        ConfigError: if the trace has none of a kind that is asked for.
    """
    first, total = weights[0], sum(weights)
    kinds = [meta for meta in trace if meta.items], [meta for meta in trace if not meta.items]
    for own, weight, name in zip(kinds, weights, ("with items", "without items"), strict=True):
        if weight and not own:
            raise ConfigError(
                f"--mixtures {weights[0]}:{weights[1]}: no sample of the trace is {name} (of those that an "
                "encoder takes): leave it out, or give another --trace, such as longtail"
            )
    out = list[SampleMeta]()
    for n in range(len(trace)):
        before, after = n * first // total, (n + 1) * first // total  # samples with items so far
        own, at = (kinds[0], before) if after > before else (kinds[1], n - before)
        out.append(own[at % len(own)])
    return out

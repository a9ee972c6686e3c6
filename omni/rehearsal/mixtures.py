"""Traces to compare systems on: counted by a model's encoders, mixed of samples with and without items."""

from collections.abc import Mapping, Sequence

from dataloader.tokens import SampleMeta
from omni.config import ConfigError
from omni.models.registry import Encoder
from omni.planning.traces import for_encoders, open_trace, with_sizes


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


def read_mixture(text: str) -> tuple[int, int]:
    """Read "1:9": of so many samples with items, and without.

    Raises:
        ConfigError: if it is none.
    """
    with_items, mark, without = text.partition(":")
    if not (mark and with_items.isdecimal() and without.isdecimal() and int(with_items) + int(without)):
        raise ConfigError(
            f"--mixtures {text!r}: say how many samples with items to how many without, such as 1:9,5:5,9:1"
        )
    return int(with_items), int(without)


def mixed(trace: Sequence[SampleMeta], weights: tuple[int, int]) -> list[SampleMeta]:
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

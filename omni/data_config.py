"""The keys of the data: dataclasses that type `data` and its sections. No torch here."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from omegaconf import MISSING

from dataloader.tokens import LONG_SAMPLE_POLICIES
from omni.keys import Rule, Rules, at_least, one_of


@dataclass
class AugmentConfig:
    """How pictures of a source are changed, anew in each epoch: see `dataloader.augment.Augment`."""

    crop: float = at_least(0, 1.0)
    ratio: float = at_least(1, 1.0)
    flip: float = at_least(0, 0.0)
    brightness: float = at_least(0, 0.0)
    contrast: float = at_least(0, 0.0)
    saturation: float = at_least(0, 0.0)
    hue: float = at_least(0, 0.0)

    rules: ClassVar[Rules] = (
        Rule("crop", lambda own: 0 < own.crop <= 1, "is a share of the area: above 0, at most 1"),
        Rule("flip", lambda own: own.flip <= 1, "is a probability: at most 1"),
        Rule("hue", lambda own: own.hue <= 0.5, "is a share of the circle: at most 0.5"),
    )


@dataclass
class SourceConfig:
    """A dataset folder, its integer weight in the mixture (samples in a period), and how its pictures are
    changed, if at all.
    """

    path: str = MISSING
    weight: int = at_least(0, 1)
    augment: AugmentConfig | None = None


@dataclass
class PhaseConfig:
    """A phase of the mixture: what is other from step `first` on. `weights` of sources, 0 to leave one out;
    files that list the ids of samples to `remove`, by source, or `tag:NAME` for those that carry a tag, and
    of those to `keep` alone until a later phase says others, none for all; `step_tokens` or `step_samples` of
    a step. `position` is where it begins in the stream of samples, which the run finds: nobody sets it.
    """

    first: int = at_least(1)
    weights: dict[str, int] = field(default_factory=dict, metadata={"least": 0})
    remove: dict[str, list[str]] = field(default_factory=dict)
    keep: dict[str, list[str]] = field(default_factory=dict)
    step_tokens: int | None = at_least(1, None)
    step_samples: int | None = at_least(1, None)
    position: int | None = at_least(0, None)

    rules: ClassVar[Rules] = (
        Rule(
            "step_tokens",
            lambda own: own.step_tokens is None or own.step_samples is None,
            "leave it out, or step_samples={step_samples}: a step has one of them",
        ),
    )


@dataclass
class HeldoutConfig:
    """A held-out dataset: `samples` of it give the loss, `generate` are transcribed freely at the end, each
    with at most `generate_tokens` tokens.
    """

    path: str = MISSING
    samples: int = at_least(1, 128)
    generate: int = at_least(0, 0)
    generate_tokens: int = at_least(1, 128)


@dataclass
class DataConfig:
    """What to train on: `sources` by weight and, from later steps on, as phases of the `mixture` say. A step
    takes samples up to `step_tokens` LLM tokens or `step_samples` samples. A sample has at most
    `sample_tokens`; more than `microbatch_tokens` takes ranks that share it. Null is `microbatch_tokens`, and
    where a system leaves choices open (`omni`) what its ranks hold together. `microbatch_tokens: null` leaves
    it to be chosen for the run. Null `loader_threads` are the machine's cores by its ranks, from 1 to 16.
    Ranks of a node share row groups of compressed files in `cache_dir` (null: below the folder for temporary
    files), at most `cache_gb`, 0 for none.
    """

    sources: dict[str, Any] = field(default_factory=dict)
    mixture: dict[str, Any] = field(default_factory=dict)
    heldout: dict[str, Any] = field(default_factory=dict)
    tokenizer: Any = "bytes"
    microbatch_tokens: int | None = at_least(1)
    sample_tokens: int | None = at_least(1, None)
    step_tokens: int | None = at_least(1, None)
    step_samples: int | None = at_least(1, None)
    on_long: str = one_of(LONG_SAMPLE_POLICIES, "error")
    on_error: str = one_of(("fail", "skip"), "fail")
    max_error_share: float = at_least(0, 0.01)
    window_groups: int = at_least(1, 64)
    loader_threads: int | None = at_least(1, None)
    cache_dir: str | None = None
    cache_gb: float = at_least(0, 16.0)
    record_samples: bool = False

    rules: ClassVar[Rules] = (
        Rule("max_error_share", lambda own: own.max_error_share <= 1, "is a share of samples: at most 1"),
    )

    @property
    def pass_tokens(self) -> int:
        """`microbatch_tokens` of a run, which has chosen it if nobody gave it."""
        assert self.microbatch_tokens is not None, "data.microbatch_tokens is chosen as a run is prepared"
        return self.microbatch_tokens

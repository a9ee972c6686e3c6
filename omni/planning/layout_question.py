"""Whose layout is looked for: a run before its layout, with its data open."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dataloader.tokens import SampleMeta
from omni.config import Config
from omni.models.registry import Encoder
from omni.planning.choice import AUTO, value_of, with_keys
from omni.planning.layout_space import DP, Space, space_of, spelt_out
from omni.planning.prepare import make_encoders, prepare_run
from omni.planning.room import lengths_of
from omni.planning.run_data import RunData, open_data, tokenizer_of
from omni.planning.run_spec import RunSpec
from ops.ints import Ints


@dataclass(frozen=True)
class Question:
    """A run whose layout is looked for, from that step and position in the stream on which it is to `begin`:
    its configuration, of which keys that were `given` stay, its encoders and data, and the tokens of its next
    samples.
    """

    config: Config
    given: frozenset[str]
    encoders: Mapping[str, Encoder]
    data: RunData
    lengths: Ints
    begin: tuple[int, int] = (1, 0)

    @cached_property
    def longest(self) -> int:
        """Tokens that a sample may have."""
        data, own = self.config.data, int(self.lengths.max())
        return data.sample_tokens or min(own, data.step_tokens or own)

    @cached_property
    def step_tokens(self) -> int:
        """Tokens of a step, about."""
        data = self.config.data
        mean = int(np.minimum(self.lengths, self.longest).mean())
        return data.step_tokens or (data.step_samples or 1) * mean

    def resolve(self, config: Config, ranks: int) -> RunSpec:
        """Prepare a candidate of which nothing is open."""
        return prepare_run(config, ranks, begin=self.begin, opened=self.data)

    def space(self, ranks: int) -> Space:
        """The layouts of so many ranks."""
        vocab_size = tokenizer_of(self.config.data).vocab_size
        return space_of(self.config, self.given, self.encoders, vocab_size, ranks)


def question_of(config: Config, given: Collection[str], trace: Sequence[SampleMeta] = ()) -> Question:
    """Ask for the layout of a run, of which keys that were `given` stay, and which takes the samples of a
    `trace`, if there is one.

    Raises:
        ConfigError, DataError: for data or encoders that cannot be.
    """
    encoders = make_encoders(config.model.encoders)
    data = open_data(config.data, config.train.seed, encoders, tokenizer_of(config.data), trace)
    own = spelt_out(config, encoders)
    given = {key for key in given if _is_set(own, key)}
    own = with_keys(own, {} if DP in given else {DP: None})
    cursor = config.start.cursor or 0
    lengths = lengths_of(data.mixture.samples_at(cursor), cursor)
    return Question(own, frozenset(given), encoders, data, lengths, (1, cursor))


def _is_set(config: Config, key: str) -> bool:
    """Whether a key has a value, and does not leave it open."""
    try:
        return value_of(config, key) not in (None, AUTO)
    except (AttributeError, KeyError):
        return False  # a group, or what was taken away

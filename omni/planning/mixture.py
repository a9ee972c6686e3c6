"""The mixture by step: from phases of the configuration to what steps of each take.

    steps      1 … 199          200 … 299          300 …
    phase      `data.sources`   first: 200         first: 300
    position   0 … 3,183        3,184 … 4,790      4,791 …

A phase begins where its first step does. That position follows from the steps before, so it is found by
going through them by metadata, once, and noted in the configuration. Given it, which sample is where is in
closed form again: a source goes on in its own order after the draws that it had before.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from dataloader.format import DataError
from dataloader.global_batch import REMOVED, Lengths
from dataloader.index import Index
from dataloader.removed import among, read_keys, rows_of
from dataloader.samples import Samples
from dataloader.stream import Stream
from dataloader.tags import PREFIX, rows_with
from omni.config import ConfigError
from omni.data_config import DataConfig, PhaseConfig
from omni.planning.world_planner import MixturePhase, WorldPlanner
from ops.ints import Ints

KEY = "data.mixture"
_TOLD_EVERY = 10_000  # steps, which take about 10 s to go through


@dataclass(frozen=True)
class Drawn:
    """What a phase draws: samples of sources by weight, but those `removed`, rows by source, and of sources
    of which some are `kept` only these.
    """

    name: str
    config: PhaseConfig
    weights: Mapping[str, int]
    removed: Mapping[str, Ints]
    kept: Mapping[str, Ints]


@dataclass(frozen=True)
class Mixture:
    """The later phases of a run, in their order, over the `samples` that the first one takes."""

    samples: Samples
    phases: Sequence[Drawn] = field(default=())

    def begun(self) -> tuple[MixturePhase, ...]:
        """Return the phases up to the first whose position is not known."""
        found: list[MixturePhase] = []
        for drawn in self.phases:
            if drawn.config.position is None:
                break
            found.append(self._phase(len(found), found, drawn.config.position))
        return tuple(found)

    def samples_at(self, cursor: int) -> Samples:
        """Return what steps take samples of at a position, by the phases whose positions are known."""
        begun = [phase.samples for phase in self.begun() if phase.start <= cursor]
        return begun[-1] if begun else self.samples

    def located(self, world: WorldPlanner, step: int, cursor: int, last: int) -> WorldPlanner:
        """Return a planner of all phases up to step `last`. Those that begin at a position that is not known
        are found by taking the samples of steps, from `step` on, which begins at `cursor`.

        Raises:
            ConfigError: for a phase of which steps are done without it.
            DataError: what taking samples raises.
        """
        later = list(world.later)
        if later and later[-1].first > step:
            step, cursor = later[-1].first, later[-1].start
        for drawn in self.phases[len(later) :]:
            first = drawn.config.first
            if first > last:
                break
            if first < step:
                raise ConfigError(
                    f"{KEY}.{drawn.name}.first={first}: steps up to {step - 1} were trained on without it, "
                    f"and what was trained on stays: set it to {step} or more"
                )
            while step < first:
                step, cursor = step + 1, world.take(cursor).next_cursor
                if step % _TOLD_EVERY == 0:
                    what = f"looking for step {first:,}, where {KEY}.{drawn.name} begins"
                    print(f"{what}: {step:,} are gone through ...", file=sys.stderr, flush=True)
            later.append(self._phase(len(later), later, cursor))
            world = replace(world, later=tuple(later))
        return world

    def _phase(self, number: int, before: Sequence[MixturePhase], start: int) -> MixturePhase:
        """The later phase of a number, after those `before`, from position `start` on."""
        drawn, last = self.phases[number], before[-1].samples.stream if before else self.samples.stream
        assert isinstance(last, Stream)
        sources = {name: replace(of, weight=drawn.weights[name]) for name, of in last.sources.items()}
        stream = Stream(sources, last.seed, last.window_groups, start, last.drawn(start))
        samples = replace(self.samples, stream=stream, lengths=_left(drawn, self.samples.lengths))
        own = drawn.config
        return MixturePhase(own.first, start, samples, own.step_tokens, own.step_samples)


def mixture_of(data: DataConfig, samples: Samples, indexes: Mapping[str, Index]) -> Mixture:
    """Check the phases of a run that takes `samples` first, of datasets that `indexes` open.

    Raises:
        ConfigError, DataError: naming the key, what is wrong with it and the remedy.
    """
    weights = {name: source.weight for name, source in data.sources.items()}
    removed = {name: np.empty(0, np.int64) for name in weights}
    kept: dict[str, Ints] = {}
    phases: list[Drawn] = []
    for name, own in ordered(data):
        for key in ("weights", "remove", "keep"):
            for source in getattr(own, key):
                if source not in weights:
                    raise ConfigError(
                        f"{KEY}.{name}.{key}.{source}: there is no such source; there are "
                        f"{', '.join(weights)}. A new one also needs +data.sources.{source}.path and "
                        f"data.sources.{source}.weight=0"
                    )
        weights = {**weights, **own.weights}
        for source, files in own.remove.items():
            rows = _rows(f"{name}.remove.{source}", files, indexes[source])
            removed = {**removed, source: np.union1d(removed[source], rows)}
        for source, files in own.keep.items():
            rows = _rows(f"{name}.keep.{source}", files, indexes[source])
            kept = {of: those for of, those in {**kept, source: rows}.items() if of != source or files}
        phases.append(Drawn(name, own, weights, removed, kept))
        _check_drawn(phases[-1], {source: len(index) for source, index in indexes.items()})
    return Mixture(samples, phases)


def ordered(data: DataConfig) -> list[tuple[str, PhaseConfig]]:
    """Return the phases of a configuration by their first step.

    Raises:
        ConfigError: if two have the same.
    """
    phases = sorted(data.mixture.items(), key=lambda pair: pair[1].first)
    for (name, own), (other, following) in pairwise(phases):
        if own.first == following.first:
            raise ConfigError(
                f"{KEY}.{other}.first={own.first}: {KEY}.{name} begins there, too: make one phase of both"
            )
    return phases


def with_positions(data: DataConfig, known: Mapping[int, int]) -> DataConfig:
    """Return a configuration whose phases begin where is `known` by their first steps, the others at a
    position that is not known.
    """
    data = deepcopy(data)
    for own in data.mixture.values():
        own.position = known.get(own.first)
    return data


def positions(data: DataConfig) -> dict[int, int]:
    """Return where phases begin in the stream, by their first steps, as far as it is known."""
    of_mixture = data.mixture.values()
    return {own.first: own.position for own in of_mixture if own.position is not None}


def flattened_at(data: DataConfig, step: int) -> DataConfig:
    """Return a configuration that draws from its beginning as this one does at `step`."""
    data, remove, keep = deepcopy(data), dict[str, list[str]](), dict[str, list[str]]()
    for _, own in ordered(data):
        if own.first > step:
            break
        for name, weight in own.weights.items():
            data.sources[name].weight = weight
        for name, files in own.remove.items():
            remove[name] = [*remove.get(name, ()), *files]
        keep.update(own.keep)
        if (own.step_tokens, own.step_samples) != (None, None):
            data.step_tokens, data.step_samples = own.step_tokens, own.step_samples
    data.mixture = {"begun": PhaseConfig(1, remove=remove, keep=keep)} if remove or keep else {}
    return data


def told(data: DataConfig) -> Iterator[str]:
    """Say in a line each what changes when, in the order of steps."""
    for name, own in ordered(data):
        what = [f"{source} weight {weight}" for source, weight in own.weights.items()]
        what += [f"without those of {source} in {', '.join(files)}" for source, files in own.remove.items()]
        what += [
            f"of {source} only those in {', '.join(files)}" if files else f"all of {source}"
            for source, files in own.keep.items()
        ]
        if own.step_tokens is not None:
            what.append(f"{own.step_tokens:,} tokens a step")
        if own.step_samples is not None:
            what.append(f"{own.step_samples} samples a step")
        yield f"{name}, from step {own.first}: {'; '.join(what) or 'as before'}"


def repeats(data: DataConfig, sizes: Mapping[str, int]) -> Iterator[str]:
    """Say which sources, of so many samples, have fewer than their share of a period: those come again."""
    weights = {name: source.weight for name, source in data.sources.items()}
    phases: list[tuple[str, Mapping[str, int]]] = [("data.sources", {})]
    phases += [(f"{KEY}.{name}", own.weights) for name, own in ordered(data)]
    for key, own in phases:
        weights = {**weights, **own}
        divisor = int(np.gcd.reduce(list(weights.values()))) or 1
        for name, weight in weights.items():
            share = weight // divisor
            if share > sizes[name]:
                yield (
                    f"{key}: {share:,} of {sum(weights.values()) // divisor:,} samples are of {name}, which "
                    f"has {sizes[name]:,}: each comes {share / sizes[name]:.1f} times among them. Give it a "
                    "smaller weight if that is not meant"
                )


def _rows(key: str, lists: Sequence[str], index: Index) -> Ints:
    """The rows, ascending, of the samples of a source that files list, or that carry a tag."""
    rows = [np.empty(0, np.int64)]
    for each in lists:
        try:
            if each.startswith(PREFIX):
                rows.append(rows_with(index.path, index.manifest, each.removeprefix(PREFIX)))
            else:
                rows.append(rows_of(index.path, index.manifest, read_keys(each)))
        except DataError as error:
            raise DataError(f"{KEY}.{key}: {error}") from error
    return np.unique(np.concatenate(rows))


def _check_drawn(drawn: Drawn, sizes: Mapping[str, int]) -> None:
    """Refuse a phase that draws nothing, or of a source nothing but what is left out."""
    of, weights = f"{KEY}.{drawn.name}", drawn.weights
    if not any(weights.values()):
        raise ConfigError(
            f"{of}.weights: the weights of all sources ({', '.join(weights)}) are 0: give one a weight"
        )
    for name, weight in weights.items():
        gone, kept = drawn.removed[name], drawn.kept.get(name)
        left = sizes[name] - len(gone) if kept is None else len(np.setdiff1d(kept, gone))
        if weight and not left:
            raise ConfigError(
                f"{of}: remove and keep leave none of the {sizes[name]} samples of {name}: change "
                f"{of}.remove.{name} or .keep.{name}, or set {of}.weights.{name}=0 to leave the source out"
            )


def _left(drawn: Drawn, lengths: Lengths) -> Lengths:
    """Lengths of samples as trained on in a phase, which leaves some out."""

    def left(source: str, ids: Ints, budget: int, policy: str) -> Ints:
        out = lengths(source, ids, budget, policy)
        out[among(ids, drawn.removed[source])] = REMOVED
        if source in drawn.kept:
            out[~among(ids, drawn.kept[source])] = REMOVED
        return out

    return left

"""How long a run's samples may be: which domains hold the longest together, and what is cut of others.

For example, the longest sample has 100,000 tokens, a pass 16,384, and there are 16 replicas: a domain of 8
holds it, so domains have 8 replicas or more, and a sample may have 131,072 tokens.
"""

from collections.abc import Sequence

import numpy as np

from dataloader.samples import Samples
from omni.config import Config, ConfigError
from omni.planning.choice import AUTO, LLM_SP, PASS_TOKENS, value_of, with_keys
from omni.planning.run_spec import RunSpec
from ops.ints import Ints
from parallel.policies import SharingPolicy
from parallel.policy import find

SIZES = (1, 2, 4, 8, 16, 32)
"""Replicas of a domain that are tried, or as many below as divide dp."""
LARGER = (64, 128, 256)
"""Tried as well, but as plans of them take a rank long, taken only if the longest sample needs so many, or if
they gain `LARGE_GAIN`.
"""
LINKED = 256  # ranks of a domain at most, where the cluster does not say how many share a rail
PLANNED = 2048
"""Samples of a step that a domain plans at most, unless the longest sample needs more replicas, or planning
more is not long beside the step.
"""
PLAN_NS = 2_000_000  # of a rank, for each sample of a domain, where schedules are compared
PLAN_SHARE = 0.04  # of a step, that planning takes at most, on average over the ranks of a node
A_REPLICA = 64  # samples of a simulated step for each replica, at most
ROUND = 256  # tokens, of which microbatches that nobody gave have a multiple
LOOKED = 1 << 16
_ANY = 1 << 40  # tokens


def lengths_of(samples: Samples, cursor: int = 0) -> Ints:
    """Return the tokens of the next `LOOKED` samples of a run's stream, whole: int64 [n]."""
    sources, ids = samples.stream.take(cursor, min(LOOKED, samples.stream.cycle))
    out = np.zeros(len(ids), np.int64)
    for number in np.unique(sources).tolist():
        of = sources == number
        out[of] = samples.lengths(samples.stream.names[number], ids[of], _ANY, "truncate")
    return np.maximum(out, 0)


def domain_sizes(config: Config, start: RunSpec, lengths: Ints) -> tuple[list[int], int]:
    """The replicas that a domain may have, ascending, all enough for the longest of samples of `lengths`, or
    for what is given, if any are; and the most tokens that a sample may then have. Links alone bound them.
    """
    world, budget = start.arrangement, config.data.microbatch_tokens
    most = config.data.step_tokens or _ANY  # a longer sample would be a step of its own
    longest = config.data.sample_tokens or min(int(lengths.max()), max(most, budget or PASS_TOKENS))
    dp, least = world.llm.dp, world.replicas
    linked = max(least, (config.cluster.ranks_per_rail or LINKED) * dp // world.world)

    def divisors(limits: Sequence[int], most: int) -> list[int]:
        below = (max(n for n in range(1, limit + 1) if dp % n == 0) for limit in limits)
        return [n for n in dict.fromkeys(max(least, n) for n in below) if n <= most]

    every = divisors((*SIZES, *LARGER), linked) if config.layout.domain is None else [config.layout.domain]
    if budget is None:
        return every, max(longest, PASS_TOKENS)
    if longest <= budget or not may_be_cut(value_of(config, LLM_SP)):
        return every, budget
    enough = next((n for n in every if n * budget >= longest), every[-1])
    return [n for n in every if n >= enough], min(enough * budget, most)


def planned_long(samples: int, sharers: int, step_ns: float) -> bool:
    """Whether planning a domain of so many samples of a step takes more than `PLAN_SHARE` of it, on average
    over `sharers`, of which one makes the plan.
    """
    return samples * PLAN_NS > PLAN_SHARE * sharers * step_ns


def may_be_cut(policy: str) -> bool:
    """Whether samples may be longer than what a rank holds of a pass."""
    return policy == AUTO or find(SharingPolicy, policy, LLM_SP).finds_room


def microbatch_tokens(given: int | None, cuts: bool, size: int, longest: int) -> int:
    """The tokens of a microbatch, as they are given, or enough for the replicas of a domain to hold the
    longest sample, together if it may be cut.
    """
    share = -(-longest // (size if cuts else 1))
    return given or max(PASS_TOKENS, -(-share // ROUND) * ROUND)


def mean_context(lengths: Ints) -> int:
    """The tokens of the sequence that a token of such samples is in, on average: what its attention costs."""
    tokens = lengths.astype(np.float64)
    mean = float((tokens * tokens).sum() / max(1.0, float(tokens.sum())))
    return max(ROUND, round(mean / ROUND) * ROUND)


def shortened(config: Config, start: RunSpec, lengths: Ints, longest: int) -> Config:
    """The configuration of a run with shorter steps, where they have many samples a replica."""
    count, most = samples_of_step(config, lengths, longest), A_REPLICA * start.arrangement.llm.dp
    keys = ("data.step_tokens", "data.step_samples")
    given = {key: value_of(config, key) for key in keys if value_of(config, key) is not None}
    return with_keys(config, {key: value * min(count, most) // count for key, value in given.items()})


def cut_of_longer(config: Config, lengths: Ints, held: int) -> str:
    """Say how many samples have more tokens than ranks hold, and what would hold them.

    Raises:
        ConfigError: where such samples are an error.
    """
    data, over = config.data, lengths[lengths > held]
    if not len(over):
        return ""
    budget = config.data.microbatch_tokens or min(held, PASS_TOKENS)
    lost, num_cp_ranks = int((over - held).sum()), max(1, held // budget)
    if held == data.step_tokens:
        remedy = f"data.step_tokens={int(over.max())}"
    else:
        remedy = f"data.microbatch_tokens={-(-int(over.max()) // num_cp_ranks)} or more replicas"
    said = (
        f"{len(over):,} of the first {len(lengths):,} samples have more than {held:,} tokens, which "
        f"{num_cp_ranks} ranks share at data.microbatch_tokens={budget}; the longest has "
        f"{int(over.max()):,}. Beyond are {lost:,} tokens, {lost / int(lengths.sum()):.1%} of all: {remedy} "
        "would hold them"
    )
    if data.on_long == "error":
        raise ConfigError(f"data.on_long=error: {said}; or set data.on_long to drop or truncate")
    return f"data.on_long={data.on_long}: {said}"


def samples_of_step(config: Config, lengths: Ints, longest: int) -> int:
    """About how many samples a step has."""
    data = config.data
    if data.step_tokens is None:
        return data.step_samples or 1
    return max(1, data.step_tokens // max(1, int(np.minimum(lengths, longest).mean())))

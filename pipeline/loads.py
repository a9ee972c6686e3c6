"""What compute ops process on a rank: from a domain's plan to the loads that parts state their work for."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from parallel.attended import attended
from parallel.sequence import Shard
from parallel.work import Load, Part
from pipeline.domain_plan import DomainPlan, EncoderBatch, Microbatch


def pass_load(
    domain: DomainPlan, m: int, domain_rank: int, part: Part, *, losses: bool, messages: bool = True
) -> Load:
    """Load of the pass of microbatch `m` through `part`, a virtual stage of the LLM, which computes `losses`
    or not.

    Without `messages` it leaves out what exchanges send: of memory, buffers for a moment.
    """
    batch, cp_rank, tp = domain.microbatches[m], domain.cp_rank(domain_rank), domain.tp
    tail = batch.layout.padded_tokens(cp_rank, tp) - batch.layout.local_tokens(cp_rank)
    first = domain_rank - domain_rank % part.ep if part.ep else 0
    seen = partial(attended, batch.layout, batch.tiles, cp_rank, tail)
    within = None if part.window is None else replace(part.shape, window=part.window - 1)
    return Load(
        seen=seen(part.shape, part.head_dim, messages, part.delta),
        windowed=None if within is None else seen(within, part.head_dim, messages),
        squares=batch.share(cp_rank).squares,
        anew=batch.anew,
        sequences=_sequences(batch.layout.shards, cp_rank),
        targets=_targets(domain, batch, cp_rank) if losses else 0,
        routed=tuple(
            batch.layout.padded_tokens(domain.cp_rank(at), tp) // tp for at in range(first, first + part.ep)
        ),
        router=domain_rank - first if part.ep else 0,
    )


def encoder_batch_load(
    encoder_batch: EncoderBatch, domain_rank: int, part: Part, unit: int | None, *, messages: bool = True
) -> Load:
    """Load of an encoder batch on the tp group of `domain_rank`, of an encoder that splits items by `unit`
    tokens; `messages` as for a pass.
    """
    tp_group, tail = encoder_batch.tp_group(domain_rank), encoder_batch.tail(domain_rank, unit)
    return Load(
        seen=attended(
            encoder_batch.layout, encoder_batch.tiles, tp_group, tail, part.shape, part.head_dim, messages
        ),
        squares=encoder_batch.share(domain_rank).squares,
        sequences=_sequences(encoder_batch.layout.shards, tp_group),
        rows=encoder_batch.rows_of(domain_rank),
        most_rows=max(encoder_batch.rows[tp_group * encoder_batch.tp : (tp_group + 1) * encoder_batch.tp]),
    )


def _sequences(shards: Sequence[Sequence[Shard]], rank: int) -> int:
    """Sequences of which a rank holds a part."""
    return sum(any(shard.cp_rank == rank and shard.length for shard in of) for of in shards)


def _targets(domain: DomainPlan, batch: Microbatch, cp_rank: int) -> int:
    """Positions that give losses, padded to one number on every tensor-parallel rank and summed over them."""
    share = batch.layout.padded_tokens(cp_rank, domain.tp) // domain.tp
    counts = [0] * domain.tp
    at = 0
    for sample, shards in zip(batch.samples, batch.layout.shards, strict=True):
        for shard in shards:
            if shard.cp_rank != cp_rank:
                continue
            for start, stop in domain.samples[sample].targets:
                low, high = max(start, shard.start), min(stop, shard.start + shard.length)
                _count(counts, share, at + low - shard.start, high - low)
            at += shard.length
    return max(counts) if domain.tp == 1 else domain.tp * max(1, *counts)


def _count(counts: list[int], share: int, start: int, length: int) -> None:
    """Add a run of a cp rank's tokens, if there is one, to the parts that hold it."""
    while length > 0:
        part, local = divmod(start, share)
        step = min(length, share - local)
        counts[part] += step
        start, length = start + step, length - step

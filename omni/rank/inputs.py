"""From a plan to the tensors that one rank needs for it.

`fetch_of` says what the loader must bring; `assemble` turns what came into the engine's inputs. A rank loads
the texts that its cp rank holds if it embeds them or computes their loss, and the items that it
encodes: no more.

Bad data keeps its planned shape. An item that cannot be prepared becomes zeros, and its sample a bad one:
see `bad_samples.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dataloader.format import DataError
from dataloader.loader import Fetch, Fetched, TextArrays
from dataloader.tokens import SampleMeta
from omni.llm_config import LLMConfig
from omni.models.grid_positions import grid_positions, rows_of_grids
from omni.models.llm_pack import pack_llm
from omni.models.llm_stage import MicrobatchInputs
from omni.models.moe import tail_mask
from omni.models.registry import Encoder, ItemArrays, transferred
from omni.rank.literals import with_literals
from ops.one_copy import arrival, brought
from parallel.memory import Continued, Recalled
from parallel.packed import PackedTokens, Sharding
from parallel.sequence import Shard
from parallel.shipping import make_ends
from pipeline.anchor import StepInputs
from pipeline.domain_plan import DomainPlan, EncoderBatch, Microbatch


@dataclass(frozen=True)
class EncoderBatchInputs:
    """An encoder batch's items on this rank's tp group, packed: values [T, ...], positions [T, A] and how
    attention divides them. `row_counts` are the rows that each rank of the tp group passes on, `samples` the
    names of the samples that the items belong to.
    """

    values: torch.Tensor
    positions: torch.Tensor
    packed: PackedTokens
    row_counts: tuple[int, ...]
    samples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where this rank stands: its domain rank, its device, and the stream of a GPU on which inputs
    come.
    """

    domain_rank: int
    device: torch.device
    dtype: torch.dtype
    stream: torch.cuda.Stream | None = None


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of sequence number `sequence` of a microbatch, which is sample `sample`."""

    sequence: int
    sample: int
    start: int
    stop: int


@dataclass(frozen=True)
class Assembler:
    """Builds inputs for one rank of a run with given models."""

    llm: LLMConfig
    encoders: Mapping[str, Encoder]
    sources: tuple[str, ...]
    place: Place

    def reads_text(self, domain: DomainPlan) -> bool:
        """Whether this rank embeds tokens or computes losses."""
        return domain.is_first(self.place.domain_rank) or domain.is_last(self.place.domain_rank)

    def pieces(self, domain: DomainPlan, batch: Microbatch) -> list[Piece]:
        """Return what this rank's cp rank holds of a microbatch, in order."""
        cp_rank = domain.cp_rank(self.place.domain_rank)
        return [
            Piece(number, sample, shard.start, shard.start + shard.length)
            for number, (sample, shards) in enumerate(zip(batch.samples, batch.layout.shards, strict=True))
            for shard in shards
            if shard.cp_rank == cp_rank and shard.length
        ]

    def texts(self, domain: DomainPlan) -> list[int]:
        """Return the samples whose texts this rank needs, in the order of loading."""
        if not self.reads_text(domain):
            return []
        batches = domain.microbatches
        return list(dict.fromkeys(p.sample for batch in batches for p in self.pieces(domain, batch)))

    def fetch_of(self, domain: DomainPlan, metas: Sequence[SampleMeta]) -> Fetch:
        """Say what this rank must load. `metas` are those of the domain's samples."""
        texts = tuple((metas[i].source, metas[i]) for i in self.texts(domain))
        items = [(metas[i.sample], i.index) for i in (domain.items[n] for n in self.items(domain))]
        return Fetch(
            texts,
            tuple((meta.source, meta.id, index) for meta, index in items),
            tuple(_cost(meta, index) for meta, index in items),
        )

    def items(self, domain: DomainPlan) -> list[int]:
        """Return the items that this rank encodes any of, in the order of loading."""
        return [i for encoder_batch in domain.encoder_batches for i, _ in self.shards(encoder_batch)]

    def shards(self, encoder_batch: EncoderBatch) -> list[tuple[int, list[Shard]]]:
        """Return the items of an encoder batch that this rank's tp group encodes any of, by number, with its
        shards.
        """
        if self.place.domain_rank not in encoder_batch.ranks:
            return []
        tp_group = encoder_batch.tp_group(self.place.domain_rank)
        found = (
            (i, [s for s in shards if s.cp_rank == tp_group and s.length])
            for i, shards in zip(encoder_batch.items, encoder_batch.layout.shards, strict=True)
        )
        return [(i, own) for i, own in found if own]

    def assemble(
        self,
        domain: DomainPlan,
        fetched: Fetched[ItemArrays],
        predict: bool,
        continued: Continued | None = None,
    ) -> StepInputs:
        """Build the tensors of a step. With `predict`, the last stage gives each next token; tokens may
        be those that follow what passes before have `continued`.

        It may run on any thread: a thread that touches the GPU must name it, or it takes the first one. All
        goes there in one copy, on a stream of its own, and may be read after `StepInputs.arrive`.
        """
        device, stream = self.place.device, self.place.stream
        if stream is None:
            return self._assemble(domain, fetched, predict, continued)
        with torch.cuda.device(device), torch.cuda.stream(stream):
            inputs = brought(self._assemble(domain, fetched, predict, continued), device)
            return replace(inputs, arrive=arrival(inputs, stream))

    def _assemble(
        self,
        domain: DomainPlan,
        fetched: Fetched[ItemArrays],
        predict: bool,
        continued: Continued | None,
    ) -> StepInputs:
        domain_rank = self.place.domain_rank
        texts = with_literals(domain, dict(zip(self.texts(domain), fetched.texts, strict=True)))
        in_llm = domain.stage(domain_rank) is not None
        microbatches = [
            self._microbatch(domain, batch, texts, predict, continued)
            for batch in (domain.microbatches if in_llm else ())
        ]
        items = dict(zip(self.items(domain), fetched.items, strict=True))
        encoder_batches = {
            number: self._encoder_batch(domain, number, items)
            for number, encoder_batch in enumerate(domain.encoder_batches)
            if domain_rank in encoder_batch.ranks
        }
        ends = tuple(None if route is None else make_ends(route, domain_rank) for route in domain.routes)
        return StepInputs(tuple(microbatches), encoder_batches, ends)

    def _microbatch(
        self,
        domain: DomainPlan,
        batch: Microbatch,
        texts: Mapping[int, TextArrays],
        predict: bool,
        continued: Continued | None,
    ) -> MicrobatchInputs:
        place, tp = self.place, domain.tp
        pieces = self.pieces(domain, batch)
        tokens = batch.layout.padded_tokens(domain.cp_rank(place.domain_rank), tp)
        tail = tokens - sum(p.stop - p.start for p in pieces)
        seen, at = [0] * len(batch.samples), [0] * len(batch.samples)
        if continued is not None:
            for p in pieces:
                seen[p.sequence], at[p.sequence] = continued.seen[p.sample], continued.at[p.sample]
        packed = pack_llm(
            self.llm,
            Sharding(batch.layout, batch.tiles, domain.cp_rank(place.domain_rank), tail, tp),
            _positions(domain, batch, pieces, at, tail, in_grids=bool(self.llm.rotary.sections)),
            seen,
            dtype=place.dtype,
            device=place.device,
        )
        packed = replace(packed, anew=batch.anew)
        if continued is not None:
            names = tuple(continued.names[p.sample] for p in pieces)
            counts = tuple(p.stop - p.start for p in pieces)
            packed = replace(packed, recalled=Recalled(continued.memory, names, counts, tail))
        tensors: dict[str, Any] = {}
        if self.llm.mixture is not None:
            tensors["padding"] = tail_mask(tokens, tokens - tail, place.domain_rank % tp, tp)
        if domain.is_first(place.domain_rank):
            ids = [texts[p.sample][0][p.start : p.stop] for p in pieces]
            padded = np.concatenate([*ids, np.zeros(tail, np.int64)])
            tensors["ids"] = torch.from_numpy(padded).unsqueeze(0)
        if domain.is_last(place.domain_rank):
            numbers = {name: number for number, name in enumerate(self.sources)}
            # Held-out sources have no number: evaluation sums losses by itself.
            sources = [numbers.get(domain.samples[p.sample].source, 0) for p in pieces]
            targets = _last_tokens(batch, pieces) if predict else _targets(pieces, texts, sources)
            wanted = _wanted(targets, tokens, tp, place.domain_rank % tp, predict)
            tensors |= {name: torch.from_numpy(array) for name, array in wanted.items()}
        return MicrobatchInputs(packed=packed, **tensors)

    def _encoder_batch(
        self, domain: DomainPlan, number: int, items: Mapping[int, ItemArrays | None]
    ) -> EncoderBatchInputs:
        """Pack this rank's items of an encoder batch, of which one that could not be prepared is None."""
        encoder_batch = domain.encoder_batches[number]
        encoder = self.encoders[encoder_batch.component]
        tp_group = encoder_batch.tp_group(self.place.domain_rank)
        pieces = []
        names = []
        for i, shards in self.shards(encoder_batch):
            sample = domain.samples[domain.items[i].sample]
            names.append(f"{sample.source}, sample {sample.id}, item {domain.items[i].index}")
            length = domain.items[i].tokens
            arrays = items[i]
            item = _silence(encoder, length) if arrays is None else arrays
            found = (len(item.values), len(item.positions))
            if found != (length, length):
                raise DataError(
                    f"{names[-1]}: {encoder_batch.component} made {found[0]} tokens with "
                    f"{found[1]} positions of it, "
                    f"and its count() tells {length}: make count() and preprocess() agree"
                )
            pieces += [item.part(s.start, s.start + s.length) for s in shards]
        tail = encoder_batch.tail(self.place.domain_rank, encoder.unit)
        if tail:
            pieces.append(_silence(encoder, tail))
        values = transferred(encoder, np.concatenate([piece.values for piece in pieces]), self.place.device)
        positions = torch.from_numpy(np.concatenate([piece.positions for piece in pieces]))
        grids = tuple(domain.items[i].grid for i in encoder_batch.items)
        sharding = Sharding(
            encoder_batch.layout, encoder_batch.tiles, tp_group, tail, encoder_batch.tp, grids
        )
        packed = encoder.pack(sharding, positions, self.place.dtype, self.place.device)
        counts = encoder_batch.rows[tp_group * encoder_batch.tp : (tp_group + 1) * encoder_batch.tp]
        return EncoderBatchInputs(values, positions, packed, counts, tuple(names))


def _cost(meta: SampleMeta, index: int) -> int:
    """What it takes to prepare an item: its share of the sample's bytes, by its tokens. Bytes of a file say
    more of decoding than tokens do, since encoders shrink what is large.
    """
    tokens = sum(item.tokens for item in meta.items)
    return meta.bytes * meta.items[index].tokens // max(1, tokens)


def _positions(
    domain: DomainPlan,
    batch: Microbatch,
    pieces: Sequence[Piece],
    at: Sequence[int],
    tail: int,
    *,
    in_grids: bool,
) -> torch.Tensor:
    """Positions of a cp rank's tokens, the first of each sequence `at` one, and then those of padding: [T],
    or [T, 3] where rows of any item stand `in_grids`.
    """
    grids = rows_of_grids(domain, batch) if in_grids else {}
    lengths = batch.layout.lengths
    if not grids:
        runs = [torch.arange(at[p.sequence] + p.start, at[p.sequence] + p.stop) for p in pieces]
        return torch.cat([*runs, torch.arange(tail)])
    of_sequence = {
        number: grid_positions(lengths[number], grids.get(sample, ()))
        for number, sample in {p.sequence: p.sample for p in pieces}.items()
    }
    held = [of_sequence[p.sequence][p.start : p.stop] + at[p.sequence] for p in pieces]
    return torch.from_numpy(np.concatenate([*held, grid_positions(tail, ())]))


def _targets(
    pieces: Sequence[Piece], texts: Mapping[int, TextArrays], sources: Sequence[int]
) -> dict[str, np.ndarray]:
    """Tokens whose next one counts: where they stand among a cp rank's tokens, and what is known of each."""
    lengths = [p.stop - p.start for p in pieces]
    masks = [texts[p.sample][2][p.start : p.stop] for p in pieces]
    labels = [texts[p.sample][1][p.start : p.stop] for p in pieces]
    at = np.flatnonzero(np.concatenate([np.zeros(0, bool), *masks]))
    return {
        "at": at,
        "labels": np.concatenate([np.zeros(0, np.int64), *labels])[at],
        "sources": np.repeat(np.array(sources, np.int64), lengths)[at],
        "sequences": np.repeat(np.array([p.sequence for p in pieces], np.int64), lengths)[at],
    }


def _last_tokens(batch: Microbatch, pieces: Sequence[Piece]) -> dict[str, np.ndarray]:
    """The last token of each sequence, where a cp rank holds it."""
    ends = np.cumsum([p.stop - p.start for p in pieces], dtype=np.int64) - 1
    last = np.array([p.stop == batch.layout.lengths[p.sequence] for p in pieces], bool)
    return {"at": ends[last]}


def _wanted(
    targets: dict[str, np.ndarray], tokens: int, tp: int, tp_rank: int, predict: bool
) -> dict[str, np.ndarray]:
    """Divide targets over the tp ranks that hold `tokens`: see `MicrobatchInputs`."""
    at = targets.pop("at")
    part, local = np.divmod(at, tokens // tp)
    counts = np.bincount(part, minlength=tp)
    each = int(counts.max()) if tp == 1 else max(1, int(counts.max()))
    # Targets are in order, so those of a part are neighbours: where each goes among the gathered ones.
    place = part * each + np.arange(len(at)) - (np.cumsum(counts) - counts)[part]
    gathered = np.zeros(tp * each, np.int64)
    gathered[place] = local
    out = {"wanted": gathered[tp_rank * each : (tp_rank + 1) * each]}
    if predict:
        return out | {"order": place}
    for name, values in targets.items():
        padded = np.full(tp * each, -1 if name == "sequences" else 0, np.int64)
        padded[place] = values
        out[name] = padded
    weights = np.zeros(tp * each, np.float32)
    weights[place] = 1.0
    return out | {"weights": weights}


def _silence(encoder: Encoder, length: int) -> ItemArrays:
    """Stand in for an item that cannot be prepared: its planned tokens, all zero."""
    blank = encoder.preprocess(encoder.blank())
    return ItemArrays(
        np.zeros((length, *blank.values.shape[1:]), blank.values.dtype),
        np.zeros((length, *blank.positions.shape[1:]), blank.positions.dtype),
    )

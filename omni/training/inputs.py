"""From a plan to the tensors that one rank needs for it.

`fetch_of` says what the loader must bring; `assemble` turns what came into the engine's inputs. A rank loads
the texts of its replica if it embeds them or computes their loss, and the items that it encodes: no more.

Bad data keeps its planned shape. An item that cannot be decoded becomes zeros, its sample is a tombstone:
the ranks of the replica tell each other which samples these are, and the last stage masks their targets.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dataloader.loader import Failure, Fetch, Fetched
from dataloader.tokens import SampleMeta
from omni.config import LLMConfig
from omni.models.llm import MicrobatchInputs
from omni.models.registry import Encoder, ItemArrays
from parallel.boundary import make_ends
from parallel.packed import PackedTokens, pack_tokens
from pipeline.anchor import StepInputs
from pipeline.plan import ReplicaPlan, StepPlan

TextArrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True)
class ChunkInputs:
    """The items of a chunk, packed: values [T, ...], positions [T, A] and how attention divides them."""

    values: torch.Tensor
    positions: torch.Tensor
    packed: PackedTokens


@dataclass(frozen=True)
class Place:
    """Where this rank stands: its position among the ranks of its replica, and its device."""

    position: int
    num_stages: int
    device: torch.device
    dtype: torch.dtype

    @property
    def reads_text(self) -> bool:
        """Whether this rank embeds tokens or computes losses."""
        return self.position in (0, self.num_stages - 1)


@dataclass(frozen=True)
class Assembler:
    """Builds inputs for one rank of a run with given models."""

    llm: LLMConfig
    encoders: Mapping[str, Encoder]
    sources: tuple[str, ...]
    place: Place

    def fetch_of(self, replica: ReplicaPlan, metas: Mapping[int, SampleMeta]) -> Fetch:
        """Say what this rank must load. `metas` are those of the replica's samples, by place in the plan."""
        texts = (
            tuple((metas[i].source, metas[i]) for batch in replica.microbatches for i in batch.samples)
            if self.place.reads_text
            else ()
        )
        items = tuple(
            (metas[replica.items[i].sample].source, metas[replica.items[i].sample].id, replica.items[i].index)
            for chunk in replica.chunks
            if chunk.rank == self.place.position
            for i in chunk.items
        )
        return Fetch(texts, items)

    def assemble(self, plan: StepPlan, replica: ReplicaPlan, fetched: Fetched, predict: bool) -> StepInputs:
        """Build the tensors of a step. With `predict`, the last stage gives each next token.

        It may run on any thread: a thread that touches the GPU must name it, or it takes the first one.
        """
        on_gpu = self.place.device.type == "cuda"
        with torch.cuda.device(self.place.device) if on_gpu else contextlib.nullcontext():
            return self._assemble(plan, replica, fetched, predict)

    def _assemble(self, plan: StepPlan, replica: ReplicaPlan, fetched: Fetched, predict: bool) -> StepInputs:
        texts = iter(fetched.texts)
        # Held-out sources have no number: evaluation sums losses by itself.
        numbers = {name: number for number, name in enumerate(self.sources)}
        microbatches = []
        for batch in replica.microbatches:
            arrays = [next(texts) for _ in batch.samples] if self.place.reads_text else []
            lengths = batch.layout.local_lengths(0)
            positions = _positions(batch.layout.local_positions(0))
            sources = [numbers.get(plan.samples[i].source, 0) for i in batch.samples] if arrays else []
            microbatches.append(self._microbatch(lengths, positions, arrays, sources, predict))
        items = iter(fetched.items)
        chunks = {
            number: self._chunk(replica, number, [next(items) for _ in chunk.items])
            for number, chunk in enumerate(replica.chunks)
            if chunk.rank == self.place.position
        }
        ends = tuple(
            None if route is None else make_ends(route, self.place.position, self.place.device)
            for route in replica.routes
        )
        return StepInputs(tuple(microbatches), chunks, ends)

    def _microbatch(
        self,
        lengths: Sequence[int],
        positions: torch.Tensor,
        arrays: Sequence[TextArrays],
        sources: Sequence[int],
        predict: bool,
    ) -> MicrobatchInputs:
        place = self.place
        packed = pack_tokens(
            lengths,
            positions,
            heads=self.llm.heads,
            head_dim=self.llm.hidden // self.llm.heads,
            rotary_base=self.llm.rotary_base,
            causal=True,
            dtype=place.dtype,
            device=place.device,
        )
        tensors: dict[str, Any] = {}
        if place.position == 0:
            tensors["ids"] = self._tensor(np.concatenate([ids for ids, _, _ in arrays])).unsqueeze(0)
        if place.position == place.num_stages - 1 and predict:
            tensors["wanted"] = self._tensor(np.cumsum(lengths) - 1)
        elif place.position == place.num_stages - 1:
            wanted = np.flatnonzero(np.concatenate([mask for _, _, mask in arrays]))
            tensors["wanted"] = self._tensor(wanted)
            tensors["labels"] = self._tensor(np.concatenate([labels for _, labels, _ in arrays])[wanted])
            tensors["weights"] = self._tensor(np.ones(len(wanted), np.float32))
            tensors["sources"] = self._tensor(np.repeat(np.array(sources), np.array(lengths))[wanted])
        return MicrobatchInputs(packed=packed, **tensors)

    def _chunk(self, replica: ReplicaPlan, number: int, arrays: Sequence[np.ndarray | None]) -> ChunkInputs:
        chunk = replica.chunks[number]
        encoder = self.encoders[chunk.component]
        lengths = [replica.items[i].tokens for i in chunk.items]
        items = [
            _silence(encoder, length) if array is None else encoder.preprocess(array)
            for array, length in zip(arrays, lengths, strict=True)
        ]
        for item, length in zip(items, lengths, strict=True):
            found = (len(item.values), len(item.positions))
            assert found == (length, length), f"{chunk.component}: {found} tokens, planned {length}"
        values = self._tensor(np.concatenate([item.values for item in items]))
        positions = self._tensor(np.concatenate([item.positions for item in items]))
        packed = encoder.pack(lengths, positions, self.place.dtype, self.place.device)
        return ChunkInputs(values, positions, packed)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        if self.place.device.type == "cuda":
            return tensor.pin_memory().to(self.place.device, non_blocking=True)
        return tensor


def _positions(runs: Sequence[range]) -> torch.Tensor:
    return torch.cat([torch.arange(run.start, run.stop) for run in runs])


def _silence(encoder: Encoder, length: int) -> ItemArrays:
    """Stand in for an item that cannot be decoded: its planned tokens, all zero."""
    blank = encoder.preprocess(encoder.blank())
    return ItemArrays(
        np.zeros((length, *blank.values.shape[1:]), blank.values.dtype),
        np.zeros((length, *blank.positions.shape[1:]), blank.positions.dtype),
    )


def share_tombstones(
    plan: StepPlan, replica: ReplicaPlan, failures: Sequence[Failure], group: dist.ProcessGroup
) -> tuple[int, ...]:
    """Return the plan's samples of this replica that have a bad item on any of its ranks.

    Every rank of the replica calls it, with the failures of its own items.
    """
    members = sorted({i for batch in replica.microbatches for i in batch.samples})
    bad = {(f.source, f.sample) for f in failures}
    flags = torch.tensor(
        [(plan.samples[i].source, plan.samples[i].id) in bad for i in members], dtype=torch.uint8
    )
    if group.size() > 1 and any(replica.routes):
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
    return tuple(i for i, flag in zip(members, flags.tolist(), strict=True) if flag)


def mask_tombstones(replica: ReplicaPlan, inputs: StepInputs, tombstones: Sequence[int]) -> None:
    """Take the targets of tombstones out of the loss, where this rank computes it."""
    for batch, tensors in zip(replica.microbatches, inputs.microbatches, strict=True):
        start = 0
        for sample, length in zip(batch.samples, batch.layout.lengths, strict=True):
            if sample in tombstones and tensors.weights is not None:
                inside = (tensors.wanted >= start) & (tensors.wanted < start + length)
                tensors.weights.masked_fill_(inside, 0.0)
            start += length

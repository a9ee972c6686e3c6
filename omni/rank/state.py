"""The state of a run, saved by name and place rather than by rank.

Each rank saves the shards it owns: for every parameter, by its canonical name, the fp32 weights and AdamW's
moments of an interval of the elements of its region. Copies that tensor-parallel ranks or those of the first
and last virtual stage hold alike are saved once, so together the ranks' files hold each element of each
parameter once. Loading reads whatever elements a rank needs from whichever files have them, so a checkpoint
loads under any layout; under its own layout it is exact to the bit. Moments are saved as they are kept, in
fp32 or bf16: where a run keeps those of a checkpoint in bf16 that had them in fp32, they are rounded to the
nearest, once.

The index says what every file holds, so a rank opens those alone that have something for it, and reads of
them what it needs.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from infra.shard_file import CheckpointError, Shard, pack
from omni.models.adapters import A, B
from omni.models.llm_stage import LLMStage
from omni.models.regions import Numbering, Region, all_parameters
from omni.rank.bucket_shares import MOMENTS
from omni.rank.optimizer import ComponentOptimizer

BUFFERS = "buffers"
CPU_RNG, CUDA_RNG = "rng/cpu", "rng/cuda"
_SIZE = 4  # bytes of an fp32 element
DTYPES = {4: torch.float32, 2: torch.bfloat16}
"""Of weights and of moments in files, by bytes of an element."""
Names = Mapping[str, Mapping[int, Numbering]]
"""For each component and each of its parts on this rank, what its canonical names need."""
Index = Sequence[Mapping[str, Any]]
"""By rank what its file holds: `parameters`, plain `Piece`s by component and name; `buffers`, elements by
name; `rng`, bytes by name.
"""
Read = Callable[[int, Sequence[tuple[str, int, int]]], Iterable[tuple[int, np.ndarray | torch.Tensor]]]
"""read(rank, [(tensor, first byte, last + 1)]) yields the number of each of these and its bytes [n] of uint8
out of the file of a rank, in any order."""


def snapshot(
    components: Mapping[str, ComponentOptimizer],
    names: Names,
    stage: LLMStage | None,
    room: torch.Tensor | None = None,
) -> Shard:
    """Copy this rank's shards, and what state its stage has beside the weights, into host memory.

    `room` is memory of an earlier snapshot that may be used again.
    """
    tensors = _rng_states()
    held: dict[str, Any] = {"rng": {name: len(state) for name, state in tensors.items()}}
    buffers = stage.buffers() if stage else {}
    held["buffers"] = {name: buffer.numel() for name, buffer in buffers.items()}
    tensors |= {f"{BUFFERS}/{name}": buffer for name, buffer in buffers.items()}
    pieces = held["parameters"] = {}
    for component, optimizer in components.items():
        for shard in owned(optimizer, names[component]):
            if shard.copy != (0, 0):
                continue
            key = f"{component}/{shard.name}"
            trained = MOMENTS[0] in shard.adam
            size = shard.main.element_size()
            of_moments = shard.adam[MOMENTS[0]].element_size() if trained else _SIZE
            piece = Piece(shard.region, shard.start, shard.main.numel(), trained, size, of_moments)
            pieces[key] = piece.plain()
            tensors[f"{key}/main"] = shard.main.detach()
            if trained:
                tensors |= {f"{key}/{moment}": shard.adam[moment] for moment in MOMENTS}
                tensors[f"{key}/step"] = shard.adam["step"].reshape(1)
    return pack(tensors, held, room)


def read_state(
    index: Index,
    read: Read,
    components: Mapping[str, ComponentOptimizer],
    names: Names,
    stage: LLMStage | None,
    rank: int,
    moments: bool = True,
    drawn: Collection[str] = (),
) -> None:
    """Load this rank's shards from a checkpoint that any layout may have written, for `spread_weights`;
    without `moments` weights alone, and the optimizer begins anew. Adapters of the components `drawn` are not
    looked for, and stay as they are.

    No other rank is waited for, so one that cannot read does not hold up the others.

    Raises:
        CheckpointError: if a parameter is missing, or has another shape; and what `read` raises.
    """
    wanted: dict[int, list[Wanted]] = defaultdict(list)  # by the rank whose file has it
    pieces = pieces_of(index)
    for component, optimizer in components.items():
        optimizer.forget_state()
        trained: dict[torch.Tensor, bool] = {}
        for shard in owned(optimizer, names[component]):
            if component in drawn and shard.name.endswith((A, B)):
                continue
            key = f"{component}/{shard.name}"
            own = _want_shard(optimizer, shard, key, pieces.get(key, []), wanted, moments)
            if trained.setdefault(shard.whole, own) != own:
                raise CheckpointError(
                    f"{key}: some experts beside it have optimizer state and some have none"
                )
    biases = _want_buffers(index, stage.biases() if stage else {}, wanted)
    rng = _want_rng(index, rank, wanted)
    for holder, wants in sorted(wanted.items()):
        for number, data in read(holder, [(want.tensor, want.start, want.stop) for want in wants]):
            wants[number].fill(torch.as_tensor(data))
    if stage is not None:
        stage.load_buffers(biases)
    _set_rng_states(rng)


def spread_weights(components: Mapping[str, ComponentOptimizer]) -> None:
    """Let all ranks compute with the weights that each has read its shards of. All ranks call it."""
    for optimizer in components.values():
        optimizer.arrive()
        for inner in optimizer.optimizers:
            inner._copy_main_params_to_model_params()
        optimizer.gather_weights()
        optimizer.gather_base()
        optimizer.arrive()


@dataclass(frozen=True)
class Piece:
    """What a file holds of one parameter: `count` elements from `start` of a flattened region, with AdamW's
    state if it is `trained`. Its elements have `size` bytes, 4 of fp32 or 2 of bf16, and those of moments
    `of_moments`.
    """

    region: Region
    start: int
    count: int
    trained: bool
    size: int = _SIZE
    of_moments: int = _SIZE

    def plain(self) -> list[Any]:
        """Return it in plain values, for the manifest; what came last is left out where it is as it was."""
        region, sizes = self.region, [self.size, self.of_moments]
        while sizes and sizes[-1] == _SIZE:
            sizes.pop()
        return [region.shape, region.dim, region.runs, self.start, self.count, int(self.trained), *sizes]

    @classmethod
    def of(cls, plain: Sequence[Any]) -> Self:
        """Read what `plain` made."""
        shape, dim, runs, start, count, trained, *sizes = plain
        return cls(Region(tuple(shape), dim, tuple(map(tuple, runs))), start, count, bool(trained), *sizes)


@dataclass(frozen=True)
class Wanted:
    """Bytes [start, stop) of a tensor in a file, and where they go: for each of `runs`, (place in `target`,
    place in what was read, length), counted in elements. `target` is flat; what is read has numbers of
    `dtype`, that of `target` if None, and they are rounded to the nearest of its own.
    """

    tensor: str
    start: int
    stop: int
    target: torch.Tensor
    runs: Sequence[tuple[int, int, int]]
    dtype: torch.dtype | None = None

    def fill(self, data: torch.Tensor) -> None:
        """Copy bytes that were read."""
        source = data.view(self.dtype or self.target.dtype)
        for here, there, length in self.runs:
            self.target[here : here + length].copy_(source[there : there + length])


@dataclass(frozen=True)
class Owned:
    """What a rank owns of one parameter: elements from `start` of its flattened `region`.

    `main` are the fp32 weights, flat; `adam` is AdamW's state. Both lie `at` these elements of those of the
    optimizer's parameter, `whole`, which several experts share; the count of steps is of all of it. Of a
    parameter that never learns, `whole` are elements in its own type, and `learns` is false. `copy` tells
    apart what several ranks of a replica own alike (see `Named`); (0, 0) is saved.
    """

    name: str
    region: Region
    start: int
    whole: torch.Tensor
    at: slice
    adam: dict[str, torch.Tensor]
    copy: tuple[int, int]
    learns: bool = True

    @property
    def main(self) -> torch.Tensor:
        """Its weights."""
        return self.whole.detach().view(-1)[self.at]

    @property
    def grad(self) -> torch.Tensor | None:
        """Their gradient, while a step is under way."""
        return None if self.whole.grad is None else self.whole.grad.view(-1)[self.at]

    def places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where its elements lie in the flattened full tensor: see `Region.elements`."""
        return self.region.elements(self.start, self.start + self.main.numel())


def owned(optimizer: ComponentOptimizer, numberings: Mapping[int, Numbering]) -> Iterator[Owned]:
    """Yield this rank's shards of a component's parameters, by canonical name."""
    owned, base = optimizer.main_weights(), optimizer.base_shards()
    for named in all_parameters(optimizer.modules, numberings):
        whole: torch.Tensor
        state: dict[str, torch.Tensor] = {}
        if learns := named.parameter not in base:
            if named.parameter not in owned:
                continue
            inner, whole = owned[named.parameter]
            held = inner._get_model_param_range_map(named.parameter)["param"].start
            state = inner.optimizer.state.get(whole, {})
        else:
            held, whole = base[named.parameter]
        first, count = named.elements
        low, high = max(first, held), min(first + count, held + whole.numel())
        if low < high:
            at = slice(low - held, high - held)
            adam = {key: of if of.dim() == 0 else of.view(-1)[at] for key, of in state.items()}
            start = named.first + low - first
            yield Owned(named.name, named.region, start, whole, at, adam, named.copy, learns)


def pieces_of(index: Index) -> dict[str, list[tuple[int, Piece]]]:
    """Return by parameter the ranks whose files have some of it, and what."""
    pieces: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for rank, held in enumerate(index):
        for key, plain in held["parameters"].items():
            pieces[key].append((rank, Piece.of(plain)))
    return pieces


def _want_shard(
    optimizer: ComponentOptimizer,
    shard: Owned,
    key: str,
    pieces: list[tuple[int, Piece]],
    wanted: dict[int, list[Wanted]],
    moments: bool,
) -> bool:
    """Note what a shard needs of the saved pieces, and give it room for its moments if they are asked for.
    Returns whether the pieces have them.
    """
    if not pieces or pieces[0][1].region.shape != shard.region.shape:
        found = f"has shape {pieces[0][1].region.shape}" if pieces else "is not in the checkpoint"
        raise CheckpointError(f"{key} {found}, the model has {shard.region.shape}")
    trained = {piece.trained for _, piece in pieces}
    if len(trained) > 1:
        raise CheckpointError(f"{key}: some of its optimizer state is missing in the checkpoint")
    targets = {"main": shard.main}
    step: torch.Tensor | None = None
    if shard.learns and moments and trained == {True}:
        adam = optimizer.state_of(shard.whole)
        step = adam["step"]
        targets |= {moment: adam[moment].view(-1)[shard.at] for moment in MOMENTS}
    covered = 0
    places = shard.places()
    for holder, piece in pieces:
        held = piece.region.elements(piece.start, piece.start + piece.count)
        runs = list(_overlaps(places, held))
        if not runs:
            continue
        if step is not None and covered == 0:  # every file has it: no other is opened for it
            wanted[holder].append(Wanted(f"{key}/step", 0, _SIZE, step.reshape(1), [(0, 0, 1)]))
        covered += sum(length for _, _, length in runs)
        low, high = min(there for _, there, _ in runs), max(there + length for _, there, length in runs)
        runs = [(here, there - low, length) for here, there, length in runs]
        for name, target in targets.items():
            size = piece.size if name == "main" else piece.of_moments
            wanted[holder].append(
                Wanted(f"{key}/{name}", low * size, high * size, target, runs, DTYPES[size])
            )
    if missing := len(targets["main"]) - covered:
        raise CheckpointError(f"{key}: {missing} of its elements are not in the checkpoint")
    return trained == {True}


def _want_buffers(
    index: Index, buffers: Mapping[str, torch.Tensor], wanted: dict[int, list[Wanted]]
) -> dict[str, torch.Tensor]:
    """Note what is needed for state beside the weights. Returns where it will be read to; some may be
    missing.
    """
    found = {}
    for rank, held in enumerate(index):
        for name in held["buffers"].keys() & buffers.keys():
            count = held["buffers"][name]
            found[name] = torch.zeros(count, dtype=torch.float32)
            size = count * _SIZE
            wanted[rank].append(Wanted(f"{BUFFERS}/{name}", 0, size, found[name], [(0, 0, count)]))
    return found


def _want_rng(index: Index, rank: int, wanted: dict[int, list[Wanted]]) -> dict[str, torch.Tensor]:
    """Note that a rank wants the states of random numbers that the rank of its number had."""
    states = {}
    for name, size in index[rank]["rng"].items() if rank < len(index) else ():
        states[name] = torch.empty(size, dtype=torch.uint8)
        wanted[rank].append(Wanted(name, 0, size, states[name], [(0, 0, size)]))
    return states


def _rng_states() -> dict[str, torch.Tensor]:
    states = {CPU_RNG: torch.get_rng_state()}
    if torch.cuda.is_available():
        states[CUDA_RNG] = torch.cuda.get_rng_state()
    return states


def _set_rng_states(states: Mapping[str, torch.Tensor]) -> None:
    if CPU_RNG in states:
        torch.set_rng_state(states[CPU_RNG])
    if CUDA_RNG in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states[CUDA_RNG])


def _overlaps(
    wanted: tuple[np.ndarray, np.ndarray, np.ndarray], held: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> Iterator[tuple[int, int, int]]:
    """Yield (offset in wanted, offset in held, length) of the places that two lists of runs share."""
    here, place, size = wanted
    there, other, room = held
    # Both lists are in order of place, so the runs of `held` that a wanted run meets are neighbours.
    first = np.searchsorted(other + room, place, side="right")
    last = np.searchsorted(other, place + size, side="left")
    for i in np.flatnonzero(first < last):
        for j in range(first[i], last[i]):
            low = max(place[i], other[j])
            high = min(place[i] + size[i], other[j] + room[j])
            yield int(here[i] + low - place[i]), int(there[j] + low - other[j]), int(high - low)

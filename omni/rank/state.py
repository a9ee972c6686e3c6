"""The state of a run, saved by name and place rather than by rank.

Each rank saves the shards it owns: for every parameter, by its canonical name, the fp32 weights and AdamW's
moments of an interval of the elements of its region. Copies that tensor-parallel ranks or those of the first
and last part hold alike are saved once, so together the ranks' files hold each element of each parameter
once. Loading reads whatever elements a rank needs from whichever files have them, so a checkpoint loads under
any layout; under its own layout it is exact to the bit.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infra.checkpoint import CheckpointError
from omni.models.llm_stage import LLMStage
from omni.models.regions import Numbering, Region, all_parameters
from omni.rank.optimizer import ComponentOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
Names = Mapping[str, Mapping[int, Numbering]]
"""For each component and each of its parts on this rank, what its canonical names need."""


def write_state(
    path: Path, components: Mapping[str, ComponentOptimizer], names: Names, stage: LLMStage | None
) -> None:
    """Write this rank's shards, and what state its stage has beside the weights, to `path`."""
    state: dict[str, Any] = {"rng": torch.get_rng_state(), "shards": []}
    state["buffers"] = {name: b.cpu().clone() for name, b in (stage.buffers() if stage else {}).items()}
    if torch.cuda.is_available():
        state["cuda_rng"] = torch.cuda.get_rng_state()
    for component, optimizer in components.items():
        for shard in owned(optimizer, names[component]):
            if shard.copy != (0, 0):
                continue
            region = shard.region
            saved: dict[str, Any] = {"component": component, "name": shard.name, "start": shard.start}
            saved |= {"shape": region.shape, "dim": region.dim, "runs": region.runs}
            saved["main"] = shard.main.detach().cpu().clone()
            saved |= {key: shard.adam[key].cpu().clone() for key in MOMENTS if key in shard.adam}
            if "step" in shard.adam:
                saved["step"] = float(shard.adam["step"])
            state["shards"].append(saved)
    with path.open("wb") as file:
        torch.save(state, file)


def read_state(
    path: Path,
    files: list[str],
    components: Mapping[str, ComponentOptimizer],
    names: Names,
    stage: LLMStage | None,
    rank: int,
    moments: bool = True,
) -> None:
    """Load this rank's shards from a checkpoint that any layout may have written; without `moments` weights
    alone, and the optimizer begins anew.

    Raises:
        CheckpointError: if a parameter is missing, or has another shape.
    """
    saved: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    buffers: dict[str, torch.Tensor] = {}
    for file in files:
        state = torch.load(path / file, map_location="cpu", mmap=True, weights_only=True)
        for shard in state["shards"]:
            saved[shard["component"], shard["name"]].append(shard)
        buffers |= state["buffers"]
        if file == f"rank_{rank:05d}.pt":
            torch.set_rng_state(state["rng"])
            if "cuda_rng" in state and torch.cuda.is_available():
                torch.cuda.set_rng_state(state["cuda_rng"])
    if stage is not None:
        stage.load_buffers(buffers)
    for component, optimizer in components.items():
        for shard in owned(optimizer, names[component]):
            what = f"{path.name}: {component} {shard.name}"
            pieces = saved.get((component, shard.name), [])
            if not pieces or tuple(pieces[0]["shape"]) != shard.region.shape:
                found = f"has shape {tuple(pieces[0]['shape'])}" if pieces else "is not in the checkpoint"
                raise CheckpointError(f"{what} {found}, the model has {shard.region.shape}")
            _fill(optimizer, shard, pieces, what, moments)
        for inner in optimizer.optimizers:
            inner._copy_main_params_to_model_params()
        optimizer.gather_weights()


@dataclass(frozen=True)
class Owned:
    """What a rank owns of one parameter: elements from `start` of its flattened `region`.

    `main` are the fp32 weights, their gradient in `.grad` while a step is under way; `adam` is AdamW's state.
    `copy` tells apart what several ranks of a replica own alike (see `Named`); (0, 0) is saved.
    """

    name: str
    region: Region
    start: int
    main: torch.nn.Parameter
    adam: dict[str, torch.Tensor]
    copy: tuple[int, int]

    def places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where its elements lie in the flattened full tensor: see `Region.elements`."""
        return self.region.elements(self.start, self.start + self.main.numel())


def owned(optimizer: ComponentOptimizer, numberings: Mapping[int, Numbering]) -> Iterator[Owned]:
    """Yield this rank's shards of a component's parameters, by canonical name."""
    owned = optimizer.main_weights()
    for named in all_parameters(optimizer.modules, numberings):
        if named.parameter not in owned:
            continue
        inner, main = owned[named.parameter]
        start = inner._get_model_param_range_map(named.parameter)["param"].start
        adam = inner.optimizer.state.get(main, {})
        yield Owned(named.name, named.region, start, main, adam, named.copy)


def _fill(
    optimizer: ComponentOptimizer, shard: Owned, pieces: list[dict[str, Any]], what: str, moments: bool
) -> None:
    """Copy a shard's elements, and its moments if asked, from the saved pieces that overlap it."""
    main = shard.main
    adam: dict[str, torch.Tensor] = {}
    trained = {"step" in piece for piece in pieces} | {MOMENTS[0] in piece for piece in pieces}
    if len(trained) > 1:
        raise CheckpointError(f"{what}: some of its optimizer state is missing in the checkpoint")
    if moments and trained == {True}:
        # A tensor of its own for every parameter: a shared one would count every step many times.
        adam["step"] = torch.tensor(pieces[0]["step"], dtype=torch.float32, device=main.device)
        adam |= {key: torch.zeros_like(main) for key in MOMENTS}
        inner: Any = optimizer.owner_of_main(main)
        inner.optimizer.state[main] = adam
    covered = 0
    wanted = shard.places()
    for piece in pieces:
        region = Region(tuple(piece["shape"]), piece["dim"], tuple(map(tuple, piece["runs"])))
        held = region.elements(piece["start"], piece["start"] + piece["main"].numel())
        for here, there, length in _overlaps(wanted, held):
            main.data.view(-1)[here : here + length].copy_(piece["main"].view(-1)[there : there + length])
            for key in MOMENTS if adam else ():
                source = piece[key].view(-1)[there : there + length]
                adam[key].view(-1)[here : here + length].copy_(source)
            covered += length
    if covered < main.numel():
        raise CheckpointError(f"{what}: {main.numel() - covered} of its elements are not in the checkpoint")


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

"""The state of a run, saved by name and interval rather than by rank.

Each rank saves the shards it owns: for every parameter, by its canonical name, the interval of its flattened
elements with the fp32 weights and AdamW's moments. Together the ranks' files hold each element of each
parameter. Loading reads whatever intervals a rank needs from whichever files have them, so a checkpoint
loads under any data- and pipeline-parallel layout; under its own layout it is exact to the bit.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infra.checkpoint import CheckpointError
from omni.models.initialise import canonical_parameters
from omni.training.optimizer import ComponentOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")
Names = Mapping[str, tuple[int, bool]]
"""For each component, its first layer and whether its output is tied: what canonical names need."""


def write_state(path: Path, components: Mapping[str, ComponentOptimizer], names: Names) -> None:
    """Write this rank's shards to `path`."""
    state: dict[str, Any] = {"rng": torch.get_rng_state(), "shards": []}
    if torch.cuda.is_available():
        state["cuda_rng"] = torch.cuda.get_rng_state()
    for component, optimizer in components.items():
        for shard in shards(optimizer, *names[component]):
            saved = {"component": component, "name": shard.name, "shape": shard.shape, "start": shard.start}
            saved["main"] = shard.main.detach().cpu().clone()
            saved |= {key: shard.adam[key].cpu().clone() for key in MOMENTS if key in shard.adam}
            if "step" in shard.adam:
                saved["step"] = float(shard.adam["step"])
            state["shards"].append(saved)
    with path.open("wb") as file:
        torch.save(state, file)


def read_state(
    path: Path, files: list[str], components: Mapping[str, ComponentOptimizer], names: Names, rank: int
) -> None:
    """Load this rank's shards from a checkpoint that any layout may have written.

    Raises:
        CheckpointError: if a parameter is missing, or has another shape.
    """
    saved: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for file in files:
        state = torch.load(path / file, map_location="cpu", mmap=True, weights_only=True)
        for shard in state["shards"]:
            saved[shard["component"], shard["name"]].append(shard)
        if file == f"rank_{rank:05d}.pt":
            torch.set_rng_state(state["rng"])
            if "cuda_rng" in state and torch.cuda.is_available():
                torch.cuda.set_rng_state(state["cuda_rng"])
    for component, optimizer in components.items():
        for shard in shards(optimizer, *names[component]):
            what = f"{path.name}: {component} {shard.name}"
            pieces = saved.get((component, shard.name), [])
            if not pieces or tuple(pieces[0]["shape"]) != shard.shape:
                found = f"has shape {tuple(pieces[0]['shape'])}" if pieces else "is not in the checkpoint"
                raise CheckpointError(f"{what} {found}, the model has {shard.shape}")
            _fill(optimizer, shard, pieces, what)
        inner: Any = optimizer.optimizer
        inner._copy_main_params_to_model_params()
        optimizer.ddp.start_param_sync(force_sync=True)


@dataclass(frozen=True)
class Shard:
    """What a rank owns of one parameter: elements from `start` of the flattened full `shape`.

    `main` are the fp32 weights, their gradient in `.grad` while a step is under way; `adam` is AdamW's state.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    main: torch.nn.Parameter
    adam: dict[str, torch.Tensor]


def shards(optimizer: ComponentOptimizer, first_layer: int, tied: bool) -> Iterator[Shard]:
    """Yield this rank's shards of a component's parameters, by canonical name."""
    inner: Any = optimizer.optimizer
    for name, parameter in canonical_parameters(optimizer.module, first_layer, tied):
        if parameter not in inner.model_param_group_index_map:
            continue
        group, order = inner.model_param_group_index_map[parameter]
        main = inner.optimizer.param_groups[group]["params"][order]
        start = inner._get_model_param_range_map(parameter)["param"].start
        yield Shard(name, tuple(parameter.shape), start, main, inner.optimizer.state.get(main, {}))


def _fill(optimizer: ComponentOptimizer, shard: Shard, pieces: list[dict[str, Any]], what: str) -> None:
    """Copy a shard's elements and moments from the saved pieces that overlap it."""
    main, start, stop = shard.main, shard.start, shard.start + shard.main.numel()
    adam: dict[str, torch.Tensor] = {}
    trained = {"step" in piece for piece in pieces} | {MOMENTS[0] in piece for piece in pieces}
    if len(trained) > 1:
        raise CheckpointError(f"{what}: some of its optimizer state is missing in the checkpoint")
    if trained == {True}:
        # A tensor of its own for every parameter: a shared one would count every step many times.
        adam["step"] = torch.tensor(pieces[0]["step"], dtype=torch.float32, device=main.device)
        adam |= {key: torch.zeros_like(main) for key in MOMENTS}
        inner: Any = optimizer.optimizer
        inner.optimizer.state[main] = adam
    covered = torch.zeros(main.numel(), dtype=torch.bool)
    for piece in pieces:
        low = max(start, piece["start"])
        high = min(stop, piece["start"] + piece["main"].numel())
        if low >= high:
            continue
        here, there = slice(low - start, high - start), slice(low - piece["start"], high - piece["start"])
        main.data.view(-1)[here].copy_(piece["main"].view(-1)[there])
        for key in MOMENTS:
            if adam:
                adam[key].view(-1)[here].copy_(piece[key].view(-1)[there])
        covered[here] = True
    if not covered.all():
        raise CheckpointError(f"{what}: elements {start} to {stop} are not all in the checkpoint")

"""Parity: the same model and batch under two configurations, loss, norms and every gradient compared.

Invariant (docs/architecture.md): under any layout, placement and policy, the loss and each parameter's
gradient equal those of one rank in fp32, ‖a - b‖ / max(‖b‖, 1e-6 · global norm) ≤ 1e-5. Every capability of
the platform is held against it, by `omni parity` and by the tests.

A measurement takes the way that training takes. Gradients and weights are collected by canonical name from
the shards that ranks own, so nothing is compared that the optimizer would not see. Squared norms are those
that clip: with gradients that are equal they may still differ, if a rank counts what another has counted.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from infra.lineage import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before the imports that take seconds

import numpy as np
import torch

from dataloader.format import DataError
from infra.run_folder import RunFolder
from omni.models.llm import NAME as LLM
from omni.planning.plan_process import PlanStep
from omni.planning.run_spec import RunSpec
from omni.rank.state import Owned, owned
from omni.training.figures import StepRun
from omni.training.trainer import Trainer
from parallel.plain import collect_plain

TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 1e-4
SMALL = 1e-2  # of a weight
FILE = "measurement.pt"
# Adam turns rounding noise into signs; a large epsilon keeps updates comparable.
OVERRIDES = ("train.precision=fp32", "optim.eps=1e-4", "tracking=jsonl", "train.eval_every=0")


@dataclass(frozen=True)
class Measurement:
    """Loss and gradients of the first step, and weights after the last, by "component/name".

    `squares` are the squared norms of the summed gradients of the first step, of each component that trains.
    The biases of experts are among the weights. A parameter of which several ranks of a replica hold copies
    appears once for each, as "name@copy": copies must agree with the reference one by one.
    """

    loss: float
    squares: Mapping[str, float]
    gradients: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Difference:
    """How far one quantity of the candidate is from the reference, relative as the invariant says."""

    name: str
    relative: float


def measure(
    spec: RunSpec,
    folder: RunFolder,
    rank: int,
    device: torch.device,
    steps: int = 1,
    plan_step: PlanStep | None = None,
) -> Measurement | None:
    """Run `steps` training steps and collect their results on rank 0; None on other ranks.

    Raises:
        DataError: on all ranks, if there is nothing to learn from the first step.
    """
    trainer = Trainer(spec, folder, rank, device, plan_step)
    loss, gradients = math.nan, None
    squares: dict[str, float] = {}
    with trainer.ahead() as ahead:
        for step in range(1, steps + 1):
            done = trainer.run_step(trainer.begin(ahead, step))
            if step == 1:
                loss = first_loss(done)
                optimizer = trainer.rank.optimizer
                by_name = zip(optimizer.names, done.totals.squares, strict=True)
                squares = {name: square for name, square in by_name if name not in optimizer.frozen}
                gradients = collect(trainer, partial(_gradient, done.totals.num_targets))
            trainer.update(done)
    trainer.rank.optimizer.arrive()
    weights = collect(trainer, lambda own: own.main.detach())
    buffers = collect_buffers(trainer)
    trainer.control.barrier("the end")
    trainer.close()
    if gradients is None or weights is None or buffers is None:
        return None
    return Measurement(loss, squares, gradients, weights | buffers)


def first_loss(done: StepRun) -> float:
    """Return the loss of the first step.

    Raises:
        DataError: on all ranks, if there is nothing to learn from it.
    """
    if not done.totals.num_targets:
        raise DataError(
            "step 1 has no target token, so there is no loss and no gradient to compare: let it take more "
            "(data.step_tokens or data.step_samples), or data that has targets"
        )
    return done.totals.loss


def _gradient(targets: float, own: Owned) -> torch.Tensor | None:
    return None if own.grad is None else own.grad / targets


def collect(
    trainer: Trainer, value: Callable[[Owned], torch.Tensor | None]
) -> dict[str, torch.Tensor] | None:
    """Assemble full tensors on rank 0 from `value` of every own of every rank."""
    pieces = []
    for component, optimizer in trainer.rank.components.items():
        for own in owned(optimizer, trainer.rank.names[component]):
            tensor = value(own)
            if tensor is not None:
                # Cloned: of a view all would be sent.
                flat = tensor.detach().float().cpu().reshape(-1).clone()
                places = torch.from_numpy(np.stack(own.places()))
                pieces.append((component, own.name, own.copy, tuple(own.region.shape), places, flat))
    gathered = _gather(trainer, pieces)
    return None if gathered is None else _assemble(gathered)


def collect_buffers(trainer: Trainer) -> dict[str, torch.Tensor] | None:
    """Return on rank 0 the state beside the weights, from the ranks that save it."""
    stage = trainer.rank.stage
    own = stage.buffers().items() if stage else ()
    gathered = _gather(trainer, [(f"{LLM}/{name}", buffer.cpu().clone()) for name, buffer in own])
    return None if gathered is None else dict(gathered)


def _gather(trainer: Trainer, own: list[Any]) -> list[Any] | None:
    """Return the lists of all ranks, one after the other, on rank 0."""
    gathered = collect_plain(own, trainer.rank.groups.world)
    return None if gathered is None else [piece for of_rank in gathered for piece in of_rank]


def _assemble(pieces: list[Any]) -> dict[str, torch.Tensor]:
    copies: dict[tuple[str, str], set[tuple[int, int]]] = defaultdict(set)
    for component, name, copy, *_ in pieces:
        copies[component, name].add(copy)
    full: dict[str, torch.Tensor] = {}
    for component, name, copy, shape, places, flat in pieces:
        known = sorted(copies[component, name])
        key = f"{component}/{name}" + (f"@{known.index(copy)}" if len(known) > 1 else "")
        tensor = full.setdefault(key, torch.full((math.prod(shape),), math.nan))
        for here, there, length in places.T.tolist():
            tensor[there : there + length] = flat[here : here + length]
    return full


def compare(reference: Measurement, candidate: Measurement) -> list[Difference]:
    """Relative differences of the loss, of each component's squared norm and of every gradient, worst first.

    Only gradients have a "/" in their names.

    Raises:
        AssertionError: if a component or a parameter is missing on either side.
    """
    loss = Difference("loss", abs(candidate.loss - reference.loss) / abs(reference.loss))
    total = math.sqrt(sum(float(g.double().square().sum()) for g in reference.gradients.values()))
    gradients = _tensors(reference.gradients, candidate.gradients, lambda expected: 1e-6 * total)
    return worst_first([loss, *_squares(reference.squares, candidate.squares), *gradients])


def _squares(reference: Mapping[str, float], candidate: Mapping[str, float]) -> Iterator[Difference]:
    missing = set(reference) ^ set(candidate)
    assert not missing, f"only on one side: {sorted(missing)}"
    total = sum(reference.values())
    for name, square in reference.items():
        # The floor of `_tensors`, squared: a component without items has a norm of zero.
        relative = abs(candidate[name] - square) / max(square, 1e-12 * total)
        yield Difference(f"squared norm of {name}", relative)


def compare_weights(reference: Measurement, candidate: Measurement) -> list[Difference]:
    """Relative differences of every weight after the last step, worst first. Weights smaller than SMALL count
    as if they were that large: near zero Adam hands on the rounding of a gradient times lr / ε, whatever the
    weight has come to.
    """

    def least(expected: torch.Tensor) -> float:
        return SMALL * math.sqrt(expected.numel())

    return worst_first(_tensors(reference.weights, candidate.weights, least))


def _tensors(
    reference: Mapping[str, torch.Tensor],
    candidate: Mapping[str, torch.Tensor],
    least: Callable[[torch.Tensor], float],
) -> list[Difference]:
    """Distances relative to the norm of the reference, or to what is `least` for such a tensor."""
    base = {_base(name): tensor.double() for name, tensor in reference.items()}
    missing = set(base) ^ {_base(name) for name in candidate}
    assert not missing, f"only on one side: {sorted(missing)}"
    out = []
    for name, tensor in candidate.items():
        expected = base[_base(name)]
        distance = float((tensor.double() - expected).norm())
        out.append(Difference(name, distance / max(float(expected.norm()), least(expected))))
    return out


def _base(name: str) -> str:
    return name.partition("@")[0]


def worst_first(differences: list[Difference]) -> list[Difference]:
    """Differences, the worst first: NaN, such as of an element that no rank owned, then the largest."""
    return sorted(differences, key=lambda d: (-math.inf if math.isnan(d.relative) else -d.relative, d.name))


def save(measurement: Measurement, path: Path) -> None:
    """Write a measurement where `load` finds it."""
    torch.save(vars(measurement), path)


def load(path: Path) -> Measurement:
    """Read a measurement."""
    return Measurement(**torch.load(path, weights_only=True))


def main(config_path: Path) -> None:
    """One rank of a measurement, as torchrun starts it."""
    from omni.compose import load_config
    from omni.training.seats import find_seat
    from omni.training.worker import joined

    seat = find_seat(load_config(config_path), RunFolder(config_path.parent))
    with joined(config_path, seat) as (spec, folder, rank, device, plan_step):
        measurement = measure(spec, folder, rank, device, spec.config.train.steps, plan_step)
        if measurement is not None:
            save(measurement, folder.path / FILE)


if __name__ == "__main__":
    from omni.training.worker import exit_with

    exit_with(main, Path(sys.argv[1]))

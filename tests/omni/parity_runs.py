"""Cases of the parity matrix on real ranks: their configuration, their measurement, and how far it is from
that of one rank.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from parity_matrix import Case
from ranks import RankPool
from small import overrides, with_values, write_one_item, write_uneven

from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.config import Config, EncoderLayoutConfig
from omni.models.moe import routing_margins
from omni.optim_config import ComponentOptimConfig
from omni.planning.prepare import prepare_run
from omni.training import parity
from omni.training.parity import Difference, Measurement
from omni.training.trainer import Trainer

STEPS = 2  # an update that all ranks take, and a step on the new weights
SAMPLES = {"mixed": 8, "one": 3}
LINE = (
    # Grouped queries, and as many key/value heads as the largest tp.
    "model.llm.heads=8",
    "model.llm.kv_heads=4",
    # The narrowest choice of an expert is 1e-4 wide: rounding cannot change it.
    "train.seed=15",
    f"train.steps={STEPS}",
    # Alike packs would leave no microbatch without items.
    "pairing=in_order",
    # With links that cost nothing it pays to share even sequences as short as these.
    "cluster.link_latency_ns=0",
    "cluster.node_link_latency_ns=0",
    "cluster.link_bytes_per_s=1000000000000",
    "cluster.node_link_bytes_per_s=1000000000000",
    "cluster.op_overhead_ns=0",
    "cluster.ranks_per_node=2",
)


def write_data(folder: Path) -> None:
    """Write the datasets of the axis `data`."""
    write_uneven(folder / "mixed")
    write_one_item(folder / "one")


def configure(case: Case, folder: Path) -> Config:
    """Return the configuration of a case; data and run are in `folder`."""
    config = with_values(_composed(folder, case.data), {"layout.encoders.image": EncoderLayoutConfig()})
    config.optim.components = {name: ComponentOptimConfig() for name in case.frozen_steps}
    return with_values(config, case.settings())


@cache
def _composed(folder: Path, data: str) -> Config:
    return compose_config(command_line(folder, data))


def command_line(folder: Path, data: str) -> list[str]:
    """The overrides that all cases on one dataset share."""
    return overrides(folder / data, folder / "run", *LINE, samples=SAMPLES[data])


def measure(rank: int, config: Config, world: int, single_queue: bool = False) -> Measurement | None:
    """One rank of a measurement; the result on rank 0."""
    spec = prepare_run(config, world)
    domain = replace(spec.planner.domain, single_queue=single_queue)
    spec = replace(spec, planner=replace(spec.planner, domain=domain))
    folder = RunFolder.create(Path(config.run.dir))
    return parity.measure(spec, folder, rank, torch.device("cpu"), steps=config.train.steps)


def run(ranks: RankPool, config: Config, world: int, single_queue: bool = False) -> Measurement:
    """Measure a configuration on `world` ranks."""
    measurement: Measurement | None = ranks.run(world, measure, config, world, single_queue)[0]
    assert measurement is not None
    return measurement


@dataclass(frozen=True)
class Distance:
    """How far a measurement is from the reference: loss, the worst squared norm of a component and the worst
    gradient of the first step, the worst weights after the last.
    """

    loss: float
    square: Difference
    gradient: Difference
    weights: Difference


def distance(reference: Measurement, candidate: Measurement) -> Distance:
    """Compare two measurements; AssertionError if one has parameters that the other lacks."""
    differences = parity.compare(reference, candidate)
    (loss,) = (d.relative for d in differences if d.name == "loss")
    square = next(d for d in differences if d.name.startswith("squared norm"))
    gradient = next(d for d in differences if "/" in d.name)
    return Distance(loss, square, gradient, parity.compare_weights(reference, candidate)[0])


def narrowest_choices(rank: int, config: Config) -> list[float]:
    """Return for each step on one rank by how much the choice of an expert hangs together: see
    `routing_margins`.
    """
    return list(_narrowest_choices(config))


def _narrowest_choices(config: Config) -> Iterator[float]:
    folder = RunFolder.create(Path(config.run.dir))
    trainer = Trainer(prepare_run(config, 1), folder, 0, torch.device("cpu"))
    assert trainer.rank.stage is not None
    with trainer.ahead() as ahead:
        for step in range(1, config.train.steps + 1):
            with routing_margins(trainer.rank.stage.models) as margins:
                done = trainer.run_step(trainer.begin(ahead, step))
            trainer.update(done)
            yield min(float(margin) for margin in margins)

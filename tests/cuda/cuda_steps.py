"""Steps on fake CUDA, for the process that has it."""

from pathlib import Path

import torch
from parity_matrix import Case
from parity_runs import configure

from omni.commands.plan import plan_of_step
from omni.compose import compose_config
from omni.config import Config
from omni.planning.prepare import prepare_run
from omni.rehearsal.rehearse import Rehearsal, rehearse

GPU = torch.device("cuda", 0)


def run_case(
    case: Case,
    rank: int,
    folder: Path,
    device: torch.device = GPU,
    layers: int = 2,
    samples: int = 2,
    zero: int = 1,
    offload: int = 0,
) -> Rehearsal:
    """Rehearse a rank of a combination of the parity matrix, in bf16, with few layers and samples. Where
    inputs of `offload` layers are on the host, so is what attention puts out.
    """
    config = configure(case, folder)
    config.layout.llm.zero = zero
    config.train.precision = "bf16"
    config.model.llm.offload = offload
    config.model.llm.keep_attention = offload > 0
    config.model.llm.layers = max(layers, case.pp * case.layout.vpp)
    config.model.encoders["image"]["layers"] = layers
    config.data.step_samples = max(samples, case.dp)
    return run_config(config, case.world, rank, device)


def run_line(line: list[str], world: int, rank: int, device: torch.device = GPU) -> Rehearsal:
    """Rehearse a rank of a configuration."""
    return run_config(compose_config(line), world, rank, device)


def run_config(config: Config, world: int, rank: int, device: torch.device = GPU) -> Rehearsal:
    config.cluster.queues = "one"  # as GPUs have it
    spec = prepare_run(config, world)
    plan = plan_of_step(spec, 1, spec.arrangement.domain(rank))
    return rehearse(spec, plan, rank, device)

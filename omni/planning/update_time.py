"""How long AdamW takes on a rank, behind a step's passes: memory bounds it (`ops/adamw.py`)."""

from omni.models.llm import NAME as LLM
from omni.planning.held_state import laid_on
from omni.planning.workload import Workload
from parallel.work import FP32, virtual_stage_name
from pipeline.plan import StepPlan


def update_ns(spec: Workload, plan: StepPlan, rank: int) -> int:
    """Return the nanoseconds in which `rank` reads gradients for their norm and updates its shares of what
    trains in a step; the parts of a domain rank are those of `plan` in every domain.
    """
    world = spec.arrangement
    domain_rank = world.global_ranks(world.domain(rank)).index(rank)
    held = plan.domain.virtual_stages(domain_rank)
    parts = [(LLM, spec.work[virtual_stage_name(LLM, number)]) for number in held]
    parts += [(name, spec.work[name]) for name in spec.encoders if rank in world.encoder_meshes[name]]
    shares = sum(
        laid.total // replicas
        for name, part in parts
        if plan.trains(name)
        for laid, _, replicas in laid_on(spec, name, part, rank)
    )
    # The gradient twice; the weight in fp32 and both moments, read and written; the model's own weight.
    moved = 2 * FP32 + 2 * FP32 + 4 * spec.of_moments + (spec.element < FP32) * spec.element
    return shares * moved * 10**9 // spec.cluster.moved_per_s

"""A closed form of what a device holds in a step at least: no plan is made."""

from collections import Counter
from collections.abc import Collection

from omni.models.llm import NAME as LLM
from omni.planning.held_state import state_of
from omni.planning.memory import Parts
from omni.planning.run_spec import RunSpec
from parallel.work import virtual_stage_name


def least_held(spec: RunSpec, tokens: int, passes: int, frozen: Collection[str] = ()) -> Parts:
    """Return the bytes that the fullest stage holds at least, by kind and component: its state, and what
    passes keep that are in flight where a stage runs one forward and one backward in turn, the fewest of all
    schedules that never wait (Narayanan et al., arXiv 2104.04473, section 2.2): `passes` of a replica, of
    `tokens` each.
    """
    world, stages = spec.arrangement, []
    for stage, numbers in enumerate(world.virtual_stages_by_stage):
        rank, held = world.mesh.rank(pp=stage), Parts()
        for name in (virtual_stage_name(LLM, number) for number in numbers):
            held += state_of(spec, LLM, spec.work[name], rank, learns=LLM not in frozen)
            kept = spec.table.parts[name].kept_bytes(tokens // world.llm.cp)
            held["activations", LLM] += kept * min(passes, world.llm.pp - stage) * (LLM not in frozen)
        for name in spec.encoders:
            if rank in world.encoder_meshes[name]:
                held += state_of(spec, name, spec.work[name], rank, learns=name not in frozen)
        stages.append(held)
    return max(stages, key=Counter.total)

"""Gradients that travel in bf16 and would be summed sooner in fp32: found before a run starts, from layout
and cluster alone.

An example: eight of 64 replicas of a weight lie on each node. In fp32 a ring leaves a node once for all of
them; in bf16 each sends its gradient, in half the bytes, to the 56 that lie elsewhere itself.
"""

from collections.abc import Iterator, Mapping

from omni.models.llm import NAME as LLM
from omni.planning.work import cost_table
from omni.planning.workload import Workload
from parallel.work import FP32, virtual_stage_name

Held = Mapping[str, tuple[str, ...]]
"""The parts that a rank holds, by component."""


def slower_in_bf16(spec: Workload) -> Iterator[str]:
    """Say what it takes to reduce gradients in bf16 and in fp32, and what to set, where the ranks that take
    longest take longer in bf16: of their components those that do.
    """
    if spec.sent == FP32:
        return
    held = _held(spec)
    in_bf16, in_fp32 = ([_reduce_ns(spec, each, sent) for each in held] for sent in (spec.sent, FP32))
    longest = max(in_bf16, key=lambda each: sum(each.values()))
    if sum(longest.values()) <= max(sum(each.values()) for each in in_fp32):
        return
    exact = in_fp32[in_bf16.index(longest)]
    both = ", ".join(
        f"those of {name} take {ns / 1e6:,.1f} ms in bf16 and {exact[name] / 1e6:,.1f} ms in fp32"
        for name, ns in longest.items()
        if ns > exact[name]
    )
    yield (
        f"gradients would be reduced sooner in fp32, as nodes hold several replicas: {both} (simulated). Set "
        f"train.mixed_precision_reduce=fp32"
    )


def _held(spec: Workload) -> list[Held]:
    """What ranks of a domain hold that learns: once for all that hold the same."""
    world, found = spec.arrangement, list[Held]()
    for domain_rank, rank in enumerate(world.global_ranks(0)):
        stage = domain_rank // world.stage_size
        numbers = world.virtual_stages_by_stage[stage] if domain_rank < world.llm_size else ()
        held = {LLM: tuple(virtual_stage_name(LLM, number) for number in numbers)}
        held |= {name: (name,) for name, mesh in world.encoder_meshes.items() if rank in mesh}
        held = {name: parts for name, parts in held.items() if name in spec.learns_from}
        if held not in found:
            found.append(held)
    return found


def _reduce_ns(spec: Workload, held: Held, sent: int) -> dict[str, int]:
    """Nanoseconds of reducing gradients once, by component, where a number takes `sent` bytes."""
    table = cost_table(spec.work, spec.encoders, spec.arrangement, spec.cluster, spec.row_bytes, sent=sent)
    return {name: sum(table.parts[part].reduce_ns for part in parts) for name, parts in held.items()}

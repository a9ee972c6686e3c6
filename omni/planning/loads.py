"""What plans amount to: FLOPs and planned loads by component, of a domain and of the world."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omni.models.llm import NAME as LLM
from omni.planning.run_spec import RunSpec
from parallel.sequence import SequenceLayout
from parallel.work import Load, Work, even_load, virtual_stage_name
from pipeline.plan import StepPlan

_MOST_SAMPLES = 1 << 20  # of a step: nanoseconds of one and its number in 63 bits


def step_flops(spec: RunSpec, plan: StepPlan) -> dict[str, float]:
    """FLOPs of a domain by component, without those of the output layer: backward counts twice the forward,
    that of weights which never learn once, recomputation not at all.
    """
    domain, flops = plan.domain, dict.fromkeys(plan.components, 0.0)
    for batch in domain.microbatches:
        load = _whole(batch.layout)
        parts = (spec.work[virtual_stage_name(LLM, number)] for number in range(domain.num_virtual_stages))
        flops[LLM] += sum(_trained(plan, LLM, part.forward(load)) for part in parts) * domain.tp
    for encoder_batch in domain.encoder_batches:
        forward = spec.work[encoder_batch.component].forward(_whole(encoder_batch.layout))
        flops[encoder_batch.component] += _trained(plan, encoder_batch.component, forward) * encoder_batch.tp
    return flops


def _trained(plan: StepPlan, name: str, forward: Work) -> int:
    """FLOPs of a forward of a component and, unless it is frozen in the step, of its backward."""
    return forward.flops if name in plan.frozen else 3 * forward.flops - forward.frozen_flops


def _whole(layout: SequenceLayout) -> Load:
    """All of a pack, as one rank would see it, of no targets."""
    return even_load(sum(layout.lengths), sum(n * n for n in layout.lengths))


def loads(spec: RunSpec, plan: StepPlan) -> dict[str, list[int]]:
    """Planned nanoseconds of forward passes in a domain: of each cp rank of the pool for the LLM, with the
    first virtual stage to speak for all, and of each rank for an encoder.
    """
    domain, first = plan.domain, spec.table.parts[virtual_stage_name(LLM, 0)]
    found = {
        LLM: [
            sum(first.forward_ns(*batch.share(cp_rank)[:3]) for batch in domain.microbatches)
            for cp_rank in range(domain.pool)
        ]
    }
    for number, name in enumerate(plan.components):
        if name != LLM:
            own = dict.fromkeys(range(*domain.homes[number]), 0)
            for encoder_batch in domain.encoder_batches:
                for rank in encoder_batch.ranks if encoder_batch.component == name else ():
                    own[rank] += spec.table.parts[name].forward_ns(*encoder_batch.share(rank)[:3])
            found[name] = list(own.values())
    return found


@dataclass(frozen=True)
class Largest:
    """The largest planned loads of a domain, or of the world, by component: forward nanoseconds of a rank and
    of a domain; `sample_ns` are those of the costliest sample, whose number in the step is `sample`.
    """

    ranks: tuple[int, ...]
    domains: tuple[int, ...]
    sample_ns: int
    sample: int

    def packed(self) -> tuple[int, ...]:
        """As integers whose maxima over domains are those of the world."""
        return (*self.ranks, *self.domains, self.sample_ns * _MOST_SAMPLES + self.sample)

    @classmethod
    def unpacked(cls, values: Sequence[int]) -> "Largest":
        """Read what `packed` gave."""
        count = len(values) // 2
        return cls(tuple(values[:count]), tuple(values[count:-1]), *divmod(values[-1], _MOST_SAMPLES))


def largest(spec: RunSpec, plan: StepPlan) -> Largest:
    """The largest loads of a plan's domain."""
    found = loads(spec, plan)
    assert len(plan.taken) <= _MOST_SAMPLES, f"a step has at most {_MOST_SAMPLES} samples"
    return Largest(
        tuple(max(found[name], default=0) for name in plan.components),
        tuple(sum(found[name]) for name in plan.components),
        *plan.domain.costliest,
    )


def planned_sums(spec: RunSpec, plan: StepPlan, counts: bool) -> tuple[float, ...]:
    """What the plans of all domains add up to: FLOPs and loads by component, tokens that their microbatches
    had room for. Only one rank of a domain `counts`.
    """
    if not counts:
        return (0.0,) * (2 * len(plan.components) + 1)
    flops, found = step_flops(spec, plan), loads(spec, plan)
    sums = [sum(found[name]) for name in plan.components]
    return (*(flops[name] for name in plan.components), *sums, _capacity(spec, plan))


def _capacity(spec: RunSpec, plan: StepPlan) -> int:
    """Tokens that the microbatches of a domain had room for: a full pack of each replica, or a sample that is
    longer.
    """
    full = spec.arrangement.replicas * spec.planner.domain.pack_tokens
    return sum(max(full, sum(batch.layout.lengths)) for batch in plan.domain.microbatches)


def trained_flops(
    spec: RunSpec, plan: StepPlan, planned: Mapping[str, float], num_targets: int
) -> dict[str, float]:
    """FLOPs of a step by component, of which plans add up to those `planned`: the output layer counts only
    for the targets it ran on.
    """
    flops = dict(planned)
    last = spec.work[virtual_stage_name(LLM, plan.domain.num_virtual_stages - 1)]
    flops[LLM] += _trained(plan, LLM, last.forward(even_load(0, targets=num_targets))) * last.tp
    return flops


def imbalance(spec: RunSpec, plan: StepPlan, most: Largest, sums: Sequence[float]) -> dict[str, float]:
    """Largest over mean planned load, 1 is even, by what they are ratios of: "max_over_mean/<component>" of
    cp ranks of all pools for the LLM and of ranks for each encoder, "domain_max_over_mean/<component>" of
    domains. `most` and `sums` are those of the world.
    """
    means, domains = mean_loads(spec, plan, sums), spec.arrangement.num_domains
    found = {}
    for (name, mean), rank, domain, total in zip(means.items(), most.ranks, most.domains, sums, strict=True):
        if mean:
            found[f"max_over_mean/{name}"] = rank / mean
            found[f"domain_max_over_mean/{name}"] = domain * domains / total
    return found


def over_even(spec: RunSpec, most: Largest, sums: Sequence[float], idle: float) -> float:
    """About how many times a step takes what even work would: that of the busiest domain over the mean, if
    ranks of every domain are idle for the share `idle` that those of the first are. `most` and `sums` are
    those of the world.
    """
    even = sum(sums) / spec.arrangement.num_domains
    return sum(most.domains) / even / (1 - idle) if even and idle < 1 else 1.0


def mean_loads(spec: RunSpec, plan: StepPlan, sums: Sequence[float]) -> dict[str, float]:
    """Mean planned load by component, of which `sums` are those of the world: of a cp rank of a pool for the
    LLM, of a rank for an encoder.
    """
    homes = zip(plan.components, plan.domain.homes, strict=True)
    counts = [plan.domain.pool if name == LLM else stop - first for name, (first, stop) in homes]
    return {
        name: total / (count * spec.arrangement.num_domains)
        for name, count, total in zip(plan.components, counts, sums, strict=True)
    }

"""The whole of a step: policies → plans of all domains → lists for one queue → simulator. Simulated.

    python benchmarks/whole_step.py [--layout tp8_pp4,tp2_pp4] [--trace longtail,shift] [--balance lpt,…]
        [--schedule encode_first,joint,…] [--ranks 512] [--domain 8] [--domains N] [--quick]

Two layouts on `cluster=h100_8x8`, 16 samples a replica, sequences shared by `dynamic`: Llama 3 70B with a ViT
of 2.4 B, both tp 8, pp 4; and a model of 1 B with a ViT of 0.4 B, both tp 2, pp 4. The ViT takes images,
videos and recordings alike; of a sample longer than `data.microbatch_tokens` a prefix is kept. `shift` is the
step after the jump. Every domain is planned, as all its ranks would, and run by the machine with one queue a
rank; with --domains N the first N of them, as the table then says.

The figure is the time of the slowest domain's step over all work of all domains / all ranks. Work is compute
with the collectives that its layers need in any case (tensor and sequence parallelism); exchanges of shared
sequences, messages between stages, shipping rows and waiting come on top. Reducing gradients, the same under
any policy, is apart: the step ends with the last op before it. `queues` is the same with a queue for each
communicator.

Leaves with 1 where a `joint` schedule with the default balance takes more than 1.15, or where the default
balance takes more than 1.02 times what the best does. The last line is JSON.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from dataloader.balance import BalancePolicy
from dataloader.tokens import SampleMeta
from dataloader.trace import generate
from omni.compose import compose_config
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec, for_gpus
from parallel.costs import CostTable
from parallel.policy import find, registered
from pipeline.costs import part_of, plan_costs, simulate
from pipeline.domain_plan import DomainPlan
from pipeline.ops import COMPUTE, Kind
from pipeline.simulator import Timeline

SAMPLES = 16  # of a replica
LAYOUTS = {  # ranks of a replica, configuration
    "tp8_pp4": (32, ("experiment=llama3_70b", "layout=tp8_pp4", "+data.sources.trace.path=none")),
    "tp2_pp4": (
        8,
        (
            "~experiment", "model=llama3_1b_so400m", "cluster=h100_8x8", "train.steps=1", "layout=tp2",
            "layout.llm.pp=4", "+layout.encoders.image.tp=2", "data.microbatch_tokens=16384",
            "data.on_long=truncate", "train.precision=bf16", "+data.sources.trace.path=none",
        ),
    ),
}  # fmt: skip
TRACES = ("longtail", "shift")
SCHEDULES = ("encode_first", "joint", "joint_zero_bubble_h2")
MOST, NEAR_BEST = 1.15, 1.02


@dataclass(frozen=True)
class Figures:
    """Ratios over all work / all ranks: of the slowest domain with one queue a rank and with one for each
    communicator, and of the mean domain with one; milliseconds of the step, and of reducing gradients.
    """

    slowest: float
    queues: float
    mean: float
    step_ms: float
    reduce_ms: float
    domains: int


def trace_of(name: str, count: int) -> list[SampleMeta]:
    """The samples of a step; of `shift` after its jump."""
    return generate(name, 2 * count, 0)[count:] if name == "shift" else generate(name, count, 0)


def prepare(layout: str, ranks: int, replicas: int, balance: str, schedule: str, trace: str) -> RunSpec:
    """The run as GPUs would plan it."""
    replica, overrides = LAYOUTS[layout]
    count = SAMPLES * ranks // replica
    config = compose_config(
        [
            *overrides, f"launch.ranks={ranks}", f"layout.domain={replicas}", "encoder_sp=dynamic",
            "llm_sp=dynamic", f"balance={balance}", f"pipeline={schedule}", "data.step_tokens=null",
            f"data.step_samples={count}",
        ]
    )  # fmt: skip
    return for_gpus(prepare_run(config, ranks, trace_of(trace, count)))


def work_ns(domain: DomainPlan, table: CostTable) -> int:
    """Compute of all ranks of a domain, with the collectives of its layers and without exchanges."""
    compute_ns, _ = plan_costs(domain, table)
    total = 0
    for rank in range(domain.num_ranks):
        for op in domain.ops_of(rank):
            if op.kind in COMPUTE:
                part, share = part_of(domain, table, rank, op)
                assert share is not None
                grad, cost = domain.made_by(op), table.parts[part]
                exchanged = cost.talk_ns(share.tokens, share.exchange_ns, grad) - cost.talk_ns(
                    share.tokens, 0, grad
                )
                total += compute_ns(rank, op) - exchanged
    return total


def before_reducing(timeline: Timeline) -> int:
    """When the last op that is no reduction ends."""
    return max(
        end
        for ops, ends in zip(timeline.domain.ops, timeline.ends_ns, strict=True)
        for op, end in zip(ops, ends, strict=True)
        if op.kind is not Kind.REDUCE
    )


def measure(spec: RunSpec, most_domains: int | None) -> Figures:
    """Plan and simulate the first step of all domains, or of the first few."""
    one, several, work, reducing, ranks = [], [], 0, 0, 0
    for plan in islice(spec.planner.all_domains(1, 0), most_domains):
        spec.planner.verify(plan)
        timeline = simulate(plan.domain, spec.table, single_fifo=True)
        one.append(before_reducing(timeline))
        several.append(before_reducing(simulate(plan.domain, spec.table)))
        reducing = max(reducing, timeline.makespan_ns - one[-1])
        work += work_ns(plan.domain, spec.table)
        ranks += plan.domain.num_ranks
    even = work / ranks
    return Figures(
        slowest=round(max(one) / even, 4),
        queues=round(max(several) / even, 4),
        mean=round(sum(one) / len(one) / even, 4),
        step_ms=round(max(one) / 1e6, 1),
        reduce_ms=round(reducing / 1e6, 1),
        domains=len(one),
    )


def missed(table: dict[str, Figures], default: str) -> Iterator[str]:
    """Say which targets are missed; keys are layout, trace, balance, schedule."""
    for key, found in table.items():
        layout, trace, balance, schedule = key.split(", ")
        if balance == default and schedule.startswith("joint") and found.slowest > MOST:
            yield f"{key}: {found.slowest:.3f}, at most {MOST}"
        own = table.get(f"{layout}, {trace}, {default}, {schedule}")
        if own is not None and own.slowest > NEAR_BEST * found.slowest:
            better = f"{balance} {found.slowest:.3f}"
            yield f"{layout}, {trace}, {schedule}: {default} takes {own.slowest:.3f}, {better}"


def _names(text: str) -> list[str]:
    return text.split(",")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", type=_names, default=list(LAYOUTS))
    parser.add_argument("--trace", type=_names, default=list(TRACES))
    parser.add_argument("--balance", type=_names, default=registered(BalancePolicy.group))
    parser.add_argument("--schedule", type=_names, default=list(SCHEDULES))
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--domain", type=int, default=8, help="replicas of a domain")
    parser.add_argument("--domains", type=int, help="plan only so many of them")
    parser.add_argument("--quick", action="store_true", help="64 ranks in domains of 2, none and the default")
    asked = parser.parse_args()
    if asked.quick:
        asked.ranks, asked.domain, asked.schedule = 64, 2, ["joint"]
        asked.balance = ["none", *({_default()} - {"none"})]
    return asked


def _default() -> str:
    return str(compose_config([]).balance.policy)


def main() -> int:
    """Plan, simulate, print, judge."""
    asked, table = arguments(), dict[str, Figures]()
    print(
        f"{'layout':8} {'trace':9} {'balance':15} {'schedule':21} {'slowest':>8} {'queues':>7} {'mean':>6} "
        f"{'step ms':>8} {'reduce ms':>10} {'domains':>8}"
    )
    for layout in asked.layout:
        for trace in asked.trace:
            for schedule in asked.schedule:
                spec = prepare(layout, asked.ranks, asked.domain, asked.balance[0], schedule, trace)
                for name in asked.balance:
                    policies = replace(
                        spec.planner.policies, balance=find(BalancePolicy, name, "balance.policy")
                    )
                    own = replace(spec, planner=replace(spec.planner, policies=policies))
                    found = table[f"{layout}, {trace}, {name}, {schedule}"] = measure(own, asked.domains)
                    print(
                        f"{layout:8} {trace:9} {name:15} {schedule:21} {found.slowest:8.3f} "
                        f"{found.queues:7.3f} {found.mean:6.3f} {found.step_ms:8.1f} {found.reduce_ms:10.1f} "
                        f"{found.domains:5} of {spec.arrangement.num_domains}",
                        flush=True,
                    )
    problems = list(missed(table, _default()))
    for problem in problems:
        print(f"missed: {problem}")
    result = {key: vars(found) for key, found in table.items()}
    print(json.dumps({"benchmark": "whole_step", "simulated": result, "missed": problems}))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

"""The whole of a step: policies → plans of all domains → lists for one queue → simulator. Simulated.

    python benchmarks/whole_step.py [--layout tp8_pp4,tp2_pp4] [--trace longtail,shift] [--balance lpt,…]
        [--schedule joint,…] [--ranks 512] [--samples 16] [--domain 1] [--domains N] [--jobs 1] [--quick]

Two layouts on `cluster=h100`, 16 samples a rank, sequences shared by `dynamic`: Llama 3 70B with a ViT
of 2.4 B, both tp 8, pp 4; and a model of 1 B with a ViT of 0.4 B, both tp 2, pp 4. The ViT takes images,
videos and recordings alike; of a sample longer than `data.microbatch_tokens` a prefix is kept. `shift` is the
step after the jump. Every domain is planned, as all its ranks would, and run by the machine with one queue a
rank; with --domains N the first N of them, as the table then says.

The figure is the time of the slowest domain's step over all work of all domains / all ranks. Work is compute
with the collectives that its layers need in any case (tensor and sequence parallelism); exchanges of shared
sequences, messages between stages, shipping rows and waiting come on top. Reducing gradients, the same under
any policy, is apart: `step ms` is of the same lists with reductions that take nothing, `reduce ms` what they
add at most. What the slowest domain takes beyond 1 is the sum of five columns, in percent: work, bubble,
exchange, messages and queue, as `pipeline/causes.py` has them.

Leaves with 1 where a `joint` schedule with the default balance takes more than 1.15, or where the default
balance takes more than 1.02 times what the best does. The last line is JSON.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from multiprocessing import get_context

from baselines import say_if_missing

from dataloader.balance import BalancePolicy
from dataloader.tokens import SampleMeta
from dataloader.trace import all_as, generate
from omni.compose import compose_config
from omni.planning.cut import told
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.planning.traces import others
from parallel.policy import find, registered
from pipeline.causes import causes_of, unreduced_ns, work_of
from pipeline.costs import simulate

SAMPLES = 16  # of a rank
LAYOUTS = {
    "tp8_pp4": (
        "experiment=llama3_70b", "system=multiplexed", "layout=tp8_pp4", "+data.sources.trace.path=none",
    ),
    "tp2_pp4": (
        "~experiment", "system=multiplexed", "model=llama3_1b_so400m", "cluster=h100", "train.steps=1",
        "layout=tp2", "layout.llm.pp=4", "+layout.encoders.image.tp=2", "data.microbatch_tokens=16384",
        "data.on_long=truncate", "train.precision=bf16", "+data.sources.trace.path=none",
    ),
}  # fmt: skip
TRACES = ("longtail", "shift")
SCHEDULES = ("joint", "joint_zero_bubble_h2")
MOST, NEAR_BEST = 1.15, 1.02
PARTS = ("work", "bubble", "exchange", "messages", "queue")


@dataclass(frozen=True)
class Figures:
    """Over all work / all ranks: the slowest domain's step and the mean domain's, and what the slowest one's
    is made of beyond 1; milliseconds of the step, and of reducing gradients.
    """

    slowest: float
    mean: float
    work: float
    bubble: float
    exchange: float
    messages: float
    queue: float
    step_ms: float
    reduce_ms: float
    domains: int


def trace_of(name: str, count: int) -> list[SampleMeta]:
    """The samples of a step; of `shift` after its jump."""
    return generate(name, 2 * count, 0)[count:] if name == "shift" else generate(name, count, 0)


def prepare(
    layout: str, ranks: int, samples: int, replicas: int, balance: str, schedule: str, trace: str
) -> RunSpec:
    """The run as GPUs would plan it, of so many samples a rank and replicas of a domain."""
    overrides, count = LAYOUTS[layout], samples * ranks
    config = compose_config(
        [
            *overrides, f"launch.ranks={ranks}", f"layout.domain={replicas}", "encoder_sp=dynamic",
            "llm_sp=dynamic", f"balance={balance}", f"pipeline={schedule}", "data.step_tokens=null",
            f"data.step_samples={count}",
        ]
    )  # fmt: skip
    return prepare_run(config, ranks, all_as("image", trace_of(trace, count)))


def measure(spec: RunSpec, most_domains: int | None) -> Figures:
    """Plan and simulate the first step of all domains, or of the first few."""
    ends, work, slowest, reducing = [], list[int](), None, 0
    for plan in islice(spec.planner.all_domains(1, 0), most_domains):
        spec.planner.verify(plan)
        ends.append(unreduced_ns(plan.domain, spec.table, single_queue=True))
        whole = simulate(plan.domain, spec.table, single_fifo=True).makespan_ns
        reducing = max(reducing, whole - ends[-1])
        if ends[-1] == max(ends):
            slowest = plan.domain
        work += work_of(plan.domain, spec.table)
    assert slowest is not None
    even = sum(work) / len(work)
    causes = vars(causes_of(slowest, spec.table, even, single_queue=True))
    return Figures(
        round(max(ends) / even, 4),
        round(sum(ends) / len(ends) / even, 4),
        *(round(causes[name] / even, 4) for name in PARTS),
        step_ms=round(max(ends) / 1e6, 1),
        reduce_ms=round(reducing / 1e6, 1),
        domains=len(ends),
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
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of a rank")
    parser.add_argument("--domain", type=int, default=1, help="replicas of a domain")
    parser.add_argument("--domains", type=int, help="plan only so many of them")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each a layout, trace and schedule")
    parser.add_argument("--quick", action="store_true", help="64 ranks, joint, none and the default")
    say_if_missing()
    asked = parser.parse_args()
    if asked.quick:
        asked.ranks, asked.schedule = 64, ["joint"]
        asked.balance = ["none", *({_default()} - {"none"})]
    return asked


def _default() -> str:
    return str(compose_config(["system=multiplexed"]).balance.policy)


def by_policy(
    asked: argparse.Namespace, setting: tuple[str, str, str]
) -> tuple[str, dict[str, tuple[Figures, int]]]:
    """Measure a layout, trace and schedule under each policy of balance; also the number of all domains. The
    samples of the step, the same under any policy, come first.
    """
    layout, trace, schedule = setting
    spec = prepare(layout, asked.ranks, asked.samples, asked.domain, asked.balance[0], schedule, trace)
    found = {}
    for name in asked.balance:
        group = replace(spec.planner.group, balance=find(BalancePolicy, name, "balance.policy"))
        own = replace(spec, planner=replace(spec.planner, group=group))
        found[name] = measure(own, asked.domains), spec.arrangement.num_domains
    alike = others(trace_of(trace, asked.samples * asked.ranks), ["image"])
    as_images = f"; counted as images: {alike}" if alike else ""
    return told(spec.planner, spec.planner.world.take(0)) + as_images, found


def main() -> int:
    """Plan, simulate, print, judge."""
    asked, table = arguments(), dict[str, Figures]()
    print(
        f"{'layout':8} {'trace':9} {'balance':15} {'schedule':21} {'slowest':>8} {'mean':>6} "
        f"{' '.join(f'{name:>8}' for name in PARTS)} {'step ms':>8} {'reduce ms':>10} {'domains':>8}"
    )
    settings = list(product(asked.layout, asked.trace, asked.schedule))
    with get_context("spawn").Pool(asked.jobs) as pool:
        found_of = pool.imap(partial(by_policy, asked), settings)
        for (layout, trace, schedule), (step, measured) in zip(settings, found_of, strict=True):
            print(f"{layout}, {trace}: {step}")
            for name, (found, domains) in measured.items():
                table[f"{layout}, {trace}, {name}, {schedule}"] = found
                columns = " ".join(f"{100 * getattr(found, part):8.1f}" for part in PARTS)
                print(
                    f"{layout:8} {trace:9} {name:15} {schedule:21} {found.slowest:8.3f} "
                    f"{found.mean:6.3f} {columns} {found.step_ms:8.1f} {found.reduce_ms:10.1f} "
                    f"{found.domains:5} of {domains}",
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

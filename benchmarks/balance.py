"""How even policies of balance and of sharing leave a step, on traces: one table. Simulated.

    python benchmarks/balance.py [--quick] [--trace longtail,mine.parquet] [--ranks 8,64,512,4096]
        [--policy none,lpt] [--sharing none,dynamic] [--domains 1,8,64] [--groups 1,256] [--samples 16]
        [--deal by_length] [--seeds 20] [--jobs 2]

A model of 1 B with a ViT of 0.4 B (llama3_1b_so400m, tp=pp=1) on `cluster=h100`, 16 samples a rank, full
attention over whole images, videos and recordings, which the ViT takes all alike. Every registered policy of
balance, sequences shared by `dynamic`, by `dhp` and by none; domains of 1 to 64 ranks (of 1, 8 and 64 from
4,096 ranks on); samples reordered in groups of one domain (not at all), of 256 ranks (the default) and of
all. Without sharing (`none`) items spread whole over the domain's ranks, and sequences stay on their rank.
The columns, sizes of domains in ranks, of groups in domains:

    encoder, llm    the slowest rank's phase, its exchanges overlapped, over the mean of the phase's work
    step            both slowest phases together over the mean work of both, exchanges overlapped
    in turn         the same, exchanges after the work
    off 20 %        step, where each item and each sequence takes up to 20 % more or less than planned
    bound           what step cannot be below: in each phase the mean, or the costliest sequence spread as far
                    as can be
    MiB across      sent to other nodes in the forward passes, a rank on average
    plan ms         CPU time of one rank: the step dealt, its group divided, its domain's sequences shared

Who gets which sample is as planned; the rest is coarser than plans, as omni/planning/balance_score.py says:
each phase is shared and waited for once, and tokens of microbatches are not bounded. Whole plans are timed by
benchmarks/whole_step.py, all of planning by benchmarks/planning.py.

Leaves with 1 where a target is missed. On `longtail`, and on `shift` after the jump, from 512 ranks on, of
rows with sharing: the best step is above 1.08; the default policy's best is more than 2 % above that; in
domains of 8, groups of 256 ranks gain less than 95 % of what reordering over the world gains over none. And
on 8 or 64 ranks, whichever the table has (`--ranks ""`: none), a policy is above `none` in the mean of all
seeds, in any column of the first five. The last line is JSON.

All of it takes more than an hour of CPU, most of it at 4,096 ranks: with --jobs 2 some 40 minutes on two
cores of a cloud VM. Rows are the same with fewer --ranks, --trace or --domains.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from baselines import say_if_missing

from dataloader.balance import BalancePolicy
from dataloader.dealing import DealPolicy
from dataloader.tokens import SampleMeta
from dataloader.trace import all_as, generate
from dataloader.trace_file import read_trace
from omni.compose import compose_config
from omni.config import Config
from omni.planning.balance_score import Step, divide_group, groups_of, place_domain, without_bounds
from omni.planning.balance_table import TITLES, Row, choices, scored, text_of
from omni.planning.planner import Planner
from parallel.policy import registered

TRACES = ("balanced", "longtail", "shift")
SIZES = (8, 64, 512, 4096)
DOMAINS = (1, 2, 4, 8, 16, 32, 64)
LARGE, DOMAINS_AT_LARGE = 4096, (1, 8, 64)
GROUPS = (1, 256, 1 << 20)  # in ranks: no reordering, the default, all
SHARING = ("none", "dynamic", "dhp")
COLUMNS = ("encoder", "llm", "overlapped", "in_turn")
JUDGED, JUDGED_FROM = ("longtail", "shift, after"), 512
MOST, NEAR_BEST, OF_GLOBAL, TIE = 1.08, 1.02, 0.95, 1.001
SEED_RANKS, SEED_SHARING, SEED_DOMAINS = (8, 64), ("none", "dynamic"), (1, 8)


def configure(samples: int, deal: str | None = None) -> Config:
    """The model and the cluster that samples are scored with, dealt to groups as told or by the default; a
    sample of 131,072 tokens is not too long.
    """
    return compose_config(
        [
            "~experiment", "system=multiplexed", "model=llama3_1b_so400m", "cluster=h100",
            "data.microbatch_tokens=131072",
            "train.steps=1", "train.precision=bf16", "data.step_tokens=null", f"data.step_samples={samples}",
            "+data.sources.trace.path=none", *([f"deal={deal}"] if deal else []),
        ]
    )  # fmt: skip


def steps_of(name: str, count: int, seed: int = 0) -> Iterator[tuple[str, list[SampleMeta]]]:
    """A step of `count` samples of a trace, generated or read, by its title; of `shift` one of each phase."""
    if name not in TRACES:
        trace = all_as("image", read_trace(name))
        if len(trace) < count:
            raise ValueError(
                f"{name} has {len(trace)} samples, a step takes {count}: lower --ranks or --samples"
            )
        yield Path(name).stem, trace[:count]
    elif name == "shift":
        trace = all_as("image", generate(name, 2 * count, seed))
        yield from (("shift, before", trace[:count]), ("shift, after", trace[count:]))
    else:
        yield name, all_as("image", generate(name, count, seed))


def plan_ms(planner: Planner, step: Step) -> float:
    """CPU time in which one rank deals a step, divides its group and shares sequences in its domain."""
    domain, start = without_bounds(planner.domain), time.process_time()
    samples = groups_of(planner, step.taken)[0]
    costs = planner.domain.costing.costs([step.metas[n] for n in samples])
    place_domain(domain, divide_group(planner, 0, samples, costs)[0], step.metas)
    return round((time.process_time() - start) * 1e3, 1)


def line(title: str, ranks: int, row: Row, planning: float) -> dict[str, Any]:
    """A line of the table: as text, and its figures."""
    figures = {key: round(value, 4) for key, value in asdict(row.planned).items()}
    off = round(row.off.overlapped, 4)
    return {
        "text": f"{title:14} {ranks:5} {text_of(row)} {planning:8.1f}",
        "trace": title, "ranks": ranks, **asdict(row.choice), **figures, "off": off, "plan_ms": planning,
    }  # fmt: skip


@dataclass(frozen=True)
class Part:
    """What one process scores of the table: a size of domains on a trace, by all else that was asked for."""

    ranks: int
    trace: str
    domain: int
    asked: argparse.Namespace

    def lines(self) -> list[dict[str, Any]]:
        """Score every choice, those that leave the same step once."""
        asked, count, found = self.asked, self.asked.samples * self.ranks, []
        config = configure(count, asked.deal)
        for title, metas in steps_of(self.trace, count):
            sizes = [self.domain], asked.groups
            every = choices(config, self.ranks, metas, asked.policy, asked.sharing, *sizes)
            for row, planner, step in scored(every):
                found.append(line(title, self.ranks, row, plan_ms(planner, step)))
        return found


def lines_of(part: Part) -> list[dict[str, Any]]:
    """Score a part of the table, in a process of its own."""
    return part.lines()


def domains_for(ranks: int, asked: Sequence[int] | None) -> list[int]:
    """The sizes of domains to try."""
    sizes = asked or (DOMAINS_AT_LARGE if ranks >= LARGE else DOMAINS)
    return [size for size in sizes if size <= ranks and ranks % size == 0]


def gain_of_groups(lines: Sequence[dict[str, Any]], policy: str) -> Iterator[tuple[str, float]]:
    """What groups of 256 ranks gain of what the world gains over no reordering, in domains of 8 that share by
    `dynamic`: of the step beyond its work, by costs that are off; 1 where the world gains nothing.
    """
    steps: dict[tuple[str, int], dict[int, float]] = {}
    for of in lines:
        if (of["policy"], of["sharing"], of["domain"]) == (policy, "dynamic", 8):
            steps.setdefault((of["trace"], of["ranks"]), {})[of["group"]] = of["off"]
    for (trace, ranks), by_group in steps.items():
        if {1, 32, ranks // 8} <= set(by_group):
            alone, grouped, everywhere = by_group[1], by_group[32], by_group[ranks // 8]
            gain = (alone - grouped) / (alone - everywhere) if alone > everywhere else 1.0
            yield f"{trace}, {ranks} ranks", round(gain, 3)


Where = tuple[str, str, int, str, str]
"""A trace, who shares, a size of domains, a column, a policy."""


def columns_of(seed: int, policies: Sequence[str], ranks: int, deal: str | None) -> dict[Where, float]:
    """The columns that policies are compared with `none` in, for a seed."""
    found = {}
    config = configure(16 * ranks, deal)
    for name in TRACES[1:]:
        for title, metas in steps_of(name, 16 * ranks, seed):
            every = choices(config, ranks, metas, policies, SEED_SHARING, SEED_DOMAINS, [16])
            for row, _, _ in scored(every):
                of, choice = row.planned, row.choice
                values = {column: getattr(of, column) for column in COLUMNS} | {"off": row.off.overlapped}
                for column, value in values.items():
                    found[title, choice.sharing, choice.domain, column, choice.policy] = value
    return found


def worse_than_none(
    policies: Sequence[str], seeds: int, ranks: int, deal: str | None, many: Callable[..., Any]
) -> Iterator[str]:
    """Say where a policy is above `none` in the mean of all seeds; `many` maps as `map` does."""
    sums: dict[Where, float] = {}
    for found in many(partial(columns_of, policies=policies, ranks=ranks, deal=deal), range(seeds)):
        for key, value in found.items():
            sums[key] = sums.get(key, 0.0) + value / seeds
    for (*where, policy), value in sums.items():
        if value > TIE * sums[(*where, "none")]:
            title, sharing, domain, column = where
            yield (
                f"{policy} is above none: {value:.3f} > {sums[(*where, 'none')]:.3f} ({title}, {ranks} "
                f"ranks, sharing {sharing}, domains of {domain}, {column}, mean of {seeds} seeds)"
            )


def missed(lines: Sequence[dict[str, Any]], gains: dict[str, float], default: str) -> Iterator[str]:
    """Say which targets of the table are missed."""
    wheres = {(of["trace"], of["ranks"]) for of in lines}
    for trace, ranks in sorted(wheres):
        rows = [
            of for of in lines if (of["trace"], of["ranks"]) == (trace, ranks) and of["sharing"] != "none"
        ]
        own = [of["overlapped"] for of in rows if of["policy"] == default]
        if trace not in JUDGED or ranks < JUDGED_FROM or not own:
            continue
        least = min(of["overlapped"] for of in rows)
        if least > MOST:
            yield f"{trace}, {ranks} ranks: the best step is {least:.3f}, above {MOST}"
        if min(own) > NEAR_BEST * least:
            yield f"{trace}, {ranks} ranks: {default}, the default, {min(own):.3f}; the best {least:.3f}"
    for where, gain in gains.items():
        if gain < OF_GLOBAL:
            yield f"{where}: groups of 256 ranks gain {gain:.3f} of what all gain, at least {OF_GLOBAL}"


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    say_if_missing()
    known = registered(BalancePolicy.group)
    parser.add_argument("--trace", type=_names, default=list(TRACES), help="names of traces, or files")
    parser.add_argument("--ranks", type=_numbers, default=list(SIZES), help="of the table; empty: none")
    parser.add_argument("--policy", type=_names, default=known, help=f"of {', '.join(known)}")
    parser.add_argument("--sharing", type=_names, default=list(SHARING))
    parser.add_argument("--domains", type=_numbers)
    parser.add_argument("--groups", type=_numbers, default=list(GROUPS), help="in ranks")
    parser.add_argument(
        "--deal", choices=registered(DealPolicy.group), help="as the default system, if not given"
    )
    parser.add_argument("--samples", type=int, default=16, help="of a rank")
    parser.add_argument("--seeds", type=int, default=20, help="of the comparison with none; 0: leave it out")
    parser.add_argument("--jobs", type=int, default=1, help="processes that score; planning times them apart")
    parser.add_argument("--quick", action="store_true", help="8 and 64 ranks, domains of 1 and 8, 4 seeds")
    found = parser.parse_args()
    if found.quick:
        found.ranks, found.domains, found.seeds = [8, 64], [1, 8], 4
    return found


def main() -> int:
    """Score, print, judge."""
    asked = arguments()
    default = configure(1).balance.policy
    parts = [
        Part(ranks, name, domain, asked)
        for ranks in asked.ranks
        for name in asked.trace
        for domain in domains_for(ranks, asked.domains)
    ]
    lines: list[dict[str, Any]] = []
    problems: list[str] = []
    print(f"{'trace':14} {'ranks':>5} {TITLES} {'plan ms':>8}")
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn")) as workers:
        many = map if asked.jobs == 1 else workers.map
        for found in many(lines_of, parts):
            for of in found:
                print(of.pop("text"), flush=True)
            lines += found
        gains = dict(gain_of_groups(lines, default))
        problems += missed(lines, gains, default)
        if asked.seeds and "none" in asked.policy:
            for ranks in SEED_RANKS:
                problems += worse_than_none(asked.policy, asked.seeds, ranks, asked.deal, many)
    for problem in problems:
        print(f"missed: {problem}")
    result = {"rows": lines, "gain_of_groups": gains, "default": default}
    print(json.dumps({"benchmark": "balance", "simulated": result, "missed": problems}))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

"""What a run gets that names no policy, beside policies chosen by hand, on whole samples. Simulated.

    python benchmarks/default.py [--layout dp,tp2_pp4,tp8_pp4] [--trace longtail,…] [--ranks 64]
        [--samples 16] [--seeds 0] [--sets multiplexed,…] [--best RESULTS] [--domains N] [--fits] [--jobs 1]
        [--quick]

Three layouts on `cluster=h100`, 16 samples a rank of up to 131,072 tokens, none of which is cut: Llama 3 8B
with a ViT-H on data parallelism alone and over tp 2, pp 4; Llama 3 70B with a ViT of 2.4 B over tp 8, pp 4.
GPUs are taken to hold anything: 8 B do not fit one. With `--fits` they hold what they do, and the LLM
recomputes as little as lets it fit; what is recomputed is work. The ViT takes images, videos and recordings
alike. Traces are `balanced`, `longtail`, the same of at most 32,768 tokens a sample (`longtail_32k`), and of
`shift` the step before its jump and the one after it.

The figure is the slowest domain's step over all work of all domains / all ranks, as in `whole_step.py`, with
reducing gradients left out; `step ms`, which sets are compared by, is what a step takes with it. `bound` is
the best possible step of the same samples in this layout over the same work, whatever shares sequences
(`omni/planning/bound.py`). `seconds` are of the CPU, for preparing the run, choosing included.

Beside the default stand `system=multiplexed` and 60 combinations by hand, on the same samples: domains of 1
to 16 replicas, encoders that share nothing, as much as pays or all, and four schedules, one with packs of
half as many tokens. Encoders keep what attention puts out where the default may. Where sequences are not
shared, or by too few ranks, microbatches hold the longest. A combination is planned up to the first domain
that takes longer than the default's slowest, and stands for at least that (`>`). With `--best` the best five
of each layout and trace of earlier results stand there again, beside those of `--sets`.

Leaves with 1 where the default takes more than its target (dp 1.08, tp2_pp4 1.15, tp8_pp4 1.12) and more than
1.04 of the bound, or more than 1.01 times what the best set takes. The last line is JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from dataloader.tokens import SampleMeta
from dataloader.trace import all_as, generate
from omni.compose import compose_config
from omni.planning.bound import step_bound
from omni.planning.choice import text_of
from omni.planning.cut import cut_of
from omni.planning.planner import Planner
from omni.planning.prepare import prepare_run
from pipeline.causes import unreduced_ns, work_of
from pipeline.costs import simulate
from pipeline.plan import Taken

SAMPLES = 16  # of a rank
ANYTHING = 10**15  # bytes
_8B = (
    "~experiment", "+model/llm=llama3_8b", "+model/encoder@model.encoders.image=vit_h14", "cluster=h100",
    "train.steps=1", "train.precision=bf16", "optim.lr=1e-4",
)  # fmt: skip
LAYOUTS = {
    "dp": (*_8B, "data.microbatch_tokens=16896"),
    "tp2_pp4": (*_8B, "layout=tp2", "layout.llm.pp=4", "+layout.encoders.image.tp=2",
                "data.microbatch_tokens=16896"),
    "tp8_pp4": ("experiment=llama3_70b", "layout=tp8_pp4", "data.microbatch_tokens=67584"),
}  # fmt: skip
TARGETS = {"dp": 1.08, "tp2_pp4": 1.15, "tp8_pp4": 1.12}
TRACES = ("longtail", "longtail_32k", "shift_after", "shift_before", "balanced")
LONGEST = 135_168  # tokens of a sample
SHORTER = {"longtail_32k": 33_792}
SIZES, ENCODER_SP = (1, 2, 4, 8, 16), ("none", "dynamic", "all")
SCHEDULES: dict[str, tuple[str, ...]] = {
    "encode_first": ("pipeline=encode_first",),
    "joint": ("pipeline=joint",),
    "auto": ("pipeline=auto",),
    "halves": ("pipeline=auto", "packing.divisor=2"),
}
MULTIPLEXED = "multiplexed"
COMBINATIONS: dict[str, tuple[str, ...]] = {
    f"{size} {sharing} {schedule}": (
        f"system={MULTIPLEXED}", f"layout.domain={size}", f"encoder_sp={sharing}", *keys,
        *["llm_sp=dynamic"] * (size > 1),
    )
    for size, sharing, (schedule, keys) in product(SIZES, ENCODER_SP, SCHEDULES.items())
}  # fmt: skip
BY_HAND = {MULTIPLEXED: (f"system={MULTIPLEXED}",), **COMBINATIONS}
ATTEND_ONCE = "++model.encoders.image.keep_attention=true"  # what holds anything keeps what that saves
NEAR_BEST, NEAR_BOUND = 1.01, 1.04
DEFAULT, BEST = "default", 5


@dataclass(frozen=True)
class Row:
    """A set's step over all work / all ranks and that of the bound, its time with gradients reduced, what is
    cut of its tokens, and what was chosen; `part` if only so many domains were planned as show that it takes
    longer.
    """

    over: float
    bound: float
    step_ms: float
    cut: float
    seconds: float
    chosen: str = ""
    part: bool = False


Rows = dict[str, Row | str]
"""By set, the default first; or why one cannot be."""


def trace_of(name: str, count: int, seed: int) -> list[SampleMeta]:
    """The samples of a step."""
    if name == "longtail_32k":
        return generate("longtail", count, seed, max_tokens=32_768)
    if name.startswith("shift"):
        both = generate("shift", 2 * count, seed)
        return both[count:] if name == "shift_after" else both[:count]
    return generate(name, count, seed)


def cell(asked: argparse.Namespace, setting: tuple[str, str, int, list[str]]) -> Rows:
    """The default on a layout and trace, and sets by hand beside it."""
    layout, trace, seed, names = setting
    own = row(asked, layout, trace, seed, DEFAULT)
    most_ms = own.step_ms if isinstance(own, Row) else None
    below = {name: most_ms if name in COMBINATIONS else None for name in names}
    return {DEFAULT: own, **{name: row(asked, layout, trace, seed, name, below[name]) for name in names}}


def row(
    asked: argparse.Namespace, layout: str, trace: str, seed: int, name: str, most_ms: float | None = None
) -> Row | str:
    """Prepare, plan and simulate a set on a layout and trace, up to a domain that takes more than `most_ms`;
    or why it cannot be.
    """
    keys, count = BY_HAND.get(name, ("system=omni",)), asked.samples * asked.ranks
    own = [
        *LAYOUTS[layout], *keys, f"launch.ranks={asked.ranks}", "data.step_tokens=null",
        f"data.step_samples={count}", "data.on_long=truncate", "+data.sources.trace.path=none",
        "model.llm.recompute=auto" if asked.fits else f"cluster.memory_bytes={ANYTHING}",
        *[ATTEND_ONCE] * (name in BY_HAND and not asked.fits),
    ]  # fmt: skip
    metas = all_as("image", trace_of(trace, count, seed))
    begin = time.process_time()
    try:
        config = compose_config(own)
        if name in BY_HAND:  # whole samples: whoever cannot share them has a pass that holds the longest
            whole = config.llm_sp.policy == "dynamic"
            held = config.data.microbatch_tokens * (config.layout.domain or 1) * config.layout.llm.cp
            config.data.sample_tokens = longest = SHORTER.get(trace, LONGEST)
            if not whole or held < longest:
                config.data.microbatch_tokens = longest
        spec = prepare_run(config, asked.ranks, metas)
    except ValueError as error:
        return str(error)
    seconds = time.process_time() - begin
    slowest, whole_ns, work, part = 0, 0, list[int](), False
    for plan in islice(spec.planner.all_domains(1, 0), asked.domains):
        spec.planner.verify(plan)
        slowest = max(slowest, unreduced_ns(plan.domain, spec.table, single_queue=True))
        whole_ns = max(whole_ns, simulate(plan.domain, spec.table, single_fifo=True).makespan_ns)
        work += work_of(plan.domain, spec.table)
        if part := most_ms is not None and whole_ns > most_ms * 1e6:
            break
    even, taken = sum(work) / len(work), spec.planner.world.take(0)
    bound = round(bound_ns(spec.planner, taken) / even, 4)
    cut, chosen = cut_of(spec.planner, taken), text_of(spec.choice.keys) if spec.choice else ""
    return Row(
        round(slowest / even, 4), bound, round(whole_ns / 1e6, 1), round(cut.tokens, 4), round(seconds, 1),
        chosen, part,
    )  # fmt: skip


def bound_ns(planner: Planner, taken: Taken) -> int:
    """The best possible step of these samples, whatever ranks share them, reductions left out."""
    parts = {
        name: replace(cost, reduce_ns=0, gather_ns=0) for name, cost in planner.domain.table.parts.items()
    }
    own = planner.with_table(replace(planner.domain.table, parts=parts))
    metas = [own.world.kept(taken.sources[s], i) for s, i in zip(taken.source, taken.ids, strict=True)]
    return step_bound(metas, own.domain, any_domain=True).ns


def missed(table: dict[str, dict[str, Row]]) -> Iterator[str]:
    """Say which targets are missed; keys are layout, trace, seed."""
    for where, rows in table.items():
        if DEFAULT not in rows:
            yield f"{where}: the default is refused"
            continue
        own, layout = rows[DEFAULT], where.split(", ")[0]
        most = max(TARGETS[layout], NEAR_BOUND * own.bound)
        if own.over > most:
            yield f"{where}: {own.over:.3f}, at most {most:.3f}"
        best = min(rows, key=lambda name: rows[name].step_ms)
        if own.step_ms > NEAR_BEST * rows[best].step_ms:
            yield f"{where}: {own.step_ms:,.0f} ms, {best} {rows[best].step_ms:,.0f} ms"
        if own.cut:
            yield f"{where}: {own.cut:.1%} of tokens are cut"


def best_by_hand(rows: dict[str, Any]) -> list[str]:
    """The names of the best combinations of a result's rows; of those that take the same the first."""
    found = dict[float, str]()
    for name in sorted(set(rows) & set(COMBINATIONS), key=lambda name: rows[name]["step_ms"]):
        found.setdefault(rows[name]["step_ms"], name)
    return list(found.values())[:BEST]


def settings_of(asked: argparse.Namespace) -> list[tuple[str, str, int, list[str]]]:
    """The layouts, traces and seeds to run, each with its sets by hand."""
    best: dict[str, list[str]] = {}
    if asked.best:
        earlier = json.loads(asked.best.read_text())["simulated"]
        for where, rows in earlier.items():
            best.setdefault(where.rsplit(", ", 1)[0], best_by_hand(rows))
    return [
        (layout, trace, seed, list(dict.fromkeys([*best.get(f"{layout}, {trace}", ()), *asked.sets])))
        for layout, trace, seed in product(asked.layout, asked.trace, asked.seeds)
    ]


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layout", type=_names, default=list(LAYOUTS))
    parser.add_argument("--trace", type=_names, default=list(TRACES))
    parser.add_argument("--seeds", type=lambda text: list(map(int, text.split(","))), default=[0])
    parser.add_argument("--sets", type=_names, help='by hand; "": the default alone')
    parser.add_argument("--best", type=Path, help="earlier results, of which the best sets stand again")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of a rank")
    parser.add_argument("--domains", type=int, help="plan only so many of them")
    parser.add_argument("--fits", action="store_true", help="on GPUs that hold what they do")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each a layout, trace and seed")
    parser.add_argument("--quick", action="store_true", help="longtail, multiplexed and one set by hand")
    asked = parser.parse_args()
    if asked.quick:
        asked.trace, asked.sets = ["longtail"], [MULTIPLEXED, "8 dynamic encode_first"]
    elif asked.sets is None:
        asked.sets = [] if asked.best else list(BY_HAND)
    if unknown := sorted(set(asked.sets) - set(BY_HAND)):
        parser.error(f"--sets {','.join(unknown)}: there are {', '.join(BY_HAND)}")
    return asked


def main() -> int:
    """Prepare, plan, simulate, print, judge."""
    asked = arguments()
    table: dict[str, dict[str, Row]] = {}
    settings = settings_of(asked)
    print(
        f"{'layout':8} {'trace':13} {'seed':>4} {'set':22} {'over':>7} {'bound':>7} {'step ms':>11} "
        f"{'cut':>6} {'seconds':>8}"
    )
    with get_context("spawn").Pool(asked.jobs) as pool:
        for setting, rows in zip(settings, pool.imap(partial(cell, asked), settings), strict=True):
            layout, trace, seed, _ = setting
            for name, found in rows.items():
                if isinstance(found, str):
                    print(f"{layout:8} {trace:13} {seed:4} {name:22} refused: {found}", flush=True)
                    continue
                table.setdefault(f"{layout}, {trace}, {seed}", {})[name] = found
                step = f"{'>' * found.part}{found.step_ms:,.0f}"
                figures = (
                    f"{found.over:7.3f} {found.bound:7.3f} {step:>11} {found.cut:6.1%} {found.seconds:8.1f}"
                )
                print(f"{layout:8} {trace:13} {seed:4} {name:22} {figures}  {found.chosen}", flush=True)
    problems = list(missed(table))
    for problem in problems:
        print(f"missed: {problem}")
    result = {
        where: {
            name: vars(rows[name])
            for name in (DEFAULT, MULTIPLEXED, *best_by_hand({name: vars(of) for name, of in rows.items()}))
            if name in rows
        }
        for where, rows in table.items()
    }
    print(json.dumps({"benchmark": "default", "simulated": result, "missed": problems}))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

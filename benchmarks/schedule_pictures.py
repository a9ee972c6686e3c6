"""One step under every schedule, drawn one above the other, with what its idle time is made of. Simulated.

    python benchmarks/schedule_pictures.py [schedules.svg] [--trace longtail] [--only stage0,joint] [KEYS]

A model of 1 B with an encoder of 0.4 B, four stages of one GPU, 131,072 tokens of the trace: the same samples
under each schedule, each list as GPUs run it, with one queue a rank. Leaves with 1 where `auto` takes more
than 1.01 of the time of any other that is drawn. The last line is JSON: the simulated step time and the idle
share of all ranks by cause.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from infra.run_folder import write_text
from omni.compose import compose_config
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.rehearsal.stand_in_data import use_trace
from pipeline.costs import simulate
from pipeline.drawing import Track, idle_ns, rows_of, svg
from pipeline.simulator import Timeline

STAGES = 4
NEAR_BEST = 1.01
OVERRIDES = (
    "system=multiplexed",
    "model=llama3_1b_so400m",
    "cluster=h100",
    "train.precision=bf16",
    f"launch.ranks={STAGES}",
    f"layout.llm.pp={STAGES}",
    "data.microbatch_tokens=8192",
    "data.step_tokens=131072",
)
DRAWN = {
    "stage0 (the encoder in front of the first stage, 1F1B)": ("system=megatron",),
    "one_f_one_b": ("pipeline=one_f_one_b",),
    "encode_first": ("pipeline=encode_first",),
    "interleaved, two virtual stages a rank": ("pipeline=interleaved", "layout.llm.vpp=2"),
    "zero_bubble_h1": ("pipeline=zero_bubble_h1",),
    "joint (1F1B)": ("pipeline=joint",),
    "joint_interleaved, two virtual stages a rank": ("pipeline=joint_interleaved", "layout.llm.vpp=2"),
    "joint_zero_bubble_h1": ("pipeline=joint_zero_bubble_h1",),
    "auto": ("pipeline=auto",),
}


def prepare(folder: Path, trace: str, overrides: list[str]) -> RunSpec:
    """The run as GPUs would have it, on samples of a trace."""
    config = compose_config([*OVERRIDES, f"run.dir={folder / 'run'}", *overrides])
    use_trace(config, trace, folder / trace)
    return prepare_run(config, STAGES)


def timeline_of(spec: RunSpec) -> Timeline:
    """The simulated first step."""
    plan = spec.planner.next_step(1, 0, 0)
    spec.planner.verify(plan)
    return simulate(plan.domain, spec.table, single_fifo=True)


def main() -> int:
    """Plan, simulate, draw."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", type=Path, nargs="?", help="where to draw, such as schedules.svg")
    parser.add_argument("--trace", default="longtail")
    parser.add_argument("--only", default="", help="beginnings of the titles to draw, with commas between")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    pictures: list[tuple[str, list[Track]]] = []
    results = {}
    for title, overrides in DRAWN.items():
        if not title.startswith(tuple(arguments.only.split(","))):
            continue
        with tempfile.TemporaryDirectory() as folder:
            timeline = timeline_of(prepare(Path(folder), arguments.trace, [*overrides, *arguments.overrides]))
        rows = rows_of(timeline, [f"rank {team}" for team in timeline.domain.teams])
        step, idle = timeline.makespan_ns, idle_ns(rows)
        shares = {cause: round(ns / step / len(rows), 4) for cause, ns in sorted(idle.items()) if ns}
        pictures.append((f"{title}: {step / 1e6:.0f} ms (simulated)", rows))
        results[title] = {"step_ms": round(step / 1e6, 2), "idle": round(sum(shares.values()), 4), **shares}
        print(f"{title:56} {step / 1e6:8.1f} ms, idle {sum(shares.values()):6.1%}")
    if arguments.picture:
        write_text(arguments.picture, svg(pictures))
    best = min((of["step_ms"] for of in results.values()), default=0.0)
    own = results.get("auto", {"step_ms": best})["step_ms"]
    missed = [f"auto takes {own} ms, another schedule {best} ms"] if own > NEAR_BEST * best else []
    for problem in missed:
        print(f"missed: {problem}")
    print(json.dumps({"benchmark": "schedule_pictures", "simulated": results, "missed": missed}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

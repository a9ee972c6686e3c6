"""How much of a step reductions of gradients and gathering of weights take that nothing hides. Simulated.

    python benchmarks/exposed_reductions.py [--only "8b, ZeRO-1"] [--quick]

Each run is planned on whole clusters of H100s as `omni train` would, on the trace `longtail`; the slowest
domain's step is simulated as it is, and once more with reductions and gathering free. What is exposed is the
difference, as a share of the step. Two minutes of one core.

Leaves with 1 where a share is above the run's target. The last line is JSON. `--quick` leaves the 70 B out.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from omni.compose import compose_config
from omni.planning.layouts import planned_ranks
from omni.planning.prepare import prepare_run
from omni.rehearsal.estimate import estimate
from omni.rehearsal.stand_in_data import use_trace
from pipeline.causes import unreduced_ns

COMMON = ("experiment=llama3_70b", "train.precision=bf16")
SMALL = (
    "model=llama3_1b_so400m", "model/llm=llama3_8b", "launch.ranks=64", "layout.llm.tp=1", "layout.llm.cp=1",
    "layout.llm.pp=1", "layout.domain=8", "model.llm.recompute=none", "data.step_tokens=2097152",
    "data.sample_tokens=8192", "data.microbatch_tokens=8192",
)  # fmt: skip
LARGE = (
    "launch.ranks=1024", "data.step_tokens=8388608", "data.sample_tokens=16384",
    "data.microbatch_tokens=16384",
)  # fmt: skip
BF16 = "train.mixed_precision_reduce=bf16"
RUNS = {
    "8b, ZeRO-1": (0.015, (*SMALL, "layout.llm.zero=1")),
    "8b, ZeRO-3": (0.015, (*SMALL, "layout.llm.zero=3")),
    "70b, 1,024 ranks": (0.005, LARGE),
    "70b, 1,024 ranks, bf16": (0.005, (*LARGE, BF16)),
}
"""By name: the largest share that shall be exposed, and keys."""


class Exposed(NamedTuple):
    """Simulated milliseconds of the slowest step: as it is, and with reductions and gathering free."""

    step_ms: float
    free_ms: float

    @property
    def share(self) -> float:
        """The part of the step that nothing hides."""
        return 1 - self.free_ms / self.step_ms


def exposed(keys: Sequence[str]) -> Exposed:
    """Plan a run's first step, all domains, and time the slowest."""
    config = compose_config([*COMMON, *keys])
    with tempfile.TemporaryDirectory() as folder:
        use_trace(config, "longtail", Path(folder) / "trace")
        spec = prepare_run(config, planned_ranks(config.launch))
        found = estimate(spec, spec.planner.all_domains(1, spec.planner.cursor_of(1)))
    free_ns = unreduced_ns(found.plan.domain, spec.table, spec.planner.domain.single_queue)
    return Exposed(found.timeline.makespan_ns / 1e6, free_ns / 1e6)


def main() -> int:
    """Time every run, print, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=list(RUNS), help="one run")
    parser.add_argument("--quick", action="store_true", help="without the 70 B")
    asked = parser.parse_args()
    names = [asked.only] if asked.only else [name for name in RUNS if not (asked.quick and name[:2] == "70")]
    shares, missed = dict[str, float](), list[str]()
    for name in names:
        most, keys = RUNS[name]
        found = exposed(keys)
        shares[name] = round(found.share, 5)
        print(
            f"{name}: step {found.step_ms:,.0f} ms, {found.step_ms - found.free_ms:,.1f} ms exposed, "
            f"{found.share:.2%} ({most:.1%}) (simulated)",
            flush=True,
        )
        if found.share > most:
            missed.append(name)
    print(json.dumps({"benchmark": "exposed_reductions", "exposed": shares, "missed": missed}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

"""The model of memory and bytes against rehearsals of random ranks.

    python benchmarks/memory_model.py [--ranks 20] [--seed 0] [--trace longtail] [--parameters] [OVERRIDES]

By default a step of 262,144 tokens of Llama 3 70B with a ViT of 2.4 B on 128 ranks: TP 8, CP 2, PP 4, DP 2
(experiment=llama3_70b system=multiplexed).
Prints a line for each rank and the largest deviation of each kind of memory, relative to all that the rank
holds, and leaves with 1 if memory or bytes of any rank are off by more than 2 %. The last two columns are
seconds of CPU to build and to run a rank. With --parameters it also builds every rank and adds up the
parameters, each counted once.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from random import Random

from omni.compose import compose_config
from omni.planning.layouts import planned_ranks
from omni.planning.memory import KINDS
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.rehearsal.footprint import Footprint
from omni.rehearsal.footprint_model import model_footprint
from omni.rehearsal.rehearse import owned_parameters, rehearse
from omni.rehearsal.stand_in_data import use_trace
from pipeline.plan import StepPlan

TOLERANCE = 0.02
GIB = 1 << 30
DEFAULT = ["experiment=llama3_70b", "system=multiplexed", "data.step_tokens=262144"]


def total_sent(footprint: Footprint) -> int:
    return sum(sent.total for sent in footprint.traffic.values())


def check(spec: RunSpec, plan: StepPlan, rank: int) -> dict[str, float]:
    """Rehearse and model one rank, print both, and return the deviations."""
    rehearsal, modelled = rehearse(spec, plan, rank), model_footprint(spec, plan, rank)
    found = rehearsal.footprint
    off = {kind: (modelled.peak[kind] - found.peak[kind]) / found.bytes for kind in KINDS}
    off["memory"] = modelled.bytes / found.bytes - 1
    off["sent"] = total_sent(modelled) / max(1, total_sent(found)) - 1
    at = spec.arrangement.mesh.coordinates(rank)
    place = " ".join(f"{at[axis]:3}" for axis in ("tp", "cp", "dp", "pp"))
    print(
        f"{rank:4} {place}  {found.bytes / GIB:9.3f} {modelled.bytes / GIB:9.3f} {off['memory']:+9.4%}"
        f"  {total_sent(found) / GIB:9.3f} {total_sent(modelled) / GIB:9.3f} {off['sent']:+9.4%}"
        f"  {found.at:14} {rehearsal.build_s:7.1f} {rehearsal.step_s:6.1f}",
        flush=True,
    )
    return off


def main() -> int:
    """Check, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", default="longtail")
    parser.add_argument("--parameters", action="store_true")
    parser.add_argument("overrides", nargs="*", default=DEFAULT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = compose_config([*arguments.overrides, f"run.dir={folder}"])
        use_trace(config, arguments.trace, Path(folder) / "trace")
        spec = prepare_run(config, planned_ranks(config.launch))
        plans = dict(enumerate(spec.planner.all_domains(1, 0)))
        for plan in plans.values():
            spec.planner.verify(plan)
        world = spec.arrangement.llm.world
        ranks = sorted(Random(arguments.seed).sample(range(world), min(arguments.ranks, world)))
        print(f"{spec.arrangement.describe()}; {plans[0].taken.tokens} tokens")
        print("rank  tp  cp  dp  pp   held GiB  modelled       off   sent GiB  modelled       off  fullest")
        found = [check(spec, plans[spec.arrangement.domain(rank)], rank) for rank in ranks]
        worst = {key: max((off[key] for off in found), key=abs) for key in found[0]}
        print("largest: " + ", ".join(f"{key} {value:+.4%}" for key, value in worst.items()))
        if arguments.parameters:
            owned = [owned_parameters(spec, rank) for rank in range(spec.arrangement.world)]
            for name in spec.components:
                print(f"parameters of {name}: {sum(of.get(name, 0) for of in owned):,}")
    return int(max(abs(worst["memory"]), abs(worst["sent"])) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())

"""Random configurations on 2 to 8 ranks against one rank: losses, norms, every gradient, weights.

    PYTHONPATH=tests:tests/omni python benchmarks/random_parity.py --seed 0 --count 200
    PYTHONPATH=tests:tests/omni python benchmarks/random_parity.py --quick  # 30 of them, within 3 minutes

The parity matrix has every pair of values of its axes; this draws what nobody listed: all policies of every
kind, all placements and schedules, several virtual stages on a rank, components that are frozen in some
steps, domains, groups of domains, samples longer than a microbatch, bounds on what encoders hold, small
nodes. A case that is refused counts if the message names a key and says what would do; a case that fails,
hangs for two minutes or is beyond the tolerances of `omni/training/parity.py` does not. The same seed and
count draw the same cases. The last line is JSON; the exit code is 1 if any case does not hold.
"""

import argparse
import json
import math
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from parity_runs import LINE, SAMPLES, distance, run, write_data
from ranks import RankError, RankPool
from small import overrides

from omni.compose import compose_config
from omni.config import Config
from omni.planning.fullest import check_first_steps
from omni.planning.prepare import prepare_run
from omni.policies import KINDS
from omni.training.parity import TOLERANCE, WEIGHT_TOLERANCE, Measurement
from parallel.policy import registered

MOST_RANKS = 8
LAYERS = 4
EXPERTS = "{experts: 4, topk: 2, ffn: 48, shared_ffn: 32, dense_layers: 1}"
QUICK = 30
FROZEN = (
    "",
    "",
    "+optim.components={image: {frozen: [[1, 9]]}}",
    "+optim.components={llm: {frozen: [[1, 9]]}}",
    "+optim.components={llm: {frozen: [[2, 9]]}}",
    "+optim.components={image: {frozen: [[1, 2]]}, llm: {frozen: [[2, 9]]}}",
)
# Sections whose policy is drawn by itself; placement and schedule decide what else is drawn.
SECTIONS = ("llm_sp", "encoder_sp", "boundary", "balance", "deal", "packing", "pairing")
KEY = re.compile(r"\b[a-z_]+(\.[a-z_]+)+\b")
REMEDY = re.compile(r"\b(choose|set|give|lower|raise|use|take|keep|leave|at least|add)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Case:
    """A number of ranks, a dataset, the keys that decide what is trained, and those that decide how."""

    world: int
    data: str
    what: tuple[str, ...]
    how: tuple[str, ...]


@dataclass
class Tally:
    """What became of the cases so far."""

    equal: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    gradient: float = 0.0
    loss: float = 0.0
    weights: float = 0.0


def policies_by_section() -> dict[str, list[str]]:
    """The policies that are installed, by the section that chooses them."""
    return {name: registered(kind.group) for name, kind, _ in KINDS}


def draw(rng: random.Random, policies: Mapping[str, list[str]]) -> Case:
    """Return a case at random; most are accepted."""
    placement = rng.choice(policies["placement"])
    beside = rng.randint(1, 2) if placement == "disaggregated" else 0
    world, layout = 0, (1, 1, 1, 1)
    while not 2 <= world <= MOST_RANKS:
        tp, cp, pp = rng.choice((1, 1, 2, 4)), rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 4))
        layout = tp, cp, pp, rng.randint(1, max(1, (MOST_RANKS - beside) // (tp * cp * pp)))
        world = math.prod(layout) + beside
    tp, cp, pp, dp = layout
    how = [f"layout.llm.{axis}={size}" for axis, size in zip(("tp", "cp", "pp", "dp"), layout, strict=True)]
    how += [f"placement.policy={placement}", f"placement.ranks={beside}"]
    how += [f"layout.domain={rng.choice([size for size in range(1, dp + 1) if dp % size == 0])}"]
    how += [f"+layout.encoders.image.tp={rng.choice((1, 1, 2))}"]

    what = [rng.choice(FROZEN)]
    if rng.random() < 0.3:
        what.append(f"model.llm.moe={EXPERTS}")
        how.append(f"layout.llm.ep={rng.choice([ep for ep in (1, 2, 4) if tp * cp * dp % ep == 0])}")
    schedule = rng.choice(policies["pipeline"])
    vpp = 2 if 2 * pp <= LAYERS and ("interleaved" in schedule or schedule == "auto") else 1
    how += [f"pipeline.policy={schedule}", f"layout.llm.vpp={vpp}"]
    how += [f"{section}.policy={rng.choice(policies[section])}" for section in SECTIONS]
    if "packing.policy=entrain" in how and rng.random() < 0.9:
        how = [*(key for key in how if not key.startswith("pairing")), "pairing.policy=in_order"]
    how += [f"balance.group={rng.choice(('null', 1, 2))}", f"cluster.ranks_per_node={rng.choice((1, 2, 8))}"]
    for part in ("llm", "encoders.image"):
        how.append(f"model.{part}.recompute={rng.choice(('none', 'none', 'selective', 'full'))}")
    if rng.random() < 0.25:  # samples of several microbatches, if ranks share them
        how += [f"data.microbatch_tokens={rng.choice((40, 80))}", "data.sample_tokens=160"]
    if rng.random() < 0.15:
        how.append(f"pipeline.encoder_bytes={rng.choice((100_000, 1_000_000, 10_000_000))}")
    return Case(world, rng.choice(("mixed", "mixed", "mixed", "one")), tuple(what), tuple(how))


def compose(folder: Path, case: Case) -> Config:
    """The configuration of a case."""
    fixed = [key for key in LINE if not key.startswith(("pairing", "cluster.ranks_per_node"))]
    line = overrides(folder / case.data, folder / "run", *fixed, samples=SAMPLES[case.data])
    given = {key.partition("=")[0] for key in case.how}
    kept = (key for key in line if key.partition("=")[0] not in given)
    return compose_config([*kept, *(key for key in case.what if key), *case.how])


def judge(
    ranks: RankPool, folder: Path, case: Case, references: dict[Case, Measurement], tally: Tally
) -> str:
    """Run a case and count it; returns what became of it."""
    try:
        config = compose(folder, case)
        spec = prepare_run(config, case.world)
        check_first_steps(spec, 1, 0)
        for plan in spec.planner.all_domains(1, 0):
            spec.planner.verify(plan)
    except ValueError as error:
        key = KEY.search(str(error))
        if key is None or REMEDY.search(str(error)) is None:
            tally.failures.append(f"refused without a remedy: {error}")
            return tally.failures[-1]
        tally.refused[key[0]] += 1
        return f"refused: {str(error)[:90]}"
    except Exception as error:
        tally.failures.append(f"planning failed: {type(error).__name__}: {error}")
        return tally.failures[-1]
    alone = replace(case, world=1, how=())
    try:
        if alone not in references:
            references[alone] = run(ranks, compose(folder, alone), 1)
        found = distance(references[alone], run(ranks, config, case.world))
    except (RankError, AssertionError) as error:
        tally.failures.append(f"failed: {str(error)[-1500:]}")
        return tally.failures[-1]
    tally.gradient = max(tally.gradient, found.gradient.relative)
    tally.loss = max(tally.loss, found.loss)
    tally.weights = max(tally.weights, found.weights.relative)
    first = (found.loss, found.square.relative, found.gradient.relative)
    if all(value <= TOLERANCE for value in first) and found.weights.relative <= WEIGHT_TOLERANCE:
        tally.equal += 1
        return f"equal, gradient {found.gradient.relative:.1e}"
    tally.failures.append(f"beyond tolerance: {found}")
    return tally.failures[-1]


def main() -> int:
    """Draw and run the cases; 1 if any does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} cases")
    given = parser.parse_args()
    count = QUICK if given.quick else given.count
    rng, policies, tally = random.Random(given.seed), policies_by_section(), Tally()
    references: dict[Case, Measurement] = {}
    start, ranks = time.perf_counter(), RankPool()
    with tempfile.TemporaryDirectory() as folder:
        write_data(Path(folder))
        try:
            for number in range(count):
                case, failed = draw(rng, policies), len(tally.failures)
                became = judge(ranks, Path(folder), case, references, tally)
                print(f"{number:4}  {case.world} ranks  {became}", flush=True)
                if len(tally.failures) > failed:
                    print("      ", *map(repr, (case.data, *case.what, *case.how)), flush=True)
        finally:
            ranks.close()
    result = {
        "benchmark": "random_parity",
        "seed": given.seed,
        "count": count,
        "equal": tally.equal,
        "refused": dict(tally.refused),
        "failures": len(tally.failures),
        "worst_gradient": tally.gradient,
        "worst_loss": tally.loss,
        "worst_weights": tally.weights,
        "seconds": round(time.perf_counter() - start),
    }
    print(json.dumps(result))
    return int(bool(tally.failures))


if __name__ == "__main__":
    sys.exit(main())

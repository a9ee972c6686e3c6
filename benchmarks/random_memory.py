"""The model of memory against rehearsals of configurations that nobody listed.

    python benchmarks/random_memory.py --seed 0 --count 50  # 8 minutes, 17 beside other jobs
    python benchmarks/random_memory.py --quick  # a few of them, within 3 minutes

Each case draws sizes of an LLM and of an image encoder, a layout of 1 to 64 ranks, and a policy of every
kind, in bf16. Two ranks of it, one at random and the one that the model says is fullest, are rehearsed on
fake tensors, and the bytes that they hold when they hold most must be within 0.05 % of the model's. What is
refused before that counts by key and is drawn anew, until `--count` cases were rehearsed; a rehearsal that
fails ends the run. The same seed draws the same cases. The last line is JSON; the exit code is 1 if any case
is off.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni.compose import compose_config
from omni.config import Config
from omni.planning.fullest import fullest_rank
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.policies import KINDS
from omni.rehearsal.footprint_model import model_footprint
from omni.rehearsal.rehearse import rehearse
from omni.rehearsal.stand_in_data import use_trace
from parallel.policy import registered
from pipeline.plan import StepPlan

TOLERANCE = 0.0005
MOST_RANKS = 64
QUICK = 8
TRACES = ("balanced", "longtail", "shift")
SAMPLES = 256
RECOMPUTE = ("none", "none", "selective", "full")
NORM = ("RMSNorm", "LayerNorm")
MOMENTS = ("fp32", "bf16")
FROZEN = ("", "", "", "image: {frozen: [[1, 9]]}", "llm: {frozen: [[1, 9]]}")
# Sections whose policy is drawn by itself; placement and schedule decide what else is drawn.
SECTIONS = ("llm_sp", "encoder_sp", "boundary", "balance", "deal", "packing", "pairing")
KEY = re.compile(r"\b[a-z_]+(\.[a-z_]+)+\b")


@dataclass(frozen=True)
class Case:
    """A number of ranks, a trace, and the keys of a run."""

    world: int
    trace: str
    keys: tuple[str, ...]


def policies_by_section() -> dict[str, list[str]]:
    """The policies that are installed, by the section that chooses them."""
    return {name: registered(kind.group) for name, kind, _ in KINDS}


def draw(rng: random.Random, policies: Mapping[str, list[str]]) -> Case:
    """Return a case at random; most are accepted."""
    placement = rng.choice(policies["placement"])
    beside = rng.choice((1, 2, 4)) if placement == "disaggregated" else 0
    sizes: tuple[int, ...] = (0,)
    while not 1 <= math.prod(sizes) <= MOST_RANKS - beside:
        sizes = tuple(rng.choice(of) for of in ((1, 1, 2, 4, 8), (1, 1, 2, 3), (1, 1, 2, 4), (1, 2, 3, 4)))
    tp, cp, pp, dp = sizes
    schedule = rng.choice(policies["pipeline"])
    vpp = rng.choice((2, 2, 3)) if "interleaved" in schedule or schedule == "auto" else 1
    keys = [f"layout.llm.{axis}={size}" for axis, size in zip(("tp", "cp", "pp", "dp"), sizes, strict=True)]
    keys += [f"layout.llm.vpp={vpp}", f"pipeline.policy={schedule}", f"placement.policy={placement}"]
    keys += [f"placement.ranks={beside}", f"cluster.ranks_per_node={rng.choice((2, 8))}"]
    keys += [f"layout.domain={rng.choice([size for size in range(1, dp + 1) if dp % size == 0])}"]
    keys += [f"{section}.policy={rng.choice(policies[section])}" for section in SECTIONS]
    if "packing.policy=entrain" in keys:
        keys[-1] = "pairing.policy=in_order"
    keys += _llm(rng, tp, vpp * pp, tp * cp * dp) + _encoder(rng, tp)
    keys += [f"data.microbatch_tokens={rng.choice((1024, 2048, 4096, 8192))}"]
    keys += [f"data.step_samples={rng.randint(4, 8) * dp}"]
    frozen = rng.choice(FROZEN)
    keys += [f"+optim.components={{{frozen}}}"] if frozen else []
    keys += [f"optim.moments_dtype={rng.choice(MOMENTS)}"]
    return Case(math.prod(sizes) + beside, rng.choice(TRACES), tuple(keys))


def _llm(rng: random.Random, tp: int, virtual_stages: int, ranks: int) -> list[str]:
    """Sizes of an LLM of so many virtual stages, on `ranks` ranks a stage."""
    head, kv_heads = rng.choice((32, 64, 128)), tp * rng.choice((1, 1, 2))
    heads = kv_heads * rng.choice((1, 2, 3))
    sizes: dict[str, Any] = {
        "layers": virtual_stages * rng.randint(1, 3) + rng.choice((0, 0, 1)),
        "hidden": heads * head,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": 64 * tp * rng.randint(1, 2048 // (64 * tp)),
        "norm": rng.choice(NORM),
        "qkv_bias": rng.choice(("true", "false")),
        "tied": rng.choice(("true", "false")),
        "vocab": rng.choice((512, 5000, 32_000, 100_000)),
        "vocab_multiple": 8 * tp,
        "loss_chunk": rng.choice((64, 512, 4096)),
        "recompute": rng.choice(RECOMPUTE),
    }
    if sizes["recompute"] == "full":
        sizes["layers"] += virtual_stages * rng.choice((0, 3))
        sizes["offload"] = rng.randint(0, sizes["layers"] // virtual_stages - 1)
    else:
        sizes["recompute_long"] = rng.random() < 0.5
    if sizes["recompute"] == "full" or sizes["recompute_long"]:
        sizes["keep_attention"] = _keeps(sizes)
    sizes |= _heads(rng, sizes["norm"])
    keys = [f"model.llm.{key}={value}" for key, value in sizes.items()]
    if rng.random() < 0.35:
        experts, shared = rng.choice((4, 8, 12)), tp * rng.choice((0, 32, 64))
        score = rng.choice(("sigmoid", "softmax"))
        moe = {
            "experts": experts,
            "topk": rng.choice((1, 2, 3)),
            "ffn": 32 * rng.randint(1, 24),
            "shared_ffn": shared,
            "dense_layers": rng.choice((0, 1)),
            "score": score,
            "bias_update_rate": "1e-3" if score == "sigmoid" else 0,
        }
        keys += [f"model.llm.moe.{key}={value}" for key, value in moe.items()]
        keys += [f"layout.llm.ep={rng.choice([ep for ep in (1, 2, 4) if experts % ep == ranks % ep == 0])}"]
    return keys


def _heads(rng: random.Random, norm: str) -> dict[str, object]:
    """Where an LLM has norms beside those ahead of its halves, and gates."""
    return {
        "norms": rng.choice(("before", "before", "around", "after")),
        "qk_norm": (normed := rng.random() < 0.5),
        "qk_norm_over": rng.choice(("head", "all")) if normed and norm == "RMSNorm" else "head",
        "output_gate": rng.random() < 0.3,
    }


def _encoder(rng: random.Random, tp: int) -> list[str]:
    """Sizes of an image encoder, divided among as many ranks as layers of the LLM or fewer."""
    own = rng.choice([size for size in (1, 2, 4) if tp % size == 0])
    heads = own * rng.choice((1, 2, 4))
    sizes = {
        "layers": rng.randint(1, 6),
        "hidden": heads * rng.choice((32, 64)),
        "heads": heads,
        "ffn": own * 64 * rng.randint(1, 16),
        "norm": rng.choice(NORM),
        "recompute": rng.choice(RECOMPUTE),
        "patch": 14,
        "max_tokens": rng.choice((256, 1024, 4096)),
    }
    if sizes["recompute"] == "full":
        more = random.Random(repr(sizes))  # of its own: seeds draw the cases that they drew before
        sizes["offload"] = more.randint(0, sizes["layers"] - 1)
        taps = sorted(more.sample(range(1, sizes["layers"]), more.randint(0, sizes["layers"] // 3)))
        sizes["taps"] = more.choice(([], taps))
        sizes["keep_attention"] = _keeps(sizes)
    keys = [f"++model.encoders.image.{key}={value}" for key, value in sizes.items()]
    return [*keys, f"+layout.encoders.image.tp={own}"]


def _keeps(sizes: dict[str, Any]) -> bool:
    """Whether what attention puts out is kept; by what was drawn, so that seeds draw what they did before."""
    return random.Random(repr(sizes)).random() < 0.5


def compose(folder: Path, case: Case) -> Config:
    """The configuration of a case, on its trace, which is written to the folder."""
    fixed = [
        "~experiment",
        "system=multiplexed",
        "model=tiny",
        "data.on_long=truncate",
        "train.steps=3",
        "train.precision=bf16",
    ]
    fixed += ["cluster.queues=one"]  # as GPUs have it
    config = compose_config([*fixed, f"run.dir={folder / 'run'}", *case.keys])
    use_trace(config, case.trace, folder / case.trace, SAMPLES, tell=lambda note: None)
    return config


def verified(spec: RunSpec) -> list[StepPlan]:
    """The plans of a step by domain, as an engine would run them."""
    plans = list(spec.planner.all_domains(1, 0))
    for plan in plans:
        spec.planner.verify(plan)
    return plans


def deviations(spec: RunSpec, plans: Sequence[StepPlan], rng: random.Random) -> dict[int, tuple[float, str]]:
    """Rehearse a rank at random and the fullest: by rank, how far the model is off, and where. Where it is of
    what waits on the host, that is by all.
    """
    found = {}
    for rank in sorted({rng.randrange(spec.arrangement.world), fullest_rank(spec, plans).rank}):
        plan = plans[spec.arrangement.domain(rank)]
        modelled, rehearsed = model_footprint(spec, plan, rank), rehearse(spec, plan, rank).footprint
        off = modelled.bytes / rehearsed.bytes - 1 if modelled.host == rehearsed.host else 1.0
        found[rank] = off, f"{rehearsed.bytes / 1e6:.1f} MB at {rehearsed.at}, modelled at {modelled.at}"
    return found


def main() -> int:
    """Draw and rehearse the cases; 1 if any does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} cases")
    given = parser.parse_args()
    count = QUICK if given.quick else given.count
    policies, start, refused = policies_by_section(), time.perf_counter(), Counter[str]()
    worst, failures, done, number = 0.0, 0, 0, 0
    while done < count:
        rng, number = random.Random(f"{given.seed} {number}"), number + 1
        case = draw(rng, policies)
        with tempfile.TemporaryDirectory() as name:
            try:
                spec = prepare_run(compose(Path(name), case), case.world)
                plans = verified(spec)
            except ValueError as error:
                key = KEY.search(str(error))
                refused[key[0] if key else str(error)] += 1
                print(f"{number - 1:4} refused: {error}"[:200], flush=True)
                continue
            found = deviations(spec, plans, rng)
        done += 1
        most = max(abs(off) for off, _ in found.values())
        worst, failures = max(worst, most), failures + (most > TOLERANCE)
        for rank, (off, at) in found.items():
            print(f"{number - 1:4} rank {rank} of {case.world}: {off:+.4%} of {at}", flush=True)
        if most > TOLERANCE:
            print("     ", case.trace, *case.keys, flush=True)
    result = {
        "benchmark": "random_memory",
        "seed": given.seed,
        "count": count,
        "worst": worst,
        "failures": failures,
        "refused": dict(refused),
        "seconds": round(time.perf_counter() - start),
    }
    print(json.dumps(result))
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())

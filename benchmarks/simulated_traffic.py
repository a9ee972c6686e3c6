"""What the simulator charges against what ranks send: the statement of work against dry runs.

    python benchmarks/simulated_traffic.py [--ranks 2] [--seed 0] [--full]

For random ranks of several configurations (a dense LLM with tp, cp and pp; experts with tp, cp and ep; an
encoder with tp; encoders beside the LLM; images and recordings), at reduced sizes:

  bytes     the bytes that parts state, by group and collective, equal those of a rehearsal
  charge    the time that the cost table adds to a pass for its collectives is that of the stated bytes over
            the links that the groups have, to a thousandth of the pass: a table is linear in tokens and takes
            all for targets, so passes are asked for with as many, and with whole chunks of losses
  routes    every shipment is simulated with the time by which its transport was chosen

With --full the 128 ranks of Llama 3 70B at real shapes as well. Prints a line for each configuration, ends
with one line of JSON and leaves with 1 where something is off.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from random import Random

from omni.commands.plan import plan_of_step
from omni.compose import compose_config
from omni.models.llm import NAME as LLM
from omni.planning.layouts import planned_ranks
from omni.planning.prepare import prepare_run
from omni.planning.rank_work import RankWork, rank_work
from omni.planning.run_spec import RunSpec
from omni.planning.work import part_axes
from omni.rehearsal.rehearse import rehearse
from omni.rehearsal.stand_in_data import use_trace
from omni.rehearsal.traffic import traffic
from parallel.costs import Axes, Talk, WorkCost, collectives_ns
from parallel.transports import node_map, transport_ns
from parallel.work import Grad, Load, Part, even_load, virtual_stage_name
from pipeline.costs import plan_costs
from pipeline.ops import Kind, Op
from pipeline.plan import StepPlan

SMALL = (
    "experiment=llama3_70b",
    "system=multiplexed",
    "model.llm.hidden=256",
    "model.llm.heads=16",
    "model.llm.kv_heads=16",
    "model.llm.ffn=512",
    "model.llm.layers=8",
    "data.microbatch_tokens=2048",
    "data.step_tokens=16384",
    "cluster.ranks_per_node=4",
)
IMAGE = ("model.encoders.image.hidden=128", "model.encoders.image.heads=8", "model.encoders.image.ffn=256",
         "model.encoders.image.layers=2", "model.encoders.image.max_tokens=1024")  # fmt: skip
MOE = "model.llm.moe={experts: 16, topk: 2, ffn: 128, shared_ffn: 128, dense_layers: 1}"
SIZES = {
    "dense": ["layout.llm.tp=2", "layout.llm.cp=2", "layout.llm.pp=2", "launch.ranks=16", *IMAGE],
    "experts": ["layout.llm.tp=2", "layout.llm.cp=2", "layout.llm.pp=2", "layout.llm.ep=4", "launch.ranks=16",
                MOE, *IMAGE],
    "encoder tp": ["layout.llm.tp=1", "layout.llm.cp=1", "layout.llm.pp=4", "launch.ranks=8",
                   "layout.encoders.image.tp=2", *IMAGE],
    "beside": ["layout.llm.tp=2", "layout.llm.cp=1", "layout.llm.pp=2", "launch.ranks=12",
               "placement=disaggregated", "placement.ranks=4", "layout.encoders.image.tp=2", *IMAGE],
}  # fmt: skip
TWO_ENCODERS = [
    "experiment=quickstart",
    "system=multiplexed",
    "model=tiny_audio_vision",
    "launch.ranks=8",
    "layout.llm.tp=2",
    "layout.llm.pp=2",
    "data.heldout={}",
    "data.on_long=truncate",
    "model.encoders.image.patch=14",
    "+layout.encoders.audio.tp=2",
    "data.microbatch_tokens=8192",
    "data.step_tokens=32768",
    "train.precision=bf16",
    "cluster.ranks_per_node=4",
]
FULL = ["experiment=llama3_70b", "system=multiplexed", "data.step_tokens=262144"]
TOLERANCE = 1e-3


def charge_off(spec: RunSpec, work: RankWork, axes: dict[str, Axes]) -> float:
    """The largest deviation of what passes are charged for collectives from their stated bytes and calls."""
    alone = {name: without_talk(spec, name) for name in spec.table.parts}
    worst = 0.0
    for op in work.domain.ops_of(work.domain_rank):
        if op.kind not in (Kind.FORWARD, Kind.BACKWARD, Kind.ENCODE, Kind.ENCODE_BACKWARD):
            continue
        component, part, load = work.of(op)
        name = virtual_stage_name(LLM, op.virtual_stage) if component == LLM else component
        load = all_targets(load, part, 2 * spec.config.model.llm.loss_chunk if component == LLM else part.tp)
        if op.kind in (Kind.FORWARD, Kind.ENCODE):
            stated = part.forward(load).collectives
            taken = [cost.forward_ns(load.tokens, 0) for cost in (spec.table.parts[name], alone[name])]
        else:
            stated = part.backward(load, Grad.BOTH).collectives
            taken = [cost.backward_ns(load.tokens, 0) for cost in (spec.table.parts[name], alone[name])]
        expected, charged = collectives_ns(stated, axes[name]), taken[0] - taken[1]
        worst = max(
            worst, abs(charged - expected) / max(1, spec.table.parts[name].forward_ns(load.tokens, 0))
        )
    return worst


def without_talk(spec: RunSpec, name: str) -> WorkCost:
    """The costs of a part whose ranks have nothing to tell each other."""
    cost = spec.table.parts[name]
    return replace(cost, forward_talk=Talk(), input_talk=Talk(), weight_talk=Talk())


def all_targets(load: Load, part: Part, unit: int) -> Load:
    """The load that tables assume, of about as many tokens, whole units: every token a target, nothing shared
    and every rank sending as many to experts.
    """
    tokens = -(-load.tokens // unit) * unit
    routed = (tokens // part.tp,) * part.ep
    return even_load(tokens, targets=tokens, routed=routed)


def routes_off(spec: RunSpec, plan: StepPlan) -> int:
    """How many shipments are simulated with another time than that of their transport."""
    domain, (_, message) = plan.domain, plan_costs(plan.domain, spec.table)
    nodes = node_map(spec.arrangement.global_ranks(plan.number), spec.cluster.ranks_per_node)
    wrong = 0
    for m, route in enumerate(domain.routes):
        if route is not None:
            for kind, way in ((Kind.SHIP, route), (Kind.RETURN, route.transpose())):
                ns = transport_ns(
                    way.transport, way.traffic(), nodes, spec.table.row_bytes, spec.cluster.links
                )
                wrong += message(Op(kind, m)) != ns
    return wrong


def check(name: str, line: list[str], seed: int, num_ranks: int) -> dict[str, float]:
    """Check random ranks of a configuration, print and return what was off."""
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        config = compose_config([*line, f"run.dir={folder}"])
        use_trace(config, "balanced", Path(folder) / "trace")
        spec = prepare_run(config, planned_ranks(config.launch))
        axes = part_axes(spec.work, spec.encoders, spec.arrangement, spec.cluster)
        world = spec.arrangement.world
        ranks = sorted(Random(seed).sample(range(world), min(num_ranks, world)))
        off = {"bytes": 0.0, "charge": 0.0, "routes": 0.0}
        sent = shipped = 0
        for rank in ranks:
            plan = plan_of_step(spec, 1, spec.arrangement.domain(rank))
            work = rank_work(spec, plan, rank)
            found, stated = rehearse(spec, plan, rank).footprint.traffic, traffic(spec, work)
            off["bytes"] += sum(found.get(key) != stated.get(key) for key in {*found, *stated})
            off["charge"] = max(off["charge"], charge_off(spec, work, axes))
            off["routes"] += routes_off(spec, plan)
            sent += sum(of.total for of in found.values())
            shipped += sum(route is not None and not route.is_local for route in plan.domain.routes)
        seconds = time.process_time() - start
        print(
            f"{name:12} {spec.arrangement.describe():34} ranks {ranks}: {sent / 2**20:9.1f} MiB sent, "
            f"{int(off['bytes'])} groups differ; charge off by {off['charge']:.1e}; {shipped} routes, "
            f"{int(off['routes'])} differ; {seconds:.0f} s",
            flush=True,
        )
    return off


def main() -> int:
    """Check all configurations, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--full", action="store_true")
    arguments = parser.parse_args()
    lines = {name: [*SMALL, *line] for name, line in SIZES.items()} | {"two encoders": TWO_ENCODERS}
    if arguments.full:
        lines["llama3_70b"] = FULL
    found = {name: check(name, line, arguments.seed, arguments.ranks) for name, line in lines.items()}
    worst = {key: max(off[key] for off in found.values()) for key in ("bytes", "charge", "routes")}
    holds = not worst["bytes"] and not worst["routes"] and worst["charge"] <= TOLERANCE
    print(
        json.dumps({"benchmark": "simulated_traffic", "configurations": len(found), **worst, "holds": holds})
    )
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())

"""Systems measured on real ranks, in turn: two that compute, and four and eight whose compute is SLEPT.

    python benchmarks/compare_measured.py [--only pp2] [--quick]

`omni compare --measure` on two ranks of one thread, gloo: a decoder of hidden 256 and an encoder of about
half its work, images of uneven sizes, in two layouts: `pp2` of two stages, and `dp2`, in which a rank beside
the LLM is possible. With more ranks than cores a rank computes while another idles, so bubbles vanish: four
and eight ranks train a tiny model, and before each pass they sleep for as long as it would take on a slow
cluster. Two replicas of two and of four stages; those with encoders beside the LLM have one replica, and as
many ranks that encode.

A pass of the tiny model and its messages take real time, the more the more processes share the cores. That is
measured first, in steps without sleep, and is what starting an op costs on the slow cluster
(`cluster.op_overhead_ns`): whatever chooses knows it, and ranks sleep that much less.

All systems have a few turns, then `omni` and the three quickest many more, which alone are judged: 10 and 120
on two ranks, 2 and 12 on ranks that sleep, which take seconds for a step. Half an hour at most on two cores.

A step is timed as `omni.training.side_by_side` says. Leaves with 1 where, in some layout, `omni` is neither
the quickest nor within the 95 % interval of its ratio to that. The last line is JSON.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from pathlib import Path

import torch
import torch.distributed as dist
from joint_runs import LENGTH, cores_awake, spawn, write_data

from infra.run_folder import RunFolder
from omni.commands._side_by_side import MeasuredSystem, lines, measure, overrides
from omni.commands.compare import known_systems
from omni.compose import compose_config
from omni.config import Config
from omni.data_config import SourceConfig
from omni.planning.choice import with_keys
from omni.planning.prepare import prepare_run
from omni.rehearsal.compare import comparable
from omni.training.ahead import Prepared
from omni.training.side_by_side import WARMUP, alternate, interval, over
from omni.training.trainer import Trainer
from parallel.work import Grad
from pipeline.costs import plan_costs
from pipeline.ops import BACKWARDS, COMPUTE, Op

Seconds = dict[str, list[float]]
OMNI, PLAIN, FOUND, IMAGE = "omni", "megatron", "found.json", "model.encoders.image"
COMPUTED = (
    "model.llm.layers=4", "model.llm.hidden=256", "model.llm.heads=8", "model.llm.kv_heads=8",
    "model.llm.ffn=704", f"{IMAGE}.layers=2", f"{IMAGE}.hidden=160", f"{IMAGE}.ffn=480",
    "data.microbatch_tokens=256", "costs.learn=true",
)  # fmt: skip
SLEPT = (
    "model.llm.hidden=32", "model.llm.heads=2", "model.llm.kv_heads=2", "model.llm.ffn=64",
    f"{IMAGE}.layers=2", f"{IMAGE}.hidden=32", f"{IMAGE}.ffn=64", "data.microbatch_tokens=512",
)  # fmt: skip
MICROBATCHES = {"pp2": 4, "dp2": 3, "slept, 4 ranks": 6, "slept, 8 ranks": 6}  # of a replica
TURNS = {"pp2": 120, "dp2": 120, "slept, 4 ranks": 12, "slept, 8 ranks": 12}
QUICK_TURNS = {"pp2": 10, "dp2": 10, "slept, 4 ranks": 2, "slept, 8 ranks": 2}
FIRST_TURNS = {"pp2": 10, "dp2": 10, "slept, 4 ranks": 2, "slept, 8 ranks": 2}  # of all systems
FINALISTS = 3  # of them beside omni
QUICK = ("pp2", "slept, 4 ranks")
REAL_TURNS = 2
FLOPS_PER_RANK = 4e9
"""Of a slept cluster, by the number of its ranks: with more ranks than cores they hold each other up, and the
longer passes are, the smaller that is."""


def settings() -> dict[str, tuple[int, Sequence[str], bool]]:
    """By name: ranks, keys, and whether compute is slept."""
    slept = {
        f"slept, {ranks} ranks": (
            ranks,
            (*SLEPT, f"layout.llm.pp={ranks // 2}", f"model.llm.layers={ranks // 2}",
             f"cluster.flops.fp32={FLOPS_PER_RANK / ranks:.0f}"),
            True,
        )
        for ranks in (4, 8)
    }  # fmt: skip
    return {"pp2": (2, (*COMPUTED, "layout.llm.pp=2"), False), "dp2": (2, COMPUTED, False), **slept}


def configs_of(
    folder: Path, ranks: int, keys: Sequence[str], microbatches: int, turns: int
) -> dict[str, Config]:
    """The runs of all systems, with so many microbatches of a replica."""
    tokens = next(int(key.partition("=")[2]) for key in keys if key.startswith("data.microbatch_tokens"))
    replicas = 2 if "layout.llm.pp=2" not in keys or ranks > 2 else 1
    more = (
        "cluster=cpu", f"launch.ranks={ranks}", "launch.oversubscribe=true", f"{IMAGE}.max_side=128",
        "data.step_tokens=null", f"data.step_samples={replicas * microbatches * tokens // LENGTH}",
        "train.precision=fp32",
    )  # fmt: skip
    found = {}
    for name in known_systems():
        found[name] = compose_config([*more, *keys, *overrides(turns), f"system={name}"])
        found[name].data.sources = {"images": SourceConfig(path=str(folder / "images"))}
        found[name].data.heldout = {}
        found[name].run.dir = str(folder / f"{name}-{ranks}")
    return found


def passes(op: Op) -> int:
    """Passes that an op starts, as cost tables count them: a backward of input and weights is two."""
    return 0 if op.kind not in COMPUTE else 2 if op.kind in BACKWARDS and op.grad is Grad.BOTH else 1


def sleeping(trainer: Trainer, prepared: Prepared) -> None:
    """Let a rank sleep before each pass for as long as its cost table says, but for the real pass."""
    cost, _ = plan_costs(prepared.plan.domain, trainer.tables.at(prepared.plan.step))
    real_ns = trainer.config.cluster.op_overhead_ns

    def sleep(op: Op) -> None:
        trainer.note(op)
        if op.kind in COMPUTE:
            time.sleep(max(0, cost(trainer.rank.domain_rank, op) - passes(op) * real_ns) / 1e9)

    trainer.rank.engine.on_op = sleep


def work(rank: int, folder: Path, configs: Mapping[str, Config], turns: int, sleeps: bool) -> None:
    """One rank: all systems in turn; the first leaves in `folder`, which is its own, seconds by system, and
    the passes of its last step.
    """
    os.environ["WANDB_MODE"] = "offline"
    torch.set_num_threads(1)
    world = next(iter(configs.values())).launch.ranks or 0
    dist.init_process_group("gloo", f"file://{folder / 'store'}", rank=rank, world_size=world)
    trainers = [
        Trainer(prepare_run(of, world), RunFolder.create(folder / name), rank, torch.device("cpu"))
        for name, of in configs.items()
    ]
    count = 0

    def before(trainer: Trainer, prepared: Prepared) -> None:
        nonlocal count
        count = sum(map(passes, prepared.plan.domain.ops[trainer.rank.domain_rank]))
        if sleeps:
            sleeping(trainer, prepared)

    found = alternate(trainers, turns, before)
    if rank == 0:
        (folder / FOUND).write_text(json.dumps({"seconds": found, "passes": count}))
    dist.barrier()
    dist.destroy_process_group()


def turns_of(folder: Path, ready: Mapping[str, Config], turns: int, sleeps: bool) -> tuple[Seconds, int]:
    """Seconds of each turn by system, and the passes of a rank's step."""
    ranks = next(iter(ready.values())).launch.ranks or 0
    with tempfile.TemporaryDirectory(dir=folder) as own:
        spawn(work, (Path(own), ready, turns, sleeps), ranks)
        found = json.loads((Path(own) / FOUND).read_text())
    return dict(zip(ready, found["seconds"], strict=True)), found["passes"]


def real_pass_ns(folder: Path, config: Config) -> int:
    """What a pass of the tiny model takes, with its messages, while all ranks share the cores."""
    ready = prepare_run(with_keys(config, comparable(config)), config.launch.ranks or 0).config
    seconds, passes = turns_of(folder, {"real": ready}, REAL_TURNS, sleeps=False)
    return int(interval(seconds["real"])[0] * 1e9) // passes


def finalists(seconds: Mapping[str, Sequence[float]]) -> list[str]:
    """Omni and the quickest beside it, by their least turns: what holds the machine up for one turn must not
    keep a system out.
    """
    return [OMNI, *sorted(seconds.keys() - {OMNI}, key=lambda name: min(seconds[name]))[:FINALISTS]]


def computed(configs: Mapping[str, Config], first: int, turns: int) -> Iterator[list[MeasuredSystem]]:
    """Measure systems that compute: all of them for `first` turns, then for `turns` the finalists."""

    def of(config: Config, turns: int) -> Config:
        return replace(config, train=replace(config.train, steps=WARMUP + turns))

    found = measure({name: of(config, first) for name, config in configs.items()})
    yield found
    seconds = {own.system: own.seconds for own in found if own.seconds}
    if OMNI in seconds and turns > first:
        yield measure({name: of(configs[name], turns) for name in finalists(seconds)})


def slept(
    folder: Path, configs: Mapping[str, Config], first: int, turns: int
) -> Iterator[list[MeasuredSystem]]:
    """Measure systems on ranks that sleep: all of them for `first` turns, then for `turns` the finalists."""
    ready, refused = dict[str, Config](), list[MeasuredSystem]()
    real_ns = real_pass_ns(folder, configs[PLAIN])
    print(f"a real pass of {configs[PLAIN].launch.ranks} ranks: {real_ns / 1e6:.1f} ms", flush=True)
    for name, config in configs.items():
        config.cluster.op_overhead_ns = real_ns
        config = with_keys(config, comparable(config))
        try:
            ready[name] = prepare_run(config, config.launch.ranks or 0).config
        except ValueError as error:
            refused.append(MeasuredSystem(name, refused=str(error)))
    seconds, _ = turns_of(folder, ready, first, sleeps=True)
    yield [*starmap(MeasuredSystem, seconds.items()), *refused]
    if OMNI not in ready:
        return
    last = {name: ready[name] for name in finalists(seconds)}
    yield [*starmap(MeasuredSystem, turns_of(folder, last, turns, sleeps=True)[0].items())]


def missed(setting: str, found: Sequence[MeasuredSystem]) -> Iterator[str]:
    """Say so where some system is quicker than omni, beyond the interval."""
    seconds = {of.system: of.seconds for of in found if of.seconds}
    if OMNI not in seconds:
        yield f"{setting}: omni is refused"
        return
    first = min(seconds, key=lambda name: interval(seconds[name])[0])
    ratio, low, _ = over(seconds[OMNI], seconds[first])
    if first != OMNI and low > 1:
        yield f"{setting}: omni takes {ratio:.3f} times what {first} does, at least {low:.3f}"


def main() -> int:
    """Measure every setting, print, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = settings()
    parser.add_argument("--only", choices=list(every), help="one setting")
    parser.add_argument("--quick", action="store_true", help="10 turns of pp2, 2 of four ranks that sleep")
    asked = parser.parse_args()
    turns = QUICK_TURNS if asked.quick else TURNS
    names = (asked.only,) if asked.only else QUICK if asked.quick else every
    table, problems = dict[str, list[object]](), list[str]()
    with tempfile.TemporaryDirectory() as made, cores_awake():
        folder = Path(made)
        write_data(folder / "images", 512)
        for name in names:
            ranks, keys, sleeps = every[name]
            configs = configs_of(folder, ranks, keys, MICROBATCHES[name], turns[name])
            counts = FIRST_TURNS[name], turns[name]
            for found in slept(folder, configs, *counts) if sleeps else computed(configs, *counts):
                print("\n".join(f"{name}: {line}" for line in lines(found)), flush=True)
                rounds = table.setdefault(name, [])
                rounds.append({of.system: [*of.seconds] or of.refused for of in found})
            problems += missed(name, found)
    for problem in problems:
        print(f"missed: {problem}")
    print(json.dumps({"benchmark": "compare_measured", "seconds": table, "missed": problems}))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

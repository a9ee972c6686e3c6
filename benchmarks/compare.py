"""Every system on MegaScale-Omni's workloads, over mixtures of images and text. Simulated.

    python benchmarks/compare.py [--workload A,B,C,D] [--mixtures 1:9,5:5,9:1] [--systems omni,megatron,…]
        [--samples 64] [--seed 0] [--memory] [--jobs 1] [--html compare.html] [--quick]

Encoder, LLM and GPUs are those that the paper names (arXiv 2605.08962): A is a ViT of 1 B with an LLM of 12 B
on 64 GPUs, B 2.4 B with 70 B on 128, C 10 B with 70 B on 256, D 10 B with 175 B on 512. Shapes and layouts
are ours, `hydra_conf/model` and `WORKLOADS`, and so is the data: samples are those of the trace `longtail` of
at most 16,384 tokens (A, B) or 8,192 (C, D), whole, all items as images, so many samples with items to so
many without. There are as many a replica as --samples says. `cluster=h100`; what ranks hold is printed. With
--memory it is bounded by the 74.5 GiB of an H100, and for every system it is chosen what the LLM recomputes.

A system's step is that of `omni compare`: all pack without padding and are counted alike, so ratios are of
policies, and not those that whole systems reach.

Leaves with 1 where `omni` is slower than some preset that fits on more than a twentieth of the cells, a
workload and a mixture each, or anywhere by more than 2 %, or does not fit. The last line is JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from dataloader.trace import all_as, generate
from infra.run_folder import write_text
from omni.commands._compare_page import page
from omni.commands.compare import known_systems, lines
from omni.compose import compose_config
from omni.rehearsal.compare import Cell, MixedTrace, compare
from omni.rehearsal.mixtures import mixed, read_mixtures

_COMMON = (
    "~experiment", "cluster=h100", "train.steps=1", "train.precision=bf16", "optim.lr=1e-4",
    "data.step_tokens=null", "+data.sources.trace.path=none",
)  # fmt: skip
_12B = ("hidden=5120", "layers=36", "ffn=13824", "heads=40", "kv_heads=40")
WORKLOADS: dict[str, tuple[int, int, int, tuple[str, ...]]] = {
    "A": (64, 8, 16_384, ("+model/llm=llama3_8b", "+model/encoder@model.encoders.image=vit_1b", "layout=tp2",
                          "layout.llm.pp=4", "+layout.encoders.image.tp=2",
                          *(f"model.llm.{key}" for key in _12B))),
    "B": (128, 4, 16_384, ("+model/llm=llama3_70b", "+model/encoder@model.encoders.image=vit_2b4",
                           "layout=tp8_pp4", "+layout.encoders.image.tp=8")),
    "C": (256, 8, 8_192, ("+model/llm=llama3_70b", "+model/encoder@model.encoders.image=vit_10b",
                          "layout=tp8_pp4", "+layout.encoders.image.tp=8")),
    "D": (512, 8, 8_192, ("+model/llm=gpt_175b", "+model/encoder@model.encoders.image=vit_10b",
                          "layout=tp8_pp4", "layout.llm.pp=8", "+layout.encoders.image.tp=8")),
}  # fmt: skip
"""GPUs, replicas of the LLM if encoders have none of their own, tokens of a sample, and keys."""
OMNI = "omni"
MISSED_SHARE, MOST_BELOW = 0.05, 0.02


def samples_of(asked: argparse.Namespace, workload: str, mixture: str) -> MixedTrace:
    """The samples of a step."""
    _, replicas, longest, _ = WORKLOADS[workload]
    trace = all_as("image", generate("longtail", asked.samples * replicas, asked.seed, longest))
    (weights,) = read_mixtures(mixture).values()
    return MixedTrace(*(mixed(trace, of) for of in reversed(weights)))


def cells_of(asked: argparse.Namespace, where: tuple[str, str]) -> tuple[list[Cell], float]:
    """All systems on a workload and a mixture, and seconds of the CPU."""
    workload, mixture = where
    ranks, _, longest, keys = WORKLOADS[workload]
    samples, begin = samples_of(asked, workload, mixture), time.process_time()
    more = [
        f"launch.ranks={ranks}", f"data.microbatch_tokens={longest}",
        f"data.step_samples={len(samples.trace)}",
        "model.llm.recompute=auto" if asked.memory else "cluster.memory_bytes=null",
    ]  # fmt: skip
    configs = {name: compose_config([*_COMMON, *keys, *more, f"system={name}"]) for name in asked.systems}
    found = list(compare(configs, {f"{workload}, {mixture}": samples}, lambda what: None))
    return found, time.process_time() - begin


def missed(table: dict[tuple[str, str], Sequence[Cell]]) -> Iterator[str]:
    """Say where omni is slower than a preset that fits, if that is in too many cells or by too much."""
    below = list[tuple[float, str]]()
    for (workload, mixture), cells in table.items():
        steps = {cell.system: cell.figures.step_s for cell in cells if cell.figures and cell.figures.fits}
        if OMNI not in {cell.system for cell in cells}:
            continue
        if OMNI not in steps:
            yield f"{workload}, {mixture}: omni is refused or does not fit"
            continue
        best = min(steps, key=lambda name: steps[name])
        if steps[OMNI] > steps[best]:
            slower = steps[OMNI] / steps[best] - 1
            below.append((slower, f"{workload}, {mixture}: {best} takes {slower:.1%} less than omni"))
    most = len(below) > MISSED_SHARE * len(table)
    yield from (text for slower, text in below if most or slower > MOST_BELOW)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = known_systems()
    parser.add_argument("--workload", type=lambda text: text.split(","), default=list(WORKLOADS))
    parser.add_argument("--mixtures", type=lambda text: text.split(","), default=["1:9", "5:5", "9:1"])
    parser.add_argument("--systems", type=lambda text: text.split(","), default=names)
    parser.add_argument("--samples", type=int, default=64, help="of a replica")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--memory", action="store_true", help="bound what ranks hold by an H100, and choose recomputation"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes, each a workload and a mixture")
    parser.add_argument("--html", type=Path, help="write a page with charts")
    parser.add_argument("--quick", action="store_true", help="workload A, 16 samples a replica")
    asked = parser.parse_args()
    if asked.quick:
        asked.workload, asked.samples = ["A"], 16
    return asked


def main() -> int:
    """Plan, simulate, print, judge."""
    asked, table = arguments(), dict[tuple[str, str], Sequence[Cell]]()
    settings = list(product(asked.workload, asked.mixtures))
    with get_context("spawn").Pool(asked.jobs) as pool:
        for where, (cells, seconds) in zip(
            settings, pool.imap(partial(cells_of, asked), settings), strict=True
        ):
            table[where] = cells
            *rows, _ = lines(cells)
            print("\n".join(rows), f"({seconds:.0f} s of the CPU)\n", flush=True)
    if asked.html:
        every = [cell for cells in table.values() for cell in cells]
        write_text(asked.html, page(every, "benchmarks/compare.py"))
    problems = list(missed(table))
    for problem in problems:
        print(f"missed: {problem}")
    result = {
        ", ".join(where): {cell.system: cell.as_json().get("simulated") or cell.refused for cell in cells}
        for where, cells in table.items()
    }
    print(json.dumps({"benchmark": "compare", "simulated": result, "missed": problems}))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

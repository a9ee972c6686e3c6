"""Steps that are hard to share out, and what a run that names no policy makes of them. Simulated.

    python benchmarks/hard_traces.py [--case video,text,…] [--ranks 64] [--quick]

Llama 3 8B with a ViT-H on `cluster=h100`, data parallelism alone, 16,384 tokens a microbatch, memory not
asked about: on 64 ranks, steps of 1,024 samples, of which short ones have 200 to 1,200 tokens and every other
one an image of 576 patches:

    video           short ones, and one video of a million patches
    text            short ones, and one text of a million tokens
    long            1,008 short ones, 16 of 65,536 tokens
    few             24 samples, fewer than ranks
    texts, images   no images; images alone
    tiny            262,144 texts of 8 tokens

The figure is the slowest domain's step over all work of all domains / all ranks, as in `default.py`. No
sample is cut. Leaves with 1 where it is above 1.15 (with `few`, whose ranks cannot all be busy, it is not
judged). `seconds` are of the CPU, for choosing and for planning all domains. The last line is JSON.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from random import Random

from whole_step import Figures, measure

from dataloader.tokens import ItemMeta, SampleMeta
from omni.compose import compose_config
from omni.planning.choice import text_of
from omni.planning.cut import cut_of
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec

LIMIT = 1.15
FEW = 24
KEYS = (
    "~experiment", "system=omni", "+model/llm=llama3_8b", "+model/encoder@model.encoders.image=vit_h14",
    "cluster=h100", "cluster.memory_bytes=null", "train.steps=1", "train.precision=bf16", "optim.lr=1e-4",
    "data.microbatch_tokens=16384", "data.on_long=truncate", "+data.sources.trace.path=none",
)  # fmt: skip


def sample(number: int, text: int, patches: int = 0) -> SampleMeta:
    """A sample of so many tokens of text, and an image or video, if it has patches."""
    items = (ItemMeta("image", patches, patches // 4, text // 2, ()),) if patches else ()
    return SampleMeta(number, "trace", text, items, 4 * text)


def short(count: int) -> list[SampleMeta]:
    """Samples of 200 to 1,200 tokens, every other with an image."""
    draw = Random(0)
    return [sample(n, draw.randint(200, 1200), 576 * (n % 2)) for n in range(count)]


CASES: dict[str, Callable[[], list[SampleMeta]]] = {
    "video": lambda: [*short(1023), sample(1023, 100, 1_000_000)],
    "text": lambda: [*short(1023), sample(1023, 1_000_000)],
    "long": lambda: [*short(1008), *(sample(1008 + n, 65_535) for n in range(16))],
    "few": lambda: short(FEW),
    "texts": lambda: [sample(meta.id, meta.text_tokens) for meta in short(1024)],
    "images": lambda: [sample(n, 1, 576 + 64 * (n % 31)) for n in range(1024)],
    "tiny": lambda: [sample(n, 7) for n in range(262_144)],
}


def run_of(name: str, ranks: int) -> RunSpec:
    """A run whose steps are those of a case."""
    trace = CASES[name]()
    steps = [f"launch.ranks={ranks}", "data.step_tokens=null", f"data.step_samples={len(trace)}"]
    return prepare_run(compose_config([*KEYS, *steps]), ranks, trace)


def missed(name: str, found: Figures, cut: float) -> Iterator[str]:
    """Say which targets a case misses."""
    if cut:
        yield f"{name}: {cut:.1%} of tokens are cut"
    if name != "few" and found.slowest > LIMIT:
        yield f"{name}: {found.slowest:.3f}, at most {LIMIT}"


def main() -> int:
    """Prepare, plan, simulate, print, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="all but the 262,144 tiny ones")
    asked = parser.parse_args()
    names = [name for name in asked.case if not (asked.quick and name == "tiny")]
    result, problems = {}, []
    print(f"{'case':8} {'over':>7} {'step ms':>10} {'cut':>6} {'choosing s':>11} {'planning s':>11}  chosen")
    for name in names:
        begin = time.process_time()
        spec = run_of(name, asked.ranks)
        chose = time.process_time()
        found = measure(spec, None)
        planned = time.process_time()
        cut = cut_of(spec.planner, spec.planner.world.take(0)).tokens
        assert spec.choice is not None
        keys = text_of(spec.choice.keys)
        print(
            f"{name:8} {found.slowest:7.3f} {found.step_ms:10,.1f} {cut:6.1%} {chose - begin:11.1f} "
            f"{planned - chose:11.1f}  {keys}",
            flush=True,
        )
        result[name] = {**asdict(found), "cut": cut, "chosen": keys}
        problems += missed(name, found, cut)
    for problem in problems:
        print(f"missed: {problem}")
    print(json.dumps({"benchmark": "hard_traces", "simulated": result, "missed": problems}))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())

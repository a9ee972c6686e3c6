"""What published systems add, each thing switched on alone, on work that its paper favours. Simulated.

    python benchmarks/mechanisms.py [--only dhp] [--quick]

Every row has two runs that differ in one mechanism and nothing else: the same model, samples, cluster (H100)
and engine. `x` is the tokens/s of a GPU with it over those without. `published` is what its authors report
for their whole system over theirs, where that is known first-hand, and `differs` says why it need not be the
same. Models, layouts and samples stand in `ROWS`; memory is not bounded. `megatron` is what others begin
with and has no mechanism of its own.

Leaves with 1 where a mechanism does not win. The last line is JSON. `--quick` has a quarter of the samples.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from dataloader.tokens import ItemMeta, SampleMeta
from dataloader.trace import all_as, generate
from omni.compose import compose_config
from omni.rehearsal.compare import Cell, MixedTrace, compare
from omni.rehearsal.mixtures import mixed

COMMON = (
    "~experiment", "cluster=h100", "cluster.memory_bytes=null", "train.steps=1", "train.precision=bf16",
    "optim.lr=1e-4", "data.step_tokens=null", "+data.sources.trace.path=none",
)  # fmt: skip
OFF, ON = "off", "on"
Draw = Callable[[np.random.Generator], float]


def model(llm: str, encoder: str | None, **layout: int) -> tuple[str, ...]:
    """Keys of a model, and of the LLM's layout."""
    keys = [f"+model/llm={llm}", *(f"layout.llm.{axis}={size}" for axis, size in layout.items())]
    return (*keys, *[f"+model/encoder@model.encoders.image={encoder}"] * (encoder is not None))


def drawn(count: int, text: Draw, rows: Draw | None = None, longest: int = 8192) -> list[SampleMeta]:
    """Samples of a text each, and of an image of so many rows, four patches each; shortened to `longest`."""
    rng, out = np.random.default_rng(0), list[SampleMeta]()
    for n in range(count):
        own = min(int(rows(rng)), longest // 2) if rows else 0
        image = (ItemMeta("image", 4 * own, own, 0, ()),) * (own > 0)
        out.append(SampleMeta(n, "drawn", min(max(1, int(text(rng))), longest - own - 2), image, 0))
    return out


def longtail(count: int, images: int, texts: int) -> list[SampleMeta]:
    """Whole samples of the trace `longtail`, so many with images to so many without."""
    return mixed(all_as("image", generate("longtail", count, 0, 8192)), (images, texts))


@dataclass(frozen=True)
class Row:
    """A mechanism: keys of the run without it and of the run with it, on `ranks` each."""

    preset: str
    mechanism: str
    workload: str
    ranks: tuple[int, int]
    keys: Sequence[str]
    off: Sequence[str]
    on: Sequence[str]
    samples: Sequence[SampleMeta]
    microbatch: int = 8192
    published: str = ""
    differs: str = ""
    before: Sequence[SampleMeta] = field(default=())

    def run(self, share: int) -> tuple[Cell, Cell]:
        """Simulate both on one of so many shares of the samples."""
        count = len(self.samples) // share
        step = (f"data.microbatch_tokens={self.microbatch}", f"data.step_samples={count}")
        configs = {
            name: compose_config([*COMMON, *self.keys, *step, f"launch.ranks={ranks}", *own])
            for name, ranks, own in zip((OFF, ON), self.ranks, (self.off, self.on), strict=True)
        }
        trace = MixedTrace(self.samples[:count], self.before[: len(self.before) // share])
        off, on = compare(configs, {self.workload: trace}, lambda what: None)
        return off, on


def _rows() -> list[Row]:
    """All mechanisms. Samples are drawn anew by each call, alike."""
    chats = drawn(1024, lambda rng: rng.lognormal(5.5, 0.6), lambda rng: 144 * rng.integers(1, 9))
    documents = drawn(512, lambda rng: rng.lognormal(5.5, 0.5), lambda rng: rng.normal(700, 60))
    captions = drawn(1536, lambda rng: rng.lognormal(2.4, 0.5), lambda rng: rng.lognormal(5.7, 0.8))
    charts = drawn(512, lambda rng: rng.lognormal(6, 1), lambda rng: rng.choice((400, 1600)), longest=4096)
    videos = drawn(1024, lambda rng: rng.lognormal(np.log(3000), 1.4), longest=131_072)
    few, many = longtail(1024, 1, 9), longtail(1024, 9, 1)
    megascale = (*model("llama3_8b", "vit_1b", tp=2, pp=4), "+layout.encoders.image.tp=2")
    apart = ("placement=disaggregated",)
    return [
        Row(
            "mimo_colocated", "a layout of the encoder's own: tp 1 in place of the LLM's 8",
            "ViT-L with 8 B, tp8, chats with images", (32, 32), model("llama3_8b", "vit_l14", tp=8),
            ("system=mimo_colocated", "+layout.encoders.image.tp=8"), ("system=mimo_colocated",), chats,
            published="up to 1.49 in TFLOPS of a GPU", differs="theirs is of other models",
        ),
        Row(
            "mimo_disaggregated", "one rank for the encoder beside 16",
            "SO400M with 32 B, tp4 pp2, documents", (16, 17), model("qwen3_32b", "vit_so400m", tp=4, pp=2),
            ("system=megatron", "+layout.encoders.image.tp=4"), ("system=mimo_disaggregated",), documents,
            published="1.23 to 1.45 in tokens/s of a GPU",
            differs="theirs is Qwen3.5-VL-27B, on three datasets",
        ),
        Row(
            "disttrain", "encoders on ranks of their own, as many as they need",
            "ViT-H with 8 B, tp2 pp4, captions", (96, 96), model("llama3_8b", "vit_h14", tp=2, pp=4),
            ("system=megatron",), ("system=megatron", *apart), captions,
            published="up to 2.2 over Megatron-LM", differs="theirs is the whole system, with a generator",
        ),
        Row(
            "disttrain", "samples dealt by cost, microbatches in the order that fills intervals",
            "ViT-H with 8 B, tp2 pp4, captions", (96, 96), model("llama3_8b", "vit_h14", tp=2, pp=4),
            ("system=disttrain", "balance=none", "pairing=in_order"), ("system=disttrain",), captions,
        ),
        Row(
            "entrain", "samples dealt in strata of encoder work", "ViT-H with 1 B, tp2 pp4, charts",
            (64, 64), model("llama3_1b", "vit_h14", tp=2, pp=4),
            ("system=entrain", "balance=none"), ("system=entrain",), charts, microbatch=4096,
        ),
        Row(
            "dhp", "each sequence over as many ranks as it needs, not all of cp 8",
            "8 B, cp8, texts to 131,072 tokens", (64, 64), model("llama3_8b", None, cp=8),
            ("system=megatron",), ("system=megatron", "llm_sp=dhp", "layout.domain=8"), videos,
            microbatch=131_072, published="up to 1.36; its second version 1.46 in the mean",
            differs="theirs are of multimodal models on another cluster",
        ),
        Row(
            "encode_first", "all ranks encode, not the first stage",
            "ViT-H with 32 B, tp4 pp4, whole samples", (64, 64), model("qwen3_32b", "vit_h14", tp=4, pp=4),
            ("system=encode_first", "placement=stage0", "pipeline=one_f_one_b"), ("system=encode_first",),
            many,
        ),
        Row(
            "megascale_omni", "long items shared", "ViT-1B with 8 B, tp2 pp4, one to nine",
            (64, 64), megascale, ("system=megascale_omni", "encoder_sp=none"), ("system=megascale_omni",),
            few,
        ),
        Row(
            "megascale_omni", "samples reordered by cost in groups", "ViT-1B with 8 B, tp2 pp4, nine to one",
            (64, 64), megascale,
            ("system=megascale_omni", "deal=by_length", "balance=none", "pairing=in_order"),
            ("system=megascale_omni",), many,
        ),
        Row(
            "megascale_omni", "equal encoder work before each forward, not its own microbatch's",
            "ViT-1B with 8 B, tp2 pp4, nine to one", (64, 64), megascale,
            ("system=megascale_omni", "pipeline=one_f_one_b"), ("system=megascale_omni",), many,
        ),
        Row(
            "megascale_omni", "encoders on all ranks, not on ranks of their own",
            "ViT-1B with 8 B, tp2 pp4, one to nine, for which ranks were allocated, becomes nine to one",
            (64, 64), megascale, ("system=megascale_omni", *apart), ("system=megascale_omni",), many,
            before=few,
        ),
    ]  # fmt: skip


def told(row: Row, cells: tuple[Cell, Cell]) -> Mapping[str, object]:
    """The row of the table, or what refused it."""
    off, on = cells
    base = {"preset": row.preset, "mechanism": row.mechanism, "workload": row.workload}
    if off.figures is None or on.figures is None:
        return {**base, "refused": off.refused or on.refused}
    rates = [cell.figures.tokens_per_s / n for cell, n in zip(cells, row.ranks, strict=True) if cell.figures]
    return {
        **base,
        "off_s": round(off.figures.step_s, 3),
        "on_s": round(on.figures.step_s, 3),
        "x": round(rates[1] / rates[0], 3),
        "off": off.figures.sets,
        "on": on.figures.sets,
        "published": row.published,
        "differs": row.differs,
    }


def main() -> int:
    """Simulate, print, judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="the rows of one preset")
    parser.add_argument("--quick", action="store_true", help="a quarter of the samples")
    asked, found, missed = parser.parse_args(), list[Mapping[str, object]](), list[str]()
    for row in _rows():
        if asked.only in (None, row.preset):
            found.append(told(row, row.run(4 if asked.quick else 1)))
            one = found[-1]
            said = one.get("refused") or f"{one['off_s']} s → {one['on_s']} s  x {one['x']}"
            print(f"simulated: {row.preset:18} {row.mechanism}\n    {row.workload}: {said}", flush=True)
            print(
                *[f"    published: {row.published}; {row.differs}\n"] * bool(row.published),
                end="",
                flush=True,
            )
            if not float(str(one.get("x", 0))) > 1:
                missed.append(f"{row.preset}: {row.mechanism} does not win: {said}")
    for text in missed:
        print(f"missed: {text}")
    print(json.dumps({"benchmark": "mechanisms", "simulated": found, "missed": missed}))
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

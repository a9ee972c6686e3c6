"""Samples longer than a microbatch: trained at parity on four ranks, planned and rehearsed for 64 GPUs.

    python benchmarks/long_samples.py [--quick]

First a small LLM on a text of 16,384 tokens with microbatches of 2,048 on four ranks that share it (dp 4,
one domain, llm_sp=dynamic), held against one rank whose microbatches are as long: loss, norms and every
gradient of a step, and the weights after it. Then Llama 3 70B on 64 GPUs (tp 8, cp 4, pp 2) with microbatches
of 16,384 and a text of 131,072 among 15 samples of the trace `longtail`: every domain's plan is verified and
held against the memory of the cluster file's GPUs, and the fullest rank goes through the step on fake
tensors. Leaves with 1 if parity fails, a plan is refused, a rank holds more tokens than it may, or the model
of memory is off by more than 2 %. With --quick the text on four ranks has 2,048 tokens, with microbatches of
256, and nothing is rehearsed. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from dataloader.format import Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from omni.compose import compose_config
from omni.data_config import SourceConfig
from omni.planning.fullest import check_memory
from omni.planning.layouts import planned_ranks
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.rehearsal.estimate import estimate
from omni.rehearsal.footprint_model import model_footprint
from omni.rehearsal.rehearse import rehearse
from omni.rehearsal.stand_in_data import use_trace

GIB = 1 << 30
TOLERANCE = 0.02
MICROBATCH, LONGEST = 16_384, 131_072
GPUS = [
    "experiment=llama3_70b",
    "system=multiplexed",
    "launch.ranks=64",
    "layout.llm.cp=4",
    "layout.llm.pp=2",
    "model.llm.recompute=full",
    "llm_sp=dynamic",
    "encoder_sp=dynamic",
    f"data.microbatch_tokens={MICROBATCH}",
    f"data.sample_tokens={LONGEST}",
    "data.step_tokens=null",
    "data.step_samples=16",
]


def write_texts(path: Path, tokens: list[int]) -> None:
    """Write texts of so many tokens of the LLM."""
    with DatasetWriter(path, ByteTokenizer()) as writer:
        for number, count in enumerate(tokens):
            words = " ".join(str(word * word) for word in range(number, number + count))
            writer.add(Sample(str(number), words[: count - 1]))


def train(folder: Path, microbatch: int) -> bool:
    """Hold four ranks against one on a text of eight microbatches among shorter; tell if parity holds."""
    longest = 8 * microbatch
    write_texts(folder / "texts", [longest, microbatch // 2, microbatch - 5, microbatch, 40, 3 * microbatch])
    model = [
        "~experiment",
        "system=multiplexed",
        "model=tiny",
        "model.llm.layers=1",
        "model.llm.hidden=64",
        "model.llm.ffn=96",
    ]
    learning = [
        "optim.lr=1e-3",
        "optim.min_lr=1e-3",
        "optim.eps=1e-4",
        "tracking=jsonl",
        "train.timeout_s=280",
    ]
    data = [f"+data.sources.texts.path={folder / 'texts'}", "data.step_samples=6"]
    one = ["launch.ranks=1", f"data.microbatch_tokens={longest}"]
    four = ["launch.ranks=4", "layout.domain=4", "llm_sp=dynamic", f"data.microbatch_tokens={microbatch}"]
    four.append(f"data.sample_tokens={longest}")
    line = ["parity", *model, *learning, *data, *one, "--", *four]
    print(f"a text of {longest} tokens, microbatches of {microbatch}, four ranks:", flush=True)
    return subprocess.run([sys.executable, "-m", "omni", *line], check=False).returncode == 0


def prepare(folder: Path) -> RunSpec:
    """The run on 64 GPUs: the trace `longtail`, and every 16th sample a text of the most tokens."""
    config = compose_config([*GPUS, f"run.dir={folder / 'run'}"])
    use_trace(config, "longtail", folder / "trace")
    write_texts(folder / "longest", [LONGEST] * 4)
    config.data.sources["trace"] = config.data.sources.pop("longtail")
    config.data.sources["trace"].weight = 15
    config.data.sources["texts"] = SourceConfig(path=str(folder / "longest"))
    return prepare_run(config, planned_ranks(config.launch))


def plan(spec: RunSpec) -> dict[str, Any]:
    """Plan and check a step of all domains, and rehearse the rank that holds most."""
    plans = list(spec.planner.all_domains(1, 0))
    found = estimate(spec, plans)
    check_memory(spec, found.fullest)
    batches = [batch for plan in plans for batch in plan.domain.microbatches]
    most = max(batch.layout.local_tokens(m) for batch in batches for m in range(spec.arrangement.pool))
    rehearsal = rehearse(spec, found.fullest.plan, found.fullest.rank)
    modelled = model_footprint(spec, found.fullest.plan, found.fullest.rank)
    return {
        "longest": max(plans[0].taken.lengths),
        "microbatch_tokens": MICROBATCH,
        "members": spec.arrangement.pool,
        "most_tokens_of_a_rank": most,
        "simulated_step_s": round(found.step_s, 3),
        "held_gib": round(rehearsal.footprint.bytes / GIB, 2),
        "fullest_at": rehearsal.footprint.at,
        "model_off": round(modelled.bytes / rehearsal.footprint.bytes - 1, 6),
    }


def main() -> int:
    """Train, plan, print, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a text of 2,048 tokens; rehearse nothing")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory() as folder:
        microbatch = 256 if quick else 2048
        missed = [] if train(Path(folder), microbatch) else ["parity of four ranks with one"]
        figures: dict[str, Any] = {} if quick else plan(prepare(Path(folder)))
    for name, value in figures.items():
        print(f"{name:24} {value}")
    if figures and figures["longest"] < LONGEST:
        missed.append(f"a text of {LONGEST} tokens in the step")
    if figures and figures["most_tokens_of_a_rank"] > max(MICROBATCH, LONGEST // figures["members"]):
        missed.append("the most tokens of a rank")
    if figures and abs(figures["model_off"]) > TOLERANCE:
        missed.append("the model of memory")
    print(
        json.dumps(
            {"benchmark": "long_samples", "microbatch_tokens": microbatch, **figures, "missed": missed}
        )
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

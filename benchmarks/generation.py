"""Greedy generation with and without keys and values kept, side by side in one run on one rank.

    python benchmarks/generation.py [--tokens 64] [--rounds 3] [--quick]

A decoder of 4 layers, hidden 256, 8 heads, byte vocabulary, with random weights, generates after prompts of
16 to 256 tokens. Both ways go through planner, verifier and engine; they alternate, and the figure is the
median of the ratios of neighbouring rounds. The tokens must be the same: the exit code is 1 if they are not,
or if keeping is not the quicker. --quick takes half a minute.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from dataloader.format import Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.tokens import SampleMeta, length
from dataloader.writer import DatasetWriter
from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.planning.prepare import prepare_run
from omni.training.forward import ForwardPasses
from omni.training.generate import FreeGeneration, Prompt
from omni.training.trainer import Trainer

LENGTHS = (16, 32, 64, 64, 128, 128, 200, 256)


def make_trainer(folder: Path) -> Trainer:
    """A run on one rank, of which no step is taken."""
    with DatasetWriter(folder / "data", ByteTokenizer()) as writer:
        writer.add(Sample("one", "a text"))
    config = compose_config(
        [
            "~experiment",
            "system=multiplexed",
            "model.llm.hidden=256",
            "model.llm.ffn=704",
            "model.llm.heads=8",
            "model.llm.kv_heads=4",
            "model.llm.layers=4",
            f"+data.sources.texts.path={folder / 'data'}",
            "data.microbatch_tokens=1024",
            "data.step_samples=1",
            "train.steps=1",
            "train.precision=fp32",
            "optim.lr=1e-3",
            "tracking=jsonl",
            f"run.dir={folder / 'run'}",
        ]
    )
    run = RunFolder.create(folder / "run")
    return Trainer(prepare_run(config, 1), run, 0, torch.device("cpu"))


def prompts_of(bos: int) -> list[Prompt]:
    """Prompts of random bytes."""
    draw = np.random.default_rng(0)
    out = []
    for number, size in enumerate(LENGTHS):
        ids = np.concatenate([[bos], draw.integers(0, 256, size)])
        out.append(Prompt(SampleMeta(number, "prompts", size, (), 0), ids))
        assert len(ids) == length(out[-1].meta)
    return out


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of 32 tokens")
    own = parser.parse_args()
    tokens, rounds = (32, 1) if own.quick else (own.tokens, own.rounds)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dist.init_process_group("gloo", f"file://{folder / 'store'}", rank=0, world_size=1)
        trainer = make_trainer(folder)
        generation = FreeGeneration(ForwardPasses(trainer.spec, trainer.rank, {}), trainer.control)
        prompts, seconds, found = prompts_of(ByteTokenizer.bos), {}, {}
        generation.generate(0, prompts, 2, frozenset())  # to warm up
        for _ in range(rounds):
            for cached in (True, False):
                start = time.perf_counter()
                found[cached] = generation.generate(0, prompts, tokens, frozenset(), cached=cached)
                seconds.setdefault(cached, []).append(time.perf_counter() - start)
        trainer.close()
        dist.destroy_process_group()
    ratios = [slow / fast for fast, slow in zip(seconds[True], seconds[False], strict=True)]
    same, ratio = found[True] == found[False], statistics.median(ratios)
    print(f"{tokens} tokens after each of {len(LENGTHS)} prompts of {min(LENGTHS)} to {max(LENGTHS)} bytes")
    print(f"  keys and values kept   {statistics.median(seconds[True]):7.2f} s")
    print(f"  passes over all tokens {statistics.median(seconds[False]):7.2f} s, {ratio:.1f} times as long")
    print(json.dumps({"tokens": tokens, "same": same, "ratio": round(ratio, 2)}))
    return 0 if same and ratio > 1 else 1


if __name__ == "__main__":
    sys.exit(main())

"""Trainers of small runs on gloo ranks of this machine, for the benchmarks of checkpoints."""

import multiprocessing
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dataloader.format import Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.planning.prepare import prepare_run
from omni.training.trainer import Trainer
from parallel.handshake import SECRET, new_secret

TIMEOUT_S = 900


def write_texts(path: Path, length: int, count: int = 16) -> None:
    """A dataset of texts of `length` tokens each."""
    with DatasetWriter(path, ByteTokenizer(), rows_per_group=4) as writer:
        for i in range(count):
            text = (f"text number {i} of many, " * (1 + length // 20))[: length - 1]
            writer.add(Sample(str(i), text))


def make_trainer(rank: int, world: int, keys: Sequence[str]) -> Trainer:
    """The trainer of a rank, whose process group exists."""
    spec = prepare_run(compose_config(list(keys)), world)
    return Trainer(spec, RunFolder.create(Path(spec.config.run.dir)), rank, torch.device("cpu"))


def on_ranks(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(rank, world, *arguments)` on gloo ranks, one thread each; return what each returns.

    What ranks print goes to stderr. One that fails or dies ends the benchmark with its traceback.
    """
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    os.environ.setdefault(SECRET, new_secret())
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            own = (rank, world, f"{folder}/store", theirs, function, arguments)
            processes.append(context.Process(target=_rank, args=own, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        answers = []
        for rank, pipe in enumerate(pipes):
            if not pipe.poll(TIMEOUT_S):
                raise SystemExit(f"rank {rank} gave no answer in {TIMEOUT_S} s")
            try:
                answers.append(pipe.recv())
            except EOFError:
                answers.append((False, f"rank {rank} died"))
        for process in processes:
            process.join(TIMEOUT_S if all(is_good for is_good, _ in answers) else 0)
    failed = [text for is_good, text in answers if not is_good]
    if failed:
        raise SystemExit("\n".join(failed))
    return [answer for _, answer in answers]


def _rank(rank: int, world: int, store: str, pipe: Any, function: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    sys.stdout = sys.stderr  # the benchmark's own lines are on stdout
    timeout = timedelta(seconds=TIMEOUT_S)
    try:
        dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world, timeout=timeout)
        answer = (True, function(rank, world, *arguments))
    except BaseException:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
    if answer[0]:
        dist.barrier()
        dist.destroy_process_group()

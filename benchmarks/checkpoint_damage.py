"""Checkpoints damaged at random: none is loaded, nothing in them is executed, the good ones are kept.

    python benchmarks/checkpoint_damage.py [--times 200] [--seed 0] [--quick]

Two tensor-parallel ranks train a tiny model and save after steps 2 and 4, as does a run with another seed.
Each time the checkpoint of step 4 is damaged in one of eight ways, at a random place, and both ranks restore.
They must pass it over with a warning and have the weights of step 2 to the bit, and the checkpoint of step 2
must still be sound. The last line is JSON, and the exit code 1 where one damaged checkpoint was loaded.
"""

import argparse
import contextlib
import io
import json
import pickle
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from small_runs import make_trainer, on_ranks, write_texts

from dataloader.storage import Storage
from infra.checkpoint import MANIFEST, complete, file_of, folder_of, verify
from omni.rank.state import owned
from omni.training.trainer import Trainer

KINDS = ("bit", "block", "truncated", "missing", "swapped ranks", "swapped steps", "foreign", "pickle")
GOOD, NEWEST = 2, 4


class Trap:
    """Unpickling it leaves a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def damage(kind: str, checkpoints: Path, foreign: Path, rng: random.Random) -> str:
    """Damage the newest checkpoint; say where."""
    folder = checkpoints / folder_of(NEWEST)
    path = folder / rng.choice([MANIFEST, file_of(0), file_of(1)])
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content))
    match kind:
        case "bit":
            content[at] ^= 1 << rng.randrange(8)
            path.write_bytes(content)
        case "block":
            block = rng.randbytes(4096)
            content[at : at + 4096] = block[: len(content[at : at + 4096])]
            path.write_bytes(content)
        case "truncated":
            path.write_bytes(content[:at])
        case "missing":
            path = folder / rng.choice([file_of(0), file_of(1)])
            path.unlink()
        case "swapped ranks":
            one, two = folder / file_of(0), folder / file_of(1)
            held = one.read_bytes()
            shutil.copy(two, one)
            two.write_bytes(held)
        case "swapped steps":
            shutil.copy(checkpoints / folder_of(GOOD) / path.name, path)
        case "foreign":
            if rng.random() < 0.5:  # the whole of it, or one file
                shutil.rmtree(folder)
                shutil.copytree(foreign / folder.name, folder)
            else:
                shutil.copy(foreign / folder.name / path.name, path)
        case "pickle":
            trap = pickle.dumps(Trap(checkpoints / "executed"))
            path.write_bytes(trap + bytes(max(0, len(content) - len(trap))))
    return f"{kind} in {path.name} at {at}"


def weights(trainer: Trainer) -> list[torch.Tensor]:
    """What a rank computes with, and what it owns of weights and moments, in order."""
    found = []
    for name, optimizer in trainer.rank.components.items():
        found += [parameter.detach() for parameter in optimizer.parameters]
        for shard in owned(optimizer, trainer.rank.names[name]):
            found += [shard.main.detach(), *(shard.adam[key] for key in sorted(shard.adam))]
    return found


def same(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return len(one) == len(two) and all(map(torch.equal, one, two))


def drill(rank: int, world: int, keys: list[str], folder: Path, times: int, seed: int) -> dict[str, Any]:
    for name, own in (("own", "train.seed=1"), ("foreign", "train.seed=2")):
        make_trainer(rank, world, [*keys, own, f"run.dir={folder / name}"]).run()
    trainer = make_trainer(rank, world, [*keys, "train.seed=1", f"run.dir={folder / 'own'}"])
    checkpoints, foreign = folder / "own" / "checkpoints", folder / "foreign" / "checkpoints"
    if rank == 0:
        shutil.copytree(checkpoints, folder / "sound")
        shutil.rmtree(checkpoints / folder_of(NEWEST))
    dist.barrier()
    assert trainer.saving.restore() == GOOD
    expected = [tensor.clone() for tensor in weights(trainer)]
    rng = random.Random(seed)
    outcomes, wrong = Counter[str](), []
    for number in range(times):
        where = ""
        if rank == 0:
            shutil.rmtree(checkpoints)
            shutil.copytree(folder / "sound", checkpoints)
            where = damage(KINDS[number % len(KINDS)], checkpoints, foreign, rng)
        dist.barrier()
        for tensor in weights(trainer):
            tensor.fill_(7.0)
        warned = io.StringIO()
        with contextlib.redirect_stderr(warned), contextlib.redirect_stdout(warned):
            step = trainer.saving.restore()
        outcome = step == GOOD and same(weights(trainer), expected)
        if rank == 0:
            outcome &= f"warning: {folder_of(NEWEST)}" in warned.getvalue()
            outcome &= complete(Storage.at(checkpoints)) == [GOOD]
            outcome &= verify(Storage.at(checkpoints), GOOD)["step"] == GOOD
            outcome &= not (checkpoints / "executed").exists()
        if outcome:
            outcomes[KINDS[number % len(KINDS)]] += 1
        else:
            wrong.append(where or f"on rank {rank}")
        dist.barrier()
    return {"passed_over": dict(outcomes), "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="16 times")
    options = parser.parse_args()
    times = 16 if options.quick else options.times
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_texts(folder / "texts", 64)
        keys = [
            "~experiment",
            "system=multiplexed",
            "model=tiny",
            "~model.encoders.image",
            "model.llm.layers=2",
            "layout.llm.tp=2",
            f"+data.sources.texts.path={folder / 'texts'}",
            "data.microbatch_tokens=64",
            "data.step_samples=1",
            f"train.steps={NEWEST}",
            f"train.checkpoint_every={GOOD}",
            "train.eval_every=0",
            "train.precision=fp32",
            "optim.lr=1e-3",
            "tracking=jsonl",
        ]
        first, other = on_ranks(2, drill, keys, folder, times, options.seed)
    wrong = [*first["wrong"], *other["wrong"]]
    done = sum(first["passed_over"].values())
    for where in wrong:
        print(f"wrong: {where}")
    figures = {"damaged": times, "passed_over": done, "by_kind": first["passed_over"], "wrong": len(wrong)}
    print(json.dumps({"benchmark": "checkpoint_damage", **figures}))
    return 0 if done == times and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())

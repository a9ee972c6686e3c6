"""What a rank opens and reads to restore a checkpoint under the layout that wrote it.

    python benchmarks/checkpoint_opens.py [--quick]

Counted on eight real ranks (tp2·pp2·dp2, some 40 MB of weights and moments each), and modelled for these and
for ranks of 4,096 (tp8·pp4·dp128 of a model of 70 B parameters): a rank is built on fake tensors, and so are
those that save what it has a copy of, which says what every file holds. Files: those of ranks; the first rank
reads the manifest for all. Bytes: with headers and rounded to chunks, by the weights and moments that the
rank holds; the model reads neighbours one by one, so it is an upper bound. The last line is JSON, and the
exit code 1 where a rank opens more than 16 files or reads more than 1.1 times what it holds, or where real
ranks open other files than the model or read more.
"""

import argparse
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from small_runs import make_trainer, on_ranks, write_texts

from dataloader.storage import Storage
from infra.shard_file import CHUNK
from omni.compose import compose_config
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.rank.state import Piece, owned
from omni.rehearsal.rehearse import owned_shards

FILES, RATIO = 16, 1.1
STATE = 12  # bytes of weight and moments of an element
HEADER, HASH = 1000, 32  # bytes of a header for each parameter, and for each chunk
REAL, WORLD = 8, 4096


class Counted:
    """An open file that counts what is read of it."""

    def __init__(self, file: Any, counts: dict[str, int]) -> None:
        self.file = file
        self.counts = counts
        self.seek = file.seek

    def __enter__(self) -> "Counted":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def readinto(self, room: memoryview) -> int:
        """Read into `room`, and count."""
        self.counts["bytes"] += len(room)
        return int(self.file.readinto(room))


def counted(rank: int, world: int, keys: list[str]) -> tuple[int, int, int]:
    """Save, and restore: files opened, bytes read, bytes held."""
    trainer = make_trainer(rank, world, keys)
    with trainer.ahead() as ahead:
        trainer.update(trainer.run_step(trainer.begin(ahead, 1)))
    trainer.saving.save(trainer.reporter)
    trainer.saving.finish(trainer.reporter)
    counts: dict[str, int] = defaultdict(int)
    original = Storage.open

    def opening(storage: Storage, name: str) -> Any:
        counts["files"] += 1
        return Counted(original(storage, name), counts)

    Storage.open = opening  # type: ignore[method-assign]
    assert trainer.saving.restore() == 1
    components = trainer.rank.components.items()
    shards = [s for name, o in components for s in owned(o, trainer.rank.names[name])]
    dist.barrier()
    return counts["files"], counts["bytes"], STATE * sum(shard.main.numel() for shard in shards)


def places_of(piece: Piece) -> Sequence[np.ndarray]:
    return piece.region.elements(piece.start, piece.start + piece.count)


def same(one: Sequence[np.ndarray], two: Sequence[np.ndarray]) -> bool:
    return all(map(np.array_equal, one, two))


def modelled(spec: RunSpec, rank: int) -> tuple[int, int, int]:
    """The same of a rank that is not there."""
    mesh = spec.arrangement.mesh
    own = owned_shards(spec, rank)
    # What ranks hold alike is saved by the first tensor-parallel rank, a tied embedding by the first stage.
    first = mesh.group(rank, "pp")[0]
    peers = {mesh.group(rank, "tp")[0], mesh.group(first, "tp")[0], first} - {rank}
    saved: dict[str, list[tuple[int, Piece]]] = defaultdict(list)
    for peer in sorted(peers):
        for key, (piece, is_copy) in owned_shards(spec, peer).items():
            if not is_copy:
                saved[key].append((peer, piece))
    held = STATE * sum(piece.count for piece, _ in own.values())
    header = HEADER * len(own) + HASH * (1 + held // CHUNK)
    files: dict[int, int] = {rank: header}
    for key, (piece, is_copy) in own.items():
        size = STATE * piece.count
        if not is_copy:
            files[rank] += size
            continue
        places = places_of(piece)
        (holder,) = [peer for peer, other in saved[key] if same(places, places_of(other))]
        # Weights and moments lie side by side: what is read begins and ends inside a chunk.
        files[holder] = files.get(holder, header) + size + 2 * CHUNK
    return len(files), sum(files.values()), held


def specs(folder: Path) -> tuple[list[str], RunSpec, RunSpec]:
    """The keys of the run on real ranks, what they come to, and the run that is modelled."""
    common = [
        "~experiment",
        "system=multiplexed",
        f"+data.sources.texts.path={folder / 'texts'}",
        "train.steps=1",
    ]
    common += ["data.microbatch_tokens=64", "optim.lr=1e-3", "tracking=jsonl", f"run.dir={folder / 'run'}"]
    small = [*common, "model=tiny", "~model.encoders.image", "model.llm.layers=8", "model.llm.hidden=512"]
    small += ["model.llm.ffn=1408", "layout.llm.tp=2", "layout.llm.pp=2", "train.precision=fp32"]
    small += ["data.step_samples=2"]
    large = [*common, "model=llama3_70b_vit_2b4", "layout=tp8_pp4", "data.step_samples=128"]
    large += ["cluster=h100"]
    return small, prepare_run(compose_config(small), REAL), prepare_run(compose_config(large), WORLD)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two ranks of 4,096 are modelled")
    options = parser.parse_args()
    ranks = (0, 4095) if options.quick else (0, 7, 1023, 1024, 3079, 4095)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_texts(folder / "texts", 64)
        small, real, large = specs(folder)
        results = {
            "counted": dict(enumerate(on_ranks(REAL, counted, small))),
            "modelled": {rank: modelled(real, rank) for rank in range(REAL)},
            f"modelled_of_{WORLD}": {rank: modelled(large, rank) for rank in ranks},
        }
    for title, of in results.items():
        for rank, (files, read, held) in of.items():
            print(f"{title}: rank {rank}: {files} files, {read:,} bytes for {held:,}")
    figures = {
        f"{title}_{what}": most
        for title, of in results.items()
        for what, most in (
            ("files", max(files for files, _, _ in of.values())),
            ("bytes_by_held", round(max(read / held for _, read, held in of.values()), 4)),
        )
    }
    holds = all(value <= (FILES if key.endswith("files") else RATIO) for key, value in figures.items())
    for rank, (files, read, held) in results["counted"].items():
        model = results["modelled"][rank]
        holds &= (files, held) == (model[0], model[2]) and read <= model[1]
    print(json.dumps({"benchmark": "checkpoint_opens", **figures, "holds": holds}))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())

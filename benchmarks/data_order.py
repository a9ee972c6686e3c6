"""Which samples come when, and what ranks are handed of them, whatever the world, the workers and the recipe.

    python benchmarks/data_order.py [--quick]

The same 2,000 samples are written as datasets of their own, and as files of other recipes that are indexed
where they lie. For each of these, and several worlds and layouts, the samples of steps are compared with
those of one rank on the datasets; of the first steps CRCs of all that loaders hand out: token ids, labels,
masks, values and positions of items, as the ranks of all domains fetch them. Steps go on in other worlds from
where they were, with the phases of the mixture that a checkpoint then knows. Chats have tokens that a
template writes: their tensors are compared with those of datasets of the same chats.

The mixture changes on the way: at step 200 a source is added, at 300 all are weighted anew, at 400 one in a
hundred samples is removed by its id (in a quick run at 80, 120 and 160). Beyond the first steps CRCs are
taken of the steps around each change, too. In no epoch of a source a sample may be lost or come twice, and
none may come after it was removed. The last line is JSON, and the exit code 1 if anything differs.
"""

import argparse
import io
import json
import random
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from dataloader.format import PLACEHOLDER, Item, Sample
from dataloader.loader import Fetch, Loader
from dataloader.recipes.from_messages import build_from_messages
from dataloader.recipes.quickstart_chat import write_tokenizer
from dataloader.recipes.quickstart_open import IMAGE, SPECIAL, TEMPLATE
from dataloader.sources.build import build_index
from dataloader.sources.reader import open_reader
from dataloader.tokenizer import ByteTokenizer, get_tokenizer
from dataloader.tokens import tokenize
from dataloader.writer import DatasetWriter
from omni.compose import compose_config
from omni.data_config import PhaseConfig
from omni.models.registry import prepare_item
from omni.planning.mixture import positions, with_positions
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.rank.inputs import Assembler, Place
from pipeline.plan import StepPlan

SIZES = {"a": 1_100, "b": 500, "c": 400}
WEIGHTS = {"a": 3, "b": 1, "c": 0}
ADDED, REWEIGHTED = {"c": 2}, {"a": 1, "b": 3, "c": 1}
CHANGES = (200, 300, 400)  # steps at which a source is added, all are weighted anew, samples removed
QUICK_CHANGES = (80, 120, 160)
SAMPLES = 16  # of a step
WORLDS: dict[int, tuple[str, ...]] = {
    1: (),
    2: ("layout=pp2",),
    3: (),
    4: ("layout.domain=2", "llm_sp=dynamic", "layout=pp2"),
    8: (),
}
WORKERS = (0, 1, 2, 3, 4)
RECIPES: dict[str, Any] = {
    "own shards": None,
    "shards": "shards",
    "webdataset": "webdataset",
    "parquet": {"name": "parquet", "text": "text", "image": "images"},
    "interleaved": {"name": "interleaved", "texts": "text", "images": "images"},
    "own shards of chats": None,
    "conversations": "conversations",
}
CHATS = ("own shards of chats", "conversations")
Drawn = list[tuple[str, int]]


def sample(source: str, i: int) -> Sample:
    """Sample `i` of a source, with up to two pictures."""
    rng = np.random.default_rng([i, ord(source)])
    items = []
    for _ in range(i % 3):
        height, width = (8 * int(rng.integers(1, 4)) for _ in range(2))
        pixels = rng.integers(0, 256, (height, width), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG" if i % 2 else "JPEG")
        items.append(Item("image", "png" if i % 2 else "jpeg", (height, width), buffer.getvalue()))
    text = f"{source}{i} " + "".join(f"é{PLACEHOLDER} " for _ in items) + "x" * int(rng.integers(40))
    return Sample(f"{i:05}", text, tuple(items))


def write_dataset(path: Path, samples: Sequence[Sample]) -> None:
    """Write samples as a dataset of their own."""
    with DatasetWriter(path, ByteTokenizer()) as writer:
        for one in samples:
            writer.add(one)


def write(folder: Path, recipe: str, samples: Sequence[Sample]) -> None:
    """Write samples as files that a recipe reads."""
    folder.mkdir(parents=True)
    for number, first in enumerate(range(0, len(samples), 250)):
        part = samples[first : first + 250]
        if recipe == "webdataset":
            with tarfile.open(folder / f"{number:05}.tar", "w") as tar:
                for one in part:
                    members = [(f"{k}.{item.format}", item.data) for k, item in enumerate(one.items)]
                    for ending, content in (*members, ("txt", one.text.encode())):
                        info = tarfile.TarInfo(f"{one.id}.{ending}")
                        info.size = len(content)
                        tar.addfile(info, io.BytesIO(content))
            continue
        texts: list[Any] = [one.text for one in part]
        images: list[Any] = [[item.data for item in one.items] for one in part]
        if recipe == "interleaved":
            turns = [[*_in_turn(one)] for one in part]
            texts = [[None if isinstance(of, bytes) else of for of in row] for row in turns]
            images = [[of if isinstance(of, bytes) else None for of in row] for row in turns]
        table = pa.table({"text": texts, "images": pa.array(images, pa.list_(pa.binary()))})
        pq.write_table(table, folder / f"{number:05}.parquet", row_group_size=50)


def _in_turn(one: Sample) -> Iterator[str | bytes]:
    """Texts and images of a sample in their order."""
    texts = one.text.split(PLACEHOLDER)
    yield texts[0]
    for item, text in zip(one.items, texts[1:], strict=True):
        yield item.data
        yield text


def write_chats(folder: Path, samples: Sequence[Sample]) -> None:
    """Write samples as chats: about the pictures, if there are any, somebody is told the text."""
    (folder / "images").mkdir(parents=True)
    with (folder / "chats.jsonl").open("w") as file:
        for one in samples:
            names = [f"images/{one.id}_{k}.{item.format}" for k, item in enumerate(one.items)]
            for name, item in zip(names, one.items, strict=True):
                (folder / name).write_bytes(item.data)
            asked = {"from": "human", "value": "<image>" * len(names) + "Tell."}
            told = {"from": "gpt", "value": one.text.replace(PLACEHOLDER, "")}
            file.write(json.dumps({"id": one.id, "images": names, "conversations": [asked, told]}) + "\n")


def tokenizer_of(folder: Path, recipe: str) -> Any:
    """The tokenizer of a recipe: bytes, of chats one with a template."""
    if recipe not in CHATS:
        return "bytes"
    own = folder / "tokenizer"
    if not own.exists():
        own.mkdir()
        write_tokenizer(own, [sample("a", 0).text], SPECIAL, TEMPLATE)
    return {"name": "hf", "path": str(own), "item": IMAGE}


def prepare(folder: Path, recipe: str) -> dict[str, Path]:
    """Write the sources as a recipe has them, and index them. Returns what runs name, by source."""
    paths, tokenizer = {}, tokenizer_of(folder, recipe)
    for source, size in SIZES.items():
        samples = [sample(source, i) for i in range(size)]
        paths[source] = folder / recipe.replace(" ", "_") / source
        if recipe in CHATS:
            files = folder / f"files_{recipe}" / source
            write_chats(files, samples)
            if RECIPES[recipe] is None:
                build_from_messages(files / "chats.jsonl", paths[source], get_tokenizer(tokenizer))
            else:
                build_index(files, paths[source], RECIPES[recipe], tokenizer)
        elif RECIPES[recipe] is None:
            write_dataset(paths[source], samples)
        else:
            files = folder / f"files_{recipe}" / source
            (write_dataset if recipe == "shards" else partial(write, recipe=recipe))(files, samples=samples)
            build_index(files, paths[source], RECIPES[recipe])
    return paths


def removed(source: str) -> set[int]:
    """The samples of a source that are removed: one in a hundred."""
    return set(random.Random(source).sample(range(SIZES[source]), SIZES[source] // 100))


def lists_of(folder: Path, paths: Mapping[str, Path], tokenizer: Any) -> dict[str, str]:
    """Write the ids of the samples that are removed, by source, as the recipe of `paths` names them."""
    lists = {}
    for source, path in paths.items():
        reader = open_reader(path, tokenizer=get_tokenizer(tokenizer))
        lists[source] = str(folder / f"{source}.txt")
        ids = (reader.read(i, False, False).id for i in removed(source))
        Path(lists[source]).write_text("\n".join(ids))
    return lists


def spec_of(
    paths: Mapping[str, Path],
    world: int,
    changes: Sequence[int],
    lists: Mapping[str, str],
    tokenizer: Any,
    known: Mapping[int, int] | None = None,
    begin: tuple[int, int] | None = None,
) -> RunSpec:
    """Prepare a small run on sources, on so many ranks. If it goes on, from the step and the position where
    it is to `begin`, it knows by their first steps where phases before began.
    """
    line = [
        "~experiment",
        "system=multiplexed",
        "model=tiny",
        *(f"model.encoders.image.{key}" for key in ("hidden=32", "heads=2", "ffn=64", "max_side=32")),
        *(f"+data.sources.{name}.path={path}" for name, path in paths.items()),
        *(f"+data.sources.{name}.weight={WEIGHTS[name]}" for name in paths),
        "data.microbatch_tokens=320",
        f"data.step_samples={SAMPLES}",
        "train.precision=fp32",
        "train.steps=1000",
        *WORLDS[world],
    ]
    config = compose_config(line)
    config.data.tokenizer = tokenizer
    phases = [
        PhaseConfig(changes[0], ADDED),
        PhaseConfig(changes[1], REWEIGHTED),
        PhaseConfig(changes[2], remove={source: [file] for source, file in lists.items()}),
    ]
    config.data.mixture = {f"step_{phase.first}": phase for phase in phases}
    return prepare_run(replace(config, data=with_positions(config.data, known or {})), world, begin=begin)


def drawn(spec: RunSpec, steps: int, cursor: int = 0) -> tuple[list[Drawn], list[int]]:
    """The samples of steps from a stream position on, and the position at which each begins."""
    found, cursors = [], []
    for _ in range(steps):
        taken = spec.planner.world.take(cursor)
        cursors.append(cursor)
        found.append([(taken.sources[of], i) for of, i in zip(taken.source, taken.ids, strict=True)])
        cursor = taken.next_cursor
    return found, cursors


def with_removed(spec: RunSpec, steps: int) -> list[Drawn]:
    """The samples of steps and those that they pass over, as removed, in the order of the stream."""
    cursor, found = 0, []
    for _ in range(steps):
        taken = spec.planner.world.take(cursor)
        order = spec.planner.world.samples_at(cursor).stream
        of, ids = (column.tolist() for column in order.take(cursor, taken.next_cursor - cursor))
        found.append([(order.names[n], i) for n, i in zip(of, ids, strict=True)])
        cursor = taken.next_cursor
    return found


class Handed:
    """What loaders of all ranks of a run hand out, as CRCs."""

    def __init__(self, spec: RunSpec, paths: Mapping[str, Path], workers: int) -> None:
        self.spec = spec
        self.readers = {name: open_reader(path, tokenizer=spec.tokenizer) for name, path in paths.items()}
        self.prepare = {e.modality: partial(prepare_item, e) for e in spec.encoders.values()}
        self.workers = workers
        self.loader = Loader(self.readers, spec.tokenizer, self.prepare, workers) if workers else None
        self.fetches = 0

    def crc(self, step: int, cursor: int) -> int:
        """CRC of all that ranks are handed of the samples of a step, in the order of the samples. Raises
        AssertionError if two ranks are handed something else of a sample, or nobody a part of one.
        """
        texts: dict[tuple[str, int], int] = {}
        items: dict[tuple[str, int, int], int] = {}
        plans: list[StepPlan] = list(self.spec.planner.all_domains(step, cursor))
        arrangement = self.spec.arrangement
        for plan in plans:
            for domain_rank in range(arrangement.world // arrangement.num_domains):
                place = Place(domain_rank, torch.device("cpu"), torch.float32)
                llm = self.spec.config.model.llm
                assembler = Assembler(llm, self.spec.encoders, self.spec.sources, place)
                fetch = assembler.fetch_of(plan.domain, self.spec.planner.metas_of(plan.domain))
                own_texts, own_items = self._load(fetch)
                for (source, meta), arrays in zip(fetch.texts, own_texts, strict=True):
                    found = _crc(arrays)
                    assert texts.setdefault((source, meta.id), found) == found
                for key, item in zip(fetch.items, own_items, strict=True):
                    found = _crc((item.values, item.positions))
                    assert items.setdefault(key, found) == found
        total = 0
        taken = plans[0].taken
        for source, i in zip((taken.sources[of] for of in taken.source), taken.ids, strict=True):
            meta = self.spec.planner.world.kept(source, i)
            of = [texts[source, i], *(items[source, i, k] for k in range(len(meta.items)))]
            total = crc32(repr((source, i, of)).encode(), total)
        return total

    def _load(self, fetch: Fetch) -> tuple[list[Any], list[Any]]:
        if self.loader is not None:
            self.fetches += 1
            self.loader.submit(self.fetches, fetch)
            fetched = self.loader.get(self.fetches, 120)
            assert not fetched.failures
            return list(fetched.texts), list(fetched.items)
        texts = [
            tokenize(self.readers[source].read(meta.id, True, False), meta, self.spec.tokenizer)
            for source, meta in fetch.texts
        ]
        read = (self.readers[source].read(i, False, (k,)).items[0] for source, i, k in fetch.items)
        return texts, [self.prepare[item.modality](item) for item in read]

    def close(self) -> None:
        """End the threads."""
        if self.loader is not None:
            self.loader.close()


def _crc(arrays: Sequence[np.ndarray]) -> int:
    total = 0
    for array in arrays:
        total = crc32(f"{array.dtype} {array.shape}".encode(), total)
        total = crc32(np.ascontiguousarray(array).tobytes(), total)
    return total


def wrong_epochs(steps: Sequence[Drawn], passed: Sequence[Drawn], since: int) -> list[str]:
    """Sources of which an epoch lacks a sample or has one twice; steps that lack others of the samples
    `passed` than those removed from step `since` on.
    """
    gone = {(source, i) for source in SIZES for i in removed(source)}
    found = []
    for number, (own, every) in enumerate(zip(steps, passed, strict=True), 1):
        if own != [pair for pair in every if not (number >= since and pair in gone)]:
            found.append(f"step {number} lacks samples, or has some that were removed")
    if not any(pair in gone for every in passed[since - 1 :] for pair in every):
        found.append("no sample that was removed would have come")
    steps = passed
    for source, size in SIZES.items():
        ids = [i for step in steps for of, i in step if of == source]
        whole = [ids[first : first + size] for first in range(0, len(ids) - size + 1, size)]
        assert whole, f"{len(ids)} samples of {source} are no epoch"
        found += [f"epoch {n} of {source}" for n, epoch in enumerate(whole) if len(set(epoch)) != size]
    return found


def measure(folder: Path, steps: int, loaded: int, resumes: int, changes: Sequence[int]) -> dict[str, Any]:
    """Compare everything with one rank on datasets; `differ` says what is not the same."""
    around = [step for change in changes for step in (change - 2, change - 1, change)]
    handed_of = sorted({*range(loaded), *(step for step in around if step < steps)})
    rng = random.Random(0)
    differ: list[str] = []
    expected: list[Drawn] = []
    crcs: dict[bool, list[int]] = {}
    compared = 0
    for recipe in RECIPES:
        paths, tokenizer = prepare(folder, recipe), tokenizer_of(folder, recipe)
        lists = lists_of(folder, paths, tokenizer)
        specs = {world: spec_of(paths, world, changes, lists, tokenizer) for world in WORLDS}
        for world, spec in specs.items():
            found, cursors = drawn(spec, steps)
            workers = WORKERS if world == 4 else (2,)
            expected = expected or found
            if found != expected:
                differ.append(f"samples: {recipe}, {world} ranks")
            for number in workers:
                handed = Handed(spec, paths, number)
                own = [handed.crc(step + 1, cursors[step]) for step in handed_of]
                handed.close()
                compared += len(handed_of)
                if own != crcs.setdefault(recipe in CHATS, own):
                    differ.append(f"tensors: {recipe}, {world} ranks, {number} workers")
        for step in sorted(rng.sample(range(1, steps - 20), resumes)):
            before, after = rng.sample(list(WORLDS), 2)
            cursor = specs[before].planner.cursor_of(step + 1)
            begun = positions(specs[before].config.data)
            known = {first: start for first, start in begun.items() if first <= step}
            resumed = spec_of(paths, after, changes, lists, tokenizer, known, (step + 1, cursor))
            if drawn(resumed, 20, cursor)[0] != expected[step : step + 20]:
                differ.append(f"resumed at {step}: {recipe}, {before} to {after} ranks")
        if recipe == "own shards":
            differ += wrong_epochs(expected, with_removed(specs[1], steps), changes[2])
    return {
        "recipes": list(RECIPES), "worlds": list(WORLDS), "workers": list(WORKERS), "steps": steps,
        "source_added": changes[0], "reweighted": changes[1], "removed": changes[2],
        "loaded_steps": len(handed_of), "resumes": resumes * len(RECIPES), "crcs": compared, "missed": differ,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps: a minute")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        figures = measure(Path(name), *((200, 5, 3, QUICK_CHANGES) if quick else (500, 50, 5, CHANGES)))
    for what in figures["missed"]:
        print(f"not the same: {what}")
    print(json.dumps({"benchmark": "data_order", **figures, "took_s": round(time.perf_counter() - start)}))
    return int(bool(figures["missed"]))


if __name__ == "__main__":
    sys.exit(main())

"""What an index of data that lies elsewhere costs to build and to open, and that it is one whoever builds it.

    python benchmarks/index.py [--quick]
    python benchmarks/index.py --rows 100000000

Tar files of JPEGs of about 73 kB and captions are indexed: CPU seconds of all threads by sample, the least
of several rounds. 1, 2 and 4 processes write the same files, and so do builds that were killed and went on.
An index of as many rows and files as a large set has, written as columns, is opened in a process of its own.
Samples are read in the order of a stream by 1, 8 and 64 replicas, and the bytes counted. Of an index with a
million different sizes of pictures the samples of a step of 65,536 are taken, their work is counted and they
are dealt to groups: the level of planning that looks at all samples of a step. With `--rows` an index of so
many rows, a hundred a file, is opened and nothing else: 15 GB and ten minutes for 100 million. The last line
is JSON, and the exit code 1 where a target is missed.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from loader import HEIGHT, WIDTH, photo

from dataloader.format import INDEX_SCHEMA
from dataloader.index import Index
from dataloader.manifest import PLACED_VERSION, DatasetTotals, Manifest, Place, write_manifest
from dataloader.shared_files import SharedFiles
from dataloader.sources.build import build_index
from dataloader.sources.reader import PlacedReader
from dataloader.sources.tables import BATCH_ROWS, FILES, FILES_SCHEMA, SAMPLES, SAMPLES_SCHEMA
from dataloader.stream import SourceSpec, Stream
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import written
from omni.compose import compose_config
from omni.planning.prepare import prepare_run

# Targets: µs of CPU a sample, bytes read by payload, seconds and MB to open, seconds of CPU for a step.
SAMPLE_US, READ, OPEN_S, OPEN_MB, STEP_S = 100.0, 1.1, 0.2, 20.0, 0.3
STEP, SIDES = 65_536, 1024  # samples of a step; sides of pictures, the square of them sizes
CAPTION = "a caption of about ten words that somebody wrote by hand"


def write_tars(folder: Path, files: int, each: int) -> int:
    """Write tar files of pictures with captions, and return the bytes of these."""
    photos = [photo(HEIGHT, WIDTH, seed) for seed in range(16)]
    folder.mkdir()
    payload = 0
    for number in range(files):
        with tarfile.open(folder / f"{number:05}.tar", "w") as tar:
            for i in range(each):
                text = f"{CAPTION}, {number} {i}".encode()
                for ending, content in (("jpg", photos[i % 16]), ("txt", text)):
                    info = tarfile.TarInfo(f"{number:05}{i:05}.{ending}")
                    info.size = len(content)
                    tar.addfile(info, BytesIO(content))
                    payload += len(content)
    return payload


def cpu_of_sample(tars: Path, folder: Path, samples: int, rounds: int) -> float:
    """µs of CPU that indexing a sample takes."""
    least = float("inf")
    for number in range(rounds):
        start = time.process_time()
        build_index(tars, folder / f"round{number}", "webdataset")
        least = min(least, time.process_time() - start)
    return least / samples * 1e6


def content_of(index: Path) -> dict[str, bytes]:
    """All files of an index."""
    return {file.name: file.read_bytes() for file in index.iterdir()}


def same_whoever_builds(tars: Path, folder: Path, kills: int, seed: int) -> dict[str, bool]:
    """Whether builds by several processes, and killed ones, give the same files."""
    build_index(tars, folder / "one", "webdataset")
    expected = content_of(folder / "one")
    same = {}
    for jobs in (2, 4):
        build_index(tars, folder / f"jobs{jobs}", "webdataset", jobs=jobs)
        same[f"jobs_{jobs}"] = content_of(folder / f"jobs{jobs}") == expected
    rng = random.Random(seed)
    command = [sys.executable, "-m", "omni", "data", "index", str(tars), "--recipe", "webdataset", "--out"]
    for number in range(kills):
        out = folder / f"killed{number}"
        killed = 0
        while not out.exists():
            build = subprocess.Popen(
                [*command, str(out), "--jobs", "2"], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
            parts = folder / f"killed{number}.partial/parts"
            # Later each time, counted in parts that are there.
            while build.poll() is None and len(list(parts.glob("*.rows"))) <= 2 * killed + rng.randrange(2):
                time.sleep(0.002)
            if build.poll() is None and killed < 3:
                build.send_signal(signal.SIGKILL)
                killed += 1
            build.wait()
        same[f"killed_{number}"] = killed > 0 and content_of(out) == expected
    return same


def read_by_payload(index: Path, payload: int, replicas: int) -> float:
    """Bytes read by all replicas, each of every n-th sample of a stream, by the payload."""
    manifest = PlacedReader(index).manifest
    stream = Stream({"s": SourceSpec(manifest.num_samples, manifest.rows_per_group, 1)}, seed=0)
    ids = stream.take(0, manifest.num_samples)[1].tolist()
    total = 0
    for replica in range(replicas):
        files = SharedFiles(cache_bytes=32 << 20)
        reader = PlacedReader(index, files)
        for i in ids[replica::replicas]:
            reader.read(i, text=True, items=False)
            reader.read(i, text=False, items=True)
        total += files.bytes_read
        files.close()
    return total / payload


def places(file: np.ndarray, at: np.ndarray, size: int) -> list[pa.Array]:
    """The columns of places in tables."""
    count = len(file)
    return [
        pa.array(file, pa.int32()),
        pa.array(at, pa.int64()),
        pa.array(np.full(count, size)),
        pa.array(np.arange(count, dtype=np.uint32)),
    ]


def batches(rows: int, files: int, sides: int) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """The rows of an index of samples with an image each, in `files` files, as columns. So many `sides` are
    different in each direction.
    """
    each = -(-rows // files)
    for first in range(0, rows, BATCH_ROWS):
        number = np.arange(first, min(first + BATCH_ROWS, rows))
        count = len(number)
        file, at = number // each, number % each * 75_000
        edges = pa.array(np.arange(count + 1, dtype=np.int32))
        sizes = np.stack([HEIGHT + number % sides, WIDTH + number // sides % sides], 1)
        size = pa.ListArray.from_arrays(
            pa.array(np.arange(count + 1, dtype=np.int32) * 2), pa.array(sizes.reshape(-1), pa.int32())
        )
        kinds = [pa.array([name] * count, pa.string()) for name in ("image", "jpeg")]
        item = SAMPLES_SCHEMA.field("items").type.value_type
        items = pa.StructArray.from_arrays([*kinds, size, *places(file, at + 512, 73_000)], fields=list(item))
        text = SAMPLES_SCHEMA.field("text").type
        samples = [
            pa.array([f"{f:06}.tar/{n:09}" for f, n in zip(file.tolist(), number.tolist(), strict=True)]),
            pa.array(np.full(count, 73_060)),
            pa.StructArray.from_arrays(places(file, at + 74_240, 60), fields=list(text)),
            pa.ListArray.from_arrays(edges, items),
        ]
        of_index = INDEX_SCHEMA.field("items").type.value_type
        kept = [pa.array(np.zeros(count, np.int16)), pa.array(np.zeros(count, np.int32)), size]
        index = [
            pa.array(np.full(count, 60, np.int32)),
            pa.array(np.full(count, 73_060)),
            pa.ListArray.from_arrays(edges, pa.StructArray.from_arrays(kept, fields=list(of_index))),
        ]
        yield (
            pa.RecordBatch.from_arrays(samples, schema=SAMPLES_SCHEMA),
            pa.RecordBatch.from_arrays(index, schema=INDEX_SCHEMA),
        )


def write_large(folder: Path, rows: int, files: int, sides: int = 1) -> None:
    """Write an index of so many rows in so many files, which are not there."""
    folder.mkdir()
    with (
        pa.ipc.new_file(str(folder / SAMPLES), SAMPLES_SCHEMA) as samples,
        pa.ipc.new_file(str(folder / "index.arrow"), INDEX_SCHEMA) as index,
        pa.ipc.new_file(str(folder / FILES), FILES_SCHEMA) as table,
    ):
        for of_samples, of_index in batches(rows, files, sides):
            samples.write_batch(of_samples)
            index.write_batch(of_index)
        for first in range(0, files, BATCH_ROWS):
            count = min(BATCH_ROWS, files - first)
            names = [f"{first + i:06}.tar" for i in range(count)]
            numbers = [np.full(count, 7_500_000), np.zeros(count, np.int64), np.zeros(count, np.int64)]
            columns = [
                pa.array(names),
                pa.array(numbers[0]),
                pa.array([""] * count),
                *map(pa.array, numbers[1:]),
            ]
            table.write_batch(pa.RecordBatch.from_arrays(columns, schema=FILES_SCHEMA))
    of = {name: written(folder / name, rows) for name in (SAMPLES, "index.arrow")}
    totals = DatasetTotals(60 * rows, 73_060 * rows, {"image": rows})
    place = Place("/nowhere", {"name": "webdataset"}, written(folder / FILES, files), "0" * 32)
    write_manifest(
        folder,
        Manifest(
            PLACED_VERSION, "", "bytes", rows, 32, (of[SAMPLES],), of["index.arrow"], ("image",), totals,
            place=place,
        ),
    )  # fmt: skip


def opened(folder: str) -> dict[str, float]:
    """Open an index in this process as a rank does, and read metadata of a step."""

    def anonymous() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1000

    ByteTokenizer().encode("x")  # all is imported
    before, start = anonymous(), time.perf_counter()
    index = Index.open(folder, ByteTokenizer())
    reader = PlacedReader(folder)
    seconds, mb = time.perf_counter() - start, anonymous() - before
    rng = np.random.default_rng(0)
    for i in rng.integers(0, len(index), 4096).tolist():
        assert index.meta(i, "s", lambda modality, size: (1, 1)).items[0].size == (HEIGHT, WIDTH)
    row = reader._rows.row(len(index) - 1)
    assert reader._table.row(row["text"]["file"])["name"] == row["id"].partition("/")[0]
    return {"open_s": seconds, "open_mb": mb, "after_4096_mb": anonymous() - before}


def open_alone(folder: Path) -> dict[str, float]:
    """Open an index in a process of its own."""
    command = [sys.executable, __file__, "--open", str(folder)]
    found: dict[str, float] = json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )
    return found


def step_of_many_sizes(folder: Path) -> float:
    """Seconds of the CPU for the second step of a run, of samples whose pictures differ in size: the first
    reads from the disk.
    """
    write_large(folder, SIDES * SIDES, SIDES, SIDES)
    keys = (
        "experiment=llama3_70b", "system=multiplexed", "layout=tp8_pp4", "launch.ranks=512",
        "data.step_tokens=null", f"data.step_samples={STEP}", "data.tokenizer=bytes",
        "cluster.memory_bytes=null", f"+data.sources.large.path={folder}",
    )  # fmt: skip
    spec = prepare_run(compose_config(list(keys)), 512)
    world, cursor, seconds = spec.planner.world, 0, 0.0
    for _ in range(2):
        start = time.process_time()
        taken = world.take(cursor)
        world.groups_of(taken, spec.planner.domain.costing)
        cursor, seconds = taken.next_cursor, time.process_time() - start
        assert len(taken) == STEP
    return seconds


def measure(quick: bool) -> dict[str, Any]:
    """All figures."""
    files, each, rounds, kills = (4, 300, 3, 1) if quick else (12, 500, 5, 3)
    rows, many = (2_000_000, 20_000) if quick else (10_000_000, 100_000)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        payload = write_tars(folder / "tars", files, each)
        figures: dict[str, Any] = {"sample_us": cpu_of_sample(folder / "tars", folder, files * each, rounds)}
        index = folder / "round0"
        figures["read"] = {str(n): read_by_payload(index, payload, n) for n in (1, 8, 64)}
        figures["same"] = same_whoever_builds(folder / "tars", folder, kills, seed=0)
        shutil.rmtree(folder / "tars")
        write_large(folder / "large", rows, many)
        figures |= {"rows": rows, "files": many, **open_alone(folder / "large")}
        return figures | {"step_s": step_of_many_sizes(folder / "sizes")}


def missed(figures: dict[str, Any]) -> list[str]:
    """Targets that are missed."""
    found = [name for name, same in figures["same"].items() if not same]
    found += [f"read_{n}" for n, ratio in figures["read"].items() if ratio > READ]
    limits = {"sample_us": SAMPLE_US, "open_s": OPEN_S, "open_mb": OPEN_MB, "step_s": STEP_S}
    return found + [name for name, limit in limits.items() if figures[name] > limit]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer samples and rows, a minute")
    parser.add_argument("--rows", type=int, help="open an index of so many rows, and nothing else")
    parser.add_argument("--open", metavar="DIR", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.open:
        print(json.dumps(opened(args.open)))
        return 0
    if args.rows:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "large"
            write_large(folder, args.rows, -(-args.rows // 100))
            mapped = sum(file.stat().st_size for file in folder.iterdir())
            print(json.dumps({"rows": args.rows, "mapped_gb": mapped / 1e9, **open_alone(folder)}))
        return 0
    start = time.perf_counter()
    figures = measure(args.quick)
    print(f"{figures['sample_us']:.0f} µs of CPU a sample (at most {SAMPLE_US:.0f})")
    print(f"bytes read by payload at 1, 8, 64 replicas: {figures['read']} (at most {READ})")
    print(f"the same files: {figures['same']}")
    print(
        f"{figures['rows']:,} rows in {figures['files']:,} files open in {figures['open_s']:.3f} s "
        f"(at most {OPEN_S}) and {figures['open_mb']:.1f} MB (at most {OPEN_MB})"
    )
    print(f"a step of {STEP:,} samples takes {figures['step_s']:.3f} s of the CPU (at most {STEP_S})")
    wrong = missed(figures)
    print(
        json.dumps(
            {**figures, "missed": wrong, "cores": os.cpu_count(), "took_s": time.perf_counter() - start}
        )
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

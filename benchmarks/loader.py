"""What loading costs beside decoding, how threads help it, and how much more is read than is needed.

    python benchmarks/loader.py [--quick]

CPU seconds are those of all threads, so that other jobs disturb them little; they are measured in turn, and
the least of several rounds is taken. Decoders that sleep 20 ms and a store that answers after 50 ms show what
threads do at once, whatever else the machine does. Steps of 1 s slept, of 16 images of such a store each,
show how long training would wait for data with 2 threads, if it is planned as far ahead as by a run. What
replicas read is counted: each has a cache of its own, and of n of them each reads every n-th sample of a
stream. The last line is JSON, and the exit code 1 where a target is missed.
"""

import argparse
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import simplejpeg
import torch
from fsspec.implementations.memory import MemoryFileSystem
from PIL import Image

from dataloader.decode import decode_image
from dataloader.fetching import chunk_bytes
from dataloader.format import PLACEHOLDER, Item, Sample, SampleError
from dataloader.index import Index
from dataloader.loader import Fetch, Loader
from dataloader.node_cache import NodeCache
from dataloader.reader import Reader
from dataloader.shared_files import SharedFiles
from dataloader.sources.build import build_index
from dataloader.sources.reader import open_reader
from dataloader.storage import Storage
from dataloader.stream import SourceSpec, Stream
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from omni.models.encoders.vit import ViTConfig, ViTEncoder
from omni.models.registry import ItemArrays, prepare_item

# Targets. Ratios of CPU seconds, of wall seconds slept, of bytes; the last two are MB and ms.
PATCHES, DECODERS, FILES, READ, SOURCES, BOMB_MB, BOMB_MS = 1.8, 3.5, 6.0, 1.1, 1.2, 50.0, 10.0
ROW_GROUPS = 1.3  # of compressed Parquet, a node
WAITED = 0.02  # share of the time of steps
STEP_S, IMAGES_OF_STEP, AHEAD = 1.0, 16, 3  # planned so many steps ahead, as omni.training.ahead does
HEIGHT, WIDTH = 480, 640
LATENCY_S, DECODE_S = 0.05, 0.02


def photo(height: int, width: int, seed: int) -> bytes:
    """A picture with coarse shapes and fine noise; 480 x 640 of it are a JPEG of about 73 kB."""
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    shapes = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))
    pixels = (shapes + rng.normal(0, 9, shapes.shape)).clip(0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=72)
    return buffer.getvalue()


def write(path: Path, samples: Sequence[Sample]) -> Path:
    """Write a dataset."""
    with DatasetWriter(path, ByteTokenizer()) as writer:
        for sample in samples:
            writer.add(sample)
    return path


def write_images(path: Path, items: Sequence[Item], count: int) -> Path:
    """Write a dataset of samples with an image and a short text each."""
    return write(
        path,
        [Sample(f"n{i}", PLACEHOLDER + f"picture {i}", (items[i % len(items)],)) for i in range(count)],
    )


def fetch_of(path: Path, ids: Sequence[int]) -> Fetch:
    """Ask for samples' texts and items."""
    index = Index.open(path)
    metas = [index.meta(i, "s", lambda modality, size: (1, 1)) for i in ids]
    items = tuple(("s", meta.id, k) for meta in metas for k in range(len(meta.items)))
    return Fetch(tuple(("s", meta) for meta in metas), items, tuple(meta.bytes for meta in metas))


def load(path: Path, ids: Sequence[int], prepare: Callable[[Item], Any], threads: int) -> float:
    """Load samples once, and return the wall seconds it took."""
    loader: Loader[Any] = Loader({"s": open_reader(path)}, ByteTokenizer(), {"image": prepare}, threads)
    start = time.perf_counter()
    loader.submit(0, fetch_of(path, ids))
    fetched = loader.get(0, 600)
    seconds = time.perf_counter() - start
    loader.close()
    assert not fetched.failures
    assert len(fetched.items) == len(ids)
    return seconds


def cpu_of(work: Callable[[], Any]) -> float:
    """CPU seconds of all threads of this process that `work` takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measure_cpu(folder: Path, rounds: int) -> dict[str, float]:
    """CPU of an image in ms, of the decoder alone, of what becomes patches, and of the whole loader."""
    encoder = ViTEncoder(ViTConfig())
    items = [Item("image", "jpeg", (HEIGHT, WIDTH), photo(HEIGHT, WIDTH, seed)) for seed in range(16)]
    path = write_images(folder / "photos", items, 64)
    ready = [prepare_item(encoder, item) for item in items]
    cpu = torch.device("cpu")
    # Shrunk to 2,048 patches, from 1,500 x 2,000 pixels.
    small = ViTEncoder(ViTConfig(max_tokens=2048))
    large = [Item("image", "jpeg", (1500, 2000), photo(1500, 2000, seed)) for seed in range(2)]

    def alone(of: Sequence[Item]) -> None:
        for item in of:
            simplejpeg.decode_jpeg(item.data, colorspace="RGB")

    works: dict[str, tuple[int, Callable[[], Any]]] = {
        "decoder": (16, lambda: alone(items)),
        "patches": (16, lambda: [prepare_item(encoder, item) for item in items]),
        "normalised on this CPU": (16, lambda: [encoder.transfer(one.values, cpu) for one in ready]),
        "loader": (64, lambda: load(path, range(64), lambda item: prepare_item(encoder, item), 1)),
        "decoder, large": (2, lambda: alone(large)),
        "patches, large": (2, lambda: [prepare_item(small, item) for item in large]),
    }
    least = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, (count, work) in works.items():
            least[name] = min(least[name], 1000 * cpu_of(work) / count)
    return least | {"bytes of an image": sum(len(item.data) for item in items) / len(items)}


def measure_decoders(folder: Path) -> float:
    """How much faster four threads are than one, with 16 images whose decoder sleeps."""
    item = Item("image", "jpeg", (8, 8), photo(8, 8, 0))
    path = write_images(folder / "small", [item], 16)

    def sleep(item: Item) -> ItemArrays:
        time.sleep(DECODE_S)
        return ItemArrays(np.zeros(1), np.zeros(1))

    one, four = (min(load(path, range(16), sleep, threads) for _ in range(3)) for threads in (1, 4))
    return one / four


class SlowStore(MemoryFileSystem):  # type: ignore[misc]
    """A store of which every request takes as long as that of one far away."""

    protocol = "slow"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("slow://", "memory://")))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """Wait, and read."""
        time.sleep(LATENCY_S)
        return bytes(super().cat_file(path, start, end, **kwargs))


def far_away(path: Path, items: Sequence[Item], count: int) -> Path:
    """Index a tar of so many pictures with a short text each, which lies in a slow store."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for i in range(count):
            for ending, part in (("jpg", items[i % len(items)].data), ("txt", f"picture {i}".encode())):
                info = tarfile.TarInfo(f"{i:05}.{ending}")
                info.size = len(part)
                tar.addfile(info, io.BytesIO(part))
    fsspec.register_implementation("slow", SlowStore, clobber=True)
    Storage.at(f"slow://{path.name}").write("0.tar", [content.getvalue()])
    build_index(f"slow://{path.name}", path, "webdataset")
    return path


def measure_files(folder: Path, samples: int) -> float:
    """How much faster eight threads are than one, with a store that answers late."""
    path = far_away(folder / "far", [Item("image", "jpeg", (8, 8), photo(8, 8, 0))], samples)

    def ready(item: Item) -> ItemArrays:
        return ItemArrays(np.zeros(1), np.zeros(1))

    one, eight = (load(path, range(samples), ready, threads) for threads in (1, 8))
    return one / eight


def measure_waiting(folder: Path, rounds: int, steps: int) -> float:
    """The least share of slept steps, in several rounds, that is spent waiting for what two threads load from
    a store that answers late. The first step, which every run waits for, does not count.
    """
    encoder = ViTEncoder(ViTConfig())
    items = [Item("image", "jpeg", (HEIGHT, WIDTH), photo(HEIGHT, WIDTH, seed)) for seed in range(16)]
    path = far_away(folder / "waiting", items, IMAGES_OF_STEP * (steps + 1))
    return min(_waited(path, encoder, steps) for _ in range(rounds))


def _waited(path: Path, encoder: ViTEncoder, steps: int) -> float:
    prepare = {"image": lambda item: prepare_item(encoder, item)}
    loader: Loader[Any] = Loader({"s": open_reader(path)}, ByteTokenizer(), prepare, 2)

    def submit(step: int) -> None:
        if step <= steps:
            first = IMAGES_OF_STEP * step
            loader.submit(step, fetch_of(path, range(first, first + IMAGES_OF_STEP)))

    for step in range(AHEAD):
        submit(step)
    waited, begin = 0.0, 0.0
    for step in range(steps + 1):
        start = time.perf_counter()
        assert not loader.get(step, 60).failures
        if step:
            waited += time.perf_counter() - start
        else:
            begin = time.perf_counter()
        submit(step + AHEAD)
        time.sleep(STEP_S)
    share = waited / (time.perf_counter() - begin)
    loader.close()
    return share


def measure_read(folder: Path, count: int) -> dict[int, float]:
    """Bytes read by payload, where each of so many replicas reads its samples of a stream's steps."""
    rng = np.random.default_rng(0)
    items = [Item("sonar", "raw", (1,), rng.bytes(int(size))) for size in rng.integers(2_000, 30_000, 64)]
    texts = ["x" * int(size) for size in rng.integers(20, 2_000, 64)]
    samples = [Sample(f"n{i}", PLACEHOLDER + texts[i % 64], (items[i % 61],)) for i in range(count)]
    path = write(folder / "many", samples)
    manifest = Reader(path).manifest
    stream = Stream({"s": SourceSpec(manifest.num_samples, manifest.rows_per_group, 1)}, seed=0)
    ids = stream.take(0, count)[1].tolist()
    payload = sum(len(s.text.encode()) + len(s.items[0].data) for s in samples)
    found = {}
    for replicas in (1, 8, 64):
        read = 0
        for replica in range(replicas):
            reader = Reader(path, SharedFiles(cache_bytes=32 << 20))
            for i in ids[replica::replicas]:
                reader.read(i, text=True, items=True)
            read += reader.files.bytes_read
        found[replicas] = read / payload
    return found


def measure_row_groups(folder: Path, count: int) -> dict[int, float]:
    """Bytes that all replicas of a node read of compressed Parquet, by those of its columns. They take turns
    at the samples of a stream's steps, each with a small cache of its own and one that the node shares.
    """
    rng = np.random.default_rng(0)
    pictures = [photo(160, 200, seed) for seed in range(64)]
    images = [{"bytes": pictures[number], "path": None} for number in rng.integers(0, 64, count)]
    texts = [f"picture {number} " + "x" * int(rng.integers(20, 500)) for number in range(count)]
    (folder / "parquet").mkdir()
    table = pa.table({"text": texts, "image": images})
    pq.write_table(table, folder / "parquet/0.parquet", row_group_size=64, use_dictionary=False)
    build_index(folder / "parquet", folder / "parquet_index", {"name": "parquet", "image": "image"})
    index = Index.open(folder / "parquet_index")
    stream = Stream({"s": SourceSpec(len(index), index.manifest.rows_per_group, 1)}, seed=0)
    ids = stream.take(0, count)[1].tolist()
    metadata = pq.read_metadata(folder / "parquet/0.parquet")
    groups = (metadata.row_group(number) for number in range(metadata.num_row_groups))
    payload = sum(chunk_bytes(group, ("text", "image")) for group in groups)
    found = {}
    for replicas in (1, 8, 64):
        with tempfile.TemporaryDirectory() as name:
            node = [NodeCache(Path(name) / "cache", 1 << 30) for _ in range(replicas)]
            files = [SharedFiles(cache_bytes=2 << 20, node=one) for one in node]
            readers = [open_reader(folder / "parquet_index", one) for one in files]
            for place, i in enumerate(ids):
                readers[place % replicas].read(i, text=True, items=True)
            found[replicas] = sum(one.bytes_read for one in files) / payload
    return found


def measure_apart(what: str, *given: str) -> dict[str, float]:
    """Run a measurement of this file in a process of its own."""
    line = [sys.executable, __file__, "--apart", what, *given]
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def peak_mb() -> float:
    """Most memory that this process has held since it began; getrusage counts what started it, too."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) / 1000


def bomb(stated: str) -> dict[str, float]:
    """Memory and time that a picture of 12,000 x 12,000 in some hundred bytes takes until it is refused."""
    buffer = io.BytesIO()
    Image.new("RGB", (16, 16)).save(buffer, "JPEG")
    data = bytearray(buffer.getvalue())
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = (12_000).to_bytes(2, "big") * 2
    decode_image(Item("image", "jpeg", (16, 16), buffer.getvalue()))
    before, start = peak_mb(), time.process_time()
    try:
        decode_image(Item("image", "jpeg", (int(stated), int(stated)), bytes(data)))
    except SampleError:
        ms = 1000 * (time.process_time() - start)
        return {"bytes": len(data), "mb": peak_mb() - before, "ms": ms}
    raise AssertionError("it was shown")


def sources(path: str) -> dict[str, float]:
    """Memory of a process that reads all samples of the datasets in a folder."""
    files = SharedFiles()
    opened = [(Index.open(one), Reader(one, files)) for one in sorted(Path(path).iterdir())]
    for i in range(len(opened[0][0])):
        for index, reader in opened:
            index.meta(i, "s", lambda modality, size: (1, 1))
            reader.read(i, text=True, items=True)
    return {"mb": peak_mb()}


def measure_sources(folder: Path, count: int) -> dict[str, float]:
    """Memory of one source and of forty, which hold as many samples together."""
    rng = np.random.default_rng(0)
    items = [Item("sonar", "raw", (1,), rng.bytes(60_000)) for _ in range(16)]
    found = {}
    for many in (1, 40):
        samples = [Sample(f"n{i}", PLACEHOLDER, (items[i % 16],)) for i in range(40 * count // many)]
        for number in range(many):
            write(folder / f"sources{many}" / f"{number:02d}", samples)
        found[many] = measure_apart("sources", str(folder / f"sources{many}"))["mb"]
        shutil.rmtree(folder / f"sources{many}")
    return {"one": found[1], "forty": found[40]}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and samples: 1 minute, not 2")
    parser.add_argument("--apart", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.apart:
        what, *given = options.apart
        print(json.dumps({"bomb": bomb, "sources": sources}[what](*given)))
        return 0
    torch.set_num_threads(1)
    quick = options.quick
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cpu = measure_cpu(folder, 5 if quick else 25)
        read = measure_read(folder, 1024 if quick else 4096)
        row_groups = measure_row_groups(folder, 1024 if quick else 4096)
        memory = measure_sources(folder, 32 if quick else 96)
        results: dict[str, Any] = {
            "cpu_ms": cpu,
            "patches": cpu["patches"] / cpu["decoder"],
            "loader": cpu["loader"] / cpu["decoder"],
            "normalised": (cpu["patches"] + cpu["normalised on this CPU"]) / cpu["decoder"],
            "large": cpu["patches, large"] / cpu["decoder, large"],
            "decoders": measure_decoders(folder),
            "files": measure_files(folder, 32 if quick else 64),
            "waited": measure_waiting(folder, 3 if quick else 5, 5),
            "read": read,
            "row_groups": row_groups,
            "sources_mb": memory,
            "bombs": [measure_apart("bomb", stated) for stated in ("64", "12000")],
        }
    missed = [
        *(["patches"] if results["patches"] > PATCHES else []),
        *(["decoders"] if results["decoders"] < DECODERS else []),
        *(["files"] if results["files"] < FILES else []),
        *(["waited"] if results["waited"] > WAITED else []),
        *(f"read at {replicas}" for replicas, ratio in read.items() if ratio > READ),
        *(f"row groups at {replicas}" for replicas, ratio in row_groups.items() if ratio > ROW_GROUPS),
        *(["sources"] if memory["forty"] > SOURCES * memory["one"] else []),
        *("bomb" for one in results["bombs"] if one["mb"] > BOMB_MB or one["ms"] > BOMB_MS),
    ]
    for title, found in results.items():
        print(f"{title}: {found}")
    print(json.dumps({"benchmark": "loader", **results, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

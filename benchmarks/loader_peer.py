"""A loader's pass over pictures in tar files: run by loader_peers.py, each in an environment of its own.

    python loader_peer.py webdataset|energon|streaming|omni|omni_tars FOLDER

FOLDER has `tars/*.tar` with members N.jpg and N.txt, and what the loader needs beside them is written there
before its first pass. All decode and resize a picture by `decoded`. The last line is JSON: samples, CPU
seconds of this process in its second pass, and those of them that `decoded` took.
"""

import json
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image

SIDE = 224
spent = {"decoded_s": 0.0, "samples": 0}


def decoded(data: bytes) -> Any:
    """JPEG to uint8 [224, 224, 3]."""
    start = time.thread_time()
    pixels = simplejpeg.decode_jpeg(data, colorspace="RGB")
    small = np.asarray(Image.fromarray(pixels).resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    del pixels  # to free it is part of decoding
    spent["decoded_s"] += time.thread_time() - start
    spent["samples"] += 1
    return small


def of_tars(folder: Path) -> Iterator[tuple[bytes, str]]:
    """The pictures and texts."""
    for path in sorted((folder / "tars").glob("*.tar")):
        with tarfile.open(path) as tar:
            held = {member.name: tar.extractfile(member).read() for member in tar}  # type: ignore[union-attr]
        for name in sorted(held):
            if name.endswith(".jpg"):
                yield held[name], held[name.replace(".jpg", ".txt")].decode()


def webdataset(folder: Path) -> Callable[[], Iterator[Any]]:
    """WebDataset's own pipeline, in this process."""
    import webdataset as wds  # type: ignore[import-not-found]

    urls = [str(path) for path in sorted((folder / "tars").glob("*.tar"))]
    return lambda: iter(
        wds.WebDataset(urls, shardshuffle=False).to_tuple("jpg", "txt").map_tuple(decoded, bytes.decode)
    )


def energon(folder: Path) -> Callable[[], Iterator[Any]]:
    """Megatron-Energon's, without workers, buffers and batches."""
    from megatron import energon as own  # type: ignore[import-not-found]

    if not (folder / "tars/.nv-meta").exists():
        words = ["prepare", "--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "CrudeWebdataset"]
        tool = Path(sys.executable).with_name("energon")
        subprocess.run([tool, *words, str(folder / "tars")], check=True, stdout=subprocess.DEVNULL)

    @own.stateless
    def cook(sample: dict[str, Any]) -> Any:
        text = sample["txt"]
        return own.CaptioningSample(
            **own.basic_sample_keys(sample),
            image=decoded(sample["jpg"]),
            caption=text if isinstance(text, str) else text.decode(),
        )

    class Plain(own.DefaultTaskEncoder):  # type: ignore[misc]
        cookers = (own.Cooker(cook),)
        decoder = None

    def one() -> Iterator[Any]:
        dataset = own.get_train_dataset(
            str(folder / "tars"),
            worker_config=own.WorkerConfig(rank=0, world_size=1, num_workers=0),
            batch_size=None,
            shuffle_buffer_size=None,
            max_samples_per_sequence=None,
            task_encoder=Plain(),
            repeat=False,
        )
        return iter(own.get_loader(dataset))

    return one


def streaming(folder: Path) -> Callable[[], Iterator[Any]]:
    """MosaicML Streaming's, of its own format, in this process."""
    from streaming import MDSWriter, StreamingDataset  # type: ignore[import-not-found]

    own = folder / "mds"
    if not own.exists():
        with MDSWriter(out=str(own), columns={"image": "bytes", "text": "str"}) as writer:
            for image, text in of_tars(folder):
                writer.write({"image": image, "text": text})
    dataset = StreamingDataset(local=str(own), shuffle=False, batch_size=1)

    def one() -> Iterator[Any]:
        for sample in dataset:
            yield decoded(sample["image"]), sample["text"]

    return one


def omni(folder: Path) -> Callable[[], Iterator[Any]]:
    """Ours, of shards of its own."""
    from dataloader.format import PLACEHOLDER, Item, Sample
    from dataloader.tokenizer import ByteTokenizer
    from dataloader.writer import DatasetWriter

    own = folder / "shards"
    if not own.exists():
        with DatasetWriter(own, ByteTokenizer()) as writer:
            for number, (image, text) in enumerate(of_tars(folder)):
                height, width, *_ = simplejpeg.decode_jpeg_header(image)
                item = Item("image", "jpeg", (height, width), image)
                writer.add(Sample(str(number), PLACEHOLDER + text, (item,)))
    return _loaded(own)


def omni_tars(folder: Path) -> Callable[[], Iterator[Any]]:
    """Ours, of the tar files where they lie."""
    from dataloader.sources.build import build_index

    build_index(folder / "tars", folder / "index", "webdataset")
    return _loaded(folder / "index")


def _loaded(path: Path, step: int = 128) -> Callable[[], Iterator[Any]]:
    """What a rank does with each step of `step` samples: draws, lengths, texts and items, with one thread."""
    from dataloader.index import Index
    from dataloader.loader import Fetch, Loader
    from dataloader.sources.reader import open_reader
    from dataloader.stream import SourceSpec, Stream
    from dataloader.tokenizer import ByteTokenizer

    index = Index.open(path)
    stream = Stream({"s": SourceSpec(len(index), index.manifest.rows_per_group, 1)}, seed=0)
    readers = {"s": open_reader(path)}  # for all epochs

    def one() -> Iterator[Any]:
        loader: Loader[Any] = Loader(readers, ByteTokenizer(), {"image": lambda item: decoded(item.data)}, 1)
        for number in range(0, len(index), step):
            ids = stream.take(number, min(step, len(index) - number))[1].tolist()
            metas = [index.meta(i, "s", lambda modality, size: (1, 1)) for i in ids]
            items = tuple(("s", meta.id, k) for meta in metas for k in range(len(meta.items)))
            texts = tuple(("s", meta) for meta in metas)
            loader.submit(number, Fetch(texts, items, tuple(meta.bytes for meta in metas)))
            fetched = loader.get(number, 600)
            assert not fetched.failures
            yield from fetched.items
        loader.close()

    return one


def main() -> int:
    """Make a pass to warm up, and measure the second."""
    loader, folder = globals()[sys.argv[1]], Path(sys.argv[2])
    make = loader(folder)
    for _ in range(2):
        spent.update(decoded_s=0.0, samples=0)
        start = time.process_time()
        for _ in make():
            pass
        cpu_s = time.process_time() - start
    print(json.dumps({"cpu_s": cpu_s, **spent}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

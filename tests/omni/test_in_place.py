"""Training on samples where they lie: the same steps as on a dataset of the same samples, and lost files."""

import contextlib
import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from ranks import RankPool
from small import image, overrides, strip
from tars import write_tars

from dataloader.format import PLACEHOLDER, Sample
from dataloader.sources.build import build_index
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from infra.run_folder import RunFolder, read_metrics
from omni.compose import compose_config
from omni.config import Config
from omni.planning.prepare import prepare_run
from omni.training.trainer import Trainer

CHANGED = ("crop=0.5", "brightness=0.9")
SKIP = ("data.on_error=skip", "data.max_error_share=1")


def samples() -> list[Sample]:
    rng = np.random.default_rng(0)
    strips = [strip(rng, f"strip{i}", digits) for i, digits in enumerate((1, 6, 2, 1, 3))]
    two = (image(rng, 8, 16), image(rng, 16, 24))
    pair = Sample("two", f"left {PLACEHOLDER} and right {PLACEHOLDER}.", two)
    return [*strips, pair, Sample("short", "no picture"), Sample("long", ("text alone, " * 15)[:159])]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The samples as a dataset of their own, `own`, and as an index of tar files, `index`."""
    with DatasetWriter(tmp_path / "own", ByteTokenizer()) as writer:
        for sample in samples():
            writer.add(sample)
    write_tars(tmp_path / "tars", samples(), each=3)
    assert build_index(tmp_path / "tars", tmp_path / "index", "webdataset")
    return tmp_path


def train(rank: int, config: Config, world: int) -> str:
    """Train, and return what it says if it fails, else what is on the screen."""
    screen = io.StringIO()
    try:
        with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen):
            spec = prepare_run(config, world)
            Trainer(spec, RunFolder.create(Path(spec.config.run.dir)), rank, torch.device("cpu")).run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return screen.getvalue()


def figures(folder: Path) -> list[tuple[float, ...]]:
    """What each step gave, to the bit."""
    keys = ("loss/train", "optim/grad_norm", "progress/tokens", "loss/eval/held")
    found = read_metrics(folder / "metrics.jsonl")
    assert found
    return [tuple(float(step[key]) for key in keys if key in step) for step in found]


def test_a_run_on_an_index_is_the_run_on_a_dataset_of_the_same_samples(ranks: RankPool, data: Path) -> None:
    for name, world, more in (("own", 1, ()), ("index", 1, ()), ("index", 2, ("layout=pp2",))):
        folder = data / f"run_{name}_{world}"
        held = (f"+data.heldout.held.path={data / name}", "train.eval_every=1")
        line = overrides(data / name, folder, *more, *held, samples=3)
        ranks.run(world, train, compose_config(line), world)
    one, same, piped = (figures(data / f"run_{name}") for name in ("own_1", "index_1", "index_2"))
    assert len(one) == 3
    assert len(one[-1]) == 4
    assert one == same
    np.testing.assert_allclose(piped, one, rtol=1e-5)


def test_pictures_of_compressed_parquet_change_alike_in_any_world(ranks: RankPool, tmp_path: Path) -> None:
    columns = {
        "text": [sample.text for sample in samples()],
        "image": [[item.data for item in sample.items] for sample in samples()],
    }
    (tmp_path / "source").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "source/0.parquet", compression="zstd", row_group_size=3)
    assert build_index(tmp_path / "source", tmp_path / "index", {"name": "parquet", "image": "image"})
    found = []
    for world, more in ((1, CHANGED), (2, CHANGED), (1, ())):
        folder = tmp_path / f"run{len(found)}"
        keys = [f"data.cache_dir={tmp_path / 'cache'}"]
        keys += (f"+data.sources.mixed.augment.{key}" for key in more)
        ranks.run(
            world, train, compose_config(overrides(tmp_path / "index", folder, *keys, samples=3)), world
        )
        found.append(figures(folder))
    alone, both, plain = found
    np.testing.assert_allclose(both, alone, rtol=1e-5)
    assert not np.allclose(plain, alone, rtol=1e-4)
    assert list((tmp_path / "cache").glob("*.arrow"))


def test_a_file_that_is_gone_is_counted_and_named(ranks: RankPool, data: Path) -> None:
    (data / "tars" / "00001.tar").unlink()  # strip3, strip4 and two
    line = overrides(data / "index", data / "skip", "layout=pp2", *SKIP)  # a step takes every sample once
    screens = ranks.run(2, train, compose_config(line), 2)
    assert [m["data/skipped/bad_item"] for m in read_metrics(data / "skip/metrics.jsonl")] == [3, 6, 9]
    assert "source mixed, sample 3 ('00001.tar/strip3'), its text: " in "".join(screens)
    (failed,) = ranks.run(1, train, compose_config(overrides(data / "index", data / "fail")), 1)
    assert failed.startswith("BadDataError: source mixed, sample ")
    assert "00001.tar" in failed
    assert "set data.on_error=skip" in failed


def test_an_index_of_another_tokenizer_is_refused(data: Path) -> None:
    manifest = data / "index" / "dataset.json"
    manifest.write_text(manifest.read_text().replace('"tokenizer": "bytes"', '"tokenizer": "letters"'))
    with pytest.raises(ValueError, match=r"built with tokenizer 'letters'.*add its counts with omni data"):
        prepare_run(compose_config(overrides(data / "index", data / "run")), 1)

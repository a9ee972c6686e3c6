"""Which pictures a run changes: by seed, sample and epoch, whatever the world and wherever it goes on."""

from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small import overrides, write_mixed

from dataloader.augment import Augment, key_of
from dataloader.format import Sample
from dataloader.loader import Fetch
from dataloader.stream import SourceSpec, Stream
from dataloader.tokenizer import ByteTokenizer
from dataloader.tokens import ItemMeta, SampleMeta
from dataloader.writer import DatasetWriter
from omni.compose import compose_config
from omni.config import Config, ConfigError
from omni.data_config import AugmentConfig
from omni.keys import check_keys
from omni.planning.plan_process import plan_step
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.rank.inputs import Assembler, Place
from omni.training.augmenting import Augmenting, augmenting_of
from pipeline.plan import Taken

STEPS = 9


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("augmented")
    write_mixed(folder / "mixed")
    write_mixed(folder / "plain")
    line = overrides(folder / "mixed", folder / "run", samples=20)  # more than a source has
    line += [f"+data.sources.plain.path={folder / 'plain'}", "+data.sources.mixed.augment.flip=0.5"]
    return compose_config([*line, f"train.steps={STEPS}"])


def changes(spec: RunSpec, first: int = 1, cursor: int = 0) -> tuple[list[set[Any]], list[int]]:
    """The items of steps with the key that each is changed by, of all ranks; and where the steps begin."""
    augmenting = augmenting_of(spec)
    assert augmenting is not None
    encoders, sources = spec.encoders, tuple(spec.indexes)
    found, begins = [], []
    for step in range(first, STEPS + 1):
        begins.append(cursor)
        items: set[Any] = set()
        for domain in range(spec.arrangement.num_domains):
            plan = plan_step(spec.planner, step, cursor, domain, None, predicts=False).plan
            metas = spec.planner.metas_of(plan.domain)
            for domain_rank in range(plan.domain.num_ranks):
                place = Place(domain_rank, torch.device("cpu"), torch.float32)
                assembler = Assembler(spec.config.model.llm, encoders, sources, place)
                fetch = augmenting.fetch(assembler.fetch_of(plan.domain, metas), metas, plan.taken)
                done = fetch.changes or (None,) * len(fetch.items)
                keys = [change and change.keywords["key"] for change in done]
                items.update(zip(fetch.items, keys, strict=True))
            after = plan.taken.next_cursor
        found.append(items)
        cursor = after
    return found, begins


def test_keys_are_those_of_epochs_in_any_world_and_after_a_resume(base: Config) -> None:
    spec = prepare_run(base, 1)
    alone, begins = changes(spec)
    seed, stream = base.train.seed, spec.planner.world.samples.stream
    epochs = set()
    for items, begin, end in zip(alone, begins, begins[1:], strict=False):
        sources, ids, of = stream.draw(begin, end - begin)  # type: ignore[attr-defined]
        drawn = list(zip((stream.names[n] for n in sources.tolist()), ids.tolist(), of.tolist(), strict=True))
        for source, sample, number in (item for item, _ in items):
            first = next(epoch for name, i, epoch in drawn if (name, i) == (source, sample))
            key = key_of(seed, source, sample, number, first) if source == "mixed" else None
            assert ((source, sample, number), key) in items
            epochs.add(first)
    assert epochs >= {0, 1, 2}
    assert any(len({item for item, _ in items}) < 20 for items in alone)  # some come twice
    assert changes(prepare_run(base, 2))[0] == alone
    assert changes(spec, 6, begins[5])[0] == alone[5:]
    other = deepcopy(base)
    other.train.seed += 1
    assert not set(changes(prepare_run(other, 1))[0][0]) & {pair for pair in alone[0] if pair[1]}


def test_recordings_stay_as_they_are() -> None:
    fetch = Fetch((), (("s", 3, 0), ("s", 3, 1)))
    items = tuple(ItemMeta(modality, 4, 1, 0, (8, 8)) for modality in ("audio", "image"))
    stream = Stream({"s": SourceSpec(8, 4, 1)}, seed=0)
    world: Any = SimpleNamespace(samples_at=lambda cursor: SimpleNamespace(stream=stream))
    taken = Taken(0, 8, ("s",), (0,) * 8, tuple(range(8)), (6,) * 8)
    metas = [SampleMeta(3, "s", 4, items, 100)]
    recording, picture = Augmenting({"s": Augment(flip=1)}, 0, world).fetch(fetch, metas, taken).changes
    assert recording is None
    assert picture is not None


def test_without_augment_nothing_is_changed(base: Config) -> None:
    config = deepcopy(base)
    config.data.sources["mixed"].augment = None
    assert augmenting_of(prepare_run(config, 1)) is None


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"crop": 0.0}, "crop=0.0: is a share of the area"),
        ({"crop": 1.5}, "crop=1.5: is a share of the area"),
        ({"flip": 2.0}, "flip=2.0: is a probability"),
        ({"ratio": 0.5}, "ratio=0.5: must be at least 1"),
        ({"hue": 0.6}, "hue=0.6: is a share of the circle"),
        ({"contrast": float("nan")}, "contrast=nan: must be a finite number"),
    ],
)
def test_keys_are_refused_by_name(keys: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_keys("data.sources.mixed.augment", AugmentConfig(**keys))


def test_a_source_without_pictures_is_refused(base: Config, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "texts", ByteTokenizer()) as writer:
        writer.add(Sample("a", "no picture"))
    config = deepcopy(base)
    config.data.sources["mixed"].path = str(tmp_path / "texts")
    with pytest.raises(ConfigError, match=r"data.sources.mixed.augment: it has no images, but texts alone"):
        prepare_run(config, 1)

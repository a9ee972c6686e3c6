"""What a checkpoint may be continued with, and what it may not."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small import overrides, without_hashes, write_mixed

from dataloader.format import DataError, Sample
from dataloader.manifest import read_manifest
from dataloader.reader import Reader
from dataloader.storage import Storage
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter, add_hashes
from infra.checkpoint import CheckpointError
from infra.run_folder import RunFolder
from omni.compose import compose_config
from omni.planning.prepare import prepare_run
from omni.training.evaluate import left_out_of
from omni.training.fingerprint import check_fingerprint, fingerprint, other_decoders
from omni.training.opening import opening


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fingerprint") / "mixed"
    write_mixed(path)
    return path


def of(data: Path, *more: str) -> dict[str, Any]:
    return fingerprint(prepare_run(compose_config(overrides(data, data / "run", *more)), 2))


@pytest.mark.parametrize(
    "key",
    [
        "model.llm.recompute=full",
        "model.llm.recompute_long=true",
        "++model.llm={recompute: full, keep_attention: true}",
        "model.llm.loss_chunk=16",
        "model.encoders.image.recompute=full",
        "++model.encoders.image={recompute: full, offload: 1, keep_attention: true}",
        "optim.max_skipped=3",
        "layout=pp2",
        "train.steps=9",
        "data.loader_threads=2",
    ],
)
def test_what_changes_neither_samples_nor_losses_may_change(data: Path, key: str) -> None:
    saved, current = of(data), of(data, key)
    assert saved == current
    check_fingerprint({"step": 1, "fingerprint": saved}, current, Storage.at(data))


@pytest.mark.parametrize(
    "key",
    [
        "model.llm.norm_eps=1e-6",
        "model.llm.layers=2",
        "model.encoders.image.std=0.5",
        "optim.clip=2.0",
        "data.step_samples=4",
        "train.seed=1",
        "+data.sources.mixed.augment.flip=0.5",
    ],
)
def test_what_decides_samples_or_losses_must_not_change(data: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=key.partition("=")[0].strip("+").removesuffix(".flip")):
        check_fingerprint({"step": 1, "fingerprint": of(data)}, of(data, key), Storage.at(data))


def test_a_checkpoint_of_before_pictures_were_noted_as_changed_goes_on(data: Path) -> None:
    now = of(data, "+data.sources.mixed.augment.flip=0.5")
    older = {key: value for key, value in now.items() if not key.endswith(".augment")}
    check_fingerprint({"step": 1, "fingerprint": older}, now, Storage.at(data))


def relabelled(data: Path, to: Path) -> Path:
    """A copy of a dataset that differs in one label: its files are of the same sizes."""
    with DatasetWriter(to, ByteTokenizer(), rows_per_group=4) as writer:
        reader = Reader(data)
        for i in range(reader.manifest.num_samples):
            sample = reader.read(i, text=True, items=True)
            writer.add(replace(sample, text=sample.text.replace("no picture", "no pictuRe")))
    sizes = [[(file.file, file.bytes) for file in read_manifest(path).files] for path in (data, to)]
    assert sizes[0] == sizes[1]
    return to


def test_other_labels_of_the_same_sizes_are_refused_by_name(data: Path, tmp_path: Path) -> None:
    saved, other = of(data), of(relabelled(data, tmp_path / "mixed"))
    with pytest.raises(CheckpointError, match=r"on other data: data\.sources\.mixed\.hash='"):
        check_fingerprint({"step": 1, "fingerprint": saved}, other, Storage.at(data))


def test_a_checkpoint_that_knew_no_hash_goes_on_and_one_that_did_needs_it(data: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(data, tmp_path / "mixed")
    without_hashes(copy)
    before, now = of(copy), of(data)
    assert before["data.sources.mixed.hash"] is None
    check_fingerprint({"step": 1, "fingerprint": before}, now, Storage.at(data))
    older = {key: value for key, value in now.items() if not key.endswith(".hash")}
    check_fingerprint({"step": 1, "fingerprint": older}, now, Storage.at(data))
    with pytest.raises(CheckpointError, match=r"hash=None \(checkpoint: '.*omni data hash"):
        check_fingerprint({"step": 1, "fingerprint": now}, before, Storage.at(data))
    assert add_hashes(copy)
    check_fingerprint({"step": 1, "fingerprint": now}, of(copy), Storage.at(data))


def test_other_decoders_are_told_and_unknown_ones_are_not() -> None:
    now = {"Pillow": "13.0.0", "soxr": "1.1.0"}
    assert other_decoders({}, now) == other_decoders({"decoders": now}, now) == []
    assert other_decoders({"decoders": now | {"Pillow": "12.1.0"}}, now) == ["Pillow is 13.0.0, was 12.1.0"]


def test_a_relative_path_is_told_with_the_folder_it_was_looked_for_in(data: Path, monkeypatch) -> None:
    monkeypatch.chdir(data.parent)
    assert of(Path(data.name)) == of(data)
    monkeypatch.chdir("/")
    with pytest.raises(
        DataError, match=r"sources.mixed.path=mixed \(relative, so looked for in /:.*not a data"
    ):
        of(Path(data.name))
    with pytest.raises(DataError, match=r"path=/no/mixed: /no/mixed is not a dataset"):
        of(Path("/no/mixed"))


def test_the_same_data_as_source_and_held_out_is_said(data: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(data, tmp_path / "copy")
    heldout = f"+data.heldout.seen.path={copy}"
    spec = prepare_run(compose_config(overrides(data, data / "run", heldout)), 2)
    folder = RunFolder(tmp_path / "run")
    said = "held-out seen is the data of source mixed"
    few = "note: data.heldout.seen.samples=128: there are 8, which are all taken"
    notes = [line for line in opening(spec, folder, 1, "nowhere") if line.startswith("note") and line != few]
    assert [said in note for note in notes] == [True]
    without_hashes(copy)
    spec = prepare_run(compose_config(overrides(data, data / "run", heldout)), 2)
    notes = [line for line in opening(spec, folder, 1, "nowhere") if line.startswith("note") and line != few]
    assert [f"omni data hash {copy}" in note for note in notes] == [True]


def test_held_out_samples_that_a_run_does_not_take_are_said(data: Path, tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "texts", ByteTokenizer()) as writer:
        for number in range(3):
            writer.add(Sample(f"{number}", "text " * 100**number))
    heldout = f"+data.heldout.texts={{path: {tmp_path / 'texts'}, samples: 3}}"
    spec = prepare_run(compose_config(overrides(data, data / "run", heldout)), 2)
    lines = opening(spec, RunFolder(tmp_path / "run"), None, "nowhere")
    (note,) = [line for line in lines if line.startswith("note")]
    assert note.startswith(
        "note: 2 of 3 samples of held-out texts are left out: they have more than 160 tokens"
    )


def test_more_held_out_samples_than_there_are_are_said(data: Path) -> None:
    heldout = f"+data.heldout.some={{path: {data}, samples: 9, generate: 8}}"
    spec = prepare_run(compose_config(overrides(data, data / "run", heldout)), 2)
    assert list(left_out_of(spec)) == ["data.heldout.some.samples=9: there are 8, which are all taken"]

"""What training saves and what it goes on from: damage is passed over, what is not finite is not saved."""

import json
import math
import re
import shutil
import socket
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from ranks import RankPool
from saved import tensors_of
from small import overrides, write_mixed

from dataloader.storage import Storage
from infra.checkpoint import DAMAGED, CheckpointError, Keep, complete, file_of, folder_of, verify
from infra.run_folder import RunFolder, read_metrics
from infra.watchdog import EXIT_CODE
from omni.__main__ import main
from omni.compose import compose_config
from omni.config import Config
from omni.planning.prepare import prepare_run
from omni.rank.build import Rank
from omni.training import loading
from omni.training.checkpoints import Checkpoints
from omni.training.progression import NoUpdateError
from omni.training.reporter import Silent
from omni.training.saving import Saving
from omni.training.trainer import Trainer
from parallel.control import Control
from parallel.control_tree import Tree


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saving") / "mixed"
    write_mixed(path)
    return path


def make_trainer(rank: int, config: Config, world: int) -> Trainer:
    spec = prepare_run(config, world)
    return Trainer(spec, RunFolder.create(Path(spec.config.run.dir)), rank, torch.device("cpu"))


def _train(rank: int, config: Config) -> int:
    trainer = make_trainer(rank, config, 2)
    trainer.run()
    return trainer.step


def _restore(rank: int, config: Config) -> tuple[int | str | None, list[str]]:
    """Restore, and say after which step, or why not; and which files the rank opened."""
    trainer = make_trainer(rank, config, 2)
    opened: list[str] = []
    original = Storage.open

    def opening(storage: Storage, name: str) -> object:
        opened.append(Path(name).name)
        return original(storage, name)

    with patch.object(Storage, "open", opening):
        try:
            return trainer.saving.restore(), opened
        except CheckpointError as error:
            return str(error), opened


@pytest.fixture(scope="module")
def trained(ranks: RankPool, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two tensor-parallel ranks with checkpoints of steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("trained")
    assert ranks.run(2, _train, compose_config(keys_of(data, folder))) == [6, 6]
    return folder


def keys_of(data: Path, folder: Path) -> list[str]:
    own = ["layout.llm.tp=2", "train.steps=6", "train.checkpoint_every=2", "train.keep_checkpoints=3"]
    return overrides(data, folder, *own, "train.eval_every=0")


def test_a_damaged_checkpoint_is_passed_over_on_all_ranks(
    ranks: RankPool, data: Path, trained: Path, tmp_path: Path
) -> None:
    keys = keys_of(data, tmp_path)
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / "checkpoints"
    storage = Storage.at(folder)
    assert complete(storage) == [2, 4, 6]
    # Tensor-parallel ranks hold norms alike, which the first one saves.
    (step, first), (other, second) = ranks.run(2, _restore, compose_config(keys))
    assert (step, other) == (6, 6)
    assert Counter(first) == {file_of(0): 1}
    assert Counter(second) == {file_of(0): 1, file_of(1): 1}

    flipped = folder / folder_of(6) / file_of(1)
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 4
    flipped.write_bytes(content)
    (folder / folder_of(4) / file_of(0)).unlink()
    assert [step for step, _ in ranks.run(2, _restore, compose_config(keys))] == [2, 2]
    assert [(folder / folder_of(step) / DAMAGED).exists() for step in (2, 4, 6)] == [False, True, True]
    assert ranks.run(2, _train, compose_config(keys)) == [6, 6]
    assert [record["progress/step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ]
    assert complete(storage) == [2, 4, 6]
    assert verify(storage, 6)["cursor"] == 48

    run_id = folder / "run_id"
    run_id.write_text("another")
    for refusal, _ in ranks.run(2, _restore, compose_config(keys)):
        assert isinstance(refusal, str)
        assert "holds checkpoints of another run (another, and this one is" in refusal


class _Misread:
    """A file of which one bit is read wrongly, behind the header."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.start = 8 + int.from_bytes(file.read(8), "little")
        file.seek(0)

    def __enter__(self) -> "_Misread":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def seek(self, at: int) -> None:
        self.file.seek(at)

    def readinto(self, into: memoryview) -> int:
        behind = self.file.tell() >= self.start
        count: int = self.file.readinto(into)
        if behind and count:
            into[0] ^= 1
        return count


def _restore_blindly(rank: int, config: Config, blind: int, how: str) -> int | str | None:
    """Restore as `_restore`, where one rank does not see the files of ranks, or reads other bits."""
    trainer = make_trainer(rank, config, 2)
    original = Storage.open

    def opening(storage: Storage, name: str) -> object:
        if how == "missing":
            raise FileNotFoundError(2, "No such file or directory", storage.path(name))
        return _Misread(original(storage, name))

    with patch.object(Storage, "open", opening if rank == blind else original):
        try:
            return trainer.saving.restore()
        except CheckpointError as error:
            return str(error)


@pytest.mark.parametrize(
    ("blind", "how", "words"),
    [
        (1, "missing", ("is not there on {host}", "seen by rank 0", "Is {storage} mounted on {host}")),
        (1, "other bits", ("rank 0 on {host} has read the same, and it is as it was written", "memory")),
        (0, "other bits", ("rank 1 on {host} has read the same, and it is as it was written", "memory")),
    ],
)
def test_a_rank_that_reads_what_others_do_not_sets_nothing_aside(
    ranks: RankPool, data: Path, trained: Path, tmp_path: Path, blind: int, how: str, words: tuple[str, ...]
) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    config = compose_config(keys_of(data, tmp_path))
    storage = Storage.at(tmp_path / "checkpoints")
    for refusal in ranks.run(2, _restore_blindly, config, blind, how):
        assert isinstance(refusal, str)
        for word in (f"rank {blind}: ", f"{folder_of(6)}/{file_of(0)}", "Nothing was set aside", *words):
            assert word.format(host=socket.gethostname(), storage=storage) in refusal
    assert complete(storage) == [2, 4, 6]
    assert [step for step, _ in ranks.run(2, _restore, config)] == [6, 6], "once the fault has passed"


def _restore_unmoved(rank: int, config: Config) -> str:
    """Restore where nothing can be given another name, and say why not."""
    trainer = make_trainer(rank, config, 2)
    unwritable = OSError(30, "Read-only file system")
    with patch.object(Storage, "move", side_effect=[unwritable]), pytest.raises(CheckpointError) as error:
        trainer.saving.restore()
    return str(error.value)


def test_a_damaged_checkpoint_that_cannot_be_set_aside_is_not_tried_for_ever(
    ranks: RankPool, data: Path, trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    flipped = tmp_path / "checkpoints" / folder_of(6) / file_of(1)
    content = bytearray(flipped.read_bytes())
    content[len(content) // 2] ^= 4
    flipped.write_bytes(content)
    for refusal in ranks.run(2, _restore_unmoved, compose_config(keys_of(data, tmp_path))):
        for word in (
            "step_00000006",
            "is damaged: rank 1: ",
            "Read-only file system",
            f"to {DAMAGED} yourself",
        ):
            assert word in refusal
    assert complete(Storage.at(tmp_path / "checkpoints")) == [2, 4, 6]


def test_a_warning_says_how_to_take_back_what_was_set_aside(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    storage, rank = Storage.at(tmp_path / "checkpoints"), cast(Rank, SimpleNamespace(is_first=True))
    control = Control(0, Tree(1, 1), cast(Any, None), b"", 5)
    checkpoints = Checkpoints(storage, RunFolder(tmp_path), rank, control, Keep(1))
    checkpoints._give_up(6, "chunk 0")
    assert complete(storage) == [2, 4]
    found = re.search(
        r"step_00000006 .* damaged: chunk 0.* rename its (\S+) to (\S+)\.\n", capsys.readouterr().err
    )
    assert found is not None
    folder = tmp_path / "checkpoints" / folder_of(6)
    (folder / found[1]).rename(folder / found[2])
    assert complete(storage) == [2, 4, 6]
    assert verify(storage, 6)["step"] == 6


def test_a_last_save_that_goes_on_is_progress_to_the_watchdog() -> None:
    beats: list[int] = []
    stands: list[str] = []

    def wait(going_on: Any) -> None:
        going_on()
        going_on()

    saving = SimpleNamespace(
        progression=SimpleNamespace(step=4),
        checkpoints=SimpleNamespace(wait=wait),
        rank=SimpleNamespace(note=stands.append),
        beat=lambda: beats.append(1),
    )
    Saving.finish(cast(Saving, saving), Silent())
    assert len(beats) == 3, "and once when it is done"
    assert stands == ["step 4: waiting until the last checkpoint is written"]


class Restored(Exception):
    """The end of a restore, where nothing is to be trained."""


def _restores(rank: int, config: Config, hangs: bool) -> list[int]:
    """Restore from a store that gives each of ten pieces in 0.3 s, or nothing more; with which codes the
    watchdog would have ended this process.
    """
    trainer, codes, go, read = make_trainer(rank, config, 1), list[int](), threading.Event(), loading._read

    def slowly(*given: Any) -> Any:
        for number, piece in enumerate(read(*given)):
            if hangs:
                go.wait(20)
            else:
                time.sleep(0.3 * (number < 10))
            yield piece

    def restored(*_: Any) -> None:
        raise Restored

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "_read", slowly)
        patch.setattr(loading, "spread_weights", restored)
        patch.setattr("os._exit", lambda code: (codes.append(code), go.set()))
        with pytest.raises(Restored):
            trainer.run()
    return codes


def _train_alone(rank: int, config: Config) -> bool:
    return make_trainer(rank, config, 1).run()


def test_a_restore_is_watched_and_may_take_long_while_it_goes_on(
    ranks: RankPool, data: Path, tmp_path: Path
) -> None:
    line = overrides(data, tmp_path, "train.steps=1")
    ranks.run(1, _train_alone, compose_config(line))
    config = compose_config([*line, "train.timeout_s=1", "health.report_hang_s=1"])
    assert ranks.run(1, _restores, config, False) == [[]]
    assert ranks.run(1, _restores, config, True) == [[EXIT_CODE]]


def _refused(rank: int, config: Config) -> str:
    with pytest.raises(CheckpointError) as error:
        make_trainer(rank, config, 2).run()
    return str(error.value)


def test_a_run_whose_store_is_empty_is_refused_and_left_as_it_was(
    ranks: RankPool, data: Path, tmp_path: Path
) -> None:
    store, run = tmp_path / "kept", tmp_path / "run"
    keys = [*keys_of(data, run), "train.steps=2", f"train.checkpoint_dir={store}"]
    config = compose_config(keys)
    assert ranks.run(2, _train, config) == [2, 2]
    records = (run / "metrics.jsonl").read_bytes()
    store.rename(tmp_path / "away")
    store.mkdir()
    for refusal in ranks.run(2, _refused, config):
        for word in ("train.checkpoint_dir", f"saved {store}/{folder_of(2)}", "mounted?", "from the start"):
            assert word in refusal
    assert list(store.iterdir()) == []
    assert (run / "metrics.jsonl").read_bytes() == records
    assert not (run / "metrics.jsonl.1").exists()
    store.rmdir()
    (tmp_path / "away").rename(store)
    (run / "last_checkpoint").unlink()  # as of an earlier version
    assert [step for step, _ in ranks.run(2, _restore, config)] == [2, 2]
    assert (run / "last_checkpoint").read_text() == f"{store}/{folder_of(2)}\n"


def test_a_data_parallel_rank_opens_its_own_file_alone(ranks: RankPool, data: Path, tmp_path: Path) -> None:
    keys = overrides(data, tmp_path, "train.steps=1", "train.checkpoint_every=1", "train.eval_every=0")
    assert ranks.run(2, _train, compose_config(keys)) == [1, 1]
    assert ranks.run(2, _restore, compose_config(keys)) == [(1, [file_of(0)]), (1, [file_of(1)])]


def test_checkpoints_are_verified_shown_and_exported(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(trained / "checkpoints", folder)

    def omni(*words: str) -> tuple[int, str]:
        code = main(["checkpoint", *words])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    code, out = omni("verify", str(folder))
    assert (code, out.count("good, 2 files")) == (0, 3)
    code, out = omni("show", str(folder), "--step", "4")
    assert code == 0
    for words in ("step 4 of run", "position 32", "2 ranks, tp2", "llm: ", "image: ", "state of AdamW"):
        assert words in out
    exported = tmp_path / "all.safetensors"
    code, out = omni("export", str(folder), "--out", str(exported))
    assert (code, "tensors of step 6" in out) == (0, True)
    whole = tensors_of(exported)
    sharded = [tensors_of(folder / folder_of(6) / file_of(rank)) for rank in range(2)]
    names = {name.removesuffix("/main") for of in sharded for name in of if name.endswith("/main")}
    assert whole.keys() == names
    # The rows of a matrix that is divided by them lie one rank's after the other's; norms are held by one.
    embedding = "llm/embedding.word_embeddings.weight"
    rows = torch.cat([of[f"{embedding}/main"] for of in sharded])
    assert torch.equal(whole[embedding].flatten(), rows)
    norm = "llm/decoder.final_layernorm.weight"
    assert torch.equal(whole[norm], sharded[0][f"{norm}/main"])

    broken = folder / folder_of(4) / file_of(1)
    broken.write_bytes(broken.read_bytes()[:-1] + b"?")
    code, out = omni("verify", str(folder))
    assert code == 1
    assert "step_00000004: DAMAGED: step_00000004/rank_00001.safetensors: chunk" in out
    assert out.count("good, ") == 2
    good = exported.read_bytes()
    code, out = omni("export", str(folder), "--step", "4", "--out", str(exported))
    assert (code, "rank_00001.safetensors" in out) == (1, True)
    assert exported.read_bytes() == good, "an export that fails leaves the file before"
    assert set(tmp_path.iterdir()) == {folder, exported}
    assert omni("show", str(folder), "--step", "5")[0] == 2
    assert omni("show", str(tmp_path / "nothing"))[0] == 2


def _train_spoiled(rank: int, config: Config, at: int) -> str:
    """Train, with weights that are not finite from step `at` on."""
    trainer = make_trainer(rank, config, 2)
    original = trainer.run_step

    def run_step(prepared, watch):  # type: ignore[no-untyped-def]
        if prepared.plan.step == at:
            trainer.rank.optimizer.arrive()
            for parameter in trainer.rank.components["llm"].parameters:
                parameter.data.fill_(math.nan)
        return original(prepared, watch)

    with patch.object(trainer, "run_step", run_step), pytest.raises(NoUpdateError) as error:
        trainer.run()
    return str(error.value)


def test_a_run_that_ends_not_finite_fails_and_keeps_what_was_good(
    ranks: RankPool, data: Path, tmp_path: Path
) -> None:
    keys = overrides(data, tmp_path, "train.steps=4", "train.checkpoint_every=1", "train.keep_checkpoints=1")
    one, two = ranks.run(2, _train_spoiled, compose_config(keys), 3)
    assert one == two
    for word in ("after the last step, 4", "not finite", "new run folder"):
        assert word in one
    assert complete(Storage.at(tmp_path / "checkpoints")) == [2]
    assert verify(Storage.at(tmp_path / "checkpoints"), 2)["step"] == 2
    assert not (tmp_path / "summary.json").exists()
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["loss/train"] == "NaN"


def _train_on_a_full_disk(rank: int, config: Config, at: int) -> str:
    """Train; the disk of the second rank is full when the checkpoint of step `at` is written."""
    trainer = make_trainer(rank, config, 2)
    original, run_step = Storage.write, trainer.run_step

    def patient(prepared, watch):  # type: ignore[no-untyped-def]
        saver = trainer.saving.checkpoints.saver
        if saver is not None and saver.thread is not None:
            saver.thread.join()  # so that the next step's record tells of it
        return run_step(prepared, watch)

    def write(storage: Storage, name: str, parts: object) -> None:
        if rank == 1 and name.startswith(folder_of(at)):
            raise OSError(28, "No space left on device")
        original(storage, name, parts)  # type: ignore[arg-type]

    patched = patch.object(Storage, "write", write), patch.object(trainer, "run_step", patient)
    with patched[0], patched[1], pytest.raises(CheckpointError) as error:
        trainer.run()
    return str(error.value)


def test_a_run_whose_last_save_fails_beside_training_fails_at_its_end(
    ranks: RankPool, data: Path, tmp_path: Path
) -> None:
    keys = overrides(data, tmp_path, "train.steps=4", "train.checkpoint_every=2", "train.eval_every=0")
    for refusal in ranks.run(2, _train_on_a_full_disk, compose_config(keys), 4):
        for words in ("the checkpoint of step 4 could", "rank 1: OSError: [Errno 28] No space", folder_of(2)):
            assert words in refusal
    storage = Storage.at(tmp_path / "checkpoints")
    assert complete(storage) == [2]
    size = sum(size for size, _ in verify(storage, 2)["files"].values())
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert ["perf/save_s" in record for record in records] == [False, False, True, False]
    assert [record.get("perf/save_gb") for record in records] == [None, None, size / 1e9, None]
    assert not (tmp_path / "summary.json").exists()

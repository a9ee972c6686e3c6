import json
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import RankPool

from infra.checkpoint import MANIFEST, CheckpointError, latest_checkpoint, read_manifest, save_checkpoint


def _save(rank: int, root: str, step: int, fail_on: int | None, keep: int) -> str:
    def write(path: Path) -> None:
        if rank == fail_on:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        path.write_bytes(f"step {step} of rank {rank}".encode())

    try:
        return str(save_checkpoint(Path(root), step, write, {"cursor": 7 * step}, keep, dist.group.WORLD))
    except CheckpointError as error:
        return f"refused: {error}"


def test_a_checkpoint_is_complete_and_says_what_it_holds(ranks: RankPool, tmp_path: Path) -> None:
    paths = ranks.run(2, _save, str(tmp_path), 30, None, 2)
    assert paths == [str(tmp_path / "step_00000030")] * 2
    manifest = read_manifest(latest_checkpoint(tmp_path))
    assert (manifest["step"], manifest["cursor"]) == (30, 210)
    assert sorted(manifest["files"]) == ["rank_00000.pt", "rank_00001.pt"]


@pytest.mark.parametrize("fail_on", [0, 1])
def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_the_last_good_one(
    ranks: RankPool, tmp_path: Path, fail_on: int
) -> None:
    ranks.run(2, _save, str(tmp_path), 10, None, 2)
    for answer in ranks.run(2, _save, str(tmp_path), 20, fail_on, 2):
        assert answer.startswith("refused: the checkpoint of step 20")
        assert f"rank {fail_on}: OSError: [Errno 28] No space left" in answer
        assert "step_00000010" in answer
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000010"]
    assert read_manifest(latest_checkpoint(tmp_path))["step"] == 10


def test_the_newest_are_kept(ranks: RankPool, tmp_path: Path) -> None:
    for step in (5, 10, 15, 100):
        ranks.run(1, _save, str(tmp_path), step, None, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000015", "step_00000100"]


def test_a_save_that_was_cut_short_is_not_seen_and_is_swept_away(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, _save, str(tmp_path), 10, None, 2)
    partial = tmp_path / "step_00000020.partial"
    partial.mkdir()
    (partial / "rank_00000.pt").write_bytes(b"half")
    without_manifest = tmp_path / "step_00000030"
    without_manifest.mkdir()
    assert latest_checkpoint(tmp_path).name == "step_00000010"
    ranks.run(1, _save, str(tmp_path), 20, None, 2)
    assert latest_checkpoint(tmp_path).name == "step_00000020"
    assert not partial.exists()


def test_a_damaged_checkpoint_is_refused_by_name(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, _save, str(tmp_path), 10, None, 2)
    path = latest_checkpoint(tmp_path)
    (path / "rank_00001.pt").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=r"rank_00001\.pt has 5 bytes"):
        read_manifest(path)
    (path / "rank_00001.pt").unlink()
    with pytest.raises(CheckpointError, match=r"rank_00001\.pt is missing"):
        read_manifest(path)
    assert json.loads((path / MANIFEST).read_text())["step"] == 10


def test_a_folder_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "nothing") is None

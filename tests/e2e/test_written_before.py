"""What earlier versions wrote goes on, to the bit, or is refused with the command that converts it.

`tests/written` has a folder for each version, named by its commit: a dataset, a run on it that ended after
step 4 of 8, on two ranks in two stages, and what that version found when it went on (`went_on.json`). A
version whose formats differ adds a folder; none is ever changed.

Kernels depend on the processor: one that computes loss and gradients of the first step as theirs did, to the
bit, is held to every bit of the steps after it.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from runs import Running, learnt, read_lines
from saved import newest_folder, tensors_of

WRITTEN = Path(__file__).parents[1] / "written"
LAST_STEP = 4  # of the runs as they were written


def sums(checkpoint: Path) -> dict[str, list[float]]:
    """Sums of every tensor in a checkpoint, and of its squares."""
    return {
        f"{file.name}/{name}": [float(tensor.double().sum()), float(tensor.double().square().sum())]
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in tensors_of(file).items()
        if tensor.dtype == torch.float32
    }


@pytest.mark.parametrize("version", sorted(folder.name for folder in WRITTEN.iterdir()))
def test_a_run_of_an_earlier_version_goes_on(tmp_path, version):
    shutil.copytree(WRITTEN / version, tmp_path, dirs_exist_ok=True)
    resumed = Running(["-m", "omni", "resume", "run"], tmp_path).finish()
    assert resumed.code == 0, resumed.err
    assert f"continued after step {LAST_STEP}" in resumed.out

    before = json.loads((tmp_path / "went_on.json").read_text())
    assert read_lines(tmp_path / "run" / "samples.jsonl") == before["samples"]
    now = learnt(tmp_path / "run")
    assert len(now) == len(before["learnt"])
    first = LAST_STEP  # of those that went on; earlier ones stand as they were written
    tolerance = 0.0 if now[first].items() >= before["learnt"][first].items() else 1e-6  # relative
    for ours, theirs in zip(now, before["learnt"], strict=True):
        found = {key: ours[key] for key in theirs}  # metrics may be added, none may go
        assert found == pytest.approx(theirs, rel=tolerance, abs=0)
    tensors = sums(newest_folder(tmp_path / "run" / "checkpoints"))
    assert tensors.keys() == before["tensors"].keys()
    for name, of in before["tensors"].items():
        assert tensors[name] == pytest.approx(of, rel=10 * tolerance, abs=10 * tolerance), name

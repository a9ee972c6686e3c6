"""Published towers on fake CUDA tensors: nothing that they compute of grids makes the host wait."""

from pathlib import Path

import pytest
from cuda_steps import run_line
from fake_gpu import FakeGPU
from tower_folders import make_tower
from tower_runs import line, write_data

from omni.rehearsal.findings import unexpected

LONGER = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("Qwen2.5-VL", "InternViT", "Whisper", "Qwen2.5-VL ours")
]


@pytest.mark.parametrize("name", ["Qwen3-VL", "SigLIP2", "Qwen3-VL ours", *LONGER])
def test_a_rank_with_a_tower_runs_a_step(gpu: FakeGPU, name: str, tmp_path: Path) -> None:
    write_data(name, tmp_path / "data")
    make_tower(name, tmp_path / "tower")
    given = tmp_path / "data", name, tmp_path / "tower", tmp_path / "run"
    found = gpu.run(run_line, line(*given, "weights: true", "train.precision=bf16", "layout=pp2"), 2, 1)
    assert not unexpected(found.findings)
    assert found.launches["encode"]

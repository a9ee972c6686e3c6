"""The nearest configuration that devices can hold, where they cannot hold a step."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from omni.__main__ import main
from omni.compose import compose_config
from omni.planning.fullest import fullest_rank
from omni.planning.nearest import nearest, nearest_text
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.rehearsal.stand_in_data import use_trace

SMALL = ("model.llm.layers=4", "model.encoders.image.layers=4")
GIVEN = (
    "system=multiplexed",
    "~experiment",
    "model=llama3_1b_so400m",
    "cluster=h100",
    "optim.lr=1e-4",
    *SMALL,
)
STEP = ("train.steps=1", "train.precision=bf16", "data.step_samples=8", "data.microbatch_tokens=4096")
WORLDS, SIZES = (1, 2, 4, 8), (1, 2, 4, 8)


def run_of(folder: Path, *keys: str) -> RunSpec:
    config = compose_config([*GIVEN, *STEP, *keys])
    use_trace(config, "4096", folder / "trace")
    return prepare_run(config, config.launch.ranks or 1)


def most(spec: RunSpec) -> int:
    return fullest_rank(spec, spec.planner.all_domains(1, 0)).bytes


def overrides(keys: dict[str, Any]) -> list[str]:
    return [
        f"{key}={OmegaConf.to_yaml(value).strip() if value is None else value}" for key, value in keys.items()
    ]


@pytest.mark.parametrize("share", [0.8, 0.3])
def test_what_is_named_fits_and_nothing_on_fewer_ranks_does(tmp_path: Path, share: float) -> None:
    held = int(share * most(run_of(tmp_path / "all", "launch.ranks=1", "cluster.memory_bytes=null")))
    memory = f"cluster.memory_bytes={held}"
    spec = run_of(tmp_path, "launch.ranks=1", memory)
    found = nearest(spec, 1, 0)
    assert found is not None
    keys, peak = dict(found[0]), found[1]
    again = run_of(tmp_path / "again", *overrides({"launch.ranks": 1, **keys}), memory)
    assert most(again) == peak.bytes <= held
    fewer = (world for world in WORLDS if world < again.arrangement.world)
    for world in fewer:
        for tp in (size for size in SIZES if world % size == 0):
            for pp in (size for size in SIZES if world % (tp * size) == 0):
                layout = {"launch.ranks": world, "layout.llm.tp": tp, "layout.llm.pp": pp}
                folder = tmp_path / f"{world}_{tp}_{pp}"
                least = most(run_of(folder, *overrides(layout), memory, "model.llm.recompute=full"))
                assert least > held, layout


@pytest.mark.parametrize(("domain", "keys"), [(8, {}), (1, {"layout.domain": 8})])
def test_zero_is_named_in_a_domain_that_has_something_to_divide(
    tmp_path: Path, domain: int, keys: dict[str, int]
) -> None:
    """Of a model of one layer with one head, which nothing else divides."""
    one = ("model.llm.layers=1", "model.llm.heads=1", "model.llm.kv_heads=1", "model.llm.recompute=full")
    line = (*one, "launch.ranks=8", f"layout.domain={domain}")
    held = most(run_of(tmp_path / "all", *line, "layout.domain=8", "layout.llm.zero=3"))
    found = nearest(run_of(tmp_path, *line, f"cluster.memory_bytes={held}"), 1, 0)
    assert found is not None
    assert found[0] == {"layout.llm.zero": 3, **keys}
    assert found[1].bytes <= held


def test_nothing_is_named_where_nothing_fits(tmp_path: Path) -> None:
    spec = run_of(tmp_path, "launch.ranks=1", "cluster.memory_bytes=1000")
    assert nearest(spec, 1, 0) is None
    assert "No more ranks" in nearest_text(spec, 1, 0)


def test_a_plan_that_does_not_fit_ends_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [*GIVEN, *STEP, "launch.ranks=1", "cluster.memory_bytes=4000000000"]
    assert main(["plan", "--trace", "4096", *keys]) == 2
    assert "The nearest that fits: launch.ranks=" in capsys.readouterr().err.splitlines()[-1]

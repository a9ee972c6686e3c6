"""The environment of ranks: by place, overruled by a user, and as the page says."""

import re
import subprocess
from pathlib import Path

import pytest

from infra import environment
from infra.environment import VARIABLES, Place, capability, defaults
from infra.launch import environment_of

ERRORS = Path("/runs/one/errors")
PAGE = Path(__file__).parents[2] / "docs/launching.md"
CPU, HOPPER, BLACKWELL = (Place(1, has, ERRORS) for has in (None, 9.0, 10.0))


def test_a_place_decides() -> None:
    assert defaults(CPU, {}).keys() == {"OMP_NUM_THREADS", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"}
    hopper, blackwell = defaults(HOPPER, {}), defaults(BLACKWELL, {})
    assert hopper.pop("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    assert hopper == blackwell
    assert hopper["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert hopper["TORCH_FR_DUMP_TEMP_FILE"].startswith(f"{ERRORS}/")
    assert hopper.keys() | {"CUDA_DEVICE_MAX_CONNECTIONS"} == {one.name for one in VARIABLES}


@pytest.mark.parametrize("name", [name for one in VARIABLES for name in (one.name, *one.also)])
def test_what_a_user_has_set_stays(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (of,) = (one for one in VARIABLES if name in (one.name, *one.also))
    for other in (of.name, *of.also):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "mine")
    monkeypatch.setattr("infra.launch.capability", lambda: 9.0)
    found = environment_of(1, tmp_path / "config.yaml", {}, "name")
    assert found[name] == "mine"
    assert not ({of.name, *of.also} - {name}) & found.keys()
    assert (tmp_path / "errors").is_dir(), "the flight recorder makes no folder"


def test_the_least_capability_of_all_gpus_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert capability() is None or environment._DRIVER.exists()
    monkeypatch.setattr(environment, "_DRIVER", tmp_path)
    said = ["9.0\n8.0\n", "", "[N/A]\n"]
    monkeypatch.setattr(
        subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, stdout=said.pop(0))
    )
    assert [capability() for _ in range(3)] == [8.0, None, None]


def test_the_page_has_the_table() -> None:
    table = PAGE.read_text().partition("## Environment of ranks")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == [one.name for one in VARIABLES]
    for one in VARIABLES:
        assert one.why in table
        assert all(f"`{name}`" in table for name in one.also)

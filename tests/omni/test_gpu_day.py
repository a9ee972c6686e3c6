"""A first day on GPUs, without one: rungs that pass, fail and hang, what is not run again, and the report."""

import importlib
import json
import platform
import re
import tomllib
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("gpu_report")  # of --quick, on two CPU ranks
FACTS = {"commit": "c0ffee", "gpus": 1, "devices": ["NVIDIA H100 80GB HBM3"], "brief": False}
WRITES = 'open(\'{out}/figures.json\', \'w\').write(\'{{"runs": [{{"run": "a|b", "MFU": 0.41234}}]}}\')'
HANGS = """
import os, subprocess, sys
if os.path.exists("{out}/child"):
    sys.exit()
sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleeps, start_new_session=True)
print(child.pid, end="", file=open("{out}/child", "w"), flush=True)
child.wait()
"""


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Any:
    """benchmarks/gpu_day.py, which is in no package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("gpu_day")


def rung(day: Any, number: int, name: str, code: str, minutes: float = 1.0) -> Any:
    return day.Rung(number, name, f"Is {name} so?", ("-c", code), (), day.RUNGS[1].read, minutes)


def test_a_rung_that_fails_or_hangs_is_recorded_and_the_next_goes_on(
    day: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hangs = rung(day, 2, "hangs", f"{WRITES}\n{HANGS}", minutes=0.1)
    rungs = [
        rung(day, 1, "fails", "print('why'); raise SystemExit(3)"),
        hangs,
        rung(day, 3, "passes", WRITES),
    ]
    assert day.climb(rungs, tmp_path, FACTS, 1, False, False) == 1
    records = day.read_records(tmp_path)
    assert [(record.outcome, record.exit_code) for record in records.values()] == [
        ("failed", 3),
        ("timed out", None),
        ("passed", 0),
    ]
    assert records["1_fails"].tail == ["why"]
    assert records["2_hangs"].figures["runs"][0]["MFU"] == 0.41234, "what it wrote by then counts"
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["missed"] == ["fails", "hangs"]
    child = int((tmp_path / "2_hangs/child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE

    assert day.climb([hangs], tmp_path, FACTS, 1, True, False) == 0, "it goes on with what it had"
    anew = rung(day, 2, "hangs", "import os; raise SystemExit(os.path.exists('{out}/child'))")
    assert day.climb([anew], tmp_path, FACTS, 1, True, False) == 0, "one that passed begins anew"


def test_a_rung_with_a_record_of_this_commit_is_not_run_again_unless_asked(day: Any, tmp_path: Path) -> None:
    counts = tmp_path / "counts"
    own = rung(day, 1, "counted", f"open({str(counts)!r}, 'a').write('.')")

    def climb(facts: dict[str, Any], again: bool = False) -> int:
        day.climb([own], tmp_path / "report", facts, 1, again, False)
        return len(counts.read_text())

    assert climb(FACTS) == 1
    assert climb(FACTS) == 1
    assert climb(FACTS, again=True) == 2
    assert climb({**FACTS, "commit": "decaf"}) == 3
    assert climb({**FACTS, "commit": "decaf", "gpus": 2}) == 4
    changed = {**FACTS, "commit": "decaf with changes"}
    assert (climb(changed), climb(changed)) == (5, 6), "nobody knows which changes"


def test_without_a_gpu_it_says_what_would_run(
    day: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ops.device.visible_devices", lambda: 0)
    assert day.main(["--out", str(tmp_path / "report")]) == 0
    said = capsys.readouterr().out
    assert all(f"{rung.number} {rung.name}" in said for rung in day.RUNGS)
    assert not (tmp_path / "report").exists()


def test_rungs_are_numbered_and_none_is_longer_than_eight_minutes(day: Any, tmp_path: Path) -> None:
    assert [rung.number for rung in day.RUNGS] == list(range(1, 9))
    assert all(rung.minutes <= 8 for rung in day.RUNGS)
    for rung in day.RUNGS:
        words = rung.words(tmp_path / rung.stem, 2, True)
        assert not [word for word in words if "{" in word]
        script = words[0]
        assert script == "-m" or (ROOT / script).exists()
    assert str(tmp_path / "7_links/cluster/here.yaml") in day.RUNGS[7].words(tmp_path / "8_steps", 1, False)


def test_the_report_tells_all_rungs_and_no_names_of_the_machine(
    day: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "private0")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    report = importlib.import_module("gpu_report")
    for file in RECORDED.glob("*.json"):
        (tmp_path / file.name).write_text(file.read_text())
    failed = json.loads((tmp_path / "1_tests.json").read_text())
    failed |= {"outcome": "failed", "exit_code": 1, "tail": ["RuntimeError: no kernel image"]}
    (tmp_path / "1_tests.json").write_text(json.dumps(failed))
    text = report.write_report(tmp_path).read_text()
    records = json.loads((tmp_path / "report.json").read_text())["records"]
    assert [record["rung"] for record in records] == list(range(1, 9))
    for record in records:
        assert f"## {record['rung']} {record['name']}: {record['outcome']}" in text
    assert "needs 8 GPUs, and there are 2" in text
    assert "RuntimeError: no kernel image" in text
    assert "NCCL_DEBUG=WARN" in text
    assert "private0" not in text
    assert platform.node() not in text
    other = json.loads((tmp_path / "8_steps.json").read_text())
    (tmp_path / "8_steps.json").write_text(json.dumps(other | {"of": FACTS | {"gpus": 8}}))
    assert "Of another day" in report.write_report(tmp_path).read_text()


def test_figures_of_tests_and_training_are_read(day: Any, tmp_path: Path) -> None:
    tests, training = (day.RUNGS[i].read for i in (0, 3))
    assert tests(tmp_path) == training(tmp_path) == {}
    (tmp_path / "tests.xml").write_text(
        "<testsuites><testsuite><testcase classname='a' name='b'/><testcase classname='a' name='c'><failure/>"
        "</testcase><testcase classname='a' name='d'><skipped/></testcase></testsuite></testsuites>"
    )
    assert tests(tmp_path) == {"passed": 1, "skipped": 1, "failed": ["a.c"]}
    (tmp_path / "run").mkdir()
    steps = [{"progress/step": n, "loss/train": 4.0 - n, "perf/step_s": 0.5} for n in (1, 2)]
    (tmp_path / "run/metrics.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in steps))
    assert training(tmp_path)["loss/train, mean of the last 2"] == 2.5


def test_measured_links_are_held_against_the_file_of_the_gpu(day: Any) -> None:
    links = importlib.import_module("gpu_links")
    assert [links.cluster_of(f"NVIDIA {name}") for name in ("H100 80GB HBM3", "GB200", "L40S")] == [
        "h100",
        "gb200",
        None,
    ]
    said = links.shipped("h100")
    measured = {"flops": {"bf16": 494.5e12}, "memory_bytes_per_s": 3.35e12, "node_link_bytes_per_s": 45e9}
    one, two = (links.held_against(measured, said, gpus) for gpus in (1, 2))
    assert [row["ratio"] for row in two] == [0.5, 1.0, 0.1]
    assert one == two[:2], "one GPU has nobody to talk to"


def test_kernels_that_are_wrong_are_found(day: Any) -> None:
    kernels = importlib.import_module("gpu_kernels")
    exact = [torch.ones(4, dtype=torch.float64)]
    assert kernels.relative([torch.ones(4)], exact) == 0
    assert kernels.relative([torch.tensor([1.0, 1, 1, 0])], exact) == 0.5
    assert kernels.relative([torch.tensor([1.0, 1, 1, float("nan")])], exact) == float("inf")


def test_parity_climbs_over_every_axis_and_schedule(day: Any) -> None:
    parity = importlib.import_module("gpu_parity")
    keys = {key for case in parity.CASES for key in case.keys}
    for axis in ("tp", "cp", "pp", "ep"):
        assert any(key.startswith(f"layout.llm.{axis}=") for key in keys)
    tried = {key.partition("=")[2] for key in keys if key.startswith("pipeline.policy=")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["omni.schedule"].keys() - tried == {"auto", "disaggregated"}
    assert {case.gpus for case in parity.CASES} == {1, 2, 8}


def test_the_image_pins_what_is_known_to_work_together() -> None:
    text = (ROOT / "Dockerfile").read_text()
    pins = dict(re.findall(r"([a-z][\w-]*)==([\w.]+)", text))
    known = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert f"torch=={pins.pop('torch')}" in (ROOT / "Makefile").read_text()
    assert pins.items() <= known.items()
    (python,) = re.findall(r"^FROM python:(\d+\.\d+)\.\d+-slim-bookworm$", text, re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert re.fullmatch(r">=3\.11,<3\.14", project["requires-python"])
    assert python in ("3.11", "3.12", "3.13")
    assert f"PYTHON=python{python}" in text
    targets = set(re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    (built,) = re.findall(r"^RUN make PYTHON=\S+ TORCH=\S+ (.+)$", text, re.MULTILINE)
    assert {*built.split(), "gpu"} <= targets
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert not {"Makefile", "constraints.txt", "benchmarks", "tests", ".git"} & {*ignored}


def test_a_reference_of_the_cpu_is_the_only_one_that_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from omni.__main__ import main
    from omni.commands import parity

    class EndError(ValueError):
        pass

    seen = []

    def measure(overrides: list[str], *_: Any, env: Any = None) -> Any:
        seen.append((overrides, env))
        if len(seen) == 2:
            raise EndError("both were asked for")
        return None, 7

    monkeypatch.setattr(parity, "measure", measure)
    assert main(["parity", "--cpu-reference", "launch.ranks=1", "--", "layout.llm.pp=2"]) == 2
    assert seen == [
        (["launch.ranks=1"], {"CUDA_VISIBLE_DEVICES": ""}),
        (["launch.ranks=1", "layout.llm.pp=2"], None),
    ]

"""Faults planted one by one: each is found, named, and told with what to do; a sound machine passes."""

import os
import socket
import stat
from pathlib import Path

import pytest

from infra import host_checks
from infra.host_checks import (
    check_binding,
    check_descriptors,
    check_folder,
    check_name,
    check_port,
    check_processes,
    check_ray,
    check_shadowed,
    check_slurm,
    check_threads,
    check_wandb,
)


@pytest.fixture
def taken():
    """A port that somebody has."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.fixture
def free():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        return other.getsockname()[1]


def wrong(finding, *words):
    assert not finding.ok, finding
    assert [word for word in words if word not in f"{finding.said} {finding.remedy}"] == [], finding


def test_too_few_file_descriptors():
    wrong(check_descriptors(1024, 1024), "1,024", "4,352", "ulimit -n 4352")
    assert check_descriptors(1024, 2).ok


def test_too_few_processes():
    wrong(check_processes(500, 400, 2), "500", "400", "ulimit -u 528")
    assert check_processes(2**62, 400, 8).ok


@pytest.mark.parametrize("threads", ["32", "many"])
def test_threads_that_do_not_fit(threads):
    wrong(check_threads({"OMP_NUM_THREADS": threads}, 16, 8), "on 16 cores", "set it to 2")
    assert check_threads({}, 16, 8).ok
    assert check_threads({}, 2, 8).ok, "ranks of one thread may share cores"


GPUS = ["0000:1b:00.0", "0000:dc:00.0", "0000:dd:00.0"]


@pytest.fixture
def sysfs(tmp_path):
    """A machine with GPUs on nodes 0 and 1, of four cores each, and one of which it says nothing."""
    for node, (gpu, cores) in enumerate(zip(GPUS, ("0-3", "4-7"), strict=False)):
        for path, text in (
            (f"bus/pci/devices/{gpu}/numa_node", str(node)),
            (f"devices/system/node/node{node}/cpulist", cores),
        ):
            (tmp_path / path).parent.mkdir(parents=True)
            (tmp_path / path).write_text(text + "\n")
    return tmp_path


@pytest.mark.parametrize(
    ("value", "given", "first", "second"),
    [
        ("node", range(8), "its rank keeps to 0-3", "its rank keeps to 4-7"),
        ("node", (0, 1, 3, 5), "its rank keeps to 0-1,3", "its rank keeps to 5"),
        ("node", (1, 2), "its rank keeps to 1-2", "given 1-2 alone: its rank is not bound"),
        ("none", range(8), "OMNI_NUMA is none: its rank is not bound", "OMNI_NUMA is none: its rank is not"),
    ],
)
def test_cores_that_ranks_are_bound_to_are_told(sysfs, value, given, first, second):
    found = list(check_binding({"OMNI_NUMA": value}, GPUS, set(given), sysfs))
    assert [finding.what for finding in found] == [f"binding, GPU {number}" for number in range(3)]
    assert all(finding.ok for finding in found)
    for finding, gpu, cores, words in zip(found, GPUS, ("0-3", "4-7"), (first, second), strict=False):
        assert f"cores {cores} lie beside {gpu}" in finding.said
        assert words in finding.said
    assert found[2].said.endswith("which cores lie beside 0000:dd:00.0: its rank is not bound")


def test_a_binding_that_there_is_not_is_wrong(sysfs):
    (finding,) = check_binding({"OMNI_NUMA": "socket"}, GPUS, {0}, sysfs)
    wrong(finding, "OMNI_NUMA=socket", "set it to node or none", "unset OMNI_NUMA")


def test_without_gpus_ranks_are_bound_to_no_cores():
    (finding,) = check_binding({"OMNI_NUMA": "socket"}, [], set())
    assert (finding.ok, finding.said) == (True, "there are no GPUs, so ranks are bound to no cores")


def test_a_port_in_use(taken, free):
    wrong(check_port(taken, "127.0.0.1"), "in use", f"ss -ltnp 'sport = :{taken}'")
    wrong(check_port(70000), "choose another")
    assert check_port(free, "127.0.0.1").ok


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    wrong(check_folder(tmp_path / "file" / "run"), "is a file", "choose another run.dir")
    wrong(check_folder(Path("/proc/run")), "cannot be written", "choose another run.dir")
    assert check_folder(tmp_path / "not" / "yet" / "there").ok
    assert list(tmp_path.iterdir()) == [tmp_path / "file"], "leaves nothing"


def test_a_folder_that_is_slow_or_full(tmp_path, monkeypatch):
    monkeypatch.setattr(host_checks, "SLOW_BYTES_PER_S", 1e15)
    wrong(check_folder(tmp_path), "MB/s", "choose another run.dir")
    monkeypatch.setattr(host_checks, "SLOW_BYTES_PER_S", 0)
    monkeypatch.setattr(host_checks, "LEAST_FREE_BYTES", 2**62)
    wrong(check_folder(tmp_path), "GiB free", "free space")


@pytest.mark.parametrize("name", ["calendar.py", "torch/__init__.py", "omni/__init__.py"])
def test_a_name_that_shadows_another(tmp_path, name):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    shadow = str(tmp_path / Path(name).parts[0])
    wrong(check_shadowed(["", str(tmp_path)], Path("/")), shadow, "rename", "PYTHONPATH")
    in_cwd = check_shadowed(["", str(host_checks.ROOT)], tmp_path)
    assert in_cwd.ok
    assert f"ranks do not see {Path(name).parts[0]}" in in_cwd.said


def test_a_host_name_that_leads_nowhere():
    wrong(check_name("no-such-host.invalid"), "leads nowhere", "/etc/hosts")
    assert check_name("localhost").ok


def test_wandb_where_the_user_does_not_mean_it_to_go(taken, free, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "sometimes")
    wrong(check_wandb("wandb", "auto", os.environ), "WANDB_MODE=sometimes", "tracking.mode")
    wrong(check_wandb("wandb", "offline", {"WANDB_MODE": "online"}), "not heeded", "tracking.mode=online")
    away = {"WANDB_BASE_URL": f"http://127.0.0.1:{free}"}
    wrong(check_wandb("wandb", "online", away), f"127.0.0.1:{free} does not answer", "tracking.mode=offline")
    assert check_wandb("wandb", "online", {"WANDB_BASE_URL": f"http://127.0.0.1:{taken}"}).ok
    assert check_wandb("wandb", "offline", {}).ok
    assert check_wandb("jsonl", "auto", {}).ok


def sinfo_that(folder, does):
    sinfo = folder / "sinfo"
    sinfo.write_text(f"#!/bin/sh\n{does}\n")
    sinfo.chmod(sinfo.stat().st_mode | stat.S_IXUSR)
    return str(sinfo)


def test_slurm_that_fails_or_does_not_answer(tmp_path, monkeypatch):
    assert check_slurm(None).ok
    assert "2 idle" in check_slurm(sinfo_that(tmp_path, "echo 2 idle")).said
    wrong(check_slurm(sinfo_that(tmp_path, "echo no controller >&2; exit 1")), "no controller", "slurmctld")
    monkeypatch.setattr(host_checks, "ANSWER_S", 0.5)
    wrong(check_slurm(sinfo_that(tmp_path, "sleep 60")), "sinfo does not answer", "slurmctld")


def test_a_ray_cluster_that_does_not_answer(taken, free):
    wrong(check_ray({"RAY_ADDRESS": f"127.0.0.1:{free}"}), "does not answer", "ray start --head")
    wrong(check_ray({"RAY_ADDRESS": "cluster"}), "no HOST:PORT")
    assert check_ray({"RAY_ADDRESS": f"ray://127.0.0.1:{taken}"}).ok
    assert check_ray({}).ok

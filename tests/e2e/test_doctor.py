"""`omni doctor` finds what is wrong on this machine and among ranks; `omni status` reads what runs do."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from runs import Running, omni

from omni.commands.doctor import _addresses, _binding, _of_ranks

# Nothing is chosen, which takes longer than all that is examined.
SOUND = ["doctor", "--no-ranks", "tracking=jsonl", "system=multiplexed", "launch.ranks=2"]


def test_a_machine_without_faults_passes_and_planted_ones_are_told_with_remedies(tmp_path):
    sound = omni(SOUND, tmp_path)
    # What this machine has of its own: a client of Slurm without a cluster, a slow disk.
    wrong = [line for line in sound.out.splitlines() if line.startswith("WRONG")]
    assert [line for line in wrong if "Slurm" not in line and "MB/s" not in line] == []
    assert sound.code == int(bool(wrong))
    assert "ok     binding: there are no GPUs, so ranks are bound to no cores\n" in sound.out
    (tmp_path / "file").write_text("")
    faulty = omni(
        [*SOUND, "run.dir=file/run", "launch.ranks=100000", "cluster.ranks_per_node=100000"], tmp_path
    )
    assert faulty.code == 1
    told = faulty.out.splitlines()
    for what in ("machine: ", "file descriptors: ", "folder file/run: "):
        at = next(number for number, line in enumerate(told) if line.startswith(f"WRONG  {what}"))
        assert told[at + 1].startswith("       → ")
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_gpus_are_asked_where_they_stand_by_a_process_that_ends(monkeypatch):
    def run(command, **_):
        return subprocess.CompletedProcess(command, 0, "0000:01:00.0 0000:c1:00.0\n")

    def no_context(index):
        raise AssertionError(f"GPU {index} was asked by the process that tries the ranks")

    monkeypatch.setattr("ops.device.visible_devices", lambda: 2)
    monkeypatch.setattr("ops.device.pci_address", no_context)
    monkeypatch.setattr("omni.commands.doctor.subprocess.run", run)
    assert _addresses() == ["0000:01:00.0", "0000:c1:00.0"]


def test_gpus_that_do_not_answer_are_a_finding(monkeypatch):
    monkeypatch.setattr("ops.device.visible_devices", lambda: 1)  # and torch finds none: the process fails
    (finding,) = _binding(1)
    assert not finding.ok
    assert "GPUs do not say where they stand" in finding.said


def test_a_configuration_that_is_none_is_refused(tmp_path):
    result = omni(["doctor", "launch.ranks=0"], tmp_path)
    assert (result.code, result.out) == (2, "")
    assert "launch.ranks=0" in result.err


def found(**changes):
    groups = {"groups": 5, "peers": 7, "make_s": 0.5, "warm_s": 0.25, "mib": 3.0}
    links = {"all_reduce": [[1024, 50_000], [2**25, 10_000_000]]}
    one = {"device": "CPU", "torch": "2.13", "backend": "gloo", "sums_right": True, "links": links}
    return {**one, "groups": groups, **changes}


def test_what_ranks_found_is_told():
    findings = {finding.what: finding for finding in _of_ranks([found(), found()], "dp2")}
    assert all(finding.ok for finding in findings.values())
    assert findings["link, all_reduce"].said == "3.36 GB/s for 32 MiB, 50 µs for 1.0 KiB"
    assert "dp2: a rank shares 5 groups with others and talks to 7 peers" in findings["process groups"].said


def test_a_rank_that_computes_otherwise_and_another_torch_are_wrong():
    findings = {f.what: f for f in _of_ranks([found(), found(sums_right=False, torch="2.12")], "dp2")}
    assert not findings["collectives"].ok
    assert "rank 1 got wrong sums" in findings["collectives"].said
    assert not findings["versions"].ok


@pytest.mark.slow
def test_ranks_examine_collectives_links_and_groups(tmp_path):
    line = ["-m", "omni", "doctor", "tracking=jsonl", "launch.ranks=2", "layout=pp2"]
    elsewhere = {"PATH": str(Path(sys.executable).parent)}  # where no Slurm is installed, in order or not
    result = Running(line, tmp_path, elsewhere).finish()
    assert result.code == 0, result.out + result.err
    for words in ("collectives: 2 ranks on CPU", "link, all_to_all: ", "process groups: "):
        assert words in result.out
    counted = omni([*line[2:], "--no-ranks"], tmp_path)
    told = [re.search(r"shares (\d+) groups .* to (\d+) peers", of.out) for of in (result, counted)]
    assert told[0][0] == told[1][0]


def test_the_groups_of_a_large_job_are_counted(tmp_path):
    job = ["experiment=llama3_70b", "launch.ranks=1024", "layout.domain=1"]
    assert "tp8·cp2·dp16·pp4" in (out := omni([*SOUND[:-1], *job], tmp_path).out)
    assert "a rank shares 11 groups with others and talks to 1335 peers in them, at most (counted)" in out
    assert re.search(
        r"control plane: a rank has 10 connections .* 16 messages deep; a commit brings 9,433 ", out
    )
    out = omni([*SOUND[:-1], *job, "layout.llm.pp=3"], tmp_path).out
    assert re.search(r"WRONG  process groups: .*as a multiple of 48: 1008 is the .*\n       → choose", out)


@pytest.mark.slow
def test_a_peer_that_does_not_answer_is_named(tmp_path):
    job = tmp_path / "job.json"
    job.write_text(json.dumps({"out": str(tmp_path / "out"), "config": "unused", "timeout_s": 1}))
    world = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "omni.doctor.worker", str(job)],
        env={**os.environ, **world, "PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "of 3 ranks, rank 1, 2 did not answer in 1 s" in done.stderr
    assert "Traceback" not in done.stderr


def test_status_tells_of_one_run_and_of_a_sweep(tmp_path):
    for number in (2, 10):
        folder = tmp_path / "sweep" / str(number)
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text("train: {steps: 3}")
        (folder / "metrics.jsonl").write_text(f'{{"progress/step": {number % 4}, "loss/train": 2.5}}\n')
    one = omni(["status", "sweep/2"], tmp_path)
    assert one.code == 0, one.err
    assert "stopped: no launch trains it" in one.out
    assert "none: it would begin anew" in one.out
    (tmp_path / "sweep" / "2" / "last_checkpoint").write_text("/store/step_00000002\n")
    unmounted = omni(["status", "sweep/2"], tmp_path)
    assert "none is seen from here, and it saved /store/step_00000002: it would not start" in unmounted.out
    several = omni(["status", "sweep"], tmp_path)
    assert [line.split()[0] for line in several.out.splitlines()] == ["sweep/2", "sweep/10"]
    nothing = omni(["status", "."], tmp_path / "sweep" / "..")
    assert nothing.code == 2
    assert "is no run folder" in nothing.err
    (tmp_path / "sweep" / "10" / "metrics.jsonl").unlink()
    (tmp_path / "sweep" / "10" / "metrics.jsonl").mkdir()
    unread = omni(["status", "sweep"], tmp_path)
    assert (unread.code, unread.out) == (2, "")
    assert unread.err.startswith("error: [Errno 21] Is a directory"), unread.err

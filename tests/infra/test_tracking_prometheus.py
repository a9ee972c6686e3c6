"""Metrics as Prometheus reads them, on a port that lives as long as the run."""

import math
import socket
import threading
import urllib.error
import urllib.request

import pytest

from infra.run_folder import RunFolder
from infra.tracker import About
from infra.tracking import make_tracker
from infra.tracking_prometheus import _Handler, exposition, start_prometheus


def test_the_text():
    metrics = {
        "progress/step": 7,
        "perf/mfu": 0.5,
        "loss/train": math.nan,
        "perf/mfu/llm": 0.25,
        "x-y/z": -math.inf,
    }
    assert exposition(metrics, 'a "run"').splitlines() == [
        "# TYPE omni_progress_step gauge",
        r'omni_progress_step{run="a \"run\""} 7',
        "# TYPE omni_perf_mfu gauge",
        r'omni_perf_mfu{run="a \"run\""} 0.5',
        r'omni_perf_mfu{run="a \"run\"",part="llm"} 0.25',
        "# TYPE omni_loss_train gauge",
        r'omni_loss_train{run="a \"run\""} NaN',
        "# TYPE omni_x_y_z gauge",
        r'omni_x_y_z{run="a \"run\""} -Inf',
    ]


def test_the_last_step_is_served_until_the_run_ends(tmp_path):
    folder = RunFolder.create(tmp_path)
    tracker = make_tracker("jsonl", folder, About({}, "mine", prometheus=("127.0.0.1", 0)), None)
    address = tracker.where.rpartition(" ")[2]
    with urllib.request.urlopen(address, timeout=10) as answer:
        assert answer.read() == b"", "no step yet"
    for step in (1, 2):
        tracker.log(step, {"loss/train": 1 / step})
    with urllib.request.urlopen(address, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert 'omni_loss_train{run="mine"} 0.5\n' in answer.read().decode()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(address.replace("/metrics", "/else"), timeout=10)

    port = int(address.split(":")[2].split("/")[0])
    with pytest.raises(ValueError, match=rf"tracking\.prometheus_port={port} .* choose another port"):
        make_tracker(
            "jsonl", RunFolder.create(tmp_path / "b"), About({}, "b", prometheus=("127.0.0.1", port)), None
        )
    tracker.finish(0)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(address, timeout=10)
    assert not [thread for thread in threading.enumerate() if thread.name == "prometheus"]


def test_who_connects_and_says_nothing_is_let_go(monkeypatch):
    monkeypatch.setattr(_Handler, "timeout", 0.1)
    tracker = start_prometheus("127.0.0.1", 0, "run")
    port = int(tracker.where.rsplit(":", 1)[1].removesuffix("/metrics"))
    with socket.create_connection(("127.0.0.1", port), timeout=30) as silent:
        assert silent.recv(1) == b""
    tracker.finish(0)

"""Trackers: JSONL is the truth, W&B (offline, real) and TensorBoard hold the same records."""

import json
import math
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dataloader.within import within
from infra.json_lines import JsonLines
from infra.run_folder import RunFolder, read_metrics
from infra.shard_file import CheckpointError
from infra.tracker import About, Tracker
from infra.tracking import JsonlTracker, Trackers, make_tracker
from infra.tracking_wandb import resolve_mode, sync_wandb
from infra.wandb_offline import read_offline_run

CONFIG = {
    "model": {"llm": {"layers": 4, "width": 64}, "encoders": ["image", "audio"]},
    "optim": {"lr": 3e-4, "betas": [0.9, 0.95], "clip": None},
    "name": "quickstart",
    "long": "x" * 100_000,  # several 32 KiB blocks of the .wandb file
}


ABOUT = About(CONFIG, "a run", "omni-tests", "a group", tags=("lr=1", "y" * 70, "y" * 80))


@pytest.fixture
def folder(tmp_path):
    return RunFolder.create(tmp_path / "run")


@pytest.fixture(autouse=True)
def no_key(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def start(kind, folder, resumed_from=None, mode="auto"):
    return make_tracker(kind, folder, replace(ABOUT, mode=mode), resumed_from)


def metrics_of(step):
    return {
        "progress/tokens": 4096 * step,
        "loss/train": 1 / (3 * step),
        "optim/lr/llm": 1e-3 * 0.9**step,
        "loss/train/a source.v2": math.nan if step == 2 else 5e-324,
        "perf/tokens_per_s": math.inf if step == 3 else 1e17 + step,
    }


def log_steps(tracker, first, last):
    for step in range(first, last + 1):
        tracker.log(step, metrics_of(step))


def same(a, b):
    return repr(a) == repr(b)  # NaN equals NaN, and the order of keys counts


def sorted_rows(rows):
    return [sorted(row.items()) for row in rows]


def test_jsonl_is_always_written(folder):
    tracker = start("jsonl", folder)
    log_steps(tracker, 1, 3)
    tracker.summary({"loss/eval": 0.5, "worst": math.inf})
    tracker.summary({"loss/eval": 0.25})
    tracker.finish(0)
    expected = [{"progress/step": step, **metrics_of(step)} for step in (1, 2, 3)]
    assert same(read_metrics(folder.metrics), expected)
    assert json.loads(folder.summary.read_text()) == {"loss/eval": 0.25, "worst": "Infinity"}


def test_a_resumed_run_appends_and_a_fresh_one_sets_aside(folder):
    tracker = start("jsonl", folder)
    log_steps(tracker, 1, 5)
    tracker.finish(1)
    tracker = start("jsonl", folder, resumed_from=3)
    log_steps(tracker, 4, 6)
    tracker.finish(0)
    assert [record["progress/step"] for record in read_metrics(folder.metrics)] == [1, 2, 3, 4, 5, 6]
    start("jsonl", folder).finish(0)
    assert read_metrics(folder.metrics) == []
    assert len(read_metrics(folder.path / "metrics.jsonl.1")) == 6


def test_two_records_for_one_step_are_a_bug(folder):
    tracker = start("jsonl", folder)
    tracker.log(1, {})
    with pytest.raises(AssertionError, match="one record a step"):
        tracker.log(1, {})
    tracker.finish(1)


def test_wandb_offline_reads_back_as_config_and_metrics(folder):
    tracker = start("wandb", folder)
    log_steps(tracker, 1, 20)
    tracker.summary({"loss/eval": 0.125, "host": {"cores": 2}})
    tracker.finish(0)
    run = read_offline_run(folder.path)
    assert run.config == CONFIG
    assert (run.name, run.group, set(run.tags)) == ("a run", "a group", {"lr=1", "y" * 64})
    assert len(run.history) == 20
    assert same(sorted_rows(run.history), sorted_rows(read_metrics(folder.metrics)))
    assert run.summary["loss/eval"] == 0.125
    assert run.summary["host"] == {"cores": 2}
    assert run.summary["loss/train"] == 1 / 60


def test_a_resumed_wandb_run_is_the_same_run_with_one_whole_history(folder):
    tracker = start("wandb", folder)
    log_steps(tracker, 1, 5)
    tracker.finish(1)
    (before,) = (folder.path / "wandb").glob("offline-run-*")
    tracker = start("wandb", folder, resumed_from=3)
    log_steps(tracker, 4, 6)
    tracker.finish(0)
    (after,) = (folder.path / "wandb").glob("offline-run-*")
    assert before.name.split("-")[-1] == after.name.split("-")[-1]
    run = read_offline_run(folder.path)
    assert [row["progress/step"] for row in run.history] == [1, 2, 3, 4, 5, 6]
    assert same(sorted_rows(run.history), sorted_rows(read_metrics(folder.metrics)))


def test_a_run_resumed_twice_and_requeued_is_one_history_after_sync(folder):
    attempts = [(None, 1, 5), (3, 4, 9), (6, 7, 8), (8, 9, 12)]  # step 9 twice, steps 4, 5, 7 and 8, too
    for number, (resumed, first, last) in enumerate(attempts):
        tracker = start("jsonl", folder, resumed)
        for step in range(first, last + 1):
            tracker.log(step, {"attempt": number, "loss/train": 1 / step})
        if last == 12:
            tracker.summary({"loss/train": 1 / 12, "worst": math.nan})
        tracker.finish(1)
    last_attempts = [0, 0, 0, 1, 1, 1, 2, 2, 3, 3, 3, 3]

    where = sync_wandb(folder, ABOUT)
    run = read_offline_run(folder.path)
    assert [row["progress/step"] for row in run.history] == list(range(1, 13))
    assert [row["attempt"] for row in run.history] == last_attempts
    assert run.config == CONFIG
    assert run.summary["loss/train"] == 1 / 12
    assert run.summary["worst"] is None, "W&B keeps no NaN there, but no word in its place either"

    again = sync_wandb(folder, ABOUT)
    assert Path(again).name.split("-")[-1] == Path(where).name.split("-")[-1] == run.id
    assert read_offline_run(folder.path) == run
    assert [path.name for path in folder.path.glob("wandb*")].count("wandb.1") == 0
    assert len(list((folder.path / "wandb").glob("offline-run-*"))) == 1


def test_wandb_holds_pictures_checkpoints_by_reference_and_alerts(folder):
    tracker = start("wandb", folder)
    assert tracker.shows_pictures
    tracker.log(1, metrics_of(1))
    tracker.picture(2, "timeline", "<svg>what ranks did</svg>")
    tracker.log(2, metrics_of(2))
    path = folder.checkpoints / "step_00000002"
    path.mkdir()
    (path / "rank_00000").write_text("weights")
    tracker.checkpoint(2, str(path))
    tracker.checkpoint(4, "s3://bucket/step_00000004")
    tracker.alert("stall", "step 2 took long")
    tracker.finish(0)
    run = read_offline_run(folder.path)
    assert ["timeline" in row for row in run.history] == [False, True]
    pictures = list((folder.path / "wandb").glob("offline-run-*/files/media/html/*.html"))
    assert ["what ranks did" in picture.read_text() for picture in pictures] == [True]
    assert run.references == [f"file://{path}/rank_00000"]
    assert run.alerts == [("stall", "step 2 took long")]


def test_nothing_to_sync_is_said(folder):
    with pytest.raises(ValueError, match="holds no steps"):
        sync_wandb(folder, ABOUT)


def test_a_damaged_wandb_file_is_refused_and_a_cut_one_is_read(folder):
    tracker = start("wandb", folder)
    log_steps(tracker, 1, 20)
    tracker.finish(0)
    (file,) = (folder.path / "wandb").glob("offline-run-*/*.wandb")
    data = file.read_bytes()
    cut = folder.path / "cut.wandb"
    history_in = data.index(b"loss/train")  # the first history record
    last = data.rindex(b"loss/train/a source.v2")
    cut.write_bytes(data[:history_in])
    assert read_offline_run(cut).history == []
    cut.write_bytes(data[:last])
    assert 0 < len(read_offline_run(cut).history) <= 20
    cut.write_bytes(data[:last] + b"!" + data[last + 1 :])
    with pytest.raises(ValueError, match="wrong checksum"):
        read_offline_run(cut)
    cut.write_bytes(b"not a log")
    with pytest.raises(ValueError, match=r"not a \.wandb file"):
        read_offline_run(cut)
    with pytest.raises(ValueError, match="tracking=wandb"):
        read_offline_run(folder.checkpoints)


KILLED_SERVICE = """
import pathlib, psutil, sys, time
from infra.run_folder import RunFolder
from infra.tracker import About, Tracker
from infra.tracking import make_tracker
folder = RunFolder.create(pathlib.Path(sys.argv[1]))
tracker = make_tracker("wandb", folder, About({}, "a run", "omni-tests", None, "offline"), None)
tracker.log(1, {"loss/train": 1.0})
# The first: one that it is about to start has its name for a moment, too.
service = next(p for p in psutil.Process().children(recursive=True) if p.name() == "wandb-core")
service.kill()
service.wait()
for step in range(2, 40):
    tracker.log(step, {"loss/train": 1.0})
    time.sleep(0.01)
tracker.summary({"done": True})
tracker.finish(0)
"""


def test_when_wandb_dies_the_run_goes_on_with_one_warning(folder):
    # A process of its own: W&B complains at its exit.
    command = [sys.executable, "-c", KILLED_SERVICE, str(folder.path)]
    environment = {key: value for key, value in os.environ.items() if key != "WANDB_SERVICE"}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tracking: wandb failed and is dropped") == 1
    assert [record["progress/step"] for record in read_metrics(folder.metrics)] == list(range(1, 40))
    assert json.loads(folder.summary.read_text()) == {"done": True}


def test_wandb_that_cannot_start_is_refused_with_the_remedy(folder, monkeypatch):
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr("infra.tracking_wandb.START_S", 2.0)
    began = time.monotonic()
    with pytest.raises(ValueError, match="tracking=jsonl"):
        start("wandb", folder)
    assert time.monotonic() - began < 20


class _Slow:
    """W&B's run where nothing arrives, as settings have it end."""

    offline, url, dir, id, starting_step = False, "https://wandb.example.org/run", "", "1", 0

    def __init__(self, settings, **_):
        self.raises, self.summary = settings.finish_timeout_raises, {}

    def define_metric(self, *_, **__):
        pass

    def log(self, *_, **__):
        pass

    def finish(self, exit_code):
        if self.raises:
            raise TimeoutError("Timed out finishing run.")


def test_a_view_that_takes_nothing_more_is_dropped_and_the_run_goes_on(folder, monkeypatch, caplog):
    class Stuck(Tracker):
        """Such as W&B where its process is stopped, and the socket to it is full."""

        def log(self, step, metrics):
            going_on.wait(20)

    going_on = threading.Event()
    monkeypatch.setattr("infra.tracking.within", lambda seconds, act: within(min(seconds, 0.2), act))
    trackers = Trackers(JsonlTracker(folder, None), {"wandb": Stuck()})
    began = time.monotonic()
    log_steps(trackers, 1, 3)
    trackers.finish(0)
    going_on.set()
    assert time.monotonic() - began < 10
    assert [record["progress/step"] for record in read_metrics(folder.metrics)] == [1, 2, 3]
    assert caplog.text.count("wandb failed and is dropped") == 1
    assert "`omni sync`" in caplog.text


def test_what_wandb_has_not_taken_in_time_is_said(folder, monkeypatch, caplog):
    ended = []
    monkeypatch.setattr("wandb.init", lambda **keys: _Slow(**keys))
    monkeypatch.setattr("wandb.teardown", ended.append)
    tracker = start("wandb", folder, mode="online")
    log_steps(tracker, 1, 3)
    tracker.finish(0)
    assert "wandb failed and is dropped" in caplog.text
    assert "`omni sync` sends the rest" in caplog.text
    with pytest.raises(TimeoutError, match=r"example.org/run had not taken all of the run after 60 s"):
        sync_wandb(folder, replace(ABOUT, mode="online"))
    assert ended == [0, 1], "its process is ended"


def test_a_process_of_wandb_that_does_not_end_is_left_alone(folder, monkeypatch):
    tracker = start("jsonl", folder)
    log_steps(tracker, 1, 3)
    tracker.finish(0)
    going_on = threading.Event()
    monkeypatch.setattr("wandb.init", lambda **keys: _Slow(**keys))
    monkeypatch.setattr(_Slow, "finish", lambda *_, **__: None)
    monkeypatch.setattr("wandb.teardown", lambda exit_code: going_on.wait(20))
    monkeypatch.setattr("infra.tracking_wandb.FINISH_S", 0.2)
    try:
        with pytest.raises(TimeoutError, match=r"had not taken all of the run after 0\.2 s: `omni sync`"):
            sync_wandb(folder, replace(ABOUT, mode="online"))
    finally:
        going_on.set()


def test_wandb_that_takes_no_record_of_earlier_steps_is_refused_with_the_remedy(folder, monkeypatch):
    tracker = start("jsonl", folder)
    log_steps(tracker, 1, 3)
    tracker.finish(0)
    going_on = threading.Event()
    monkeypatch.setattr("wandb.init", lambda **keys: _Slow(**keys))
    monkeypatch.setattr(_Slow, "log", lambda *_, **__: going_on.wait(20))
    monkeypatch.setattr("infra.tracking_wandb.TAKE_S", 0.2)
    try:
        with pytest.raises(
            ValueError, match=r"example\.org/run has not taken the next 10 .* in 0\.2 s.* tracking=jsonl"
        ):
            start("wandb", folder, resumed_from=3, mode="online")
    finally:
        going_on.set()


def test_mode_auto_is_online_only_with_a_key_for_the_host(tmp_path, monkeypatch):
    assert resolve_mode("auto") == "offline"
    (tmp_path / ".netrc").write_text("machine github.com login a password b\n")
    assert resolve_mode("auto") == "offline"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password " + "a" * 40 + "\n")
    assert resolve_mode("auto") == "online"
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert resolve_mode("auto") == "offline"
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    assert resolve_mode("auto") == "online"
    assert resolve_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert resolve_mode("auto") == "offline"


def test_a_user_without_a_home_has_no_key(monkeypatch):
    def unknown(user):
        raise KeyError(user)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)  # as of a container that is given any user id
    assert resolve_mode("auto") == "offline"


def test_a_key_that_cannot_be_read_is_said(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("NETRC", str(tmp_path / "keys"))
    assert resolve_mode("auto") == "offline"
    assert caplog.text == ""
    (tmp_path / "keys").write_text(f"machine api.wandb.ai login user {'a' * 40}\n")
    assert resolve_mode("auto") == "offline"
    assert f"{tmp_path / 'keys'} is not looked at for a key of W&B" in caplog.text
    assert "aaaa" not in caplog.text


def test_tensorboard_holds_the_records_and_hides_repeated_steps(folder):
    tracker = start("tensorboard", folder)
    log_steps(tracker, 1, 5)
    tracker.finish(1)
    tracker = start("tensorboard", folder, resumed_from=3)
    log_steps(tracker, 4, 6)
    tracker.finish(0)
    events = EventAccumulator(str(folder.path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss/train")]
    assert [step for step, _ in losses] == [1, 2, 3, 4, 5, 6]
    for step, value in losses:
        assert value == pytest.approx(1 / (3 * step), rel=1e-6)  # stored as float32


def test_unknown_kind_and_mode_name_the_choices(folder):
    with pytest.raises(ValueError, match="tracking=mlflow is unknown: choose one of jsonl, wandb"):
        start("mlflow", folder)
    with pytest.raises(ValueError, match=r"tracking\.mode=on is unknown: choose one of auto"):
        start("wandb", folder, mode="on")


def test_what_never_ends_is_left_alone_in_time():
    never = threading.Event()
    with pytest.raises(TimeoutError, match=r"no answer in 0\.01 s"):
        within(0.01, never.wait)
    never.set()
    with pytest.raises(KeyError):
        within(60, lambda: {}["x"])


def test_records_that_go_nowhere_are_noticed_before_a_checkpoint(tmp_path):
    folder = RunFolder.create(tmp_path / "run")
    tracker = JsonlTracker(folder, None)
    tracker.log(1, {"loss/train": 1.0})
    tracker.settle()
    shutil.rmtree(folder.path)
    with pytest.raises(CheckpointError, match="removed or replaced"):
        tracker.settle()


@contextmanager
def files_of(size):
    """No file of this process grows beyond `size` bytes, as under a quota."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_records_wait_while_the_disk_takes_none(folder, caplog):
    tracker = start("jsonl", folder)
    log_steps(tracker, 1, 1)
    with files_of(folder.metrics.stat().st_size + 10):  # the second line is cut short
        log_steps(tracker, 2, 4)
        tracker.summary({"loss/eval": 0.5})
    assert caplog.text.count("metrics.jsonl cannot be written") == 1
    tracker.settle()
    log_steps(tracker, 5, 5)
    tracker.finish(0)
    expected = [{"progress/step": step, **metrics_of(step)} for step in range(1, 6)]
    assert same(read_metrics(folder.metrics), expected)


def test_no_checkpoint_comes_before_the_records_of_its_steps(folder, caplog):
    tracker = start("jsonl", folder)
    log_steps(tracker, 1, 1)
    with files_of(folder.metrics.stat().st_size):
        log_steps(tracker, 2, 3)
        with pytest.raises(CheckpointError, match=r"metrics\.jsonl lacks records.*File too large.*make room"):
            tracker.settle()
        tracker.finish(1)  # a failure is told, and none comes on top
    assert "metrics.jsonl lacks 2 lines" in caplog.text
    assert [record["progress/step"] for record in read_metrics(folder.metrics)] == [1]


def test_a_summary_that_cannot_be_written_ends_nothing(folder, caplog):
    tracker = start("jsonl", folder)
    with files_of(1):
        tracker.summary({"loss/eval": 0.5})
    assert "summary.json is not written" in caplog.text
    tracker.summary({"steps": 3})
    assert json.loads(folder.summary.read_text()) == {"loss/eval": 0.5, "steps": 3}


def test_lines_wait_in_bounded_memory_and_dropped_ones_are_not_forgotten(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("infra.json_lines.KEPT_BYTES", 30)
    lines = JsonLines(tmp_path / "lines.jsonl")
    with files_of(5):
        for step in range(1, 6):
            lines.append({"step": step})
    lines.append({"step": 6})
    written = [json.loads(line)["step"] for line in lines.path.read_text().splitlines()]
    assert written == [1, 2, 6]
    with pytest.raises(OSError, match="3 lines were dropped"):
        lines.settle()
    lines.close()
    assert "lacks 3 lines" in caplog.text

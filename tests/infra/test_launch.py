"""Real torchrun launches: exit codes, signals, restarts, and nothing left behind."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import psutil
import pytest
from processes import MARK, end_all, heed_signals, marked

from infra.launch import LAUNCH_ID, _run_agent, launch_local

# What a worker does, chosen by ACTION; each writes its pid and environment to the run folder first.
WORKER = """
from infra.lineage import end_with_parent
if __name__ == "__main__":
    end_with_parent()

import calendar
import os, signal, subprocess, sys, time
from pathlib import Path
from infra.shutdown import StopFlag


def main():
    folder = Path(sys.argv[1]).parent
    rank = os.environ["RANK"]
    action = os.environ["ACTION"]
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if action == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sleeper = subprocess.Popen(["sleep", "300"], start_new_session=True)

    def ready():
        written = folder / f".rank{rank}"
        written.write_text(f"{os.getpid()} {os.environ['OMP_NUM_THREADS']} {os.environ['WORLD_SIZE']}")
        written.rename(folder / f"rank{rank}")

    if action == "stop":
        with StopFlag() as stop:
            ready()
            while not stop.requested:
                time.sleep(0.05)
        (folder / f"saved{rank}").write_text(stop.signal_name)
        sys.exit(0)
    if action == "meet":
        import torch
        import torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 2
        if rank == "0" and restart == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
    ready()
    if action in ("ignore", "stay"):
        time.sleep(300)
    if action == "mistake" and rank == "1":
        time.sleep(1)  # for rank 0 to be stopped
        sys.exit(2)
    if action == "mistake":
        os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(300)
    if action == "fail" and rank == "1":
        while not (folder / "go").exists():  # the test first notes which processes there are
            time.sleep(0.05)
        raise KeyError("the reason it failed")
    if action == "fail_once" and rank == "0" and restart == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "fail":
        time.sleep(300)
    print(f"rank {rank} done after {restart} restarts", flush=True)


if __name__ == "__main__":
    main()
"""

MAIN = """
import os, sys
from pathlib import Path
from infra.launch import launch_local
assert "torch" not in sys.modules
parent = os.getppid()
log = Path(os.environ["LOG"]) if "LOG" in os.environ else None
config, ranks, restarts = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
sys.exit(launch_local(config, ranks, "worker", log, None, restarts, parent=parent))
"""


@pytest.fixture
def run_folder(tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("a: 1\n")
    # Ranks start in a folder with a module of Python's name, which is not theirs.
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd" / "calendar.py").write_text("raise ImportError('the calendar of the working folder')")
    yield tmp_path / "run"
    end_all(marked(tmp_path / "run"))


def command_of(run_folder, ranks=2, restarts=0):
    # -P as for a script: the launcher, too, keeps out of the working folder.
    return [sys.executable, "-Pc", MAIN, str(run_folder / "config.yaml"), str(ranks), str(restarts)]


def start(run_folder, action, ranks=2, restarts=0, command=None, **env):
    path = os.pathsep.join(["", str(run_folder.parent), os.getcwd()])  # the empty entry is the working folder
    environment = {**os.environ, "ACTION": action, "PYTHONPATH": path, MARK: str(run_folder), **env}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command or command_of(run_folder, ranks, restarts),
        cwd=run_folder.parent / "cwd",
        env=environment,
        stdout=pipe,
        stderr=pipe,
        text=True,
        preexec_fn=heed_signals,
    )


def wait_for_ranks(run_folder, ranks=2):
    """The processes of the workers, once all are ready."""
    files = [run_folder / f"rank{rank}" for rank in range(ranks)]
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, "the workers did not start"
        time.sleep(0.05)
    return [psutil.Process(int(file.read_text().split()[0])) for file in files]


def family(workers):
    """Workers, their children and the agent above them."""
    agent = workers[0].parent()
    return [agent, *workers, *(child for worker in workers for child in worker.children(recursive=True))]


def still_running(processes):
    """Those that have not ended. On a busy machine one that has been killed takes a moment to."""
    end = time.monotonic() + 5
    while (left := [p for p in processes if is_alive(p)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def is_alive(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def last_line(text):
    return text.rstrip().splitlines()[-1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_success_and_threads_for_each_rank(run_folder, monkeypatch, ranks):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (scratch := run_folder.parent / "scratch").mkdir()
    launch = start(run_folder, "finish", ranks=ranks, TMPDIR=str(scratch))
    out, err = launch.communicate(timeout=90)
    assert list(scratch.iterdir()) == []
    assert launch.returncode == 0, err
    assert out.count("done after 0 restarts") == ranks
    assert last_line(err) == f"run folder {run_folder}: exit code 0"
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    for rank in range(ranks):
        assert (run_folder / f"rank{rank}").read_text().split()[1:] == [str(threads), str(ranks)]


def test_a_failing_worker_shows_its_traceback_and_its_code(run_folder):
    launch = start(run_folder, "fail", OMP_NUM_THREADS="7")
    workers = family(wait_for_ranks(run_folder))
    (run_folder / "go").touch()
    _, err = launch.communicate(timeout=90)
    assert launch.returncode == 1
    assert "KeyError: 'the reason it failed'" in err
    assert last_line(err) == f"run folder {run_folder}: exit code 1"
    assert (run_folder / "rank0").read_text().split()[1] == "7"  # what the user set stays
    assert still_running(workers) == []


def test_output_in_a_log_still_shows_the_reason(run_folder):
    log = run_folder / "logs" / "launch.log"
    (run_folder / "go").touch()
    launch = start(run_folder, "fail", ranks=2, LOG=str(log))
    out, err = launch.communicate(timeout=90)
    assert launch.returncode == 1
    assert out == ""
    assert "KeyError: 'the reason it failed'" in log.read_text()
    assert last_line(err) == f"run folder {run_folder}: exit code 1, output in {log}"


def test_a_killed_worker_is_restarted(run_folder):
    launch = start(run_folder, "fail_once", restarts=1)
    out, err = launch.communicate(timeout=90)
    assert launch.returncode == 0, err
    assert out.count("done after 1 restarts") == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_reaches_the_workers_which_may_end_their_step(run_folder, number):
    launch = start(run_folder, "stop")
    workers = family(wait_for_ranks(run_folder))
    launch.send_signal(number)
    _, err = launch.communicate(timeout=60)
    assert launch.returncode == 128 + number, err
    assert last_line(err) == f"run folder {run_folder}: exit code {128 + number}"
    assert [(run_folder / f"saved{rank}").read_text() for rank in (0, 1)] == ["SIGTERM"] * 2
    assert still_running(workers) == []


def test_workers_that_ignore_the_signal_are_killed_after_their_grace(run_folder):
    launch = start(run_folder, "ignore", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="1")
    workers = family(wait_for_ranks(run_folder))
    assert len(workers) == 1 + 2 + 2
    launch.send_signal(signal.SIGTERM)
    launch.communicate(timeout=60)
    assert launch.returncode == 128 + signal.SIGTERM
    assert still_running(workers) == []


def test_a_second_signal_kills_at_once(run_folder):
    launch = start(run_folder, "ignore")
    workers = family(wait_for_ranks(run_folder))
    began = time.monotonic()
    launch.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    launch.send_signal(signal.SIGINT)
    launch.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert launch.returncode == 128 + signal.SIGKILL
    assert still_running(workers) == []


def test_processes_that_no_signal_ends_are_named_and_left(monkeypatch, capsys):
    """As of processes that hang in a call of the kernel: signals are sent and do nothing."""
    for name in ("KILLED_S", "STRAGGLERS_S"):
        monkeypatch.setattr(f"infra.launch.{name}", 0.3)
    environment = {**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "50", LAUNCH_ID: "that of this test"}
    with monkeypatch.context() as deaf:
        deaf.setattr("subprocess.Popen.send_signal", lambda *_: None)
        deaf.setattr("psutil.Process.send_signal", lambda *_: None)
        deaf.setattr("os.killpg", lambda *_: None)
        code = _run_agent(["sleep", "60"], environment, None, [signal.SIGTERM, signal.SIGINT], os.getppid())
    agent, straggler = capsys.readouterr().err.splitlines()
    (pid,) = {int(re.search(r"\(process (\d+)\)", line)[1]) for line in (agent, straggler)}
    os.kill(pid, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert agent.startswith("the agent has not ended")
    assert straggler.startswith("a process of the launch has not ended")


def test_an_agent_that_dies_leaves_no_orphans_and_no_folder(run_folder):
    temporary = run_folder.parent / "temporary"
    temporary.mkdir()
    launch = start(run_folder, "ignore", TMPDIR=str(temporary))
    agent, *workers = family(wait_for_ranks(run_folder))
    assert list(temporary.glob("omni-agent-*"))
    agent.kill()
    _, err = launch.communicate(timeout=60)
    assert launch.returncode == 128 + signal.SIGKILL
    assert last_line(err) == f"run folder {run_folder}: exit code 137"
    assert still_running(workers) == []
    assert not list(temporary.glob("omni-agent-*"))


def test_an_agent_that_was_killed_is_started_again(run_folder):
    launch = start(run_folder, "stay", restarts=1)
    agent, *workers = family(wait_for_ranks(run_folder))
    for rank in (0, 1):
        (run_folder / f"rank{rank}").unlink()
    agent.kill()
    other = family(wait_for_ranks(run_folder))[0]
    assert other.pid != agent.pid
    assert still_running(workers) == []
    other.kill()
    _, err = launch.communicate(timeout=60)
    assert launch.returncode == 128 + signal.SIGKILL, "no restart is left"
    assert err.count("the agent died of signal 9: starting it again") == 1


linux = pytest.mark.skipif(not psutil.LINUX, reason="a kernel that ends children with their parent")


def gone(run_folder, within_s=10):
    """Whether no process of a test's launches is left after a while."""
    deadline = time.monotonic() + within_s
    while marked(run_folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not marked(run_folder)


@linux
@pytest.mark.parametrize("when", ["as the agent starts", "as ranks start", "while ranks run"])
@pytest.mark.parametrize("victim", ["launcher", "agent", "shell"])
def test_nothing_outlives_a_sudden_end(run_folder, victim, when):
    shell = ["bash", "-c", f"{shlex.join(command_of(run_folder))}; true"]
    started = start(run_folder, "stay", command=shell if victim == "shell" else None)
    launcher = started.pid
    if victim == "shell":
        launcher = child_of(started.pid).pid
    agent = child_of(launcher)
    if when == "as ranks start":
        child_of(agent.pid)
    elif when == "while ranks run":
        wait_for_ranks(run_folder)
    os.kill({"launcher": launcher, "agent": agent.pid, "shell": started.pid}[victim], signal.SIGKILL)
    assert gone(run_folder), marked(run_folder)
    started.communicate(timeout=10)


def child_of(pid):
    deadline = time.monotonic() + 60
    while not psutil.Process(pid).children():
        assert time.monotonic() < deadline, "no child was started"
        time.sleep(0.01)
    return psutil.Process(pid).children()[0]


@linux
def test_a_run_may_be_told_to_outlive_its_shell(run_folder):
    nohup = f"nohup {shlex.join(command_of(run_folder))} >/dev/null 2>/dev/null </dev/null & wait"
    shell = start(run_folder, "stop", command=["bash", "-c", nohup])
    workers = wait_for_ranks(run_folder)
    launcher = workers[0].parent().parent()
    shell.kill()
    shell.communicate(timeout=10)
    launcher.send_signal(signal.SIGHUP)
    time.sleep(1)
    assert all(map(is_alive, [launcher, *workers]))
    launcher.terminate()
    assert gone(run_folder, 30)
    assert (run_folder / "saved0").read_text() == "SIGTERM"


def test_a_mistake_is_not_restarted_and_a_worker_that_is_stopped_does_not_delay_the_end(run_folder):
    launch = start(run_folder, "mistake", restarts=3)
    workers = wait_for_ranks(run_folder)
    began = time.monotonic()
    launch.communicate(timeout=60)
    assert launch.returncode == 2
    assert time.monotonic() - began < 20, "torchrun gives a worker 30 s to leave"
    assert [int((run_folder / f"rank{rank}").read_text().split()[0]) for rank in (0, 1)] == [
        worker.pid for worker in workers
    ], "started once"


@pytest.mark.slow
def test_restarted_workers_meet_at_a_store_of_their_own(run_folder):
    launch = start(run_folder, "meet", restarts=1, OMP_NUM_THREADS="1")
    out, err = launch.communicate(timeout=120)
    assert launch.returncode == 0, err
    assert out.count("done after 1 restarts") == 2


def test_a_launch_that_cannot_be_is_refused(run_folder):
    with pytest.raises(ValueError, match="ranks=0"):
        launch_local(run_folder / "config.yaml", 0, "worker")
    with pytest.raises(ValueError, match=r"missing\.yaml does not exist"):
        launch_local(run_folder / "missing.yaml", 1, "worker")

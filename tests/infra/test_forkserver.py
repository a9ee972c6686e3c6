"""Ranks that are forked from a process with their imports: as the agent's own children, or not at all."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from infra.forkserver import ForkServer

pytestmark = pytest.mark.skipif(not psutil.LINUX, reason="a kernel that gives orphans to their grandparent")

PROGRAM = """
import os, sys, time
imported_by = os.getpid()
if __name__ == "__main__":
    own = sys.modules["program"].imported_by
    said = os.getpid(), os.getppid(), os.getsid(0), own, os.environ["RANK"], sys.argv[1]
    os.write(1, (" ".join(map(str, said)) + "\\n").encode())  # at once, whatever another prints
    if os.environ["RANK"] == "1":
        time.sleep(300)
    sys.exit(7)
"""


@pytest.fixture
def serving(tmp_path, monkeypatch):
    """Start servers of a program, and close them after the test."""
    servers = []

    def start(program=PROGRAM):
        (tmp_path / "program.py").write_text(program)
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.getcwd()]))
        servers.append(ForkServer("program", ["argument"]))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def test_ranks_are_children_of_the_agent_with_imports_of_another(serving, capfd):
    server = serving()
    environment = {**os.environ, "RANK": "0"}
    forked = [server.start(environment), server.start(environment)]
    assert [process.wait(timeout=30) for process in forked] == [7, 7]
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    # Side by side: either may print first.
    assert {int(row[0]) for row in rows} == {process.pid for process in forked}
    assert {int(row[1]) for row in rows} == {os.getpid()}
    assert [row[2] for row in rows] == [row[0] for row in rows], "each leads a session"
    assert len({row[3] for row in rows}) == 1, "imported once"
    assert rows[0][3] not in (row[0] for row in rows)
    assert [row[4:] for row in rows] == [["0", "argument"]] * 2


def test_a_rank_outlives_its_server_and_tells_of_a_signal(serving):
    server = serving()
    rank = server.start({**os.environ, "RANK": "1"})
    server.close()
    server.close()
    assert rank.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        rank.wait(timeout=0.1)
    os.kill(rank.pid, signal.SIGKILL)
    assert rank.wait(timeout=10) == -signal.SIGKILL
    assert rank.poll() == -signal.SIGKILL
    assert server.start({}) is None


def test_a_server_that_no_signal_ends_is_named_and_left(serving, monkeypatch, capfd):
    monkeypatch.setattr("infra.forkserver.KILLED_S", 0.1)
    server = serving("import time\ntime.sleep(60)")
    with monkeypatch.context() as deaf:
        deaf.setattr("subprocess.Popen.kill", lambda *_: None)
        server.close()
    assert f"the fork server has not ended in 10 s after SIGKILL (process {server._process.pid})" in (
        capfd.readouterr().err
    )


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("raise ImportError('of the program')", "of the program"),
        ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()", "threads"),
    ],
)
def test_a_server_that_cannot_fork_says_why_and_leaves_ranks_to_torchrun(serving, capfd, program, reason):
    assert serving(program).start({**os.environ, "RANK": "0"}) is None
    time.sleep(0.1)
    err = capfd.readouterr().err
    assert reason in err
    assert "agent: the fork server has ended: ranks import each for itself" in err


# Stands in for torch on a machine with GPUs, whose import has touched CUDA without telling.
POISONED = """
import os, sys, types
importer = os.getpid()
torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(
    is_initialized=lambda: False, _is_in_bad_fork=lambda: os.getpid() != importer
)
sys.modules["torch"] = torch
if __name__ == "__main__":
    print(os.getpid(), os.getppid(), os.getsid(0), torch.cuda._is_in_bad_fork(), sys.argv[1], flush=True)
    sys.exit(7)
"""


def test_ranks_of_a_server_that_touched_a_gpu_start_anew(serving, capfd):
    server = serving(POISONED)
    environments = [{**os.environ, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    forked = [server.start(environment) for environment in environments]
    assert [process.wait(timeout=30) for process in forked] == [7, 7]
    out, err = capfd.readouterr()
    rows = sorted(line.split() for line in out.splitlines())
    agent = str(os.getpid())
    expected = [[str(p.pid), agent, str(p.pid), "False", "argument"] for p in forked]
    assert rows == sorted(expected), "the agent's own children, each in a session, able to use CUDA"
    assert err.count("touched a GPU") == 1


def test_the_agent_has_torch_count_gpus_without_cuda():
    code = (
        "import os, sys; sys.modules['infra.elastic_agent'] = e = type(sys)('elastic'); "
        "e.run_torchrun = lambda *args: print(os.environ['PYTORCH_NVML_BASED_CUDA_CHECK']); "
        "from infra.agent import run; run([]); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", "False"]


def test_orphans_of_ranks_are_reaped_and_processes_have_names(serving):
    server = serving()
    rank = server.start({**os.environ, "RANK": "1"})
    until = time.monotonic() + 10
    while psutil.Process(rank.pid).name() != "omni-rank-1":
        assert time.monotonic() < until
        time.sleep(0.01)
    child = subprocess.Popen(["sleep", "0"])  # kept: who drops it reaps it if it has ended by then
    left = psutil.Process(child.pid)
    while left.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    server.reap()
    assert not left.is_running()
    assert rank.poll() is None


def test_a_rank_starts_without_a_word_that_its_module_is_imported(tmp_path, monkeypatch, capfd):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "program.py").write_text("print(__name__, flush=True)")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.getcwd()]))
    server = ForkServer("package.program", [])
    try:
        assert server.start({**os.environ, "RANK": "0"}).wait(timeout=30) == 0
    finally:
        server.close()
    out, err = capfd.readouterr()
    assert out.split() == ["package.program", "__main__"]
    assert err == ""


AGENT = """
import os, sys
from infra.forkserver import ForkServer
server = ForkServer("program", ["argument"])
print(server.start({**os.environ, "RANK": "1"}).pid, flush=True)
sys.stdin.read()
"""


def test_ranks_and_their_server_end_with_a_killed_agent(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.getcwd()])}
    pipe = subprocess.PIPE
    agent = subprocess.Popen([sys.executable, "-c", AGENT], env=environment, stdin=pipe, stdout=pipe)
    assert agent.stdout is not None
    agent.stdout.readline()
    # The process between server and rank may be on its way out.
    until = time.monotonic() + 10
    while len(family := psutil.Process(agent.pid).children(recursive=True)) > 2:
        assert time.monotonic() < until, family
        time.sleep(0.01)
    assert len(family) == 2
    agent.kill()
    agent.communicate(timeout=10)
    assert psutil.wait_procs(family, timeout=10)[1] == []

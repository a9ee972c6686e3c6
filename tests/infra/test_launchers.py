"""What launchers start: shapes of jobs, arguments of agents, batch scripts, and jobs side by side."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest

from infra.launchers import local, node
from infra.launchers.job import Job, agent_arguments, check_environment, columns, split_ranks
from infra.launchers.script import Batch, check_batch, render
from infra.launchers.slurm import SlurmError, wait_for, write_script
from infra.run_folder import RunFolder
from infra.run_lock import holder_of

CONTAINER = """\
#!/usr/bin/env bash
#SBATCH --job-name=mine-3
#SBATCH --nodes=128
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --account=lab
#SBATCH --time=1-00:00:00
#SBATCH --chdir=/home/me
#SBATCH --output='/fs/my runs/3/output.log'
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
#SBATCH --qos=high
#SBATCH --exclusive

# Submitting this file again continues the run after its newest checkpoint.
set -euo pipefail
export PYTHONSAFEPATH=1 # modules are not imported from the working folder
OMNI_SECRET="$(head -c 32 /dev/urandom | od -An -v -tx1 | tr -d ' \\n')"
export OMNI_SECRET
export NCCL_IB_HCA=mlx5_0,mlx5_1
module load cuda
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-270}"
rm -f '/fs/my runs/3/exit_code'

# Nodes meet at the first one. OMNI_HEAD is its address where node names do not resolve.
head="${OMNI_HEAD:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}"
port=$((20000 + SLURM_JOB_ID % 10000))

# Before the time limit Slurm says USR1 to this shell alone, and the ranks save a checkpoint and leave. To end
# the job it says TERM to all: here that must not end the wait for them.
out_of_time=no
trap 'out_of_time=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
trap : TERM

srun --kill-on-bad-exit=0 --wait=60 \\
    --mpi=none \\
    --container-image=/images/omni.sqsh \\
    '--container-mounts=/fs/my runs/3:/fs/my runs/3,/home/me:/home/me,/data:/data' \\
    --container-workdir=/home/me \\
    --no-container-mount-home \\
    python -m infra.launchers.node --nodes 128 --ranks 8 \\
    --head "$head" --port "$port" --launch "$SLURM_JOB_ID" --max-restarts 2 \\
    '/fs/my runs/3/config.yaml' &
step=$!

# A signal ends a wait, not the step.
while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
code=0
wait "$step" || code=$?
if [ "$code" -gt 128 ]; then
    [ "$out_of_time" = no ] || scontrol requeue "$SLURM_JOB_ID" || true
    again="$(scontrol show job "$SLURM_JOB_ID" | grep -o 'Restarts=[0-9]*' || true)"
    if [ -n "$again" ] && [ "$again" != "Restarts=${SLURM_RESTART_COUNT:-0}" ]; then
        echo again >'/fs/my runs/3/exit_code'
        exit
    fi
fi

echo "$code" >'/fs/my runs/3/exit_code'
exit "$code"
"""


def big(folder=Path("/fs/my runs/3")):
    return Job(3, "mine-3", folder, 128, 8, 2, ("layout=pp2",), {"NCCL_IB_HCA": "mlx5_0,mlx5_1"})


def in_container():
    return Batch(
        python="python",
        account="lab",
        time="1-00:00:00",
        save_before_s=300,
        directives={"qos": "high", "exclusive": True, "contiguous": False},
        srun=["--mpi=none"],
        container="/images/omni.sqsh",
        mounts=["/data:/data"],
        container_flags=["--no-container-mount-home"],
        setup=["module load cuda"],
    )


@pytest.mark.parametrize(
    ("ranks", "shape"), [(1, (1, 1)), (8, (1, 8)), (5, (1, 5)), (16, (2, 8)), (1024, (128, 8))]
)
def test_ranks_fill_nodes(ranks, shape):
    assert split_ranks(ranks, 8) == shape


def test_ranks_that_leave_a_node_partly_empty_are_refused_and_so_are_unknown_ones():
    with pytest.raises(ValueError, match=r"launch\.ranks=12 does not fill nodes of 8 ranks.*ranks_per_node"):
        split_ranks(12, 8)
    with pytest.raises(ValueError, match=r"launch\.ranks=null"):
        split_ranks(None, 8)


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "my_password", "A B", "1ST"])
def test_secrets_and_names_that_are_none_stay_out_of_files(name):
    check_environment({"NCCL_DEBUG": "INFO", "TOKENIZERS_PARALLELISM": "false"})
    with pytest.raises(ValueError, match=name):
        check_environment({name: "x"})


def test_the_first_node_keeps_the_rendezvous():
    first, second = (agent_arguments(big(), node, "head", 2950, "17") for node in (0, 1))
    assert [a for a, b in zip(first, second, strict=True) if a != b] == [
        "--rdzv-conf=is_host=1,read_timeout=300"
    ]
    assert {"--nnodes=128", "--nproc-per-node=8", "--rdzv-endpoint=head:2950", "--rdzv-id=17"} < set(second)
    assert second[-3:] == ["-m", "omni.training.worker", "/fs/my runs/3/config.yaml"]
    assert "--local-addr=10.0.0.2" in agent_arguments(big(), 1, "head", 2950, "17", "10.0.0.2")


def test_the_script_of_a_job_in_a_container():
    assert render(big(), in_container(), Path("/home/me")) == CONTAINER


def test_a_script_without_requeue_saves_before_the_limit_all_the_same():
    text = render(big(), Batch("/opt/python", gpus=False, requeue=False), Path("/home/me"))
    assert "#SBATCH --no-requeue\n" in text
    assert "#SBATCH --signal=B:USR1@120\n" in text
    assert "trap 'scancel --signal=TERM \"$SLURM_JOB_ID\"' USR1\n" in text
    assert not {"out_of_time", "scontrol requeue", "gpus-per-node", "container"} & set(text.split())
    assert "scontrol requeue" not in text


@pytest.mark.parametrize(
    ("before_s", "env", "own", "grace"),
    [
        (1800, {}, {}, "1770"),
        (60, {}, {}, "50"),
        (1800, {}, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}, "600"),
        (1800, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "700"}, {}, "700"),
    ],
)
def test_ranks_have_what_there_is_before_the_limit_to_save_unless_the_user_says(
    tmp_path, before_s, env, own, grace
):
    job = Job(0, "mine", tmp_path, 1, 2, env=env)
    text = render(job, Batch("python", save_before_s=before_s), tmp_path)
    (tmp_path / "srun").write_text(f'#!/bin/sh\necho "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" >{tmp_path}/grace\n')
    (tmp_path / "srun").chmod(0o755)
    inherited = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "OMNI_HEAD": "n0"}
    subprocess.run(["bash", "-c", text], env=inherited | own, check=True)
    assert (tmp_path / "grace").read_text() == f"{grace}\n"


@pytest.mark.parametrize(
    ("restarts", "before", "code"), [("1", "", 0), ("1", "1", 143), ("2", "1", 0), ("", "1", 143)]
)
def test_a_job_that_slurm_queued_again_leaves_no_exit_code(tmp_path, restarts, before, code):
    text = render(Job(0, "mine", tmp_path, 1, 2), Batch("python"), tmp_path)
    fakes = {"srun": "exit 143", "scontrol": f"echo 'JobState=COMPLETING Restarts={restarts} Requeue=1'"}
    for name, does in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does if restarts or name == 'srun' else 'exit 1'}\n")
        (tmp_path / name).chmod(0o755)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "OMNI_HEAD": "n0"}
    own |= {"SLURM_RESTART_COUNT": before} if before else {}
    done = subprocess.run(["bash", "-c", text], env=own, check=False)
    assert done.returncode == code
    assert (tmp_path / "exit_code").read_text() == (f"{code}\n" if code else "again\n")


def test_scripts_pass_shellcheck(tmp_path):
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    quotes = Job(0, "it's", Path('/a "b"/c'), 1, 2, env={"X": "a b'c"})
    texts = [CONTAINER, render(quotes, Batch("/opt/my python/bin/python", requeue=False), Path("/w"))]
    files = [tmp_path / f"{number}.sh" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text)
    done = subprocess.run(["shellcheck", *files], capture_output=True, text=True, check=False)
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("job", "batch", "said"),
    [
        ({"name": "a\ntouch /tmp/harm\n#"}, {}, "run.name="),
        ({"folder": Path("/runs/a\rb")}, {}, "run.dir="),
        ({}, {"partition": "gpu\ntouch /tmp/harm"}, "hydra.launcher.partition="),
        ({}, {"account": "lab --wrap=id"}, "hydra.launcher.account="),
        ({}, {"directives": {"qos": "high\nid"}}, "hydra.launcher.directives.qos="),
        ({}, {"directives": {"qos\nid": "high"}}, "a key of hydra.launcher.directives"),
        ({}, {"directives": {"signal": "USR2@5"}}, "set hydra.launcher.save_before_s"),
        ({}, {"directives": {"job-name": "x"}}, "set run.name"),
        ({}, {"srun": ["--mpi=none\nid"]}, r"hydra.launcher.srun\[0\]="),
        ({}, {"container": "a.sqsh\x00"}, "hydra.launcher.container="),
        ({}, {"time": "soon"}, "hydra.launcher.time=soon: Slurm takes MINUTES"),
        ({}, {"save_before_s": 1_000_000}, "hydra.launcher.save_before_s=1000000: Slurm takes 65535 at most"),
        ({}, {"time": "1:30", "save_before_s": 90}, "limit of hydra.launcher.time=1:30 is 90 s"),
        ({}, {"time": "2:00:00", "save_before_s": 7200}, "is 7200 s"),
        ({}, {"time": "30", "save_before_s": 1800}, "is 1800 s"),
    ],
)
def test_what_would_add_lines_to_a_script_or_slurm_would_refuse_is_refused(job, batch, said):
    with pytest.raises(ValueError, match=said):
        check_batch(replace(big(), **job), replace(in_container(), **batch), Path("/home/me"))


@pytest.mark.parametrize("limit", [None, "10", "10:30", "1:00:00", "1-00", "1-00:30:10", "UNLIMITED"])
def test_limits_in_slurms_notation_are_taken(limit):
    check_batch(big(), replace(in_container(), time=limit), Path("/home/me"))


def test_cores_are_asked_for_unless_directives_do():
    text = render(big(), Batch("python", cpus_per_rank=4), Path("/home/me"))
    assert "#SBATCH --cpus-per-task=32\n" in text
    assert "--cpus-per-task=32 \\\n" in text  # srun's
    for directives in ({"exclusive": True}, {"cpus-per-gpu": 8}):
        assert "cpus-per-task" not in render(big(), Batch("python", directives=directives), Path("/home/me"))


def test_a_script_is_its_owners_alone(tmp_path):
    job = big(tmp_path)
    write_script(job, Batch("python"))
    assert job.script.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["LD_PRELOAD", "PYTHONPATH", "PATH", "BASH_ENV", "OMNI_SECRET"])
def test_a_configuration_does_not_choose_what_code_ranks_run(name):
    check_environment({"PYTHONHASHSEED": "1", "NCCL_IB_HCA": "mlx5", "OMNI_HEAD": "10.0.0.1"})
    with pytest.raises(ValueError, match=f"{name} (decides which code|looks like a secret)"):
        check_environment({name: "x"})


def test_a_first_node_whose_name_does_not_resolve_is_told_with_the_remedy(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(node, "RESOLVE_S", 0)
    monkeypatch.setattr(node, "end_with_parent", lambda: None)
    shape = ["--nodes", "2", "--ranks", "1", "--node", "1", "--port", "1", "--launch", "1"]
    assert node.main([*shape, "--head", "no-such-host.invalid", str(tmp_path / "config.yaml")]) == 2
    assert "no-such-host.invalid, does not resolve here" in (said := capsys.readouterr().err)
    assert "OMNI_HEAD" in said


def test_a_controller_that_is_restarted_ends_no_wait_for_its_jobs(monkeypatch):
    answers: list = ["RUNNING", SlurmError("no contact"), SlurmError("still none"), "COMPLETED"]
    said: list[str] = []

    def state_of(number):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("infra.launchers.slurm.POLL_S", 0)
    monkeypatch.setattr("infra.launchers.slurm.state_of", state_of)
    assert wait_for(["7"], said.append) == {"7": "COMPLETED"}
    assert said == [
        "Slurm job 7: RUNNING",
        "Slurm does not answer, and is asked again: no contact",
        "Slurm job 7: COMPLETED",
    ]
    monkeypatch.setattr("infra.launchers.slurm.SILENT_S", 0)
    answers[:] = [SlurmError("gone")] * 3
    with pytest.raises(SlurmError, match="gone"):
        wait_for(["7"], said.append)


def test_columns_are_as_wide_as_their_widest_cell():
    assert columns([["a", "name"], ["10", "b c"], ["3", ""]]) == "a   name\n10  b c\n3"


# Jobs side by side: real processes, which a shell stands for.


@pytest.fixture
def shells(monkeypatch, tmp_path):
    """Have each job run the shell command that `sets` holds; GPUS and its start and end go to a file."""
    log = tmp_path / "log"

    def start(job, gpus, parallel):
        command = (
            f"echo begin {job.number} $GPUS >>{log}; {job.sets[0]}; code=$?; echo end {job.number} >>{log}"
        )
        env = {**os.environ, "GPUS": ",".join(gpus)}
        return subprocess.Popen(["sh", "-c", f"{command}; exit $code"], env=env, process_group=0)

    monkeypatch.setattr(local, "_start", start)

    def run(commands, parallel, gpus=(), ranks=1):
        jobs = [Job(n, f"job-{n}", tmp_path, 1, ranks, sets=(text,)) for n, text in enumerate(commands)]
        said = []
        codes = local.run_jobs(jobs, parallel, gpus, os.getppid(), said.append)
        return codes, log.read_text().splitlines(), said

    return run


def test_a_job_that_fails_leaves_the_others_running(shells):
    codes, lines, said = shells(["(exit 3)", "sleep 0.3", "true"], parallel=1)
    assert codes == [3, 0, 0]
    assert [line.split()[:2] for line in lines] == [
        [what, str(n)] for n in range(3) for what in ("begin", "end")
    ]
    assert "job 0 failed (exit code 3)" in said
    assert "job 2 completed" in said


def test_at_most_so_many_run_at_a_time(shells):
    _, lines, _ = shells(["sleep 0.4"] * 5, parallel=2)
    running = most = 0
    for line in lines:
        running += 1 if line.startswith("begin") else -1
        most = max(most, running)
    assert most == 2


def test_jobs_have_gpus_of_their_own_and_wait_for_them(shells):
    codes, lines, _ = shells(["sleep 0.4"] * 4, parallel=4, gpus=("4", "5", "6", "7", "9"), ranks=2)
    assert codes == [0] * 4
    assert sorted(lines[:2]) == ["begin 0 4,5", "begin 1 6,7"]
    assert lines[2].startswith("end"), "a GPU is left over, which is not enough for a job of two"


def test_a_signal_stops_jobs_under_way_and_starts_no_other(shells):
    threading.Timer(0.6, os.kill, (os.getpid(), signal.SIGTERM)).start()
    begun = time.monotonic()
    codes, lines, said = shells(["exec sleep 30"] * 3, parallel=2)
    assert time.monotonic() - begun < 20
    assert codes == [128 + signal.SIGTERM] * 2 + [None]
    assert not any(line.startswith("begin 2") for line in lines)
    assert f"job 0 stopped (exit code {128 + signal.SIGTERM})" in said


# A job as it really is, but for its ranks' work.

SWEEP = """
import os, sys
from pathlib import Path
from infra.launchers.job import Job
from infra.launchers.local import run_jobs

run_jobs([Job(0, "job", Path(sys.argv[1]), 1, 1)], 2, (), os.getppid(), print)
"""

WORKER = """
import os, sys, time
from pathlib import Path
from infra.lineage import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    Path(sys.argv[1]).with_name("rank").touch()
    time.sleep(300)
"""


def test_all_processes_end_with_a_sweeps_launcher(tmp_path):
    package = tmp_path / "omni" / "training"
    package.mkdir(parents=True)
    (package / "worker.py").write_text(WORKER)
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").touch()
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").touch()
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    launcher = subprocess.Popen(
        [sys.executable, "-Pc", SWEEP, str(folder)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_IGN),  # nohup does not change it
    )
    below: list[psutil.Process] = []
    try:
        wait_until((folder / "rank").exists, 60)
        holder, alive = holder_of(RunFolder(folder))
        below = psutil.Process(launcher.pid).children(recursive=True)
        assert (alive, holder.pid, len(below)) == (True, below[0].pid, 4), "job, agent, fork server, rank"
        launcher.kill()
        wait_until(lambda: not any(map(runs, below)), 10)
    finally:
        launcher.kill()
        launcher.wait()
        for process in filter(runs, below):
            process.kill()


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds} s"
        time.sleep(0.05)


def runs(process):
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False

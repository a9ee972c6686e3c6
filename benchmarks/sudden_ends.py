"""SIGKILL to the launcher, an agent or the shell of a training run at random moments: is a process left?

    python benchmarks/sudden_ends.py [--kills 20] [--quick]

Each trial starts a small run of two ranks from a shell, on the quickstart's data (make data), waits for a
stage of it (the agent has begun, a rank has, a step is done) and up to a second longer, kills one process and
looks for processes of the run for ten seconds: a variable of their environment marks them. Then it times
`omni train -m hydra/launcher=render` for six jobs of 128 × 8 ranks. Prints a line a trial, and at last one of
JSON. Leaves with 1 if a process was left, or if rendering took more than 5 s.
"""

import argparse
import json
import os
import random
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

VICTIMS = ("launcher", "agent", "shell")
PROCESSES = {"launcher": "omni", "agent": "infra.agent"}  # python -m …
STAGES = ("agent", "rank", "step")
WITHIN_S = 10.0
RENDER_S = 5.0
BEGIN_S = 240.0  # for a run to reach a stage
MARK = "OMNI_SUDDEN_ENDS"
KEYS = (
    "experiment=quickstart",
    "system=multiplexed",
    "launch.ranks=2",
    "tracking=jsonl",
    "train.eval_every=0",
    "train.checkpoint_every=5",
    "data.step_tokens=256",
)
SWEEP = ("launch.ranks=1024", "hydra.launcher.ranks_per_node=8", "optim.lr=1e-3,2e-3,3e-3,4e-3,5e-3,6e-3")


def trial(victim: str, stage: str, delay_s: float, folder: Path) -> tuple[float, list[str]]:
    """Kill a victim at a stage. Return the seconds until all were gone, and what was left after WITHIN_S."""
    command = [sys.executable, "-m", "omni", "train", *KEYS, f"run.dir={folder / 'run'}"]
    environment = {**os.environ, MARK: str(folder), "OMP_NUM_THREADS": "1"}
    with (folder / "output").open("wb") as output:
        # A second command keeps the shell from becoming the launcher.
        line = ["bash", "-c", f"{shlex.join(command)}; true"]
        shell = subprocess.Popen(line, env=environment, stdout=output, stderr=output)
    try:
        wait_for(stage, shell, folder)
        time.sleep(delay_s)
        pid = shell.pid if victim == "shell" else find(victim, shell)[0].pid
        os.kill(pid, signal.SIGKILL)
        start = time.monotonic()
        while (left := of_run(folder)) and time.monotonic() < start + WITHIN_S:
            time.sleep(0.05)
        return time.monotonic() - start, [f"{process.pid} {process.name()}" for process in left]
    finally:
        for process in of_run(folder):
            with suppress(psutil.Error):
                process.kill()
        shell.wait()


def wait_for(stage: str, shell: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until a run has reached a stage."""
    until = time.monotonic() + BEGIN_S
    metrics = folder / "run" / "metrics.jsonl"
    while not (metrics.exists() if stage == "step" else find(stage, shell)):
        assert shell.poll() is None, (folder / "output").read_text()
        assert time.monotonic() < until, f"no {stage} in {BEGIN_S:.0f} s:\n{(folder / 'output').read_text()}"
        time.sleep(0.05)


def find(what: str, shell: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """Return processes below a shell that are ranks, or run a module, the first one started first."""
    found = []
    for process in psutil.Process(shell.pid).children(recursive=True):
        with suppress(psutil.Error):
            rank = process.name().startswith("omni-rank-")
            if rank if what == "rank" else PROCESSES[what] in process.cmdline():
                found.append(process)
    return found


def of_run(folder: Path) -> list[psutil.Process]:
    """Return the processes of a run that have not ended."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ended = process.status() == psutil.STATUS_ZOMBIE
            if not ended and process.environ().get(MARK) == str(folder):
                found.append(process)
    return found


def render_s(folder: Path) -> tuple[float, float]:
    """Return the seconds, and those of CPU, that it takes to render a sweep of six jobs."""
    command = [sys.executable, "-m", "omni", "train", "-m", "hydra/launcher=render", *SWEEP]
    begun, cpu_begun = time.monotonic(), cpu_s()
    subprocess.run([*command, f"hydra.sweep.dir={folder}"], check=True, capture_output=True)
    taken = time.monotonic() - begun, cpu_s() - cpu_begun
    assert len(list(folder.glob("*/job.sh"))) == 6
    return taken


def cpu_s() -> float:
    """Return the CPU time of all processes that this one started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=20, help="trials a victim")
    parser.add_argument("--quick", action="store_true", help="two trials a victim")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    kills = 2 if arguments.quick else arguments.kills
    draw = random.Random(arguments.seed)
    left = dict.fromkeys(VICTIMS, 0)
    slowest_s = dict.fromkeys(VICTIMS, 0.0)
    for number in range(kills):
        for victim in VICTIMS:
            stage, delay_s = draw.choice(STAGES), draw.uniform(0, 1)
            with tempfile.TemporaryDirectory() as folder:
                gone_s, names = trial(victim, stage, delay_s, Path(folder))
            left[victim] += bool(names)
            slowest_s[victim] = max(slowest_s[victim], round(gone_s, 2))
            said = f"left: {', '.join(names)}" if names else f"all gone after {gone_s:.2f} s"
            print(f"{number} {victim}, {delay_s:.2f} s after the first {stage}: {said}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        wall_s, own_cpu_s = render_s(Path(folder))
    rendered = {"render_s": round(wall_s, 2), "render_cpu_s": round(own_cpu_s, 2)}
    found = {"benchmark": "sudden_ends", "kills": kills, "left": left, "slowest_s": slowest_s, **rendered}
    print(json.dumps(found))
    sys.exit(any(left.values()) or wall_s > RENDER_S)


if __name__ == "__main__":
    main()

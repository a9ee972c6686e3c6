"""The jobs of a sweep on this machine, some at a time, each with GPUs of its own.

Every job is a process of its own, `python -m infra.launchers.local`, so that one that fails leaves the others
running. It ends with the process that started it, its ranks with it. Agents choose free ports themselves.
"""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infra.launch import MISTAKE, launch_local, new_launch, noting_signals
from infra.launchers.job import WORKER, Job
from infra.lineage import end_with_parent, outlives_parent
from infra.machine import usable_cores
from infra.run_folder import RunFolder, write_text
from infra.run_lock import LockedError, holding

POLL_S = 0.1


@dataclass(frozen=True)
class _Running:
    job: Job
    gpus: tuple[str, ...]
    process: "subprocess.Popen[bytes]"


def own_gpus(count: int) -> tuple[str, ...]:
    """Return the names of this process's `count` GPUs, as CUDA_VISIBLE_DEVICES takes them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(visible.split(",")[:count]) if visible else tuple(map(str, range(count)))


def run_jobs(
    jobs: Sequence[Job], parallel: int, gpus: Sequence[str], parent: int, say: Callable[[str], None]
) -> list[int | None]:
    """Run jobs in order, at most `parallel` at a time, and return their exit codes, None for one not started.

    Where there are `gpus`, a job waits until as many are free as it has ranks. The output of a job goes to
    the screen if it runs alone, else to its `output.log`. A signal that asks for an end is handed on to the
    jobs under way, and no other job starts; so is the end of `parent`, which started this process, as SIGHUP.
    Needs the main thread.
    """
    assert all(job.nodes == 1 and (not gpus or job.ranks <= len(gpus)) for job in jobs)
    waiting, free = deque(jobs), list(gpus)
    running: list[_Running] = []
    codes: dict[int, int] = {}
    handed_on = 0
    with noting_signals() as received:
        while running or (waiting and not received):
            while not received and waiting and _fits(waiting[0], len(running), parallel, free, gpus):
                job = waiting.popleft()
                taken = tuple(free.pop(0) for _ in range(job.ranks if gpus else 0))
                running.append(_Running(job, taken, _start(job, taken, parallel)))
                say(f"job {job.number} started{_where(job, parallel)}")
            if not received and outlives_parent(parent):
                received.append(signal.SIGHUP)
            for number in received[handed_on:]:
                for each in running:
                    with suppress(ProcessLookupError):
                        each.process.send_signal(number)
            handed_on = len(received)
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                free.extend(each.gpus)
                codes[each.job.number] = _code(each)
                say(f"job {each.job.number} {verdict(codes[each.job.number])}")
            time.sleep(POLL_S)
    return [codes.get(job.number) for job in jobs]


def verdict(code: int | None) -> str:
    """Return what became of a job, in words."""
    if code is None:
        return "not started"
    if code == 0:
        return "completed"
    return f"stopped (exit code {code})" if code > 128 else f"failed (exit code {code})"


def _fits(job: Job, running: int, parallel: int, free: Sequence[str], gpus: Sequence[str]) -> bool:
    return running < parallel and (not gpus or job.ranks <= len(free))


def _start(job: Job, gpus: Sequence[str], parallel: int) -> "subprocess.Popen[bytes]":
    threads = {"OMP_NUM_THREADS": str(max(1, usable_cores() // (job.ranks * parallel)))}
    own = {"PYTHONSAFEPATH": "1", **({"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {})}
    command = [sys.executable, "-m", "infra.launchers.local", str(job.config), str(job.ranks)]
    command += [str(job.max_restarts), str(os.getpid())]
    if parallel > 1:
        command.append(str(job.output))
    # A group of its own: Ctrl-C in the terminal reaches each job once, from here.
    return subprocess.Popen(command, env={**threads, **os.environ, **job.env, **own}, process_group=0)


def _code(ended: _Running) -> int:
    code = ended.process.returncode
    code = 128 - code if code < 0 else code
    with suppress(OSError):  # a full disk must not end the others
        write_text(ended.job.exit_code, f"{code}\n")
    return code


def _where(job: Job, parallel: int) -> str:
    return f", output in {job.output}" if parallel > 1 else ""


def main(arguments: Sequence[str]) -> int:
    """Run one job: its config.yaml, ranks, restarts, who started it, and the file for its output, if any."""
    config, ranks, restarts, parent, *log = arguments
    end_with_parent(int(parent))
    launch = new_launch()
    try:
        with holding(RunFolder(Path(config).parent), launch):
            return launch_local(
                Path(config),
                int(ranks),
                WORKER,
                log=Path(log[0]) if log else None,
                max_restarts=int(restarts),
                launch=launch,
                parent=int(parent),
            )
    except LockedError as error:
        print(f"error: {error}", file=sys.stderr)
        return MISTAKE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

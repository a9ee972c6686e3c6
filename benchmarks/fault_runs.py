"""A run that a fault is done to: started, looked into, ended, compared with one that nobody disturbed."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from fault_reference import Reference, check, difference, learnt
from omegaconf import OmegaConf
from torch.distributed import TCPStore

from dataloader.storage import Storage
from infra.checkpoint import MANIFEST, complete, folder_of, verify
from infra.lineage import STARTED_BY
from infra.relay import Relay
from infra.run_folder import RunFolder, read_metrics, write_text
from omni.compose import compose_config
from parallel.handshake import SECRET, new_secret

STEPS = 80
SAVE_EVERY = 5
LIMIT_S = 180.0  # for anything that is waited for
GONE_S = 10.0  # for processes to be gone after the end
MARK = "OMNI_FAULT_DRILL"  # a variable that marks all processes of a trial
FAULT = "OMNI_FAULT"  # which fault fault_worker.py is to do, when and on which rank
HERE = Path(__file__).parent
KEYS = (
    "experiment=quickstart",
    "system=multiplexed",
    "launch.ranks=2",
    "tracking=jsonl",
    "~data.heldout.strips",
    "~data.heldout.docs",
    "data.step_tokens=256",
    "data.record_samples=true",
    "costs.learn=false",
    "optim.warmup_steps=0",
    "train.eval_every=0",
    f"train.steps={STEPS}",
    f"train.checkpoint_every={SAVE_EVERY}",
    "train.timeout_s=60",
)
PROGRAMS = {"launcher": "omni", "agent": "infra.agent"}  # python -m ...
RANK, PLANNER = "omni-rank-", "omni-planner"  # names of processes


@dataclass
class Trial:
    """One run in `folder`, and a fault that is done to it at a moment that `rng` draws."""

    folder: Path
    reference: Reference
    rng: random.Random
    restarts: int = 0
    moment: str = ""
    recovered_s: float | None = None
    starters: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    store: TCPStore | None = None
    secret: str = field(default_factory=new_secret)
    gate: int = 0  # the port at which agents find the store
    before: list[int] = field(default_factory=list)  # checkpoints that there were when the fault was done

    @property
    def run(self) -> RunFolder:
        """The run folder."""
        return RunFolder(self.folder / "run")

    @property
    def storage(self) -> Storage:
        """Where the checkpoints lie."""
        return Storage.at(self.run.checkpoints)

    # Starting.

    def train(self, *keys: str, out: int | None = None) -> None:
        """Start `omni train`, or go on with what is in the folder; it prints to `out`, else to the log."""
        line = ["-m", "omni", "train", *KEYS, f"launch.max_restarts={self.restarts}"]
        self._start([*line, f"run.dir={self.run.path}", *keys], {}, out)

    def resume(self) -> None:
        """Go on by `omni resume`, as a user does or a scheduler that queues the job again."""
        self._start(["-m", "omni", "resume", str(self.run.path), "launch.max_restarts=0"], {})

    def prepare(self, *keys: str) -> None:
        """Write the configuration into the run folder, for agents that are started by hand."""
        folder = RunFolder.create(self.run.path)
        config = compose_config([*KEYS, f"run.dir={folder.path}", *keys])
        write_text(folder.config, OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True))

    def with_fault(self, name: str, step: int, rank: int, *keys: str) -> None:
        """Start an agent of two ranks, in which fault_worker.py does a fault the first time."""
        self.prepare(*keys)
        self.moment = f"step {step}, rank {rank}"
        line = ["--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
        self.agent(line, "fault_worker", {FAULT: f"{name}:{step}:{rank}", "PYTHONPATH": path})

    def agents(self, count: int, extra: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
        """Start agents of one rank each, of two that meet at a store that this process holds."""
        if self.store is None:
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.gate = Relay(bytes.fromhex(self.secret)).gate(0, default=self.store.port)
        line = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=drill"]
        line += [f"--rdzv-endpoint=127.0.0.1:{self.gate}"]
        line += ["--rdzv-conf=is_host=0,last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=4"]
        for _ in range(count):
            self.agent(line, "omni.training.worker", extra or {}, cwd)

    def agent(
        self, line: Sequence[str], module: str, extra: Mapping[str, str], cwd: Path | None = None
    ) -> None:
        """Start an agent, with these arguments of torchrun's, of ranks that run a module."""
        line = ["-m", "infra.agent", *line, "--local-addr=127.0.0.1", f"--max-restarts={self.restarts}"]
        own = {STARTED_BY: str(os.getpid()), "PYTHONSAFEPATH": "1", SECRET: self.secret}
        self._start([*line, "-m", module, str(self.run.config)], {**own, **extra}, cwd=cwd)

    def _start(
        self,
        arguments: Sequence[str],
        extra: Mapping[str, str],
        out: int | None = None,
        cwd: Path | None = None,
    ) -> None:
        threads = {"OMP_NUM_THREADS": "1", MARK: str(self.folder)}
        with (self.folder / "log").open("ab") as log:
            self.starters.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    env={**os.environ, **threads, **extra},
                    stdin=subprocess.DEVNULL,
                    stdout=log if out is None else out,
                    stderr=log if out is None else out,
                    cwd=cwd,
                )
            )

    # Looking.

    @property
    def log(self) -> str:
        """What all processes have printed so far."""
        return (self.folder / "log").read_text(errors="replace")

    def rows(self) -> int:
        """How many steps are recorded."""
        with suppress(FileNotFoundError):
            return self.run.metrics.read_bytes().count(b"\n")
        return 0

    def processes(self) -> list[psutil.Process]:
        """All processes of this trial that have not ended."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                ended = process.status() == psutil.STATUS_ZOMBIE
                if not ended and process.environ().get(MARK) == str(self.folder):
                    found.append(process)
        return found

    def find(self, what: str) -> list[psutil.Process]:
        """The processes that are launcher, agent, or named so."""
        found = []
        for process in self.processes():
            with suppress(psutil.Error):
                line = process.cmdline()
                if (
                    line[1:3] == ["-m", PROGRAMS[what]]
                    if what in PROGRAMS
                    else process.name().startswith(what)
                ):
                    found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        """The processes of the two ranks, in their order; waits until they are there."""
        self.wait_until(lambda: len(self.find(RANK)) == 2, "two ranks", 0.02)
        return sorted(self.find(RANK), key=lambda process: process.name())

    def wait_until(self, condition: Callable[[], bool], what: str, poll_s: float = 0.005) -> None:
        """Wait for something; MissError if all starters end before, or after LIMIT_S."""
        until = time.monotonic() + LIMIT_S
        while not condition():
            ended = all(starter.poll() is not None for starter in self.starters)
            check(not ended or condition(), f"the run ended before {what}")
            check(time.monotonic() < until, f"no {what} in {LIMIT_S:.0f} s")
            time.sleep(poll_s)

    def wait_for_moment(self) -> None:
        """Wait for a moment of any kind: while ranks start, in a step, or while a checkpoint is written."""
        kind = self.rng.choice(["starting", "step", "step", "save", "save"])
        after, delay_s = self.rng.randrange(1, STEPS - 30), self.rng.uniform(0, 0.1)
        if kind == "starting":
            self.ranks()
            delay_s *= 20
        else:
            self.wait_until(lambda: self.rows() >= after, f"step {after}")
        if kind == "save":
            self.wait_until(self.is_saving, "save")
            delay_s /= 4
        time.sleep(delay_s)
        self.moment = f"{kind}, after step {self.rows()}"

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        folders = self.run.checkpoints.glob("step_*")
        return any(not (folder / MANIFEST).exists() for folder in folders)

    # Ending.

    def kill(self, *processes: psutil.Process) -> None:
        """Kill processes, and begin to take the time."""
        self.strike()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)

    def strike(self) -> None:
        """Note when the fault was done, and what was there then."""
        self.before = complete(self.storage)
        self.inode = _inode(self.run.metrics)
        self.struck = time.monotonic()

    def wait_for_recovery(self) -> None:
        """Wait for the first step that is recorded after the fault, and note how long that took."""
        self.wait_until(lambda: _inode(self.run.metrics) not in (None, self.inode), "new records")
        already = self.rows() if self.before else 0  # those of the checkpoint that it goes on from
        self.wait_until(lambda: self.rows() > already, "step after the fault")
        self.recovered_s = time.monotonic() - self.struck

    def end(self) -> list[int]:
        """Wait until all that was started has ended and left nothing; return the codes, -n for signals."""
        self.wait_until(lambda: all(starter.poll() is not None for starter in self.starters), "end")
        codes = [starter.returncode for starter in self.starters]
        self.starters = []
        self.gone()
        return codes

    def gone(self) -> None:
        """Check that no process is left, and no good checkpoint lost."""
        until = time.monotonic() + GONE_S
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        check(not left, f"left: {', '.join(f'{process.pid} {process.name()}' for process in left)}")
        there = complete(self.storage)
        newest = max(self.before, default=0)
        check(max(there, default=0) >= newest, f"checkpoint {newest} was there, now {there}")

    def clear(self) -> None:
        """Kill whatever is left."""
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        for starter in self.starters:
            starter.wait()

    # Judging.

    def ends_with(self, code: int) -> None:
        """Wait for the end; all exit codes must be this."""
        codes = self.end()
        check(set(codes) == {code}, f"exit codes {codes}, not {code}")

    def says(self, *words: str) -> None:
        """Some line of the output must have all of these words."""
        lines = self.log.splitlines()
        check(any(all(word in line for word in words) for line in lines), f"no line says {' … '.join(words)}")

    def is_whole(self) -> None:
        """The run has ended well: every step once, and its last checkpoints sound."""
        steps = [int(record["progress/step"]) for record in read_metrics(self.run.metrics)]
        check(steps == list(range(1, STEPS + 1)), f"steps {steps}")
        there = complete(self.storage)
        check(there[-1:] == [STEPS], f"checkpoints {there}")
        for step in there:
            verify(self.storage, step)
        check(self.run.samples.read_text() == self.reference.samples, "other samples")

    def is_exact(self) -> None:
        """The run has ended well, with the losses and samples of the reference, to the bit."""
        self.is_whole()
        for ours, theirs in zip(learnt(self.run.path), self.reference.learnt, strict=True):
            check(ours == theirs, f"step {theirs['progress/step']}: {difference(ours, theirs)}")

    def goes_on(self) -> None:
        """Go on by hand; the run must end with what the reference has."""
        self.resume()
        self.ends_with(0)
        self.is_exact()

    def copy_reference(self) -> Path:
        """Take the folder of the reference for that of this run; return its newest checkpoint."""
        shutil.copytree(self.reference.path, self.run.path)
        return self.run.checkpoints / folder_of(STEPS)


def _inode(path: Path) -> int | None:
    with suppress(FileNotFoundError):
        return path.stat().st_ino
    return None

"""Ranks that leave and come back: agents as nodes on this machine, half of them killed and started again.

    python benchmarks/elastic.py            # 4 -> 2 -> 4 ranks; --quick: 2 -> 1 -> 2

A small model trains under tp=2, pp=2 on four ranks; where these do not fit, one rank holds all. After a tenth
of the steps half of the agents are killed, the first one among them, and after two tenths as many are
started: the rest of the steps must take longer than they take to start. The run must end by itself, with the
samples of every step and, but for rounding, the losses of one rank that nobody disturbed. Ends with a line of
JSON, and with 1 if it does not.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from omegaconf import OmegaConf
from torch.distributed import TCPStore

from infra.lineage import STARTED_BY
from infra.relay import Relay
from infra.run_folder import RunFolder, read_metrics, write_text
from omni.compose import compose_config
from parallel.handshake import SECRET, new_secret

LIMIT_S = 900
CLOSE = 1e-4
KEYS = (
    "experiment=quickstart",
    "system=multiplexed",
    "tracking=jsonl",
    "~data.heldout.strips",
    "~data.heldout.docs",
    "model.llm.layers=2",
    "model.llm.hidden=64",
    "model.llm.ffn=128",
    "data.record_samples=true",
    "optim.warmup_steps=0",
    "optim.eps=1e-4",
    "train.eval_every=0",
    "train.checkpoint_every=5",
    "train.timeout_s=60",
    "launch.layouts=[{}]",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="two ranks, then one, then two")
    arguments = parser.parse_args()
    ranks, steps = (2, 150) if arguments.quick else (4, arguments.steps)
    layout = ["layout.llm.pp=2"] if arguments.quick else ["layout.llm.pp=2", "layout.llm.tp=2"]
    with tempfile.TemporaryDirectory() as folder:
        alone = prepared(Path(folder) / "alone", steps, [])
        agents = Agents(alone, 1)
        agents.start(1)
        ended = agents.wait()
        elastic = prepared(Path(folder) / "elastic", steps, layout)
        agents = Agents(elastic, ranks)
        codes = come_and_go(agents, elastic, ranks, steps) if ended == [0] else ended
        found = compare(elastic, alone, steps)
        log = (elastic.path / "log.txt").read_text(errors="replace") if codes is not ended else ""
    worlds = [int(n) for n in re.findall(r"^  ranks +(\d+) on ", log, re.MULTILINE)]
    ok = set(codes) == {0} and found["samples"] and found["loss"] <= CLOSE
    ok = bool(ok and {ranks, ranks // 2} <= set(worlds) and worlds[-1] == ranks)
    if not ok:
        print(log[-6000:], file=sys.stderr)
    print(json.dumps({"benchmark": "elastic", "ranks": worlds, "codes": codes, **found, "ok": ok}))
    return 0 if ok else 1


def prepared(path: Path, steps: int, keys: Sequence[str]) -> RunFolder:
    """Make a run folder with its configuration."""
    folder = RunFolder.create(path)
    config = compose_config([*KEYS, f"train.steps={steps}", f"run.dir={path}", *keys])
    write_text(folder.config, OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True))
    return folder


class Agents:
    """Agents of up to `most` nodes with a rank each, and the store at which they meet, which none of them is
    the end of.
    """

    def __init__(self, folder: RunFolder, most: int) -> None:
        self.folder = folder
        self.nodes = f"{max(1, most // 2)}:{most}"
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.secret = new_secret()
        self.gate = Relay(bytes.fromhex(self.secret)).gate(0, default=self.store.port)
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, count: int) -> None:
        """Start further agents."""
        command = [sys.executable, "-m", "infra.agent", f"--nnodes={self.nodes}", "--nproc-per-node=1"]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self.gate}"]
        conf = "is_host=0,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"
        command += [f"--rdzv-conf={conf}", "--rdzv-id=elastic", "--local-addr=127.0.0.1"]
        command += ["--max-restarts=20", "-m", "omni.training.worker", str(self.folder.config)]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            STARTED_BY: str(os.getpid()),
            SECRET: self.secret,
        }
        with (self.folder.path / "log.txt").open("ab") as out:
            for _ in range(count):
                agent = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
                self.running.append(agent)

    def kill(self, count: int) -> None:
        """Kill the first agents, and with them their ranks."""
        for agent in self.running[:count]:
            agent.kill()
            agent.wait()
        del self.running[:count]

    def wait(self) -> list[int]:
        """Wait for all agents; return their exit codes."""
        deadline = time.monotonic() + LIMIT_S
        for agent in self.running:
            with suppress(subprocess.TimeoutExpired):
                agent.wait(max(1.0, deadline - time.monotonic()))
            agent.kill()
        return [agent.wait() for agent in self.running]


def come_and_go(agents: Agents, folder: RunFolder, ranks: int, steps: int) -> list[int]:
    """Half of the ranks leave, and as many come. Returns the exit codes of the agents at the end."""
    agents.start(ranks)
    wait_until(lambda: done(folder) >= steps // 10)
    agents.kill(ranks // 2)
    wait_until(lambda: done(folder) >= steps // 5)
    agents.start(ranks // 2)
    return agents.wait()


def done(folder: RunFolder) -> int:
    with suppress(FileNotFoundError):
        return folder.metrics.read_bytes().count(b"\n")
    return 0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)


def compare(ours: RunFolder, theirs: RunFolder, steps: int) -> dict[str, float]:
    """Whether all steps took the same samples, and the largest difference of a loss."""
    losses = [[m["loss/train"] for m in read_metrics(folder.metrics)] for folder in (ours, theirs)]
    if [len(of) for of in losses] != [steps, steps]:
        return {"samples": False, "loss": float("inf")}
    samples = ours.samples.read_text() == theirs.samples.read_text()
    return {"samples": samples, "loss": max(abs(a / b - 1) for a, b in zip(*losses, strict=True))}


if __name__ == "__main__":
    sys.exit(main())

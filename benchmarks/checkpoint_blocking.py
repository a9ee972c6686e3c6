"""How long a save keeps training waiting, and how much steps slow down while it is written.

    python benchmarks/checkpoint_blocking.py [--megabytes 256] [--repetitions 5] [--steps 3] [--quick]

One rank with one thread trains an LLM whose weights and moments are that large. Each repetition runs some
steps undisturbed, saves and waits until all is on the disk (a synchronous save), saves and goes on, and runs
steps until that is written. Blocked: what the step waits for a save, by what a synchronous one takes. Slowed:
a step that a thread wrote beside from its begin to its end, by an undisturbed one. All is counted without
what threads waited for a core, which other programs of the machine take (Linux counts it); the last by the
clock, too.
The last line is JSON; the exit code is 1 where training is blocked for more than a tenth, or steps slow down
by more than a tenth.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from small_runs import make_trainer, on_ranks, write_texts

from omni.training.trainer import Trainer

LENGTH = 64
WIDTH, FFN = 512, 1408
LAYER = 4 * WIDTH * WIDTH + 3 * WIDTH * FFN  # parameters
MOST = 0.1


def keys_of(folder: Path, layers: int) -> list[str]:
    return [
        "~experiment",
        "system=multiplexed",
        "model=tiny",
        "~model.encoders.image",
        f"model.llm.hidden={WIDTH}",
        f"model.llm.ffn={FFN}",
        "model.llm.heads=8",
        "model.llm.kv_heads=8",
        f"model.llm.layers={layers}",
        f"+data.sources.texts.path={folder / 'texts'}",
        f"data.microbatch_tokens={LENGTH}",
        "data.step_samples=1",
        "train.steps=100000",
        "train.precision=fp32",
        "train.keep_checkpoints=1",
        "optim.lr=1e-4",
        "tracking=jsonl",
        f"run.dir={folder / 'run'}",
    ]


def waited_for_core(thread: int | None = None) -> float:
    """Seconds that this thread, or one by its number, was ready to run and no core was free."""
    thread = thread or threading.get_native_id()
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9


def is_writing(trainer: Trainer) -> bool:
    saver = trainer.saving.checkpoints.saver
    return saver is not None and saver.thread is not None and saver.thread.is_alive()


def await_written(trainer: Trainer) -> float:
    """Wait until a save is on the disk; return how long its thread waited for a core."""
    saver, waited = trainer.saving.checkpoints.saver, 0.0
    assert saver is not None
    thread = saver.thread
    while thread is not None and thread.is_alive():
        with suppress(OSError):
            waited = waited_for_core(thread.native_id)
        time.sleep(0.005)
    return waited


def measure(rank: int, world: int, keys: list[str], repetitions: int, steps: int) -> dict[str, list[float]]:
    """What each save and each step took, in seconds: `step` undisturbed, `slowed` beside a save."""
    trainer = make_trainer(rank, world, keys)
    times: dict[str, list[float]] = defaultdict(list)
    with trainer.ahead() as ahead:

        def step(name: str, is_counted: bool) -> None:
            start, waited, writing = time.perf_counter(), waited_for_core(), is_writing(trainer)
            prepared = trainer.begin(ahead, trainer.step + 1)
            trainer.update(trainer.run_step(prepared))
            if is_counted and writing == is_writing(trainer):
                took = time.perf_counter() - start
                times[f"{name}_clock"].append(took)
                times[name].append(took - (waited_for_core() - waited))

        def save(name: str, is_counted: bool, waits: bool) -> None:
            os.sync()
            start, waited = time.perf_counter(), waited_for_core()
            trainer.saving.save(trainer.reporter)
            others = await_written(trainer) if waits else 0.0
            took = time.perf_counter() - start - others - (waited_for_core() - waited)
            if is_counted:
                times[name].append(took)

        for repetition in range(repetitions + 1):
            is_counted = repetition > 0  # the first one allocates
            for _ in range(steps):
                step("step", is_counted)
            save("synchronous", is_counted, waits=True)
            trainer.saving.finish(trainer.reporter)
            step("step", False)
            save("blocked", is_counted, waits=False)
            while is_writing(trainer):
                step("slowed", is_counted)
            saved = trainer.saving.checkpoints.wait()
            assert saved is not None
            times["bytes"].append(saved.bytes)
    return dict(times)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="96 MB, two repetitions")
    options = parser.parse_args()
    if options.quick:
        options.megabytes, options.repetitions = 96, 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_texts(folder / "texts", LENGTH)
        keys = keys_of(folder, max(1, round(options.megabytes * 1e6 / 12 / LAYER)))
        (times,) = on_ranks(1, measure, keys, options.repetitions, options.steps)
    if "slowed" not in times:
        raise SystemExit("no step fits beside a save: give more --megabytes")
    middle = {name: statistics.median(values) for name, values in times.items()}
    figures = {
        "megabytes": round(middle["bytes"] / 1e6),
        "blocked_ms": round(middle["blocked"] * 1e3, 1),
        "synchronous_ms": round(middle["synchronous"] * 1e3, 1),
        "blocked_by_synchronous": round(middle["blocked"] / middle["synchronous"], 3),
        "step_ms": round(middle["step"] * 1e3, 1),
        "steps_while_writing": len(times["slowed"]),
        "slowed": round(middle["slowed"] / middle["step"] - 1, 3),
        "slowed_by_the_clock": round(middle["slowed_clock"] / middle["step_clock"] - 1, 3),
    }
    figures["holds"] = figures["blocked_by_synchronous"] <= MOST and figures["slowed"] <= MOST
    print(json.dumps({"benchmark": "checkpoint_blocking", **figures}))
    return 0 if figures["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())

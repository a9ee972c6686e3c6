"""A first day on GPUs: rungs from tests to MFU, each with a deadline, and a report that can be sent.

    make gpu                      # all rungs that have no record of this commit yet
    make gpu RUNG=5               # this one, again
    python benchmarks/gpu_day.py --quick  # tries the day itself: two CPU ranks, small models, 4 min of CPU

`benchmarks/gpu_rungs.py` lists the rungs. Each runs for at most 8 minutes in processes of its own and leaves
its record in `gpu_report/` at once, whether it passed, failed or was ended at its deadline; the next one goes
on. After each the report is written anew: report.md and report.json (benchmarks/gpu_report.py). No rung
needs a network. Without a GPU it says what would run, and the exit code is 0; else it is 1 if a rung did not
pass. docs/first_gpu.md says what to expect.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from gpu_report import Record, facts_of_machine, read_records, write_report
from gpu_rungs import RUNGS, Rung

from infra.run_folder import write_json

ROOT = Path(__file__).parents[1]
DATA = ROOT / "data/quickstart"
GRACE_S = 10.0  # between the request to end and the end
TAIL_LINES = 40
PASSED, FAILED, TIMED_OUT = "passed", "failed", "timed out"


def main(words: Sequence[str] | None = None) -> int:
    """Run what was asked for. Returns 1 if a rung did not pass."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rung", type=int, choices=[rung.number for rung in RUNGS], help="this one alone, again"
    )
    parser.add_argument("--again", action="store_true", help="also rungs that have a record")
    parser.add_argument("--out", type=Path, default=Path("gpu_report"), help="where the report goes")
    parser.add_argument("--quick", action="store_true", help="try the day itself on two CPU ranks")
    arguments = parser.parse_args(words)
    from ops.device import visible_devices

    gpus = 2 if arguments.quick else visible_devices()
    chosen = [rung for rung in RUNGS if arguments.rung in (None, rung.number)]
    if not gpus:
        print("no GPU is visible here; on a machine that has some, this would run:")
        for rung in chosen:
            print(f"  {rung.number} {rung.name:10} up to {rung.minutes:g} min: {rung.asks}")
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # so that what is under way is ended, too
    out = arguments.out.absolute()
    facts = facts_of_machine(ROOT, gpus, arguments.quick)
    again = arguments.again or arguments.rung is not None
    return climb(chosen, out, facts, gpus, again, arguments.quick)


def climb(
    rungs: Sequence[Rung], out: Path, facts: Mapping[str, object], gpus: int, again: bool, brief: bool
) -> int:
    """Run rungs one after the other and write the report after each. One that has a record of the same
    commit and machine is not run, unless `again`. Returns 1 if any of them did not pass.
    """
    out.mkdir(parents=True, exist_ok=True)
    records = []
    for rung in rungs:
        had = read_records(out).get(rung.stem)
        if had is not None and not again and had.of == facts and "changes" not in str(facts["commit"]):
            print(f"rung {rung.number}, {rung.name}: {had.outcome} before; RUNG={rung.number} runs it again")
            records.append(had)
            continue
        print(f"rung {rung.number}, {rung.name}, up to {rung.minutes:g} min: {rung.asks}", flush=True)
        if had is None or had.of != facts or had.outcome != TIMED_OUT:  # else it goes on where it was ended
            shutil.rmtree(out / rung.stem, ignore_errors=True)
        record = run(rung, out, facts, gpus, brief)
        write_json(out / f"{rung.stem}.json", record.as_json())
        write_report(out)
        print(f"rung {rung.number}, {rung.name}: {record.outcome} after {record.seconds:.0f} s", flush=True)
        records.append(record)
    bad = [record.name for record in records if record.outcome != PASSED]
    print(f"the report: {write_report(out)}")
    print(json.dumps({"rungs": {record.name: record.outcome for record in records}, "missed": bad}))
    return int(bool(bad))


def run(rung: Rung, out: Path, facts: Mapping[str, object], gpus: int, brief: bool) -> Record:
    """Run a rung to its end or its deadline. Its output goes to a file beside its figures."""
    folder = out / rung.stem
    folder.mkdir(exist_ok=True)
    words, begin = rung.words(folder, gpus, brief), time.monotonic()
    # Nothing is fetched or sent, and ranks that a deadline ends have seconds to leave.
    quiet = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "offline", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
    env = {
        **os.environ,
        **quiet,
        "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT / 'tests/omni'}:{ROOT / 'tests/e2e'}",
    }
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env=env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code: int | None = process.wait(rung.minutes * 60)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end(process)
    lines = (folder / "output.txt").read_text(errors="replace").splitlines()
    outcome = TIMED_OUT if code is None else FAILED if code else PASSED
    return Record(
        rung=rung.number,
        name=rung.name,
        asks=rung.asks,
        command=" ".join(["python", *words]).replace(f"{out}", "gpu_report").replace(f"{ROOT}/", ""),
        of=dict(facts),
        outcome=outcome,
        exit_code=code,
        seconds=time.monotonic() - begin,
        figures=rung.read(folder),
        tail=[] if outcome == PASSED else lines[-TAIL_LINES:],
    )


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it started: ask, wait a little, kill."""
    if process.poll() is None:
        below = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
        for one in below:  # those of sessions of their own
            with suppress(psutil.NoSuchProcess):
                one.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


if __name__ == "__main__":
    raise SystemExit(main())

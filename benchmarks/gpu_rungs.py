"""The rungs of a first day on GPUs: for each the question, the command, and where its figures are."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.run_folder import RunFolder, read_metrics

PARITY, SPEED, KERNELS, LINKS = (
    f"benchmarks/gpu_{name}.py" for name in ("parity", "speed", "kernels", "links")
)
TRAIN = ("-m", "omni", "train", "experiment=quickstart", "tracking=jsonl")
LAST = 50  # steps whose loss and speed say what a run has come to
Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Rung:
    """One question to the machine. `command` is what Python is given, where {out} is the rung's own folder,
    {gpus} the number of GPUs and {calibrated} the cluster file that the rung `links` writes. `brief` is added
    where the day itself is tried, on CPUs. The command ends within `minutes`, or is ended, and `read` finds
    its figures in the folder, so that what it wrote by then counts.
    """

    number: int
    name: str
    asks: str
    command: tuple[str, ...]
    brief: tuple[str, ...]
    read: Callable[[Path], Figures]
    minutes: float = 8

    @property
    def stem(self) -> str:
        """Name of its record and of its folder."""
        return f"{self.number}_{self.name}"

    def words(self, out: Path, gpus: int, brief: bool) -> list[str]:
        """The command of this rung on a machine."""
        places = {"out": out, "gpus": gpus, "calibrated": out.with_name("7_links") / "cluster/here.yaml"}
        return [word.format_map(places) for word in (*self.command, *(self.brief if brief else ()))]


def written(folder: Path) -> Figures:
    """What a benchmark wrote after each of its cases."""
    import json

    file = folder / "figures.json"
    return json.loads(file.read_text()) if file.exists() else {}


def of_tests(folder: Path) -> Figures:
    """Counts of tests, and the names of those that failed."""
    file = folder / "tests.xml"
    if not file.exists():
        return {}
    cases = list(ElementTree.parse(file).iter("testcase"))

    def names(kind: str) -> list[str]:
        return [
            f"{case.get('classname')}.{case.get('name')}" for case in cases if case.find(kind) is not None
        ]

    bad, skipped = [*names("failure"), *names("error")], names("skipped")
    return {"passed": len(cases) - len(bad) - len(skipped), "skipped": len(skipped), "failed": bad}


def of_training(folder: Path) -> Figures:
    """Losses and speed of the last steps of a run."""
    steps = read_metrics(RunFolder(folder / "run").metrics)
    if not steps:
        return {}
    last = steps[-LAST:]
    keys = (
        "loss/train",
        "perf/step_s",
        "perf/tokens_per_s",
        "perf/idle_frac",
        "plan/pred_error",
        "mem/peak_gb",
    )
    means = {key: [step[key] for step in last if key in step] for key in keys}
    evaluated = {key: value for step in steps for key, value in step.items() if key.startswith("loss/eval/")}
    return {
        "steps": len(steps),
        "first loss": steps[0]["loss/train"],
        **{f"{key}, mean of the last {len(last)}": sum(of) / len(of) for key, of in means.items() if of},
        **evaluated,
    }


RUNGS = (
    Rung(
        1,
        "tests",
        "Do the tests pass that need a GPU?",
        ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "gpu", "--junitxml={out}/tests.xml", "tests"),
        ("tests/ops",),
        of_tests,
    ),
    Rung(
        2,
        "kernels",
        "Does each operator compute what its definition says, tiles that are shared included, and how fast?",
        (KERNELS, "--out", "{out}"),
        ("--quick",),
        written,
    ),
    Rung(
        3,
        "parity",
        "Do loss, gradients and weights of the quickstart's model equal those of a CPU?",
        (PARITY, "--reference", "cpu", "--gpus", "{gpus}", "--out", "{out}"),
        ("--quick",),
        written,
    ),
    Rung(
        4,
        "quickstart",
        "Does the quickstart learn, on all GPUs?",
        (*TRAIN, "launch.ranks={gpus}", "train.generate_s=60", "run.dir={out}/run"),
        ("train.steps=20", "train.eval_every=0", "train.checkpoint_every=0", "train.generate_s=1"),
        of_training,
    ),
    Rung(
        5,
        "ladder",
        "Does every axis of a layout and every schedule equal one GPU?",
        (PARITY, "--reference", "gpu", "--gpus", "{gpus}", "--out", "{out}"),
        ("--quick",),
        written,
    ),
    Rung(
        6,
        "mfu",
        "Which share of the GPUs' peak do a model of 1 B and one of 8 B reach, and where does the rest go?",
        (SPEED, "--cases", "mfu", "--gpus", "{gpus}", "--out", "{out}", "--calibrated", "{calibrated}"),
        ("--quick",),
        written,
    ),
    Rung(
        7,
        "links",
        "Are products, memory and links as fast as the cluster's file says?",
        (LINKS, "--gpus", "{gpus}", "--out", "{out}"),
        (),
        written,
        4,
    ),
    Rung(
        8,
        "steps",
        "How far are simulated steps from measured ones?",
        (SPEED, "--cases", "steps", "--gpus", "{gpus}", "--out", "{out}", "--calibrated", "{calibrated}"),
        ("--quick",),
        written,
    ),
)

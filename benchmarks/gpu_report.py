"""The report of a first day on GPUs: records of rungs, facts of the machine, and the page made of them.

It holds no host name, no user, no address and no serial number: it may be sent.
"""

import json
import os
import platform
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from infra.run_folder import write_json, write_text

PACKAGES = ("torch", "megatron-core", "triton", "flash-attn", "numpy")
TOLD = re.compile(r"(NCCL|CUDA|PYTORCH|TORCH|GLOO|OMP|UCX)_\w+")
HIDDEN = re.compile(r"IFNAME|HOST|ADDR|TOKEN|KEY|SECRET|ID$|PATH|DIR|FILE")
COLOURS = re.compile(r"\x1b\[\d*m")
WIDEST = 12  # columns of a table


@dataclass(frozen=True)
class Record:
    """What a rung came to. `of` are the facts of commit and machine that it belongs to, `tail` the last lines
    of its output where it did not pass; `exit_code` is None where the deadline ended it.
    """

    rung: int
    name: str
    asks: str
    command: str
    of: Mapping[str, Any]
    outcome: str
    exit_code: int | None
    seconds: float
    figures: Mapping[str, Any]
    tail: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)


def read_records(out: Path) -> dict[str, Record]:
    """The records of a folder, by the stem of their files, in the order of rungs."""
    files = sorted(out.glob("[0-9]*_*.json"), key=lambda file: int(file.name.partition("_")[0]))
    return {file.stem: Record(**json.loads(file.read_text())) for file in files}


def facts_of_machine(root: Path, gpus: int, brief: bool) -> dict[str, Any]:
    """Commit, GPUs and versions: records of other ones are not of this day."""
    import torch

    changed = " with changes" if _said("git", "-C", f"{root}", "status", "--porcelain", "-uno") else ""
    on_gpu = torch.cuda.is_available()
    names = [torch.cuda.get_device_name(i) for i in range(gpus)] if on_gpu else []
    return {
        "commit": (_said("git", "-C", f"{root}", "rev-parse", "HEAD") or "unknown") + changed,
        "gpus": gpus if on_gpu else 0,
        "devices": sorted({*names}) or [f"CPU, {gpus} ranks: no GPU was used"],
        "brief": brief,
        "driver": _said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "cuda": torch.version.cuda or "none",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else "none",
        "cudnn": torch.backends.cudnn.version() if on_gpu else "none",
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }


def surroundings() -> dict[str, str]:
    """What else may explain a figure: topology, clocks and limits of the GPUs, cores, memory, environment."""
    asked = (
        "name,memory.total,power.limit,clocks.max.sm,pcie.link.gen.max,pcie.link.width.max,mig.mode.current"
    )
    cpu = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.+)", cpu.read_text()) if cpu.exists() else []
    told = sorted(name for name in os.environ if TOLD.fullmatch(name) and not HIDDEN.search(name))
    return {
        "GPUs": _said("nvidia-smi", f"--query-gpu={asked}", "--format=csv"),
        "topology": _said("nvidia-smi", "topo", "-m"),
        "CPU": f"{os.cpu_count()} cores, {models[0] if models else platform.machine()}",
        "kernel": platform.release(),
        "environment": "\n".join(f"{name}={os.environ[name]}" for name in told),
    }


def write_report(out: Path) -> Path:
    """Write report.md and report.json of the records in a folder; return the page's path."""
    records = list(read_records(out).values())
    around = surroundings()
    write_json(out / "report.json", {"records": [record.as_json() for record in records], "machine": around})
    write_text(out / "report.md", "\n".join(page(records, around)) + "\n")
    return out / "report.md"


def page(records: Sequence[Record], around: Mapping[str, str]) -> Iterator[str]:
    """The page: machine, an overview, and each rung with its figures."""
    yield "# First day on GPUs"
    yield ""
    for key, value in (records[-1].of if records else {}).items():
        yield f"- {key}: {', '.join(value) if isinstance(value, list) else value}"
    if any(record.of != records[-1].of for record in records):
        yield "- **Not all rungs are of this commit and machine:** those that are not name theirs below."
    yield ""
    yield "| rung | asks | outcome | seconds |"
    yield "|---|---|---|---|"
    for record in records:
        yield f"| {record.rung} {record.name} | {record.asks} | {record.outcome} | {record.seconds:.0f} |"
    for record in records:
        yield from ("", f"## {record.rung} {record.name}: {record.outcome}", "", f"`{record.command}`", "")
        if record.of != records[-1].of:
            yield from (f"Of another day: {json.dumps(record.of)}", "")
        yield from _shown(record.figures)
        if record.tail:
            yield from ("", "The last lines of its output:", "", "```", *record.tail, "```")
    yield from ("", "## Machine")
    for key, text in around.items():
        yield from ("", f"{key}:", "", "```", text or "not known", "```")


def _shown(figures: Mapping[str, Any]) -> Iterator[str]:
    """Figures as lines, and lists of rows as tables."""
    for key, value in figures.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            columns = list(dict.fromkeys(column for row in value for column in row))[:WIDEST]
            yield from ("", f"{key}:", "", f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}")
            for row in value:
                yield f"| {' | '.join(_cell(row.get(column)) for column in columns)} |"
        else:
            yield f"- {key}: {_cell(value)}"


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = "" if value is None else ", ".join(map(_cell, value)) if isinstance(value, list) else f"{value}"
    return text.replace("|", "/").replace("\n", " ")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _said(*command: str) -> str:
    """What a command prints, "" where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return COLOURS.sub("", done.stdout).strip() if done.returncode == 0 else ""

"""Products, memory and links of this machine against the file of the group `cluster` for its GPU.

    python benchmarks/gpu_links.py --gpus N --out FOLDER

`omni calibrate` measures and writes FOLDER/cluster/here.yaml, which plans can use afterwards. Bandwidths are
held against what the shipped file says of the hardware, which no program reaches: 0.7 of it is expected of
products and memory, and of links inside the node where several GPUs can talk. GPUs without a file of theirs,
and CPUs, are measured alone. The last line is JSON; the exit code is 1 below what is expected.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from infra.run_folder import write_json

EXPECTED = 0.7
FILES = {  # names that drivers have for GPUs, the longer ones first
    "GB300": "gb300",
    "GB200": "gb200",
    "B300": "b300",
    "B200": "b200",
    "H200": "h200",
    "H100": "h100",
    "A100": "a100",
}


def cluster_of(device: str) -> str | None:
    """The shipped file for a GPU called so, None if there is none."""
    return next((name for word, name in FILES.items() if word in device), None)


def shipped(name: str) -> dict[str, Any]:
    """A shipped cluster file."""
    read: dict[str, Any] = yaml.safe_load(files("hydra_conf").joinpath(f"cluster/{name}.yaml").read_text())
    return read


def held_against(measured: Mapping[str, Any], said: Mapping[str, Any], gpus: int) -> list[dict[str, Any]]:
    """Each figure beside what a file says, and their ratio; products in the number format measured."""
    (precision, flops), *_ = measured["flops"].items()
    pairs = {f"products, {precision}, FLOP/s": (flops, said["flops"].get(precision))}
    pairs["memory, bytes/s"] = (measured["memory_bytes_per_s"], said["memory_bytes_per_s"])
    if gpus > 1:
        key = "node_link_bytes_per_s"
        pairs["links inside the node, bytes/s"] = (measured[key], said[key])
    return [
        {"figure": name, "measured": here, "the file": there, "ratio": here / there}
        for name, (here, there) in pairs.items()
        if there
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, required=True, help="how many ranks measure together")
    parser.add_argument(
        "--out", type=Path, required=True, help="a folder for figures.json and the cluster file"
    )
    arguments = parser.parse_args()
    from ops.device import device_name

    out = arguments.out / "cluster/here.yaml"
    command = [sys.executable, "-m", "omni", "calibrate", "--ranks", f"{arguments.gpus}", "--out", f"{out}"]
    if subprocess.run(command).returncode:
        return 1
    measured, text = yaml.safe_load(out.read_text()), out.read_text().splitlines()
    name = cluster_of(device_name())
    rows = held_against(measured, shipped(name), arguments.gpus) if name else []
    missed = [row["figure"] for row in rows if row["ratio"] < EXPECTED]
    found: dict[str, Any] = {"the file": name or f"none for {device_name()}", "expected": EXPECTED}
    notes = [line.removeprefix("# ") for line in text if line.startswith("#")]
    found |= {"figures": rows, "measured": [{"what": line} for line in notes], "missed": missed}
    write_json(arguments.out / "figures.json", found)
    print(json.dumps({"ratios": {row["figure"]: row["ratio"] for row in rows}, "missed": missed}))
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())

"""Layouts and schedules on the GPUs of this machine against one GPU, or a CPU: loss, gradients, weights.

    python benchmarks/gpu_parity.py --reference cpu|gpu --gpus N --out FOLDER [--quick]

The quickstart's model and data in fp32, three steps, as `omni parity` compares them. `cpu` asks whether a GPU
computes what a CPU does: one rank, experts, and each axis where there are two. `gpu` climbs from one GPU to
two and eight, over every axis of a layout, placement and schedule. What needs more GPUs than there are is
said, and is no failure. figures.json of FOLDER has each row as soon as it is known, and rows that hold there
are not run again. --quick: three layouts. Without GPUs ranks are processes on the CPU. The last line is JSON;
the exit code is 1 where a layout fails or is beyond the tolerances of docs/parity.md.
"""

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.run_folder import write_json

if TYPE_CHECKING:
    from omni.training.parity import Measurement

STEPS = 3
COMMON = ("experiment=quickstart", "system=multiplexed")
EXPERTS = ("model.llm.moe={experts: 4, topk: 2, ffn: 64, shared_ffn: 64, dense_layers: 1}",)
FULL = ("model.llm.recompute=full", "model.encoders.image.recompute=full")
LONG = ("model.llm.recompute=selective", "model.llm.recompute_long=true", "packing.divisor=4")
PP2, TP2, CP2 = (f"layout.llm.{axis}=2" for axis in ("pp", "tp", "cp"))
SCHEDULES = (
    "encode_first",
    "one_f_one_b",
    "zero_bubble_h1",
    "zero_bubble_h1_5",
    "zero_bubble_h2",
    "joint",
    "joint_uniform",
    "joint_zero_bubble_h1",
    "joint_zero_bubble_h1_5",
    "joint_zero_bubble_h2",
)
WITH_VPP = ("interleaved", "joint_interleaved")


@dataclass(frozen=True)
class Case:
    """A layout: its name, how many GPUs it takes, what is set, and the `model` of its reference."""

    name: str
    gpus: int
    keys: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    of_cpu: bool = False


CASES = (
    Case("one rank", 1, of_cpu=True),
    Case("experts", 1, model=EXPERTS, of_cpu=True),
    Case("full recomputation", 1, FULL, of_cpu=True),
    Case("long passes recomputed", 1, LONG, of_cpu=True),
    Case("tp 2", 2, (TP2,), of_cpu=True),
    Case("cp 2", 2, (CP2,), of_cpu=True),
    Case("pp 2", 2, (PP2,), of_cpu=True),
    Case("dp 2", 2, (), of_cpu=True),
    Case("ep 2", 2, ("layout.llm.ep=2",), EXPERTS, of_cpu=True),
    Case("encoder tp 2", 2, (TP2, "+layout.encoders.image.tp=2")),
    Case("encoders on the first stage", 2, (PP2, "placement.policy=stage0")),
    Case("encoders beside", 2, ("placement.policy=disaggregated", "placement.ranks=1")),
    Case("shared sequences", 2, ("llm_sp.policy=dynamic", "encoder_sp.policy=dynamic", "layout.domain=2")),
    Case("reduce_scatter of rows", 2, (PP2, "boundary.policy=reduce_scatter")),
    *(Case(f"pp 2, {name}", 2, (PP2, f"pipeline.policy={name}")) for name in SCHEDULES),
    *(Case(f"pp 2, {name}", 2, (PP2, "layout.llm.vpp=2", f"pipeline.policy={name}")) for name in WITH_VPP),
    Case("tp 2, cp 2, pp 2", 8, (TP2, CP2, PP2, "pipeline.policy=one_f_one_b")),
    Case("tp 2, pp 2, dp 2, joint", 8, (TP2, PP2, "pipeline.policy=joint")),
    Case("pp 4, dp 2, zero_bubble_h2", 8, ("layout.llm.pp=4", "pipeline.policy=zero_bubble_h2")),
    Case("cp 4, tp 2, recomputed", 8, ("layout.llm.cp=4", TP2, *FULL)),
    Case("ep 4, tp 2, dp 4", 8, (TP2, "layout.llm.ep=4", "layout.domain=4"), EXPERTS),
    Case("two hops of rows, dp 4, pp 2", 8, (PP2, "layout.domain=4", "boundary.policy=two_level")),
    Case("all share, dp 8", 8, ("llm_sp.policy=dynamic", "encoder_sp.policy=dynamic", "layout.domain=8")),
)
QUICK = ("one rank", "tp 2", "pp 2, joint")
Row = dict[str, Any]


class References:
    """Measurements of one rank, each made when it is first asked for, on a GPU or on the CPU."""

    def __init__(self, folder: Path, on_cpu: bool) -> None:
        self.folder, self.on_cpu = folder, on_cpu
        self._made: dict[tuple[str, ...], tuple[Measurement, int]] = {}

    def of(self, model: tuple[str, ...]) -> "tuple[Measurement, int]":
        """The measurement of a model, and how long a sample may be."""
        from omni.commands.parity import NO_GPU, measure

        if model not in self._made:
            keys, env = (*COMMON, *model, "launch.ranks=1"), NO_GPU if self.on_cpu else None
            self._made[model] = measure(keys, STEPS, self.folder / f"reference-{len(self._made)}", env=env)
        return self._made[model]


def compared(case: Case, references: References, path: Path) -> Row:
    """The worst differences of a layout, or why there are none."""
    from omni.commands.parity import measure
    from omni.training.parity import TOLERANCE, WEIGHT_TOLERANCE, compare, compare_weights

    begin = time.monotonic()
    try:
        one, longest = references.of(case.model)
        keys = (*COMMON, *case.model, f"launch.ranks={case.gpus}", *case.keys)
        two, _ = measure(keys, STEPS, path, longest=longest)
    except ValueError as error:
        return {"layout": case.name, "GPUs": case.gpus, "failed": f"{error}"}
    first, last = compare(one, two)[0], compare_weights(one, two)[0]
    return {
        "layout": case.name,
        "GPUs": case.gpus,
        "gradients": first.relative,
        "worst": first.name,
        "weights": last.relative,
        "holds": first.relative <= TOLERANCE and last.relative <= WEIGHT_TOLERANCE,
        "seconds": time.monotonic() - begin,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reference", choices=("cpu", "gpu"), required=True)
    parser.add_argument("--gpus", type=int, required=True, help="how many may be used")
    parser.add_argument("--out", type=Path, required=True, help="a folder for figures.json")
    parser.add_argument("--quick", action="store_true", help="three layouts")
    arguments = parser.parse_args()
    on_cpu = arguments.reference == "cpu"
    cases = [case for case in CASES if (case.of_cpu or not on_cpu)]
    if arguments.quick:
        cases = [case for case in cases if case.name in QUICK]
    file = arguments.out / "figures.json"
    arguments.out.mkdir(parents=True, exist_ok=True)
    had = json.loads(file.read_text())["layouts"] if file.exists() else []
    rows: list[Row] = [row for row in had if row.get("holds")]
    known = {row["layout"] for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        references = References(Path(folder), on_cpu)
        for number, case in enumerate(case for case in cases if case.name not in known):
            if case.gpus > arguments.gpus:
                why = f"needs {case.gpus} GPUs, and there are {arguments.gpus}"
                rows.append({"layout": case.name, "GPUs": case.gpus, "not possible": why})
            else:
                rows.append(compared(case, references, Path(folder) / f"{number}"))
            print(json.dumps(rows[-1]), flush=True)
            write_json(file, {"reference": arguments.reference, "layouts": rows})
    missed = [row["layout"] for row in rows if "not possible" not in row and not row.get("holds")]
    ran = sum("not possible" not in row for row in rows)
    print(json.dumps({"layouts": len(rows), "ran": ran, "missed": missed}))
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())

"""Whole models with towers against transformers: the worst errors of each, in fp32 on this machine's CPU.

    PYTHONPATH=tests:tests/omni:tests/e2e python benchmarks/whole_models.py
    PYTHONPATH=tests:tests/omni:tests/e2e python benchmarks/whole_models.py --quick    # no runs: 3 minutes

Of each a tiny random model is drawn and saved with a tokenizer, a template and its processor. A line says, of
four chats with none to three pictures, which transformers computes one by one by its own processor:

    loss        of a first step, relative to transformers' own
    gradients   the worst of any tensor, relative to its norm, and on how many ranks
    steps       the largest difference of the loss in thirty steps of AdamW from plain torch, and the layout;
                at a learning rate of 1e-3, of Qwen3.5 3e-4: at 1e-3 its rounding grows tenfold a step
    answers     to the four chats, of twenty tokens at most: how many are those of transformers on the folder
                that was exported, which must lack nothing

The last line is JSON; the exit code is 1 if loss or gradients are off by more than 1e-5, a step by more than
1e-4, or an answer is another one.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ranks import RankPool
from test_whole_models import LAYOUTS, TOLERANCE, Referee, compared, configured, tuned
from whole_folders import WHOLE

ALL_LAYOUTS = "Qwen3-VL"  # the one that is trained under every layout


def begun(ranks: RankPool, referee: Referee, work: Path) -> dict[str, Any]:
    """Compare a first step on one rank and on two."""
    found: dict[str, Any] = {"loss": 0.0, "gradients": 0.0, "worst": ""}
    for world in (1, 2):
        loss, gradient, name = compared(referee, ranks, configured(referee, work / f"run{world}"), world)
        found["loss"] = max(found["loss"], loss)
        if gradient > found["gradients"]:
            found["gradients"], found["worst"] = gradient, f"{name}, {world} ranks"
    return found | {"holds": max(found["loss"], found["gradients"]) <= TOLERANCE}


def trained(referee: Referee, work: Path) -> dict[str, Any]:
    """Train, export and ask, under one layout or all."""
    found = {}
    for layout in LAYOUTS if referee.name == ALL_LAYOUTS else ("one",):
        folder = work / layout.replace(" ", "_")
        folder.mkdir()
        own = tuned(referee, layout, folder)
        right = sum(a == b for a, b in zip(own.ours, own.theirs, strict=True))
        found[layout] = {"steps": own.steps, "answers": right, "holds": own.holds}
    return found


def main() -> int:
    """Compare every model, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a first step alone")
    parser.add_argument("--only", default="", help="models whose name begins like this")
    given, start = parser.parse_args(), time.perf_counter()
    result, ranks = {}, RankPool()
    print(f"{'model':12} {'loss':>8} {'gradients':>9}  steps, answers")
    try:
        for name in (name for name in WHOLE if name.startswith(given.only)):
            with tempfile.TemporaryDirectory() as work:
                referee = Referee(name, Path(work))
                first = begun(ranks, referee, Path(work))
                runs = {} if given.quick else trained(referee, Path(work))
            holds = first["holds"] and all(own["holds"] for own in runs.values())
            told = ", ".join(f"{key}: {own['steps']:.1e}, {own['answers']}" for key, own in runs.items())
            missed = "" if holds else "  MISSED"
            print(
                f"{name:12} {first['loss']:8.1e} {first['gradients']:9.1e}  {told or '-'}{missed}", flush=True
            )
            result[name] = {**first, "runs": runs, "holds": holds}
    finally:
        ranks.close()
    missing = [name for name, found in result.items() if not found["holds"]]
    said = {"benchmark": "whole_models", "quick": given.quick, "models": result, "missed": missing}
    print(json.dumps({**said, "seconds": round(time.perf_counter() - start)}))
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())

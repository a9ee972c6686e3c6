"""What `omni plan` and benchmarks say of a step: its size, what was cut, what reductions take."""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from dataloader.tokens import SampleMeta
from omni.__main__ import main
from omni.compose import compose_config
from omni.planning.cut import cut_of, told
from omni.planning.planner import Planner
from omni.planning.prepare import prepare_run

TRACE = [SampleMeta(i, "trace", text, (), 0) for i, text in enumerate((99, 299, 49, 999))]
KEYS = (
    "~experiment",
    "system=multiplexed",
    "model=llama3_1b_so400m",
    "cluster=h100",
    "train.steps=1",
    "layout.llm.pp=2",
)
WHOLE_STEP = Path(__file__).parents[2] / "benchmarks" / "whole_step.py"


def planner(on_long: str, samples: int = 4) -> Planner:
    """Of samples of 100, 300, 50 and 1,000 tokens, of which one may have 200."""
    keys = (*KEYS, "+data.sources.none.path=none", "data.step_tokens=null", f"data.step_samples={samples}")
    config = compose_config([*keys, "data.microbatch_tokens=200", f"data.on_long={on_long}"])
    return prepare_run(config, 4, TRACE).planner


def test_shares_are_of_what_samples_are_in_their_data() -> None:
    cut = cut_of(own := planner("truncate"), taken := own.world.take(0))
    assert (cut.samples, cut.dropped) == (2, 0)
    assert cut.tokens == pytest.approx((100 + 800) / 1450)
    squares = 100**2 + 300**2 + 50**2 + 1000**2
    assert cut.squares == pytest.approx(1 - (100**2 + 50**2 + 2 * 200**2) / squares)
    assert told(own, taken) == (
        "4 samples (1 a rank, 2 a replica), 550 tokens; cut: 2 samples; lost: 62.1% of tokens, 91.6% of "
        "squared lengths"
    )


def test_samples_that_are_dropped_count_too() -> None:
    own = planner("drop", 2)
    cut = cut_of(own, own.world.take(0))
    # The step ends before the next sample that it has no room for: the longest one is passed over, too.
    assert (cut.samples, cut.dropped) == (0, 2)
    assert cut.tokens == pytest.approx(1300 / 1450)
    assert str(cut).startswith("cut: 0 samples, dropped: 2; lost: 89.7% of tokens")


def test_nothing_cut_is_said() -> None:
    own = planner("truncate", 1)
    assert told(own, own.world.take(0)) == "1 samples (0.25 a rank, 0.5 a replica), 100 tokens; cut: none"


def test_the_command_says_it_in_its_header_its_figures_and_its_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sizes = ("launch.ranks=4", "data.microbatch_tokens=1024", "data.step_tokens=8192")
    line = ("--trace", "longtail", *KEYS, *sizes, "data.on_long=truncate")
    assert main(["plan", "--json", *line]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["samples_per_rank"] == found["samples"] / 4
    assert found["samples_per_replica"] == found["samples"] / 2
    assert 0 < found["cut"]["tokens"] < found["cut"]["squares"] < 1
    assert main(["plan", *line]) == 0
    header = capsys.readouterr().out.splitlines()[0]
    assert header.startswith(f"step 1: {found['samples']} samples ({found['samples_per_rank']:g} a rank, ")
    assert header.endswith(f" {found['cut']['squares']:.1%} of squared lengths")
    assert main(["plan", "-m", *line, "pipeline=encode_first,joint"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 3
    for row in rows[1:]:
        assert row.split()[6:9] == [
            str(found["samples"]), f"{found['samples_per_rank']:g}", f"{found['cut']['tokens']:.1%}"
        ]  # fmt: skip


def test_longer_reductions_are_reductions_and_no_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(WHOLE_STEP.parent)
    script = runpy.run_path(str(WHOLE_STEP))
    sizes = ("data.step_tokens=null", "data.step_samples=32", "data.microbatch_tokens=1024")
    config = compose_config([*KEYS, *sizes, "data.on_long=truncate", "+data.sources.none.path=none"])
    spec = prepare_run(config, 4, script["trace_of"]("balanced", 32))
    parts = {name: replace(cost, reduce_ns=50 * cost.reduce_ns) for name, cost in spec.table.parts.items()}
    slow = replace(spec, table=replace(spec.table, parts=parts))
    found, longer = (vars(script["measure"](of, None)) for of in (spec, slow))
    assert found["reduce_ms"] > 0
    assert longer.pop("reduce_ms") > 20 * found.pop("reduce_ms")
    assert longer == found

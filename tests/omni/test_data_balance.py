"""`omni data balance`: a table, a suggestion that can be copied, the slowest samples, pictures."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from packages import install

from dataloader.trace import generate
from dataloader.trace_file import write_trace
from omni.__main__ import main

MODEL = (
    "~experiment",
    "system=multiplexed",
    "model=llama3_1b_so400m",
    "cluster=h100",
    "train.steps=1",
    "train.precision=bf16",
)
LIMITS = ("data.microbatch_tokens=131072", "launch.ranks=4")
BROKEN = """
from omni.policies import BalancePolicy

def fail(samples, bins):
    raise IndexError("no such bin")

RAISES = BalancePolicy("raises", fail)
"""


def run(capsys: pytest.CaptureFixture[str], *line: str) -> tuple[int, str, str]:
    code = main(["data", "balance", *line])
    done = capsys.readouterr()
    return code, done.out, done.err


def test_a_trace_gets_a_table_a_suggestion_and_its_slowest_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    trace = generate("longtail", 32, 0)
    write_trace(tmp_path / "mine.parquet", trace)
    drawn = tmp_path / "mine.svg"
    data = str(tmp_path / "mine.parquet")
    code, out, err = run(capsys, data, "--samples", "8", "--draw", str(drawn), *MODEL, *LIMITS)
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    found = {(row[0], row[1], row[3]): float(row[6]) for row in rows if row and row[0] in ("none", "dynamic")}
    assert {domain for _, domain, _ in found} == {"1", "2", "4"}
    assert found["dynamic", "4", "lpt"] < found["none", "1", "none"]
    assert "suggested: balance=" in out
    left = [item for meta in trace for item in meta.items if item.modality != "image"]
    assert err.count("note: ") == 1
    assert f": audio, video: {len(left)} of {sum(len(meta.items) for meta in trace)} items, " in err
    assert " layout.domain=4 balance.group=1 encoder_sp=dynamic llm_sp=dynamic\n" in out
    longest = max(trace, key=lambda meta: sum(item.tokens for item in meta.items if item not in left))
    assert f"slowest samples of the step (planned, forward): trace {trace.index(longest)} (" in out
    titles = [
        text.text for text in ET.parse(drawn).findall(".//{*}text") if text.get("font-weight") == "bold"
    ]
    assert titles[0] == "tokens of a sample in the LLM"
    assert [title.partition(":")[0] for title in titles[1:] if title] == ["llm", "image"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (("longtail", "--samples", "0"), "--samples 0"),
        (("longtail", "--draw", "mine.png"), "--draw mine.png"),
        (("nothing.parquet",), "trace nothing.parquet: there is no such file or folder"),
    ],
)
def test_mistakes_are_named(line: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]):
    code, _, err = run(capsys, *line, *MODEL, *LIMITS)
    assert code == 2
    assert message in err


def test_foreign_policies_that_fail_are_named_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    # Names that come first, since the first policy that can be found resolves the run for all.
    points = {"omni.balance": "absent = broken_balance:ABSENT\nraises = broken_balance:RAISES"}
    install(tmp_path, monkeypatch, "broken_balance", BROKEN, points)
    code, out, err = run(capsys, "longtail", "--samples", "2", *MODEL, *LIMITS)
    assert code == 0
    assert "suggested: balance=" in out
    tried = {line.split()[3] for line in out.splitlines() if line.startswith(("none", "dynamic"))}
    assert "lpt" in tried
    assert not {"absent", "raises"} & tried
    named = [line for line in err.splitlines() if line.startswith("left out: balance=")]
    assert len(named) == 2
    assert "balance=absent" in named[0]
    assert "cannot be imported" in named[0]
    assert named[1].startswith("left out: balance=raises: ")
    assert "no such bin" in named[1]

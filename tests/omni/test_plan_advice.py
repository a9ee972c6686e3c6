"""`omni plan`: what it advises where ranks idle is what the keys then give; sweeps of plans in a table."""

import json
import re

import pytest

from omni.__main__ import main

KEYS = (
    "--trace",
    "balanced",
    "~experiment",
    "system=multiplexed",
    "model=llama3_1b_so400m",
    "cluster=h100",
    "train.steps=1",
)
FEW = (*KEYS, "layout.llm.pp=4", "launch.ranks=4", "data.microbatch_tokens=4096", "data.step_tokens=8192")


def plan(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert main(["plan", *line]) == 0
    return capsys.readouterr().out


def test_advised_keys_bring_what_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, *FEW)
    assert re.search(r"ranks idle for \d\d% of the step", out)
    assert "few for 4 stages (layout.llm.pp)" in out
    advised = re.findall(r"advice: (.*) would bring ([\d,]+) tokens/s", out)
    assert advised
    assert advised[0][0].startswith("data.step_tokens=")
    for keys, tokens_per_s in advised:
        given = {key.partition("=")[0] for key in keys.split()}
        line = [key for key in FEW if key.partition("=")[0] not in given]
        found = json.loads(plan(capsys, "--json", *line, *keys.split()))
        assert found["simulated_tokens_per_s"] == pytest.approx(int(tokens_per_s.replace(",", "")), abs=1)


def test_a_step_far_from_the_best_possible_one_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    keys = (*KEYS[2:], "launch.ranks=4", "data.microbatch_tokens=131072", "cluster.memory_bytes=null")
    keys = (*keys, "data.step_tokens=null", "data.step_samples=32", "--step", "2")
    out = plan(capsys, "--trace", "longtail", *keys)
    best, wider = re.findall(r"best possible.* ([\d.]+) +([\d.]+)x   (.*)", out)
    assert float(best[0]) > 1.15 * float(wider[0])
    assert f"the step takes {wider[1]} times the best possible one" in out
    assert re.search(
        r"ranks of its slowest domain stand still for \d+% of it before their first pass, \d+% between", out
    )
    assert re.search(
        r"[\d,]+ ms of it are the longest chain of one sample: a sequence may be shared by 1 of 4 members",
        out,
    )
    shared = ("layout.domain=4", "llm_sp=dynamic", "encoder_sp=dynamic")
    advised = re.search(rf"advice: {' '.join(shared)} would bring ([\d,]+) tokens/s", out)
    assert advised
    found = json.loads(plan(capsys, "--json", "--trace", "longtail", *keys, *shared))
    assert found["simulated_tokens_per_s"] == pytest.approx(int(advised[1].replace(",", "")), abs=1)
    assert found["best_possible_ns"]["any_domains"] / 1e6 == pytest.approx(float(wider[0]), abs=0.1)


def test_few_samples_get_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, *FEW[:-1], "data.step_tokens=1024")
    assert re.search(r"\d samples are few for 4 ranks: \d\.0 for each of 1 replicas", out)


def test_a_long_reduction_and_uneven_work_get_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("--trace", "longtail", *KEYS[2:], "launch.ranks=4", "data.microbatch_tokens=8192")
    keys = (*keys, "data.step_tokens=24576", "data.on_long=truncate")
    slow = ("cluster.link_bytes_per_s=1000000000", "cluster.node_link_bytes_per_s=1000000000")
    out = plan(capsys, *keys, *slow)
    assert re.search(r"reducing gradients takes \d\d% of the step", out)
    assert "advice: data.step_tokens=" in out
    uneven = r"work of image is uneven: the busiest rank has \d+\.\d times the mean"
    assert not re.search(uneven, out), "it costs little of so long a step"
    assert re.search(uneven, plan(capsys, *keys))


def test_what_would_not_fit_is_not_advised(capsys: pytest.CaptureFixture[str]) -> None:
    held = json.loads(plan(capsys, "--json", *FEW))["held_bytes"]["all"]
    out = plan(capsys, *FEW, f"cluster.memory_bytes={held}")
    assert "ranks idle for" in out
    assert "advice: data.step_tokens" not in out


def test_ranks_that_work_get_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, *KEYS, "launch.ranks=1", "data.microbatch_tokens=4096", "data.step_tokens=8192")
    assert "simulated timeline" in out
    assert "ranks idle" not in out
    assert "advice" not in out


def test_a_sweep_is_a_row_for_each_combination(capsys: pytest.CaptureFixture[str]) -> None:
    lists = ("data.step_tokens=8192,16384", "pipeline=encode_first,one_f_one_b")
    rows = json.loads(plan(capsys, "-m", "--json", *FEW[:-1], *lists))
    assert [row["sets"] for row in rows] == [
        [f"data.step_tokens={tokens}", f"pipeline={schedule}"]
        for tokens in (8192, 16384)
        for schedule in ("encode_first", "one_f_one_b")
    ]
    one = json.loads(plan(capsys, "--json", *FEW[:-1], *rows[3]["sets"]))
    for key in ("simulated_step_ns", "simulated_mfu", "simulated_tokens_per_s", "schedule"):
        assert rows[3][key] == one[key]
    assert rows[3]["held_bytes"] == one["held_bytes"]["all"]
    table = plan(capsys, "-m", *FEW[:-1], *lists).splitlines()
    assert len(table) == 5
    assert "MFU" in table[0]
    assert [line.rpartition("data.step_tokens=")[2] for line in table[1:]] == [
        "8192 pipeline=encode_first",
        "8192 pipeline=one_f_one_b",
        "16384 pipeline=encode_first",
        "16384 pipeline=one_f_one_b",
    ]


def test_what_is_refused_has_its_reason_in_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    out = plan(capsys, "-m", *FEW, "layout.llm.tp=1,3")
    assert "refused layout.llm.tp=3: " in out
    assert len(out.splitlines()) == 3
    for line, message in (
        ((*FEW, "layout.llm.tp=3,5"), "each of these steps is refused"),
        (FEW, "-m: no override lists values"),
        ((*FEW, "layout.llm.tp=1,2", "--draw", "a.svg"), "--draw is of one step"),
    ):
        assert main(["plan", "-m", *line]) == 2
        assert message in capsys.readouterr().err

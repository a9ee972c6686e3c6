"""What ranks did in a step is recorded, drawn above what was simulated, and summed as metrics."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from ranks import RankPool
from small import overrides, write_mixed

from infra.run_folder import RunFolder, read_metrics
from infra.timelines import read_step, recorded_steps
from omni.__main__ import main
from omni.commands.plan import plan_of_step
from omni.compose import compose_config
from omni.planning.prepare import prepare_run
from omni.training.trainer import Trainer
from pipeline.costs import simulate
from pipeline.drawing import rows_of
from pipeline.laps import CAUSES, DATA, END, HOST, PLAN, WEIGHTS

LAYOUTS = {"pp2": ["layout.llm.pp=2"], "tp2": ["layout.llm.tp=2"], "dp2": []}


def _train(rank: int, line: list[str], room: bool = True) -> list[str]:
    """Train on two ranks; without `room` files stand where folders of timelines and of traces would be. What
    this rank says that it goes on without.
    """
    spec = prepare_run(compose_config(line), 2)
    folder = RunFolder.create(Path(spec.config.run.dir))
    if rank == 0:
        folder.config.write_text("")
    trainer = Trainer(spec, folder, rank, torch.device("cpu"))
    if not room:
        trainer.rank.engine.on_op = lambda op: [file.touch() for file in (folder.timelines, folder.profile)]
    said: list[str] = []
    with patch("infra.screen.beside", said.append):
        trainer.run()
    return said


@pytest.fixture(scope="module")
def lines(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The command lines of runs of three steps, of which the second and the last are recorded."""
    root, found = tmp_path_factory.mktemp("timeline"), {}
    write_mixed(root / "mixed")
    for name, layout in LAYOUTS.items():
        line = overrides(root / "mixed", root / name, *layout, "train.timeline_every=2", "train.steps=3")
        ranks.run(2, _train, line)
        found[name] = line
    return found


def test_what_a_run_writes_about_itself_ends_no_training(ranks: RankPool, tmp_path: Path) -> None:
    write_mixed(tmp_path / "mixed")
    keys = ("train.timeline_every=2", "train.steps=3", "profile.steps=[1,2]")
    line = overrides(tmp_path / "mixed", tmp_path / "run", *keys)
    told = ranks.run(2, _train, line, False)
    folder = folder_of(line)
    assert len(read_metrics(folder.metrics)) == 3
    for rank, said in enumerate(told):
        for what in (
            "timeline of step 2",
            "timeline of step 3",
            f"trace {folder.profile}/steps_1_to_2_rank_{rank}",
        ):
            assert any(f"rank {rank}: the {what}" in text for text in said)
        assert [text.endswith("the run goes on") for text in said] == [True] * 3


def folder_of(line: list[str]) -> RunFolder:
    return RunFolder(Path(compose_config(line).run.dir))


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_recorded_step_holds_the_ops_that_its_plan_has_and_what_is_simulated(lines, name):
    spec, folder = prepare_run(compose_config(lines[name]), 2), folder_of(lines[name])
    assert recorded_steps(folder) == [2, 3]
    for step in (2, 3):
        for domain in range(spec.arrangement.num_domains):
            plan = plan_of_step(spec, step, domain)
            found, recorded = read_step(folder, step, domain)
            assert found == step
            assert len(recorded.measured) == spec.arrangement.domain_size
            for domain_rank, row in enumerate(recorded.measured):
                ops = [str(op) for op in plan.domain.ops_of(domain_rank)]
                texts = [span.text for span in row.spans if span.text != WEIGHTS]
                assert list(dict.fromkeys(texts)) == [DATA, PLAN, HOST, *ops, END]
                assert WEIGHTS in {span.text for span in row.spans} or name == "pp2"
                assert {span.cause for span in row.spans if span.cause} <= set(CAUSES)
            expected = rows_of(simulate(plan.domain, spec.table), [row.name for row in recorded.simulated])
            assert recorded.simulated == tuple(expected)


def test_a_stage_waits_for_what_the_other_one_makes(lines):
    _, recorded = read_step(folder_of(lines["pp2"]), 2, 0)
    first, second = recorded.measured
    made = next(s for s in first.spans if s.text == "forward(0)" and s.kind == "forward")
    waited = next(s for s in second.spans if s.cause == "recv_forward")
    assert waited.end_ns >= made.end_ns - recorded.error_ns


@pytest.mark.parametrize("name", LAYOUTS)
def test_idle_time_by_cause_adds_up_to_what_is_not_work(lines, name):
    folder = folder_of(lines[name])
    for record in read_metrics(folder.metrics):
        for area in ("perf", "plan"):
            prefix = f"{area}/idle_frac/"
            causes = {key.removeprefix(prefix): v for key, v in record.items() if key.startswith(prefix)}
            assert set(causes) <= set(CAUSES)
            assert sum(causes.values()) == pytest.approx(record[f"{area}/idle_frac"])
            assert 0 <= sum(causes.values()) < 1
        assert record["perf/idle_frac"] > 0
        others = record["plan/idle_frac"] - record.get("plan/idle_frac/weights", 0)
        assert (others > 1e-9) == (name != "dp2")
    # The records of a step, of all domains together, tell the same.
    step, work, whole, idle = 2, 0, 0, dict.fromkeys(CAUSES, 0)
    for domain in range(prepare_run(compose_config(lines[name]), 2).arrangement.num_domains):
        for row in read_step(folder, step, domain)[1].measured:
            whole += row.spans[-1].end_ns - row.spans[0].start_ns
            for span in row.spans:
                if span.cause:
                    idle[span.cause] += span.end_ns - span.start_ns
                else:
                    work += span.end_ns - span.start_ns
    assert work + sum(idle.values()) == whole
    record = read_metrics(folder.metrics)[step - 1]
    assert record["perf/idle_frac"] == pytest.approx(1 - work / whole)
    for cause, ns in idle.items():
        assert record.get(f"perf/idle_frac/{cause}", 0) == pytest.approx(ns / whole)
    assert ("perf/idle_frac/recv_forward" in record) == (name == "pp2")
    assert ("perf/idle_frac/peers" in record) == (name == "tp2")


def test_the_command_draws_a_step_measured_above_simulated(lines, capsys, tmp_path):
    folder = folder_of(lines["pp2"])
    assert main(["timeline", str(folder.path)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("step 3, domain 0: clocks of ranks within ")
    assert "waits for recv_backward" in out
    picture = (folder.timelines / "step_3_domain_0.svg").read_text()
    assert picture.index("(measured; clocks of ranks within") < picture.index("(simulated)")
    assert main(["timeline", str(folder.path), "--step", "2", "--draw", str(tmp_path / "own.json")]) == 0
    events = json.loads((tmp_path / "own.json").read_text())["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert [name.split(" (")[1][:8] for name in processes] == ["measured", "simulate"]
    _, recorded = read_step(folder, 2, 0)
    for process, rows in enumerate((recorded.measured, recorded.simulated)):
        drawn = [event for event in events if event["ph"] == "X" and event["pid"] == process]
        assert len(drawn) == sum(len(row.spans) for row in rows)


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["nowhere"], ["nowhere", "no config.yaml", "run folder"]),
        (["RUN", "--step", "1"], ["step 1 is not recorded", "2, 3"]),
        (["RUN", "--domain", "1"], ["domain 1", "there are 0"]),
        (["RUN", "--draw", "step.png"], ["step.png", ".svg", ".json"]),
        (["RUN", "--draw", "/dev/null/step.svg"], ["--draw /dev/null/step.svg: ", "in /dev/null (Not a"]),
        (["EMPTY"], ["holds no timelines", "train.timeline_every=N"]),
    ],
)
def test_what_cannot_be_shown_is_refused_with_the_remedy(lines, capsys, tmp_path, arguments, named):
    RunFolder.create(tmp_path).config.write_text("")
    paths = {"RUN": str(folder_of(lines["pp2"]).path), "EMPTY": str(tmp_path)}
    assert main(["timeline", *(paths.get(word, word) for word in arguments)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    for word in named:
        assert word in shown.err


def test_a_cadence_below_zero_is_refused(lines):
    with pytest.raises(ValueError, match=r"train\.timeline_every=-1: must be at least 0"):
        prepare_run(compose_config([*lines["dp2"], "train.timeline_every=-1"]), 2)

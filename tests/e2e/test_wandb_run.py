"""What an offline W&B run holds is what the run folder holds."""

import json

import pytest
from omegaconf import OmegaConf
from runs import data_keys, document, strip, train, write

from infra.run_folder import read_metrics
from infra.wandb_offline import OfflineRun, read_offline_run

STEPS = 6


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The run folder, the W&B run read back from it, and what the screen said."""
    cwd = tmp_path_factory.mktemp("wandb_run")
    write(cwd / "strips", [strip(i) for i in range(16)])
    write(cwd / "docs", [document(i) for i in range(8)])
    own = ["tracking=wandb", "tracking.mode=offline", f"train.steps={STEPS}", "launch.ranks=1"]
    own += ["train.checkpoint_every=3", "train.timeline_every=6", "pipeline=auto"]
    heldout = [
        f"+data.heldout={{docs: {{path: {cwd / 'docs'}, samples: 8}},"
        f" strips: {{path: {cwd / 'strips'}, samples: 4, generate: 4}}}}",
        "train.eval_every=3",
    ]
    result = train([*data_keys(cwd / "strips", cwd / "docs"), *own, *heldout], cwd)
    assert result.code == 0, result.err
    assert "failed and is dropped" not in result.err
    return cwd / "run", read_offline_run(cwd / "run"), result


def test_the_history_is_metrics_jsonl_record_by_record(run):
    folder, offline, _ = run
    records = read_metrics(folder / "metrics.jsonl")
    assert [record["progress/step"] for record in records] == list(range(1, STEPS + 1))
    assert "loss/eval/docs" in records[2]
    assert "loss/eval/docs" not in records[0]
    assert len(offline.history) == STEPS
    for logged, record in zip(offline.history, records, strict=True):
        picture = logged.pop("timeline", None)
        assert (picture is not None) == (record["progress/step"] == STEPS)
        assert logged == record


def test_the_config_is_that_of_the_run_folder(run):
    folder, offline, _ = run
    config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    assert config["train"]["steps"] == STEPS
    assert offline.config == config


def test_the_summary_is_that_of_the_run_folder(run):
    folder, offline, _ = run
    assert isinstance(offline, OfflineRun)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert summary["eval/generated/strips"] == 4
    assert len(summary["mem/peak_gb/by_rank"]) == 1
    assert {key: offline.summary[key] for key in summary} == summary


def test_checkpoints_are_referred_to(run):
    folder, offline, _ = run
    last = folder / "checkpoints" / "step_00000006"
    assert any(reference.startswith(f"file://{last}/") for reference in offline.references)


def test_the_screen_says_what_trains_and_how_it_ended(run):
    folder, _, result = run
    for words in (
        "building the model on 1 rank ...",
        "parameters: llm ",
        "strips (16 samples, weight ",
        "128 tokens a step; held out: docs, strips",
        "1 on CPU, fp32: single; colocated, auto",
        "metrics.jsonl, W&B offline",
        "from the start, to step 6",
        "a checkpoint every 3 steps",
        "  imbal     planned work of the busiest rank",
        "pipeline=auto chose ",
        "checkpoint of step 3 saved in ",
    ):
        assert words in result.out, words
    last = result.err.rstrip().splitlines()[-1]
    assert last.startswith(f"SUCCEEDED: {STEPS} of {STEPS} steps; loss ")
    assert last.endswith(f"everything is in {folder}")
    saves = [record.get("perf/save_s") for record in read_metrics(folder / "metrics.jsonl")]
    assert [step for step, save in enumerate(saves, 1) if save is not None] == [4]

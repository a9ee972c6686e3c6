"""Sweeps: what is refused before a job starts, what is written to be submitted, and jobs that run here."""

import json
import re

import pytest
from runs import TINY, Running, data_keys, omni, picture, read_lines, strip, write

from dataloader.format import PLACEHOLDER, Item, Sample
from infra.run_folder import read_metrics
from omni.__main__ import main
from omni.compose import load_config


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A sound dataset, and one whose items cannot be decoded."""
    root = tmp_path_factory.mktemp("data")
    write(root / "good", [strip(i) for i in range(32)])
    whole = picture([1, 2])
    cut = Item(whole.modality, whole.format, whole.size, whole.data[:20])
    write(root / "bad", [Sample(f"cut-{i}", PLACEHOLDER + "one two", (cut,)) for i in range(32)])
    return root


def sweep(data, *keys):
    return [
        "train",
        "-m",
        *TINY,
        *data_keys(data / "good"),
        "train.steps=2",
        "hydra.sweep.dir=a/sweep",
        *keys,
    ]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["layout=data_parallel,data_parallel"], "job 0 and job 1 resolve to the same configuration"),
        (
            ["optim.lr=1e-3,0.001,2e-3"],
            "job 0 (optim.lr=0.001) and job 1 (optim.lr=0.001) resolve to the same configuration",
        ),
        (["layout=data_parallel,pp2", "run.dir=X"], "would be the folder of jobs 0 and 1: leave run.dir out"),
        (
            ["layout=data_parallel,pp2", "launch.ranks=1"],
            "job 1 (layout=pp2): layout.llm.pp=2: a replica of 2 ranks",
        ),
        (["layout=data_parallel,nowhere"], "Could not find 'layout/nowhere'"),
        (
            ["optim.lr=1e-3,2e-3", "launch.ranks=100000"],
            "job 0 (optim.lr=0.001): launch.ranks=100000: this machine has",
        ),
        (
            ["optim.lr=1e-3,2e-3", "hydra.launcher.parallel=0"],
            "hydra.launcher.parallel=0: must be at least 1",
        ),
        (
            ["optim.lr=1e-3,2e-3", "hydra/launcher=render", "hydra.launcher.time=86400"],
            "hydra.launcher.time=86400",
        ),
        (["optim.lr=1e-3,2e-3", "hydra/launcher=render"], "launch.ranks=null: nobody counts the GPUs"),
        (
            ["launch.ranks=2,3", "hydra/launcher=render", "hydra.launcher.ranks_per_node=2"],
            "job 1 (launch.ranks=3): launch.ranks=3 does not fill nodes of 2 ranks",
        ),
        (
            ["launch.ranks=2,4", "hydra/launcher=slurm", "+hydra.launcher.env.WANDB_API_KEY=abc"],
            "WANDB_API_KEY looks like a secret",
        ),
        (
            ["launch.ranks=2,4", "hydra/launcher=ray", "hydra.launcher.address=nowhere"],
            "hydra.launcher.address=nowhere: no Ray cluster answers: it is no HOST:PORT",
        ),
    ],
)
def test_one_mistake_refuses_all_jobs_and_leaves_nothing_behind(tmp_path, data, keys, said):
    result = omni(sweep(data, *keys), tmp_path)
    assert result.code == 2
    assert said in result.err
    assert "Traceback" not in result.err
    assert list(tmp_path.iterdir()) == []


def test_scripts_are_rendered_for_what_each_job_takes(tmp_path, data):
    own = ["hydra/launcher=render", "hydra.launcher.ranks_per_node=2", "+cluster.env.NCCL_DEBUG=INFO"]
    result = omni(sweep(data, "layout=pp2", "launch.ranks=2,4,8", *own), tmp_path)
    assert result.code == 0, result.err
    folder = tmp_path / "a" / "sweep"
    for number, nodes in enumerate((1, 2, 4)):
        script = (folder / str(number) / "job.sh").read_text()
        assert f"#SBATCH --nodes={nodes}\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=2\n" in script
        assert "export NCCL_DEBUG=INFO\n" in script
        config = load_config(folder / str(number) / "config.yaml")
        told = config.run.name, config.tracking.group, config.tracking.tags
        assert told == (f"quickstart-{number}", "a-sweep", [f"launch.ranks={2 * nodes}"])
        assert re.search(
            rf"^{number} +quickstart-{number} +{nodes} +{2 * nodes} +a/sweep/{number} ", result.err, re.M
        )
    shown = omni(["sweep", "show", "a/sweep"], tmp_path)
    assert shown.out.count("not begun") == 3


def test_warnings_are_told_behind_a_sweep_as_before_it(tmp_path, data, monkeypatch, caplog):
    """Hydra's own set-up of logging would silence every logger that there is."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.jsonl").write_text('[2]\n{"step": 1}\n')
    assert main(sweep(data, "launch.ranks=2", "hydra/launcher=render")) == 0
    read_metrics(tmp_path / "lines.jsonl")
    assert "1 lines cannot be read" in caplog.text


def test_a_single_job_is_launched_in_the_same_way(tmp_path, data):
    keys = [*TINY, *data_keys(data / "good"), "train.steps=2", "launch.ranks=8", "hydra/launcher=render"]
    result = omni(["train", *keys, "run.dir=run", "cluster.ranks_per_node=4"], tmp_path)
    assert result.code == 0, result.err
    assert "#SBATCH --nodes=2\n" in (tmp_path / "run" / "job.sh").read_text()
    longer = ["train.steps=4", "hydra/launcher=render", "hydra.launcher.time='1:00:00'"]
    resumed = omni(["resume", "run", *longer], tmp_path)
    assert resumed.code == 0, resumed.err
    assert "#SBATCH --nodes=2\n#SBATCH --ntasks" in (text := (tmp_path / "run" / "job.sh").read_text())
    assert "#SBATCH --time=1:00:00\n" in text
    assert load_config(tmp_path / "run" / "config.yaml").train.steps == 4
    refused = omni(["train", *keys, "run.dir=third", "cluster.ranks_per_node=3"], tmp_path)
    assert (refused.code, refused.err.count("\n")) == (2, 1), "one line, none of Hydra's"
    assert not (tmp_path / "third").exists()


def test_a_folder_without_a_sweep_is_named(tmp_path):
    result = omni(["sweep", "show", "nowhere"], tmp_path)
    assert (result.code, result.out) == (2, "")
    assert "nowhere is not the folder of a sweep" in result.err


def test_a_job_that_fails_leaves_the_others_running_and_is_named(tmp_path, data):
    paths = f"data.sources.strips.path={data / 'bad'},{data / 'good'}"
    keys = [paths, "launch.ranks=1", "hydra.launcher.parallel=2"]
    done = Running(["-m", "omni", *sweep(data, *keys)], tmp_path).finish()
    assert done.code == 2, done.err
    assert re.search(r"^0 +failed \(exit code 2\) +data\.sources\.strips\.path=\S+/bad$", done.err, re.M)
    assert re.search(r"^1 +completed ", done.err, re.M)
    folder = tmp_path / "a" / "sweep"
    assert "not an image that can be read" in (folder / "0" / "output.log").read_text()
    assert len(read_lines(folder / "1" / "metrics.jsonl")) == 2
    shown = omni(["sweep", "show", "a/sweep", "--json"], tmp_path)
    jobs = json.loads(shown.out)
    assert [job["state"] for job in jobs] == ["failed (2)", "done"]
    assert [job["step"] for job in jobs] == [0, 2]
    assert jobs[1]["metrics"]["loss/train"] > 0

"""A run of the command line that names no policy: what is chosen is told and written, and stays."""

from omegaconf import OmegaConf
from runs import TINY, Running, data_keys, document, strip, write

from omni.planning.choice import DOMAIN, POLICIES

UNNAMED = [key for key in TINY if not key.startswith("system=")]


def chosen_of(result):
    assert result.code == 0, result.err
    return [line for line in result.err.splitlines() if line.startswith("chosen")]


def written(folder):
    config = OmegaConf.load(folder / "config.yaml")
    return {key: OmegaConf.select(config, key) for key in (*POLICIES, DOMAIN, "pipeline.policy")}


def test_what_is_chosen_is_told_written_and_kept_until_the_ranks_are_others(tmp_path):
    strips = write(tmp_path / "strips", [strip(i) for i in range(32)])
    docs = write(tmp_path / "docs", [document(i) for i in range(8)])
    line = [*UNNAMED, *data_keys(strips, docs), "launch.ranks=2", "run.dir=run", "train.steps=2"]

    def run(*arguments):
        return Running(["-m", "omni", *arguments], tmp_path).finish()

    (first,) = chosen_of(run("train", *line))
    before = written(tmp_path / "run")
    assert "auto" not in {before[key] for key in POLICIES}
    assert f"layout.domain={before[DOMAIN]}" in first

    assert not chosen_of(run("train", *line, "train.steps=3"))
    assert not chosen_of(run("resume", "run", "train.steps=4"))
    assert written(tmp_path / "run") == before

    (other,) = chosen_of(run("resume", "run", "train.steps=5", "launch.ranks=1"))
    assert "again (before: for 2 ranks)" in other
    assert written(tmp_path / "run")[DOMAIN] == 1

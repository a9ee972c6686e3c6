"""Phases of the mixture: what steps draw, and what of a run may still change."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from small import overrides

from dataloader.format import DataError, Sample
from dataloader.sources.build import build_index
from dataloader.storage import Storage
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from infra.checkpoint import CheckpointError, claim, commit
from infra.run_folder import RunFolder
from infra.run_lock import holding
from omni.__main__ import main
from omni.commands._jobs import mixture_of_folder
from omni.compose import compose_config, load_config
from omni.config import Config, ConfigError
from omni.data_config import PhaseConfig, SourceConfig
from omni.planning.mixture import flattened_at, positions, repeats, told
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.training.fingerprint import check_fingerprint, fingerprint

SIZES = {"a": 30, "b": 20, "c": 12}
STEPS = 40
GONE = ["a3", "a17", "b5"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A run of 5 samples a step of a and b; c is a dataset beside them."""
    folder = tmp_path_factory.mktemp("mixture")
    for name, size in SIZES.items():
        with DatasetWriter(folder / name, ByteTokenizer(), rows_per_group=4) as writer:
            for i in range(size):
                writer.add(Sample(f"{name}{i}", f"{name} is the source of this text, {i}" + "." * (i % 7)))
    for name in "ab":
        (folder / f"{name}.txt").write_text("\n".join(key for key in GONE if key[0] == name) + "\n")
    line = overrides(folder / "a", folder / "run", "~data.sources.mixed", samples=5)
    more = (f"+data.sources.{name}.path={folder / name}" for name in "ab")
    return compose_config([*line, *more, "+data.sources.a.weight=3", f"train.steps={STEPS}"])


def remixed(base: Config, *without: str) -> Config:
    """The run with a source added, reweighted, samples removed and larger steps, `without` some of these."""
    config, data = deepcopy(base), Path(base.data.sources["a"].path).parent
    config.data.sources["c"] = SourceConfig(str(data / "c"), 0)
    lists = {name: [str(data / f"{name}.txt")] for name in "ab"}
    config.data.mixture = {
        "added": PhaseConfig(9, {"c": 2}),
        "reweighted": PhaseConfig(17, {"a": 1, "b": 0}),
        "cleaned": PhaseConfig(21, {"b": 5}, lists, step_samples=8),
    }
    for name in without:
        del config.data.mixture[name]
    return config


def taken(spec: RunSpec, first: int = 1, cursor: int = 0) -> list[tuple[list[tuple[str, int]], Any]]:
    """The samples of steps up to the last, and what else is known of each."""
    found = []
    for _ in range(first, STEPS + 1):
        step = spec.planner.world.take(cursor)
        pairs = zip((step.sources[of] for of in step.source), step.ids, strict=True)
        found.append((list(pairs), step))
        cursor = step.next_cursor
    return found


def drawn(spec: RunSpec, step: Any) -> list[tuple[str, int]]:
    """What the stream has at the positions of a step."""
    order = spec.planner.world.samples_at(step.cursor).stream
    of, ids = order.take(step.cursor, step.next_cursor - step.cursor)
    return [(order.names[n], i) for n, i in zip(of.tolist(), ids.tolist(), strict=True)]


def test_steps_draw_what_their_phase_says_and_no_source_loses_a_sample(base):
    spec = prepare_run(remixed(base), 2)
    steps = taken(spec)
    assert positions(spec.config.data) == {first: steps[first - 1][1].cursor for first in (9, 17, 21)}
    plain = taken(prepare_run(base, 2))
    assert [samples for samples, _ in steps[:8]] == [samples for samples, _ in plain[:8]]
    shares = [(8, "abc", {"a", "b", "c"}), (16, "abc", {"a", "c"}), (20, "abc", {"a", "b", "c"})]
    for first, _, sources in shares:
        assert {source for samples, _ in steps[first : first + 4] for source, _ in samples} == sources
    assert [len(samples) for samples, _ in steps] == [5] * 20 + [8] * 20
    gone = {(key[0], int(key[1:])) for key in GONE}
    after = [pair for samples, _ in steps[20:] for pair in samples]
    assert not gone & set(after)
    assert (
        set() < {pair for samples, step in steps for pair in drawn(spec, step) if pair not in samples} <= gone
    )
    assert not any(step.skipped for _, step in steps)  # those are too long, and told

    # Whole epochs: what was removed is passed over where it stands.
    for number, (samples, step) in enumerate(steps, 1):
        out = gone if number >= 21 else set()
        assert [pair for pair in drawn(spec, step) if pair not in out] == samples
    for name, size in SIZES.items():
        ids = [i for _, step in steps for source, i in drawn(spec, step) if source == name]
        whole = [ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
        assert len(whole) >= 2
        assert all(len(set(epoch)) == size for epoch in whole), name


def test_of_a_source_some_samples_are_kept_until_a_phase_keeps_others(base):
    config, data = deepcopy(base), Path(base.data.sources["a"].path).parent
    odd = data / "odd.txt"
    odd.write_text("".join(f"a{i}\n" for i in range(1, 30, 2)))
    config.data.mixture = {
        "odd": PhaseConfig(5, keep={"a": [str(odd)]}, remove={"a": [str(data / "a.txt")]}),
        "all": PhaseConfig(30, keep={"a": []}),
    }
    steps = [samples for samples, _ in taken(prepare_run(config, 2))]
    first, then = ({i for step in part for of, i in step if of == "a"} for part in (steps[4:29], steps[29:]))
    assert first == {i for i in range(1, 30, 2) if f"a{i}" not in GONE}
    assert any(i % 2 == 0 for i in then)
    assert not {3, 17} & then
    assert flattened_at(config.data, 6).mixture["begun"].keep == {"a": [str(odd)]}


def test_samples_are_kept_and_removed_by_their_tags(base, tmp_path):
    (tmp_path / "rows").mkdir()
    tags = [["odd"] * (i % 2) + ["third"] * (i % 3 == 0) for i in range(30)]
    rows = pa.table({"text": [f"row {i} of a table" for i in range(30)], "tags": tags})
    pq.write_table(rows, tmp_path / "rows" / "0.parquet")
    build_index(tmp_path / "rows", tmp_path / "t", {"name": "parquet", "tags": "tags"})
    config = deepcopy(base)
    config.data.sources["t"] = SourceConfig(str(tmp_path / "t"), 3)
    config.data.mixture = {"odd": PhaseConfig(5, keep={"t": ["tag:odd"]}, remove={"t": ["tag:third"]})}
    spec = prepare_run(config, 2)
    steps = [samples for samples, _ in taken(spec)]
    before, then = ({i for step in part for of, i in step if of == "t"} for part in (steps[:4], steps[4:]))
    assert then == {i for i in range(30) if i % 2 and i % 3}
    assert before - then
    said = fingerprint(spec)
    assert said["data.mixture.5.keep.t"] == "tag:odd"
    config.data.mixture["odd"].keep["t"] = ["tag:even"]
    with pytest.raises(
        DataError, match=r"data\.mixture\.odd\.keep\.t: tag:even: no sample .* are odd, third"
    ):
        prepare_run(config, 2)
    config.data.mixture = {"odd": PhaseConfig(5, keep={"a": ["tag:odd"]})}
    with pytest.raises(DataError, match=r"keep\.a: tag:odd: samples of .* have no tags"):
        prepare_run(config, 2)


def test_ranks_that_are_told_the_positions_draw_the_same_without_going_through_steps(base, monkeypatch):
    spec = prepare_run(remixed(base), 2)
    expected = [samples for samples, _ in taken(spec)]
    monkeypatch.setattr("omni.planning.mixture.WorldPlanner.take", None)
    again = prepare_run(spec.config, 4)
    monkeypatch.undo()
    assert again.config.data == spec.config.data
    for first in (1, 9, 15, 21, 33):
        cursor = spec.planner.cursor_of(first)
        assert [samples for samples, _ in taken(again, first, cursor)] == expected[first - 1 :]


def test_how_far_the_search_for_a_phase_is_is_told(base, monkeypatch, capsys):
    monkeypatch.setattr("omni.planning.mixture._TOLD_EVERY", 10)
    prepare_run(remixed(base), 1)
    told = [line for line in capsys.readouterr().err.splitlines() if line.startswith("looking for step")]
    assert told == [
        "looking for step 17, where data.mixture.reweighted begins: 10 are gone through ...",
        "looking for step 21, where data.mixture.cleaned begins: 20 are gone through ...",
    ]


def test_a_step_is_not_planned_with_the_samples_of_another_phase(base):
    spec = prepare_run(remixed(base), 2)
    cursor = positions(spec.config.data)[9]
    assert spec.planner.next_step(9, cursor, 0).taken.cursor == cursor
    with pytest.raises(AssertionError, match="step 8 does not begin at"):
        spec.planner.next_step(8, cursor, 0)


def test_a_sample_that_is_too_long_is_an_error_also_behind_one_that_was_removed(base):
    config, keys = deepcopy(base), Path(base.data.sources["a"].path).parent / "most.txt"
    keys.write_text("".join(f"a{i}\n" for i in range(30) if i != 6))
    config.data.mixture = {"p": PhaseConfig(1, {"b": 0}, {"a": [str(keys)]})}
    config.data.microbatch_tokens = 34  # others have more, too, and were removed
    with pytest.raises(ValueError, match=r"sample 6 of source 'a' has 38 tokens"):
        taken(prepare_run(config, 2))


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        (
            {"p": PhaseConfig(5, {"a": 0, "b": 0})},
            r"mixture\.p\.weights: the weights of all .*give one a weight",
        ),
        (
            {"p": PhaseConfig(5, {"c": 1})},
            r"mixture\.p\.weights\.c: there is no such source.*sources\.c\.path",
        ),
        ({"p": PhaseConfig(5), "q": PhaseConfig(5)}, r"mixture\.q\.first=5: .*mixture\.p begins there"),
        ({"p": PhaseConfig(5, remove={"a": ["b.txt"]})}, r"remove\.a: 1 of 1 ids are .* such as 'b5'"),
        ({"p": PhaseConfig(5, remove={"a": ["none.txt"]})}, r"remove\.a: .*none\.txt cannot be read"),
        ({"p": PhaseConfig(5, remove={"a": ["empty.txt"]})}, r"remove\.a: .*empty\.txt lists no id"),
        (
            {"p": PhaseConfig(5, remove={"a": ["all.txt"]})},
            r"leave none of the 30 samples of a: .*weights\.a=0",
        ),
        (
            {"p": PhaseConfig(5, remove={"b": ["b.txt"]}, keep={"b": ["b.txt"]})},
            "leave none of the 20 .*of b",
        ),
        ({"p": PhaseConfig(5, keep={"b": ["a.txt"]})}, r"p\.keep\.b: 2 of 2 ids are those of no sample"),
    ],
)
def test_phases_that_cannot_be_drawn_are_refused(base, phases, words):
    config, data = deepcopy(base), Path(base.data.sources["a"].path).parent
    (data / "empty.txt").write_text("\n\n")
    (data / "all.txt").write_text("".join(f"a{i}\n" for i in range(30)))
    config.data.mixture = deepcopy(phases)
    for phase in config.data.mixture.values():
        for lists in (phase.remove, phase.keep):
            lists.update({name: [str(data / file) for file in files] for name, files in lists.items()})
    with pytest.raises(ValueError, match=words):
        prepare_run(config, 2)


def test_a_source_that_is_smaller_than_its_share_is_told_of_and_comes_again(base):
    config = deepcopy(base)
    config.data.sources["a"].weight = 45
    config.data.mixture = {"even": PhaseConfig(9, {"a": 1}), "more": PhaseConfig(19, {"b": 30, "a": 7})}
    notes = list(repeats(config.data, SIZES))
    assert [re.sub(r": each.*", "", note) for note in notes] == [
        "data.sources: 45 of 46 samples are of a, which has 30",
        "data.mixture.more: 30 of 37 samples are of b, which has 20",
    ]
    assert "each comes 1.5 times among them. Give it a smaller weight" in notes[0]
    steps = taken(prepare_run(config, 2))
    assert all(len(samples) == 5 for samples, _ in steps)
    assert {i for samples, _ in steps[:8] for of, i in samples if of == "a"} == set(range(30))


def test_a_phase_has_a_first_step_and_weights_from_zero_on(base, tmp_path):
    for key, words in {
        "+data.mixture.p.weights.a=1": r"data\.mixture\.p\.first: ",
        "+data.mixture.p={first: 0}": r"data\.mixture\.p\.first=0: must be at least 1",
        "+data.mixture.p={first: 3, weights: {a: -1}}": r"mixture\.p\.weights\.a=-1: must be at least 0",
        "+data.mixture.p={first: 3, step_tokens: 9, step_samples: 2}": r"step_tokens=9: leave it out",
    }.items():
        with pytest.raises(ConfigError, match=words):
            compose_config(overrides(tmp_path, tmp_path / "run", key))


def test_what_comes_after_a_checkpoint_may_change_and_nothing_before(base):
    now, plain = fingerprint(prepare_run(remixed(base), 2)), fingerprint(prepare_run(base, 2))
    assert not any(key.startswith("data.mixture") for key in plain)

    def check(step: int, saved: dict[str, Any], current: dict[str, Any]) -> None:
        check_fingerprint({"step": step, "fingerprint": saved}, current, Storage.at(Path("/tmp")))

    check(8, plain, now)
    check(8, now, plain)
    with pytest.raises(CheckpointError, match=r"data\.mixture\.9\.first=9 \(checkpoint: None\)"):
        check(9, plain, now)
    with pytest.raises(CheckpointError, match=r"data\.mixture\.9\.first=None"):
        check(9, now, plain)
    dirty = fingerprint(prepare_run(remixed(base, "cleaned"), 2))
    check(20, dirty, now)
    with pytest.raises(CheckpointError, match=r"data\.mixture\.21\.remove\.a='[0-9a-f]{32}'"):
        check(21, dirty, now)
    early = remixed(base)
    early.data.sources["c"].weight = 1
    with pytest.raises(CheckpointError, match=r"data\.sources\.c"):
        check(8, plain, fingerprint(prepare_run(early, 2)))


def test_a_stage_begins_with_the_mixture_that_its_run_had(base):
    config = remixed(base)
    assert flattened_at(config.data, 8).mixture == {}
    data = flattened_at(config.data, 25)
    assert {name: of.weight for name, of in data.sources.items()} == {"a": 1, "b": 5, "c": 2}
    assert data.step_samples == 8
    assert data.mixture == {"begun": PhaseConfig(1, remove=config.data.mixture["cleaned"].remove)}
    config.data = data
    spec = prepare_run(config, 2)
    assert positions(spec.config.data) == {1: 0}
    assert not {("a", 3), ("a", 17), ("b", 5)} & {pair for samples, _ in taken(spec) for pair in samples}


# The command, on the folder of a run whose last checkpoint is that of step 10.


@pytest.fixture
def run(base, tmp_path) -> RunFolder:
    folder = RunFolder.create(tmp_path / "run")
    spec = prepare_run(base, 2)
    folder.config.write_text(OmegaConf.to_yaml(OmegaConf.structured(spec.config)))
    storage = Storage.at(folder.checkpoints)
    describe = {"cursor": spec.planner.cursor_of(11), "mixture": [], "fingerprint": fingerprint(spec)}
    commit(storage, claim(storage, None, adopt=True), 10, [], describe)
    return folder


def remix(run: RunFolder, *words: str) -> int:
    return main(["data", "remix", str(run.path), *words])


def test_remix_writes_what_the_next_start_takes(base, run, capsys):
    data = Path(base.data.sources["a"].path).parent
    listed = data / "again.txt"
    listed.write_text("a3\n")
    assert remix(run, "--from", "11", "--add", f"c={data / 'c'}", "--weight", "c=2", "--weight", "b=0") == 0
    assert remix(run, "--from", "15", "--remove", f"a={listed}", "--step-samples", "7") == 0
    assert "step_15, from step 15: without those of a in" in capsys.readouterr().out
    listed.write_text("a4\n")  # the run keeps its own

    written = load_config(run.config)
    config, begin = mixture_of_folder(written, run)
    spec = prepare_run(config, 2, begin=begin)
    assert begin == (11, 50)
    assert next(told(config.data)) == "step_11, from step 11: c weight 2; b weight 0"
    assert positions(spec.config.data) == {11: 50, 15: spec.planner.cursor_of(15)}
    assert positions(written.data) == positions(spec.config.data)
    steps = taken(spec)
    assert {source for samples, _ in steps[:10] for source, _ in samples} == {"a", "b"}
    assert {source for samples, _ in steps[10:] for source, _ in samples} == {"a", "c"}
    seen = {pair for samples, _ in steps[14:] for pair in samples}
    assert (("a", 3) in seen, ("a", 4) in seen) == (False, True)
    assert [len(samples) for samples, _ in steps[13:15]] == [5, 7]

    with holding(run, "another launch"):
        assert remix(run, "--from", "11", "--weight", "c=4") == 2
    assert "launch another" in capsys.readouterr().err

    # A phase that has not begun may be changed again.
    assert remix(run, "--from", "11", "--weight", "c=3") == 0
    assert load_config(run.config).data.mixture["step_11"].weights == {"c": 3, "b": 0}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from", "10", "--weight", "a=1"], "checkpoint of step 10.*name step 11 or a later one.*--fork"),
        (["--from", "11"], "nothing is to change: give --add"),
        (["--from", "11", "--weight", "a=x"], "--weight a=x: give an integer, 0 to leave"),
        (["--from", "11", "--weight", "a"], "--weight a: give NAME=N"),
        (["--from", "11", "--weight", "a=0", "--weight", "b=0"], r"step_11\.weights: .* are 0"),
        (["--from", "11", "--weight", "c=1"], r"weights\.c: there is no such source; there are a, b"),
        (["--from", "11", "--add", "a=data"], "--add a=data: the run has a source a already"),
        (["--from", "11", "--add", "c=nowhere"], r"data\.sources\.c\.path=nowhere.*is not a dataset"),
        (["--from", "11", "--remove", "a=nowhere"], r"step_11\.remove\.a: nowhere cannot be read"),
        (["--from", "11", "--step-samples", "0"], r"step_11\.step_samples=0: must be at least 1"),
    ],
)
def test_remix_refuses_and_writes_nothing(run, capsys, words, said):
    before = run.config.read_text()
    assert remix(run, *words) == 2
    text = capsys.readouterr().err
    assert re.search(said, text), text
    assert run.config.read_text() == before
    assert not (run.path / "lists").exists()

"""Lengths that users bring: files and datasets as traces, and what no encoder takes of them."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from small import write_mixed

from dataloader.index import Index
from dataloader.tokens import ItemMeta, SampleMeta
from dataloader.trace import generate
from dataloader.trace_file import write_trace
from omni.__main__ import main
from omni.compose import compose_config
from omni.models.registry import make_encoder
from omni.planning.traces import for_encoders, open_trace, with_sizes
from omni.rehearsal.stand_in_data import use_trace

ROOT = Path(__file__).parents[2]
MODEL = (
    "~experiment",
    "system=multiplexed",
    "model=llama3_1b_so400m",
    "cluster=h100",
    "train.steps=1",
    "data.on_long=truncate",
)
KEYS = (*MODEL, "launch.ranks=4", "data.microbatch_tokens=4096", "data.step_tokens=16384")


def planned(capsys: pytest.CaptureFixture[str], trace: str | Path, *keys: str) -> dict:
    assert main(["plan", "--json", "--trace", str(trace), *(keys or KEYS)]) == 0
    return json.loads(capsys.readouterr().out)


def encoders_of(*keys: str) -> dict:
    config = compose_config([*MODEL, *KEYS[-2:], *keys])
    return {name: make_encoder(name, options) for name, options in config.model.encoders.items()}


def test_a_written_trace_is_planned_as_the_named_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = str(tmp_path / "longtail.parquet")
    assert main(["data", "trace", "generate", "longtail", "--out", own, "--num", "1024", "--seed", "0"]) == 0
    capsys.readouterr()
    named, read = planned(capsys, "longtail"), planned(capsys, own)
    assert [note.removeprefix(f"trace {own}: ") for note in read.pop("notes")] == [
        note.removeprefix("trace longtail: ") for note in named.pop("notes")
    ]
    assert read == named


def test_a_dataset_is_a_trace_of_its_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_mixed(tmp_path / "mixed")
    for shard in tmp_path.glob("mixed/shard-*"):
        shard.write_bytes(b"-" * shard.stat().st_size)  # nothing of it is read
    found = planned(
        capsys,
        tmp_path / "mixed",
        "system=multiplexed",
        "launch.ranks=1",
        "data.step_tokens=null",
        "data.step_samples=8",
    )
    index = Index.open(tmp_path / "mixed")
    encoders = {name: make_encoder(name, of) for name, of in compose_config([]).model.encoders.items()}
    count = encoders["image"].count
    metas = [index.meta(i, "mixed", lambda _, size: count(size)) for i in range(len(index))]
    assert found["samples"] == len(index)
    assert found["tokens"] == sum(
        1 + meta.text_tokens + sum(item.rows + 1 for item in meta.items) for meta in metas
    )
    assert found["notes"] == []


def test_nothing_is_dropped_and_what_is_left_out_is_told(tmp_path: Path) -> None:
    config, notes = compose_config([*MODEL, *KEYS[-2:]]), list[str]()
    use_trace(config, "longtail", tmp_path / "trace", tell=notes.append)
    trace = generate("longtail", 1024, 0)
    index = Index.open(tmp_path / "trace")
    assert [index.meta(i, "", lambda m, size: (1, 1)).text_tokens for i in range(len(index))] == [
        meta.text_tokens for meta in trace
    ]
    items = [item for meta in trace for item in meta.items]
    left = [item for item in items if item.modality != "image"]
    share = sum(item.tokens for item in left) / sum(item.tokens for item in items)
    without = sum(any(item.modality != "image" for item in meta.items) for meta in trace)
    assert f"audio, video: {len(left):,} of {len(items):,} items, {share:.1%} of encoder tokens" in notes[0]
    assert f"in {without:,} of 1,024 samples (there are encoders for: image)" in notes[0]


def test_items_given_by_size_are_counted_by_their_encoder() -> None:
    items = (ItemMeta("image", 0, 0, 2, (224, 448)), ItemMeta("video", 0, 0, 3, (8, 224, 224)))
    trace, notes = for_encoders([SampleMeta(0, "s", 4, items, 9)], encoders := encoders_of())
    tokens, rows = encoders["image"].count((224, 448))
    assert trace == [SampleMeta(0, "s", 4, (ItemMeta("image", tokens, rows, 2, (224, 448)),), 9)]
    assert "video: 1 of 2 items, tokens unknown, in 1 of 1 samples" in notes[0]
    assert with_sizes(trace, encoders) == (trace, [])


def test_other_tokens_than_the_trace_has_are_told() -> None:
    trace = [SampleMeta(0, "s", 4, (ItemMeta("image", 1_000, 144, 0, ()),), 0)]
    encoders = encoders_of()
    sized, notes = with_sizes(trace, encoders)
    made, _ = encoders["image"].count(sized[0].items[0].size)
    assert len(notes) == 1
    assert "image items have 1,000 encoder tokens in the trace" in notes[0]
    assert f"makes {made:,}, which count" in notes[0]


def test_a_model_without_encoders_plans_the_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_trace(tmp_path / "t.parquet", generate("balanced", 64, 0))
    found = planned(capsys, tmp_path / "t.parquet", *KEYS, "~model.encoders.image")
    assert found["items"] == 0
    assert "image: 64 of 64 items, 100.0% of encoder tokens, in 64 of 64 samples" in found["notes"][0]
    assert "(there are encoders for: nothing)" in found["notes"][0]


def test_a_sweep_says_it_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-m", "--trace", "shift", *KEYS, "pipeline=encode_first,joint"]) == 0
    assert capsys.readouterr().err.count("are left out of their samples") == 1


def test_balancing_takes_the_same_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "t.parquet"
    items = [[{"modality": "image", "size": [224, 224 * (1 + n % 3)]}] for n in range(8)]
    pq.write_table(pa.table({"text_tokens": [100] * 8, "items": items}), own)
    line = ["--samples", "2", *KEYS]
    assert main(["data", "balance", str(own), *line]) == 0
    assert "suggested: balance=" in capsys.readouterr().out
    assert main(["data", "trace", "describe", str(own)]) == 0
    assert "note: 8 items are given by size" in capsys.readouterr().err
    pq.write_table(pa.table({"lengths": [100] * 8}), own)
    assert main(["data", "balance", str(own), *line]) == 2
    assert "needs text_tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (None, "mine.parquet: there is no such file or folder: give a Parquet file"),
        ({"length": [5]}, "a trace without lengths: it has the columns length, and needs text_tokens"),
        ({"text_tokens": [5, -1]}, "row 1: text_tokens is -1"),
        ({"text_tokens": pa.array([], pa.int32())}, "a trace without rows"),
    ],
)
def test_mistakes_end_with_two(
    tmp_path: Path, columns: dict | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if columns is not None:
        pq.write_table(pa.table(columns), tmp_path / "mine.parquet")
    assert main(["plan", "--trace", str(tmp_path / "mine.parquet"), *KEYS]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


def test_a_folder_that_is_no_dataset_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="is not a dataset"):
        open_trace(str(tmp_path), 1, 0)
    assert main(["plan", "--trace", str(tmp_path), *KEYS]) == 2
    assert "is not a dataset" in capsys.readouterr().err


def test_the_example_of_the_page_is_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "data.md").read_text()
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "text_tokens" in block
    )
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/data.md", "exec"), {})
    (own,) = tmp_path.glob("*.parquet")
    found = planned(capsys, own, *KEYS)
    assert found["items"] > 0
    assert found["samples"] > 0

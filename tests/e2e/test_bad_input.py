"""Bad configuration and bad data: a message with the key, the value and the remedy, and an exit code."""

import errno
import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from runs import TINY, Finished, data_keys, document, omni, picture, read_lines, strip, train, training, write

from dataloader.format import PLACEHOLDER, SHARD_SCHEMA, DataError, Item, Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.tokens import length
from omni.compose import compose_config
from omni.planning.prepare import prepare_run
from omni.planning.run_spec import RunSpec
from omni.training.worker import _told

RADAR = Sample("radar-0", PLACEHOLDER + "an echo", (Item("radar", "raw", (16,), b"0123456789abcdef"),))


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Two sound datasets, and some that are not."""
    root = tmp_path_factory.mktemp("data")
    write(root / "strips", [strip(i) for i in range(32)])
    write(root / "docs", [document(i) for i in range(16)])
    write(root / "radar", [RADAR])
    tokenizer = ByteTokenizer()
    tokenizer.name = "letters"
    write(root / "letters", [document(0)], tokenizer)
    for name in ("no_shard", "cut_shard", "no_manifest", "cut_manifest"):
        shutil.copytree(root / "strips", root / name)
    (root / "no_shard" / "shard-00000.parquet").unlink()
    _cut(root / "cut_shard" / "shard-00000.parquet")
    (root / "no_manifest" / "dataset.json").unlink()
    _cut(root / "cut_manifest" / "dataset.json")
    return root


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def resolve(data: Path, *keys: str, ranks: int = 2) -> RunSpec:
    """What `omni train` does before it starts ranks."""
    own = data_keys(data / "strips", data / "docs")
    return prepare_run(compose_config([*TINY, *own, "train.steps=4", "run.dir=unused", *keys]), ranks)


def refused(data: Path, *keys: str, ranks: int = 2) -> str:
    """The message with which a configuration is refused."""
    with pytest.raises(ValueError) as caught:  # what the command line shows without a traceback
        resolve(data, *keys, ranks=ranks)
    return str(caught.value)


def test_the_configuration_that_these_tests_break_is_sound(data):
    assert resolve(data).layout.dp == 2
    assert resolve(data, "layout=pp2").layout.pp == 2


def test_advice_is_about_the_override_that_was_refused():
    with pytest.raises(ValueError, match="Could not find 'optim/constant'") as caught:
        compose_config(["~experiment", "optim=constant", "data.heldout.strips.generate=0"])
    assert "experiment=" not in str(caught.value)
    assert "heldout" not in str(caught.value)


# Each key with what its message must name besides the key: the value, and the remedy.
@pytest.mark.parametrize(
    "keys, named",
    [
        (["train.stepz=3"], ["train.stepz", "not in 'TrainConfig'", "did you mean train.steps"]),
        (["microbatch_tokens=3"], ["microbatch_tokens: there is no such key", "data.microbatch_tokens?"]),
        (["optm=wsd"], ["optm: there is no such key; did you mean optim?"]),
        (["data.sources.mine.path=x"], ["to add an entry to data.sources, write +data.sources.mine.path"]),
        (["data.mixture={x: {first: 1}}"], ["to add an entry to data.mixture, write +data.mixture"]),
        (["data=null"], ["data=null", "leave it out with ~data"]),
        (["data.sources=null"], ["'data.sources' is not Optional", "one by one, such as ~data.sources.NAME"]),
        (["~data.heldout"], ["~data.heldout", "one by one, such as ~data.heldout.NAME"]),
        (["model.encoders.image=null"], ["to leave it out, write ~model.encoders.image"]),
        (["+optim.components.image=3"], ["optim.components.image: Invalid input", "decay_steps)"]),
        (["+stages={a: 4}"], ["stages.a: Invalid input", "known here: steps, optim)"]),
        (["+stages={a: {steps: 0}}"], ["stages.a.steps=0: must be at least 1"]),
        (["+stages={a: {steps: two}}"], ["stages.a.steps", "two", "Integer"]),
        (["start.optimizer=true"], ["start.optimizer=True", "start.checkpoint is null", "leave this out"]),
        (["tracking.prometheus_port=70000"], ["tracking.prometheus_port=70000", "at most 65535"]),
        (["data.max_error_share=2"], ["data.max_error_share=2", "at most 1"]),
        (["run.dir="], ["run.dir=", "name a folder"]),
        (["run.name=läufe"], ["beyond English ones: \"run.name='läufe'\""]),
        (["run.name=a(b"], ["a value with brackets", "\"run.name='a(b'\""]),
        (["model=null"], ["model=null", "leave it out with ~model"]),
        (["layout.llm.pp=abc"], ["layout.llm.pp", "abc", "Integer"]),
        (["optim.lr=fast"], ["optim.lr", "fast", "Float"]),
        (["optim=adamw"], ["optim/adamw", "cosine", "wsd"]),
        (["system=nemo"], ["system/nemo", "multiplexed", "megatron"]),
        (["optim=cosine"], ["optim=cosine", "optim.lr=0.0003", "optim.lr=0.002", "Leave"]),
        (["layout.llm.pp=3"], ["layout.llm.pp=3", "2 ranks", "launch.ranks", "multiple of 3"]),
        (["layout.llm.dp=3"], ["dp=3", "2", "launch.ranks=3", "dp=null"]),
        (["layout.llm.pp=0"], ["layout.llm.pp=0", "at least one"]),
        (["layout.llm.pp=2", "model.llm.layers=1"], ["layout.llm.pp=2", "model.llm.layers=1", "at most 1"]),
        (["model.encoders.image.name=siglip"], ["model.encoders.image.name=siglip", "vit", "_target_"]),
        (["+model.encoders.image.depth=2"], ["model.encoders.image", "depth", "layers, hidden"]),
        (["model.encoders.image.layers=two"], ["model.encoders.image", "two", "Integer"]),
        (
            ["~model.encoders.image.name", "+model.encoders.image._target_=mine.Encoder"],
            ["model.encoders.image._target_=mine.Encoder", "cannot be imported"],
        ),
        (
            ["~model.encoders.image.name", "+model.encoders.image._target_=builtins.int"],
            ["model.encoders.image._target_=builtins.int", "encoder"],
        ),
        (["+model.encoders.image._target_=mine.Encoder"], ["model.encoders.image", "either", "vit"]),
        (["model.llm.heads=3"], ["model.llm.heads=3", "hidden=32"]),
        (["data.tokenizer=gpt"], ["data.tokenizer=gpt", "bytes"]),
        (["data.on_long=cut"], ["data.on_long=cut", "error, drop, truncate"]),
        (
            ["data.sources.strips.weight=0", "data.sources.docs.weight=0"],
            ["data.sources.strips.weight=0", "data.sources.docs.weight=0", "give a source a weight"],
        ),
        (["data.on_error=ignore"], ["data.on_error=ignore", "fail, skip"]),
        (["data.step_samples=4"], ["data.step_tokens=128", "data.step_samples=4", "exactly one"]),
        (["train.precision=fp64"], ["train.precision=fp64", "auto, fp32, bf16"]),
        (["optim.warmup_steps=-1"], ["optim.warmup_steps=-1", "at least 0"]),
        (["train.seed=-1"], ["train.seed=-1", "must lie"]),
        ([f"train.seed={2**64}"], [f"train.seed={2**64}", "must lie"]),
        (["tracking=mlflow"], ["tracking/mlflow", "jsonl", "wandb"]),
        (["tracking.kind=mlflow"], ["tracking", "mlflow", "jsonl, wandb"]),
        (["tracking.mode=sometimes"], ["tracking.mode=sometimes", "offline"]),
        (["model.llm.recompute=some"], ["model.llm.recompute=some", "none", "full"]),
        (["optim.max_skipped=0"], ["optim.max_skipped=0", "at least 1"]),
        (["train.timeout_s=0"], ["timeout_s=0"]),
        (["balance=foo"], ["balance/foo", "lpt", "none", "entry point omni.balance"]),
        (["balance.policy=foo"], ["balance.policy=foo", "lpt, none", "entry point omni.balance"]),
        (["packing.policy=foo"], ["packing.policy=foo", "first_fit_decreasing", "omni.packing"]),
        (
            ["packing=entrain", "pairing=alike"],
            ["packing.policy=entrain", "pairing.policy=alike", "in_order"],
        ),
        (["pairing.policy=foo"], ["pairing.policy=foo", "in_order", "omni.pairing"]),
        (["encoder_sp.policy=foo"], ["encoder_sp.policy=foo", "dynamic", "omni.sharing"]),
        (["llm_sp.policy=foo"], ["llm_sp.policy=foo", "uniform", "omni.sharing"]),
        (["encoder_sp=uniform"], ["encoder_sp.policy=uniform", "items", "choose"]),
        (["boundary.policy=foo"], ["boundary.policy=foo", "two_level_back", "omni.transport"]),
        (["pipeline.policy=foo"], ["pipeline.policy=foo", "one_f_one_b", "omni.schedule"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and "=" in value[0] else "",
)
def test_a_wrong_key_or_value_is_named(data, keys, named):
    message = refused(data, *keys)
    assert [word for word in named if word not in message] == [], message


# Layouts. TINY has two layers, two heads, one key/value head and an encoder of two heads; "byte" has 260 ids.
TP2 = ["layout.llm.tp=2", "model.llm.kv_heads=2"]
ENCODER_TP2 = "+layout.encoders.image.tp=2"
BESIDE = ["placement=disaggregated", "placement.ranks=2"]


@pytest.mark.parametrize(
    "ranks, keys, named",
    [
        (3, TP2, ["layout.llm.tp=2", "the 3 ranks", "launch.ranks as a multiple of 2"]),
        (6, [*TP2, "layout.llm.pp=2"], ["layout.llm.tp=2, layout.llm.pp=2", "6 ranks", "multiple of 4"]),
        (
            2,
            [*TP2, "layout.llm.dp=2"],
            ["layout.llm.tp=2, layout.llm.dp=2", "4 ranks", "there are 2", "launch.ranks=4"],
        ),
        (3, ["layout.llm.tp=3"], ["layout.llm.tp=3", "model.llm.heads=2", "1 is the nearest"]),
        (2, ["layout.llm.tp=2"], ["layout.llm.tp=2", "model.llm.kv_heads=1", "choose a tp"]),
        (2, [*TP2, "model.llm.ffn=65"], ["layout.llm.tp=2", "model.llm.ffn=65", "choose a tp"]),
        (
            2,
            [*TP2, "model.llm.vocab_multiple=9"],
            ["layout.llm.tp=2", "vocabulary of 261", "model.llm.vocab_multiple=9", "a multiple of 2"],
        ),
        (3, ["layout.llm.pp=3"], ["layout.llm.pp=3", "model.llm.layers=2", "at most 2"]),
        (2, ["layout.llm.ep=3"], ["layout.llm.ep=3", "2 ranks of a stage", "2 is the nearest"]),
        (2, ["layout.llm.ep=2"], ["layout.llm.ep=2", "no experts", "ep=1"]),
        (2, ["layout.llm.tp=-2"], ["layout.llm.tp=-2", "at least one rank"]),
        (3, ["layout.domain=2"], ["layout.domain=2", "3 replicas", "1 is the nearest"]),
        (2, ["+layout.encoders.sound.tp=2"], ["layout.encoders.sound", "no such encoder", "image"]),
        (2, ["+layout.encoders.image.tp=0"], ["layout.encoders.image.tp=0", "at least one rank"]),
        (2, ["+layout.encoders.image.ways=2"], ["layout.encoders.image.ways", "known here: tp"]),
        (3, ["+layout.encoders.image.tp=3"], ["layout.encoders.image.tp=3", "heads=2", "choose a tp"]),
        (2, [ENCODER_TP2, "model.encoders.image.ffn=33"], ["layout.encoders.image.tp=2", "ffn=33"]),
        (3, [ENCODER_TP2], ["layout.encoders.image.tp=2", "dp3", "dp=3", "choose sizes"]),
        (4, [ENCODER_TP2, *BESIDE, "placement.ranks=3"], ["layout.encoders.image.tp=2", "3 ranks", "choose"]),
        (
            2,
            ["placement=disaggregated", "placement.ranks=0"],
            ["placement.policy=disaggregated", "placement.ranks=0", "at least one rank"],
        ),
        (2, BESIDE, ["the 2 ranks of this launch, less 2 for encoders: choose launch.ranks", "plus 2"]),
        (5, [*BESIDE, *TP2], ["5 ranks of this launch, less 2", "a multiple of 2, plus 2"]),
        (3, [*BESIDE, "layout.llm.dp=2"], ["placement.ranks=2 take 4 ranks", "launch.ranks=4", "dp=null"]),
        (3, ["placement=disaggregated", "placement.ranks=-1"], ["placement.ranks=-1", "at least 0"]),
        (
            3,
            ["system=megatron", "placement.ranks=1"],
            ["placement.policy=stage0", "placement.ranks=1", "none"],
        ),
        (
            2,
            ["placement.policy=beside"],
            ["placement.policy=beside", "colocated", "omni.placement"],
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and "=" in value[0] else "",
)
def test_a_layout_that_does_not_fit_is_refused_before_any_process_group(data, ranks, keys, named):
    message = refused(data, *keys, ranks=ranks)
    assert [word for word in named if word not in message] == [], message
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "ranks, keys, described",
    [
        (4, [*TP2, ENCODER_TP2], "tp2·dp2, image tp2"),
        (2, ["layout.llm.pp=2", ENCODER_TP2], "pp2, image tp2"),
        (5, ["placement=disaggregated", "placement.ranks=3"], "dp2, 3 ranks for encoders"),
        (4, ["layout.llm.cp=2", "layout.domain=2"], "cp2·dp2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_layouts_that_fit_are_accepted(data, ranks, keys, described):
    assert resolve(data, *keys, ranks=ranks).arrangement.describe() == described


@pytest.mark.parametrize(
    "key",
    [
        "model.llm.heads",
        "model.llm.kv_heads",
        "model.llm.hidden",
        "model.llm.vocab_multiple",
        "model.encoders.image.heads",
        "model.encoders.image.merge",
        "model.encoders.image.patch",
        "cluster.flops.fp32",
        "cluster.efficiency.products.fp32",
        "cluster.efficiency.attention",
        "cluster.memory_bytes_per_s",
        "cluster.link_bytes_per_s",
        "model.llm.loss_chunk",
        "model.llm.rotary_base",
        "model.llm.norm_eps",
        "+model.encoders.image.rotary_base",
        "model.encoders.image.std",
    ],
)
def test_a_size_of_zero_is_refused_by_name(data, key):
    message = refused(data, f"{key}=0")
    assert message.startswith(f"{key.removeprefix('+')}=0")


@pytest.mark.parametrize(
    "key, value",
    [
        ("model.llm.norm_eps", "-1"),
        ("model.llm.rotary_base", "nan"),
        ("model.encoders.image.mean", "nan"),
        ("model.encoders.image.std", "-0.5"),
        ("+optim.components.image.lr_scale", "-1"),
        ("+optim.components.llm.lr_scale", "nan"),
        ("optim.lr", "nan"),
        ("optim.lr", "inf"),
        ("optim.lr", "-0.001"),
        ("optim.clip", "-1"),
        ("optim.beta2", "nan"),
        ("optim.beta1", "1.0"),
        ("optim.weight_decay", "inf"),
        ("train.timeout_s", "nan"),
        ("data.max_error_share", "nan"),
    ],
)
def test_a_number_that_would_spoil_the_weights_is_refused_by_name(data, key, value):
    message = refused(data, f"{key}={value}")
    assert f"{key.removeprefix('+')}={value}" in message
    assert "must" in message


def test_entries_of_mappings_can_be_added_by_name(data):
    # Mappings, never lists, so that one entry can be set on the command line.
    more = [f"+data.{use}.more.path={data / 'docs'}" for use in ("sources", "heldout")]
    made = resolve(data, "+optim.components.image.lr_scale=0.5", *more)
    assert made.config.optim.components["image"].lr_scale == 0.5
    assert made.sources == ("strips", "docs", "more")
    assert list(made.heldout) == ["more"]


@pytest.mark.parametrize(
    "dataset, named",
    [
        ("nowhere", ["dataset.json is missing", "omni data build"]),
        ("no_manifest", ["dataset.json is missing", "omni data build"]),
        ("cut_manifest", ["dataset.json", "not valid JSON", "omni data build"]),
        ("no_shard", ["shard-00000.parquet is missing", "omni data build"]),
        ("cut_shard", ["shard-00000.parquet", "truncated", "bytes", "omni data build"]),
        ("letters", ["tokenizer 'letters'", "'bytes'", "rebuild"]),
        ("radar", ["radar items", "no encoder", "image"]),
    ],
)
@pytest.mark.parametrize("use", ["sources", "heldout"])
def test_a_dataset_that_cannot_be_used_is_named(data, dataset, named, use):
    path = data / dataset
    key = f"data.{use}.docs"
    give = f"+data.heldout={{docs: {{path: {path}}}}}" if use == "heldout" else f"{key}.path={path}"
    message = refused(data, give)
    assert [word for word in named if word not in message] == [], message
    assert key in message or dataset == "radar"


def test_a_source_is_checked_though_a_heldout_dataset_has_its_name(data):
    keys = [f"data.sources.docs.path={data / 'radar'}", f"+data.heldout={{docs: {{path: {data / 'docs'}}}}}"]
    message = refused(data, *keys)
    assert "radar items" in message


# The command line: one example of every way out.


def refused_by_omni(result: Finished, *words: str) -> None:
    assert result.code == 2
    assert [word for word in words if word not in result.err] == [], result.err
    assert "Traceback" not in result.err
    assert result.out == ""


@pytest.mark.parametrize(
    "key, words",
    [
        ("train.stepz=3", ["error: ", "train.stepz", "did you mean train.steps"]),  # by Hydra
        ("model=null", ["error: ", "leave it out with ~model"]),
        ("layout.llm.pp=abc", ["error: ", "layout.llm.pp=abc", "Integer"]),
        ("run.dir=/dev/null", ["error: run.dir=/dev/null", "choose another"]),
        ("run.dir=/proc/run", ["error: run.dir=/proc/run", "choose another"]),
        ("train.checkpoint_dir=here", ["error: train.checkpoint_dir=here", "absolute path"]),
        ("train.checkpoint_dir=nosuch://x", ["error: train.checkpoint_dir=nosuch://x", "fsspec"]),
        ("optim=cosine", ["error: optim=cosine", "optim.lr"]),  # after it has composed
        ("balance=foo", ["balance/foo", "lpt", "none", "entry point omni.balance"]),
        ("experiment=foo", ["Could not find 'experiment/foo'", "options in 'experiment': ", "quickstart"]),
        ("tracking=[tensorboard,wandb]", ["error: tracking=[tensorboard,wandb]: of tracking one is taken"]),
        ("balance.policy=foo", ["error: balance.policy=foo", "lpt, none", "entry point omni.balance"]),
        ("layout.llm.pp=3", ["error: layout.llm.pp=3", "launch.ranks"]),  # against the ranks
        ("+layout.encoders.sound.tp=2", ["error: layout.encoders.sound: there is no such encoder"]),
        ("data.sources.docs.path=nowhere", ["error: data.sources.docs.path=nowhere", "omni data build"]),
        ("model.llm.heads=0", ["heads=0"]),
        (
            "pipeline.encoder_bytes=10",
            ["error: pipeline.encoder_bytes=10: rank 0 would hold", "or more, or null"],
        ),
        ("launch.ranks=0", ["launch.ranks=0"]),
        ("launch.ranks=-1", ["launch.ranks=-1"]),
        ("launch.ranks=100000", ["error: launch.ranks=100000", "cores", "launch.oversubscribe=true"]),
        ("data=null", ["error: ", "leave it out with ~data"]),
        ("train.seed=18446744073709551616", ["error: train.seed=18446744073709551616", "must lie"]),
    ],
)
def test_omni_train_says_what_is_wrong_before_it_starts_ranks(data, tmp_path, key, words):
    own = [*data_keys(data / "strips", data / "docs"), "train.steps=1", "launch.ranks=1"]
    own = [k for k in own if k.partition("=")[0] != key.partition("=")[0]]
    result = omni(training([*own, key]), tmp_path, timeout_s=60)
    refused_by_omni(result, *words)
    assert not (tmp_path / "run").exists(), "a refused run leaves no run folder"
    assert "To append" not in result.err, "Hydra's hint is to invent the key"
    assert "search path" not in result.err, "it would bury the reason"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_is_full_or_read_only_is_told_with_the_remedy(tmp_path, capsys, number):
    assert _told(OSError(number, os.strerror(number)), tmp_path / "config.yaml") == 1
    err = capsys.readouterr().err
    for word in (os.strerror(number), str(tmp_path), "last checkpoint stays good", "the same run.dir"):
        assert word in err
    assert "Traceback" not in err


# Placeholders and items.


@pytest.mark.parametrize("text", ["no placeholder", PLACEHOLDER + PLACEHOLDER])
def test_the_writer_refuses_another_number_of_placeholders_than_items(tmp_path, text):
    with pytest.raises(DataError) as caught:
        write(tmp_path / "out", [Sample("odd-one", text, (picture([1]),))])
    assert "'odd-one'" in str(caught.value)
    assert f"{text.count(PLACEHOLDER)} placeholders" in str(caught.value)
    assert "1 items" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_omni_data_build_refuses_another_number_of_placeholders_than_items(tmp_path):
    (tmp_path / "one.png").write_bytes(picture([1]).data)
    item = {"modality": "image", "path": "one.png"}
    lines = [
        {"id": name, "text": text, "items": [item]} for name, text in (("good", "\ufffc"), ("odd", "one"))
    ]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = omni(["data", "build", "--from-jsonl", "mine.jsonl", "--out", "out"], tmp_path, timeout_s=60)
    refused_by_omni(result, "mine.jsonl:2", "'odd'", "0 placeholders", "1 items")
    assert not (tmp_path / "out").exists()


def by_hand(path: Path, change: str) -> Path:
    """A dataset whose shard was written without the writer: sample 5 breaks the rule, the index does not."""
    write(path, [strip(i) for i in range(16)])
    shard = path / "shard-00000.parquet"
    (path / "ranges.arrow").unlink()
    rows = pq.read_table(shard).to_pylist()
    if change == "no placeholder":
        rows[5]["text"] = rows[5]["text"].replace(PLACEHOLDER, "")
    elif change == "two placeholders":
        rows[5]["text"] = PLACEHOLDER + rows[5]["text"]
    elif change == "no item":
        rows[5]["items"] = []
    else:
        rows[5]["items"] = rows[5]["items"] * 2
    table = pa.Table.from_pylist(rows, schema=SHARD_SCHEMA)
    pq.write_table(table, shard, row_group_size=8, compression="none", write_page_checksum=True)
    manifest = json.loads((path / "dataset.json").read_text())
    manifest["shards"][0]["bytes"] = shard.stat().st_size
    (path / "dataset.json").write_text(json.dumps(manifest))
    return path


CHANGES = ["no placeholder", "two placeholders", "no item", "two items"]


@pytest.mark.parametrize("change", CHANGES)
def test_omni_data_verify_finds_a_shard_written_by_hand_with_another_number_of_items(tmp_path, change):
    path = by_hand(tmp_path / "odd", change)
    result = omni(["data", "verify", str(path)], tmp_path, timeout_s=60)
    assert result.code == 1
    assert "'strip-5'" in result.out
    assert "placeholders" in result.out
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    "change", [pytest.param(c, marks=pytest.mark.slow) if c != "no item" else c for c in CHANGES]
)
def test_a_run_over_a_shard_written_by_hand_stops_and_names_the_sample(tmp_path, change):
    # "two items" with one placeholder trains on the first: the index knows of no other.
    path = by_hand(tmp_path / "odd", change)
    result = train([*data_keys(path), "train.steps=6", "launch.ranks=1"], tmp_path)
    if change == "two items":
        assert result.code == 0
        return
    assert result.code > 0
    (line,) = result.lines_with("strip-5", "rank 0: error")
    assert "omni data verify" in line


# Samples longer than the budget.


@pytest.fixture(scope="module")
def long_data(tmp_path_factory) -> Path:
    """Sample 3 has three images of 12 rows each, 56 tokens in all; the others have 32 at most."""
    images = tuple(picture([d, d, d]) for d in (1, 2, 3))
    text = "aaaa" + PLACEHOLDER + "bbbb" + PLACEHOLDER + "cccc" + PLACEHOLDER + "dddd"
    path = tmp_path_factory.mktemp("long")
    return write(path / "mixed", [Sample("long", text, images) if i == 3 else strip(i) for i in range(16)])


def plans(path: Path, policy: str, budget: int = 32, steps: int = 8) -> tuple[RunSpec, list]:
    own = [*data_keys(path), f"data.on_long={policy}", f"data.microbatch_tokens={budget}"]
    config = compose_config([*TINY, *own, "data.step_tokens=64", "train.steps=8", "run.dir=unused"])
    made = prepare_run(config, 1)
    out, cursor = [], 0
    for step in range(1, steps + 1):
        out.append(made.planner.next_step(step, cursor, 0))
        cursor = out[-1].taken.next_cursor
    return made, out


def test_a_long_sample_stops_the_run_with_its_name_and_the_keys(long_data):
    with pytest.raises(DataError) as caught:
        plans(long_data, "error")
    message = str(caught.value)
    for word in ("sample 3", "'strips'", "tokens", "32", "data.microbatch_tokens", "data.on_long"):
        assert word in message


def test_a_long_sample_is_dropped_and_counted(long_data):
    made, steps = plans(long_data, "drop")
    assert made.planner.world.meta("strips", 3) is None
    assert {sample.id for plan in steps for sample in plan.domain.samples} == set(range(16)) - {3}
    assert ("strips", 3) in [skipped for plan in steps for skipped in plan.taken.skipped]


@pytest.mark.parametrize("budget", range(34, 60))
def test_a_long_sample_is_cut_but_never_inside_an_image(long_data, budget):
    made, _ = plans(long_data, "truncate", budget, steps=0)
    whole = job_meta(made, 3)
    rows = whole.items[0].rows
    assert length(whole) == 1 + 3 * (4 + rows + 1) + 4 == 56
    cut = made.planner.world.meta("strips", 3)
    if budget >= length(whole):
        assert cut == whole
        return
    assert cut.truncated
    assert length(cut) <= budget
    # The longest prefix of whole images and whole tokens of text.
    cuts = {1 + number * (4 + rows + 1) + text for number in range(4) for text in range(5)}
    assert length(cut) == max(c for c in cuts if c <= budget)
    assert cut.items == whole.items[: len(cut.items)]
    assert all(item.rows == rows for item in cut.items)
    # ... and what the plan encodes and routes is whole images, within the sample.
    plan = next(p for p in plans(long_data, "truncate", budget)[1] if 3 in p.taken.ids)
    place = next(i for i, sample in enumerate(plan.domain.samples) if sample.id == 3)
    assert plan.domain.samples[place].length == length(cut)
    planned = [item for item in plan.domain.items if item.sample == place]
    assert [item.rows for item in planned] == [rows] * len(cut.items)


def job_meta(made: RunSpec, sample: int):
    return made.planner.world.samples.metas("strips", sample)


@pytest.mark.slow  # a million samples are looked at
def test_a_budget_that_no_sample_fits_is_an_error_with_the_key(long_data):
    with pytest.raises(ValueError) as caught:  # not an assertion: the user chose the budget
        plans(long_data, "drop", budget=2, steps=1)
    assert "data.microbatch_tokens" in str(caught.value)


# Items that their encoder cannot take.


def wide(folder: Path) -> Path:
    """Sample 3 has an image of 20 patches on a side, which its encoder may not take; it is not long."""
    odd = Sample("wide", "ab" + PLACEHOLDER + "cd", (picture([1, 2, 3, 4, 5]),))
    return write(folder, [odd if i == 3 else strip(i) for i in range(12)])


@pytest.mark.parametrize("policy", ["drop", "truncate", "error"])
def test_a_sample_with_an_image_that_the_encoder_cannot_take_counts_as_too_long(tmp_path, policy):
    own = [*data_keys(wide(tmp_path / "wide")), f"data.on_long={policy}", "data.step_tokens=64"]
    keys = [*TINY, *own, "train.steps=8", "run.dir=unused", "model.encoders.image.max_side=12"]
    planner = prepare_run(compose_config(keys), 1).planner
    if policy == "error":
        with pytest.raises(DataError) as caught:
            [planner.world.meta("strips", i) for i in range(12)]
        for word in ("sample 3", "'strips'", "item 0", "8x40", "model.encoders.image.max_side=12", "on_long"):
            assert word in str(caught.value)
        return
    seen, skipped, cursor = set(), set(), 0
    for step in range(1, 9):
        plan = planner.next_step(step, cursor, 0)
        cursor = plan.taken.next_cursor
        seen |= {sample.id for sample in plan.domain.samples}
        skipped |= set(plan.taken.skipped)
    cut = planner.world.meta("strips", 3)
    if policy == "drop":
        assert (seen, skipped, cut) == (set(range(12)) - {3}, {("strips", 3)}, None)
    else:
        assert (seen, skipped) == (set(range(12)), set())
        assert (cut.text_tokens, cut.items, cut.truncated) == (2, (), True)


@pytest.mark.parametrize(
    ("policy", "metric"), [("drop", "data/skipped/too_long"), ("truncate", "data/truncated")]
)
def test_a_run_over_such_an_image_goes_on_without_it_and_names_it(tmp_path, policy, metric):
    own = [*data_keys(wide(tmp_path / "wide")), "train.steps=4", "launch.ranks=1", f"data.on_long={policy}"]
    heldout = [f"+data.heldout.odd.path={tmp_path / 'wide'}", "train.eval_every=4"]
    result = train([*own, *heldout, "model.encoders.image.max_side=12"], tmp_path)
    assert result.code == 0, result.err
    metrics = read_lines(tmp_path / "run" / "metrics.jsonl")
    last, counts = metrics[-1], {"data/skipped/too_long", "data/truncated"}
    assert {name for name in counts if last[name]} == {metric}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())[metric] == last[metric]
    assert "too long in this step: strips 3" in " ".join(result.out.split())
    assert math.isfinite(last["loss/eval/odd"])


# Items that cannot be decoded.


def broken(path: Path, bad: set[int], count: int = 24) -> Path:
    """Strips as JPEG; those of `bad` end in the middle of their pixels."""
    samples = []
    for i in range(count):
        sample = strip(i, "JPEG")
        if i in bad:
            item = sample.items[0]
            sample = replace(sample, items=(replace(item, data=item.data[:-40]),))
        samples.append(sample)
    return write(path, samples)


@pytest.fixture(scope="module")
def failed(tmp_path_factory) -> Finished:
    cwd = tmp_path_factory.mktemp("fail")
    keys = [*data_keys(broken(cwd / "strips", {5})), "data.on_error=fail", "train.steps=8", "launch.ranks=1"]
    return train(keys, cwd)


def test_a_bad_image_stops_the_run_and_is_named(failed):
    assert failed.code == 2, "it would fail again"
    assert failed.lines_with("source strips", "sample 5", "item 0", "data.on_error=skip")


def test_a_bad_image_is_told_without_a_traceback(failed):
    assert "Traceback" not in failed.err, failed.err


def skipped(tmp_path: Path, *keys: str) -> None:
    """A run over sound strips and, as another source, strips that are all bad."""
    good = write(tmp_path / "strips", [strip(i) for i in range(24)])
    bad = broken(tmp_path / "bad", set(range(12)), 12)
    weights = ["data.sources.strips.weight=2", "data.sources.docs.weight=1"]
    own = ["data.on_error=skip", "data.max_error_share=0.5", "data.step_tokens=null", "data.step_samples=9"]
    result = train([*data_keys(good, bad), *weights, *own, "train.steps=6", *keys], tmp_path)
    assert result.code == 0, result.err
    drawn = [
        [sample for source, sample in step["samples"] if source == "docs"]
        for step in read_lines(tmp_path / "run" / "samples.jsonl")
    ]
    assert [len(samples) for samples in drawn] == [3] * 6
    # Not line by line: ranks may write at the same moment.
    named = re.findall(
        r"skipped source docs, sample (\d+) \(\S+\), item 0: the image cannot be decoded", result.err
    )
    assert sorted(map(int, named)) == sorted(sample for samples in drawn for sample in samples)
    records = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [record["data/skipped/bad_item"] for record in records] == [3, 6, 9, 12, 15, 18]
    for record in records:
        assert math.isfinite(record["loss/train"])
        assert math.isfinite(record["optim/grad_norm"])
        assert record["optim/skipped_steps"] == 0
        # No target of a bad sample is in the loss, nor in the number that it is divided by.
        assert "loss/train/docs" not in record
        assert record["loss/train"] == record["loss/train/strips"]


@pytest.mark.slow
def test_bad_images_are_skipped_and_counted_on_one_rank(tmp_path):
    skipped(tmp_path, "launch.ranks=1")


@pytest.mark.slow
def test_bad_images_are_skipped_when_another_rank_computes_the_loss(tmp_path):
    # Stage 0 encodes all images, stage 1 computes the loss.
    skipped(tmp_path, "launch.ranks=2", "layout=pp2", "system=megatron")


@pytest.mark.slow
def test_bad_images_on_both_stages_are_skipped(tmp_path):
    skipped(tmp_path, "launch.ranks=2", "layout=pp2")


@pytest.mark.slow
def test_bad_images_are_skipped_on_every_replica(tmp_path):
    skipped(tmp_path, "launch.ranks=2")


@pytest.mark.slow
def test_too_many_bad_images_stop_the_run(tmp_path):
    path = broken(tmp_path / "strips", set(range(12)))
    own = ["data.on_error=skip", "data.max_error_share=0.002", "train.steps=20", "launch.ranks=1"]
    result = train([*data_keys(path), *own], tmp_path)
    assert result.code > 0
    (line,) = set(result.lines_with("data.max_error_share=0.002", "omni data verify"))
    assert "samples had bad items" in line
    # At most two of the first thousand samples: the third one ends the run.
    assert "3 of" in line or "4 of" in line or "5 of" in line

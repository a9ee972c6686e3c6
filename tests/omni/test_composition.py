import json
import re
from collections.abc import Iterator
from pathlib import Path

import composing
import pytest
from omegaconf import OmegaConf
from small import with_values

import hydra_conf
from omni.commands._quickstart_chat import CONFIG
from omni.compose import compose_config, load_config
from omni.compose_saved import compose_saved
from omni.config import RENAMED, RENAMED_OPTIONS, Config, ConfigError
from omni.open_models.draw import draw_folder

FOLDER = Path(hydra_conf.__file__).parent
OPTIONS = sorted(
    str(path.relative_to(FOLDER).with_suffix("")) for path in FOLDER.rglob("*.yaml") if path.parent != FOLDER
)


@pytest.fixture(autouse=True)
def as_hydra_does() -> Iterator[None]:
    with composing.nothing_kept():
        yield


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        compose_config(overrides)
    return str(error.value)


def test_the_default_is_the_quickstart():
    config = compose_config([])
    assert isinstance(config, Config)
    assert config == compose_config(["experiment=quickstart", f"run.dir={config.run.dir}"])
    assert (config.run.name, config.train.steps) == ("quickstart", 2000)
    assert set(config.model.encoders) == {"image"}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_file_composes(option, tmp_path, monkeypatch):
    group, name = option.rsplit("/", 1)
    if name == "quickstart_chat":  # it begins with a model that its recipe writes
        model = tmp_path / "data/quickstart_chat/model"
        model.mkdir(parents=True)
        draw_folder(model, {**CONFIG, "vocab_size": 300}, seed=0)
        monkeypatch.chdir(tmp_path)
    # The experiment sets these two itself: choosing the file alone would not give them.
    values = ["optim.lr=1e-3", "optim.warmup_steps=7"] if group == "optim" else []
    if name in ("from_folder", "quickstart_open"):  # of a model with a tower composing reads this alone
        model = tmp_path / "data/quickstart_open/model"
        model.mkdir(parents=True)
        rope = {"rope_theta": 1e4, "mrope_section": [8, 4, 4]}
        text = {**CONFIG, "vocab_size": 300, "rope_parameters": rope}
        (model / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", "text_config": text}))
        monkeypatch.chdir(tmp_path)
    if name == "from_folder":
        values = ["~experiment", f"start.weights={model}", "optim.lr=1e-3", "train.steps=1"]
        values.append("data.microbatch_tokens=64")
    config = compose_config([f"{group}={name}", *values])
    assert config.train.steps > 0
    assert config.model.llm.layers > 0


def test_options_are_really_chosen():
    config = compose_config(["model=llama3_1b_so400m", "layout=pp2", "cluster=h100", "tracking=jsonl"])
    assert (config.model.llm.hidden, config.model.encoders["image"]["hidden"]) == (2048, 1152)
    assert config.layout.llm.pp == 2
    assert config.cluster.name == "h100"
    assert config.tracking.kind == "jsonl"


def test_one_part_of_a_model_can_be_exchanged():
    config = compose_config(["model/llm=llama3_1b"])
    assert config.model.llm.layers == 16
    assert config.model.encoders["image"]["layers"] == 2


def test_values_are_set_by_key():
    config = compose_config(
        [
            "train.steps=5",
            "data.sources.docs.weight=3",
            "+optim.components={llm: {frozen: [[1, 2]]}}",
            "layout.llm.dp=4",
        ]
    )
    assert config.train.steps == 5
    assert config.data.sources["docs"].weight == 3
    assert config.optim.components["llm"].frozen == [[1, 2]]
    assert config.layout.llm.dp == 4


def test_an_entry_of_a_mapping_is_added_by_name():
    config = compose_config(["+optim.components.llm.lr_scale=0.1", "+data.sources.more.path=folder"])
    assert config.optim.components["llm"].lr_scale == 0.1
    assert config.data.sources["more"].path == "folder"


def test_a_folder_of_ones_own_is_composed(tmp_path):
    (tmp_path / "my own" / "experiment").mkdir(parents=True)
    (tmp_path / "my own" / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [override /model: tiny]\ntrain: {steps: 7}\n"
        "data: {microbatch_tokens: 64}\n"
    )
    config = compose_config(["experiment=mine"], str(tmp_path / "my own"))
    assert config.train.steps == 7
    with pytest.raises(ConfigError, match=r"--config-dir .*nowhere"):
        compose_config([], str(tmp_path / "nowhere"))


# A system owns the policies; each can still be chosen.


def test_a_system_chooses_its_policies():
    config = compose_config(["system=megatron"])
    assert (config.placement.policy, config.balance.policy, config.pipeline.policy) == (
        "stage0",
        "none",
        "one_f_one_b",
    )


@pytest.mark.parametrize(
    "overrides", [["system=megatron", "balance=lpt"], ["balance=lpt", "system=megatron"]]
)
def test_a_policy_can_be_chosen_beside_a_system(overrides):
    config = compose_config(overrides)
    assert (config.placement.policy, config.balance.policy) == ("stage0", "lpt")


# Mistakes are refused, naming the key.


@pytest.mark.parametrize("override", ["optim.nope=1", "nope=1", "model.llm.nope=1", "train.stpes=3"])
def test_an_unknown_key_is_refused(override):
    assert override.split("=")[0].split(".")[-1] in refusal(override)


@pytest.mark.parametrize("override", ["+optim.nope=1", "+nope=1"])
def test_a_key_without_a_meaning_cannot_be_added(override):
    assert "nope" in refusal(override)


@pytest.mark.parametrize(
    "override",
    ["train.steps=many", "optim.lr=fast", "data.record_samples=7.5", "layout.llm.pp=null", "train=3"],
)
def test_a_wrong_type_is_refused(override):
    assert override.split("=")[0] in refusal(override)


def test_an_unknown_option_is_refused_with_those_there_are():
    text = refusal("optim=nope")
    assert "optim/nope" in text
    assert "cosine" in text
    assert "wsd" in text


def test_an_unknown_group_is_refused():
    assert "nope" in refusal("nope=cosine")


def test_keys_that_nothing_sets_are_named():
    text = refusal("~experiment")
    assert "train.steps" in text
    assert "data.microbatch_tokens" in text
    assert "run.dir" not in text


def test_an_experiment_can_be_left_out():
    config = compose_config(["~experiment", "model=tiny", "data=quickstart", "train.steps=3"])
    assert (config.train.steps, config.optim.schedule, config.optim.lr) == (3, "cosine", 3e-4)


# A choice that something overrules.


@pytest.mark.parametrize("overrides", [["optim=cosine"], ["optim=cosine", "experiment=quickstart"]])
def test_a_choice_that_the_experiment_overrules_is_refused(overrides):
    text = refusal(*overrides)
    assert "optim=cosine sets optim.lr=0.0003" in text
    assert "optim.lr=0.002" in text


def test_a_choice_is_accepted_where_the_user_sets_what_overrules_it():
    config = compose_config(["optim=cosine", "optim.lr=1e-3", "optim.warmup_steps=5"])
    assert (config.optim.schedule, config.optim.lr, config.optim.warmup_steps) == ("cosine", 1e-3, 5)


def test_every_overruled_key_must_be_set():
    assert "optim.warmup_steps" in refusal("optim=cosine", "optim.lr=1e-3")


def test_setting_a_whole_node_sets_its_keys():
    config = compose_config(["optim=cosine", "optim={lr:1e-3,warmup_steps:5}"])
    assert (config.optim.schedule, config.optim.lr) == ("cosine", 1e-3)


def test_an_experiment_may_be_named_beside_values_that_change_it():
    assert compose_config(["experiment=quickstart", "train.steps=5", "optim.lr=1.0"]).optim.lr == 1.0


def test_choices_of_hydra_itself_are_none_of_ours():
    assert compose_config(["hydra/launcher=basic"]).train.steps == 2000


def test_no_wait_is_longer_than_torch_can_count():
    assert compose_config(["train.timeout_s=2592000"]).train.timeout_s == 2592000
    with pytest.raises(ConfigError, match=r"train\.timeout_s=1.*: must be at most 2592000, 30 days"):
        compose_config(["train.timeout_s=1e10"])


# Run folders.


def test_a_file_that_is_no_configuration_is_refused_by_name(tmp_path):
    path = tmp_path / "config.yaml"
    with pytest.raises(ConfigError, match=str(path)):
        load_config(path)
    path.write_bytes(b"\xff\xfe\x00train")
    with pytest.raises(ConfigError, match=f"{path} is not the configuration of a run: 'utf-8' codec"):
        load_config(path)
    path.write_text("train:\n  stpes: 3\n")
    with pytest.raises(ConfigError, match="stpes"):
        load_config(path)


def test_a_written_configuration_reads_back(tmp_path):
    config = compose_config(["train.steps=5"])
    path = tmp_path / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.structured(config), resolve=True))
    assert load_config(path) == config


def test_a_cluster_file_of_a_former_version_is_refused_with_its_remedy(tmp_path):
    (tmp_path / "cluster").mkdir()
    path = tmp_path / "cluster" / "mine.yaml"
    for flops, share, key in (("8", "0.5", "flops"), ("{fp32: 8}", "0.5", "efficiency")):
        path.write_text(f"name: mine\nflops: {flops}\nefficiency: {share}\n")
        with pytest.raises(
            ValueError, match=rf"cluster\.{key}: one number .* before 2026-11-24.*omni calibrate"
        ):
            compose_config(["cluster=mine"], str(tmp_path))


# Keys that have another name than they had.


def nested(key: str, value: object) -> dict:
    """Mappings of one key each around a value; where [] stands, a list of one entry."""
    name, _, rest = key.partition(".")
    inner = nested(rest, value) if rest else value
    return {name.removesuffix("[]"): [inner] if name.endswith("[]") else inner}


VALUES = {old: 2 if old.endswith("parts") else "auto" for old in RENAMED}


@pytest.mark.parametrize("old, new", RENAMED.items())
def test_a_key_of_before_is_refused_with_its_name_of_now(tmp_path, old, new):
    value = VALUES[old]
    section, _, key = old.rpartition(".")
    override = f"{section[:-2]}=[{{{key}: {value}}}]" if section.endswith("[]") else f"{old}={value}"
    for text in (override, f"+{override}"):
        assert f"{old} is {new} now" in refusal(text)
    (tmp_path / "experiment").mkdir()
    own = f"# @package _global_\n{OmegaConf.to_yaml(nested(old, value))}"
    (tmp_path / "experiment" / "mine.yaml").write_text(own)
    with pytest.raises(ConfigError, match=re.escape(f"{old} is {new} now")):
        compose_config(["experiment=mine"], str(tmp_path))


@pytest.mark.parametrize("old, new", RENAMED_OPTIONS.items())
def test_an_option_of_before_is_refused_with_its_name_of_now(tmp_path, old, new):
    before, now = old.replace("/", "="), new.replace("/", "=")
    assert f"{before} is {now} now" in refusal(before)
    (tmp_path / "experiment").mkdir()
    group, _, option = old.partition("/")
    own = f"# @package _global_\ndefaults:\n  - override /{group}: {option}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(own)
    with pytest.raises(ConfigError, match=f"{before} is {now} now"):
        compose_config(["experiment=mine"], str(tmp_path))
    compose_config([now])


@pytest.mark.parametrize("old, new", RENAMED.items())
def test_a_run_that_was_saved_with_a_key_of_before_is_read(tmp_path, old, new):
    saved = OmegaConf.structured(compose_config([]))
    values = OmegaConf.create(OmegaConf.to_container(saved))
    value, entry = VALUES[old], new.replace("[]", "[0]")
    section, _, key = old.rpartition(".")
    if section.endswith("[]"):
        values = OmegaConf.merge(values, nested(old, value))
    else:
        own = OmegaConf.select(values, section)
        del own[new.rpartition(".")[2]]
        own[key] = value
    OmegaConf.save(values, tmp_path / "config.yaml")
    assert OmegaConf.select(OmegaConf.structured(load_config(tmp_path / "config.yaml")), entry) == value


KEPT = (
    ["run.dir=one"],
    ["run.dir=one", "layout=pp2", "train.steps=7", "train.steps=8", "data.sources=null"],
    ["run.dir=two", "layout=pp2", "model={llm: {layers: 3}}", "+data.sources.a.path=x"],
    ["~experiment", "run.dir=two", "system=megatron", "model=tiny"],
    ["run.dir=one", "layout=pp2", "train.stepz=7"],
    ["run.dir=one", "layout=mine"],
    ["run.dir=one", "+optim.components=[1"],
)


def composed(overrides: list[str], folder: str | None = None) -> Config | str:
    try:
        return compose_config(overrides, folder)
    except ConfigError as error:
        return str(error)


def test_what_tests_keep_of_a_composition_changes_nothing(tmp_path):
    (tmp_path / "layout").mkdir()
    (tmp_path / "layout" / "mine.yaml").write_text("llm: {pp: 4}")
    lines = [(line, folder) for folder in (None, str(tmp_path)) for line in KEPT]
    expected = [composed(*line) for line in lines]
    assert any(isinstance(one, str) for one in expected)
    composing.remember()
    for _ in range(2):
        assert [composed(*line) for line in lines] == expected
    for saved in (one for one in expected if isinstance(one, Config)):
        assert compose_saved(saved, ["train.seed=3"])[0] == with_values(saved, {"train.seed": 3})
    changed = compose_config(KEPT[0])
    changed.model.llm.layers += 1
    changed.data.sources.clear()
    assert composed(KEPT[0]) == expected[0], "each has a copy"

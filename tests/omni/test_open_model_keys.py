"""Which model a `config.json` means: each key counts, what is not known is refused before ranks start."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from open_model_folders import FAMILIES, changed, make, transformers
from ranks import RankPool

from dataloader.format import Sample
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter
from omni.__main__ import main
from omni.compose import compose_config
from omni.config import Config, ConfigError
from omni.llm_config import LLMConfig
from omni.models.llm_pack import pack_llm
from omni.models.llm_stage import LLMStage, MicrobatchInputs
from omni.models.regions import all_parameters
from omni.open_models.folder import INDEX, Folder, check_same, config_of, open_folder
from omni.rank.folder_weights import DTYPES
from omni.training.export_folder import plain_tensors
from omni.training.start import check_start
from parallel.layout import Layout
from parallel.megatron import ProcessGroupCollection, model_parallel_cuda_manual_seed
from parallel.packed import Sharding

TOLERANCE = 1e-5
LENGTHS = (37, 5, 90, 1)
# YaRN as DeepSeek scales its latent attention's.
MSCALE = {
    **{"rope_type": "yarn", "rope_theta": 1.0, "factor": 4.0, "original_max_position_embeddings": 64},
    **{"mscale": 0.7, "mscale_all_dim": 1.0},
}
GROUPS = (
    *("tp", "cp", "pp", "dp", "dp_cp", "tp_cp", "tp_dp_cp"),
    *("ep", "tp_ep", "expt_tp", "expt_dp", "embd", "pos_embd", "pool"),
)
# What each key of ours that a family sets would be if it were forgotten.
FORGOTTEN = {
    "llama": {"norm_eps": 1e-5, "rotary_base": 10000.0},
    "qwen2": {"norm_eps": 1e-5, "rotary_base": 10000.0, "qkv_bias": False},
    "qwen3": {"norm_eps": 1e-5, "rotary_base": 10000.0, "qk_norm": False},
    "mixtral": {"moe.topk": 1, "moe.score": "sigmoid", "rotary_base": 10000.0},
    "qwen3_moe": {"moe.topk": 3, "moe.score": "sigmoid", "qk_norm": False},
    "llama 3.1": {
        **{"rotary.scaling": "linear", "rotary.factor": 4.0, "rotary.trained_tokens": 100},
        **{"rotary.slow": 2.0, "rotary.fast": 32.0},
    },
    "qwen2 yarn": {
        **{"rotary.attention_factor": 1.0, "rotary.scaling": "llama3", "rotary.factor": 2.0},
        **{"rotary.truncate": False, "rotary.trained_tokens": 32},
    },
    "qwen2 windows": {"window": 13, "attention": ["window", "full"]},
    "gemma3_text": {
        **{"window": 13, "attention": ["window", "full"], "rotary.window_base": None, "norms": "before"},
        **{"norm_zero_centered": False, "activation": "gelu", "embedding_scale": 1.0},
        **{"attention_scale": None, "rotary.scaling": "none", "qk_norm": False},
    },
    "gpt_oss": {
        **{"sinks": False, "ffn_bias": False, "activation": "silu", "activation_clamp": None},
        **{"gate_offset": 0.0, "attention": ["full", "window"], "window": 13, "rotary.truncate": True},
        **{"moe.topk": 1, "moe.score": "sigmoid", "rotary.attention_factor": 1.0},
    },
    "olmo3": {"qk_norm": False, "rotary.window_base": None, "window": 13},
    "smollm3": {"rotary.layers": [True]},
    "qwen2_moe": {"moe.normalise": True, "moe.shared_gate": False, "moe.shared_ffn": 0},
    "qwen3_moe plain": {"moe.normalise": True},
    "llama biases": {"qkv_bias": False, "output_bias": False},
    "llama all biases": {"ffn_bias": False},
    "mistral windows": {"window": 23, "attention": ["full"]},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made: dict[str, tuple[Path, torch.nn.Module]] = {}

    def model(family: str) -> tuple[Path, torch.nn.Module]:
        if family not in made:
            folder = tmp_path_factory.mktemp("model") / family
            made[family] = folder, make(family, folder)
        return made[family]

    return model


def llm_of(keys: dict) -> LLMConfig:
    return config_of(keys, vocab_multiple=1)


def full(folder: Folder, name: str) -> torch.Tensor:
    """A parameter of ours, put together the plain way."""
    rule = folder.rules[name]
    if (slab := rule.slab) is not None:
        of = folder.tensors[rule.theirs[0]]
        data = bytearray(folder.storage.read(of.file)[of.start : of.stop])
        own = torch.frombuffer(data, dtype=DTYPES[of.dtype]).view(of.shape)[slab.index]
        own = own.t() if slab.transposed else own
        return torch.cat((own[::2], own[1::2])) if slab.parts == 2 else own
    ours = torch.zeros(rule.shape)
    for theirs, runs in zip(rule.theirs, rule.runs, strict=True):
        of = folder.tensors[theirs]
        data = bytearray(folder.storage.read(of.file)[of.start : of.stop])
        values, at = torch.frombuffer(data, dtype=DTYPES[of.dtype]).view(of.shape), 0
        for start, length in runs:
            ours[start : start + length] = values[at : at + length]
            at += length
    return ours


@torch.no_grad()
def logits(
    rank: int, url: str, forgotten: dict, ids: torch.Tensor, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits of one pack of sequences of LENGTHS by our layers, with keys of the folder but for some."""
    model_parallel_cuda_manual_seed(0, tp_rank=0, ep_rank=0, etp_rank=0)
    groups = ProcessGroupCollection()
    for name in GROUPS:
        setattr(groups, name, dist.group.WORLD)
    folder = open_folder(url)
    config = llm_of({**folder.keys, **forgotten})
    device = torch.device("cpu")
    sizes = {"vocab_size": 260, "num_sources": 1, "dtype": torch.float32, "device": device}
    stage = LLMStage(config, Layout(), groups=groups, **sizes)
    part = stage.virtual_stages[0]
    for named in all_parameters({0: part.model}, {0: part.numbering}):
        named.own.copy_(full(folder, named.name))
    if positions is None:
        positions = torch.cat([torch.arange(length) for length in LENGTHS])
    packed = pack_llm(config, Sharding.whole(LENGTHS), positions, dtype=torch.float32, device=device)
    inputs = MicrobatchInputs(packed, ids=ids[None])
    hidden = part.model.decoder(stage.embed(inputs).unsqueeze(1), None, packed_seq_params=packed)
    return F.linear(hidden.squeeze(1), stage.output_weight)


SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in FORGOTTEN if family != "qwen3_moe"]


@pytest.mark.parametrize("family", ["qwen3_moe", *SLOW])
def test_logits_of_a_pack_are_those_of_its_sequences_and_each_key_counts(ranks: RankPool, models, family):
    folder, model = models(family)
    ids = torch.randint(0, 272, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        plain = torch.cat([model(part[None]).logits[0] for part in ids.split(LENGTHS)])

    def away(forgotten: dict) -> float:
        found = ranks.run(1, logits, str(folder), forgotten, ids)[0]
        return float((found - plain).abs().max() / plain.abs().max())

    assert away({}) < TOLERANCE
    for key, value in FORGOTTEN[family].items():
        assert away({key: value}) > 10 * TOLERANCE, key


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_are_taken_from_the_folder(models, family):
    folder, _ = models(family)
    config = compose_config(
        ["~experiment", "system=multiplexed", f"start.weights={folder}", "train.steps=1", *data_keys()]
    )
    llm = config.model.llm
    check_same(open_folder(str(folder)), llm)
    assert (llm.layers, llm.vocab, llm.norm_eps) == (4, 273 if "odd" in family else 272, 0.02)
    bases = {"llama 3.1": 500.0, "gemma3_text": 500.0, "qwen2 yarn": 900.0, "gpt_oss": 900.0, "olmo3": 900.0}
    assert llm.rotary_base == bases.get(family, 30.0)
    assert llm.qkv_bias == (family.startswith("qwen2") or "biases" in family or family == "gpt_oss")
    assert llm.qk_norm == family.startswith(("qwen3", "gemma", "olmo"))
    assert llm.moe.dense_layers == (family == "qwen3_moe")


def data_keys() -> list[str]:
    return ["data.microbatch_tokens=160", "optim.lr=1e-3", "+data.sources.texts.path=none"]


def test_keys_of_earlier_files_mean_the_same(models, tmp_path):
    folder = copied(models("qwen3_moe")[0], tmp_path)
    keys = open_folder(str(folder)).keys
    changed(
        folder,
        rope_parameters=...,
        rope_theta=30,
        rope_scaling=None,
        num_local_experts=...,
        num_experts=4,
        torch_dtype="bfloat16",
        dtype=...,
    )
    assert open_folder(str(folder)).keys == keys


WRONG = [("llama", "four"), ("llama", -1), ("qwen3", 1.5), ("qwen3_moe", True), ("mixtral", 10**30)]


def copied(folder: Path, where: Path) -> Path:
    return Path(shutil.copytree(folder, where / "copy"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.llm.layers=2", r"model.llm.layers=2 contradicts start.weights=.* means 4"),
        ("model.llm.norm_eps=1e-5", r"model.llm.norm_eps=1e-05 contradicts .* means 0.02"),
        ("model.llm.moe.experts=4", r"model.llm.moe.experts=4 contradicts .* means 0"),
        ("model.llm.qk_norm=true", r"model.llm.qk_norm=True contradicts"),
        ("model/llm=llama3_1b", r"model.llm.layers=16 contradicts .* the choice of model"),
    ],
)
def test_a_key_that_contradicts_the_folder_is_refused(models, override, words):
    folder, _ = models("llama")
    override = f"+{override}" if override.startswith("model/") else override
    with pytest.raises(ConfigError, match=words):
        compose_config(
            [
                "~experiment",
                "system=multiplexed",
                f"start.weights={folder}",
                "train.steps=1",
                *data_keys(),
                override,
            ]
        )


@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}}, "llama3 needs factor"),
        ("llama", {"rope_parameters": ..., "rope_theta": 1, "rope_scaling": {"type": "yarn"}}, "yarn needs"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, "'longrope' is not"),
        ("llama", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "'spiral' is not trained"),
        ("llama", {"rope_parameters": ..., "rope_theta": 1, "rope_scaling": {"type": "su"}}, "'su' is not"),
        ("llama", {"rope_parameters": MSCALE}, "'mscale': 0.7, 'mscale_all_dim': 1.0.* does not have these"),
        ("llama", {"rope_parameters": {"rope_theta": 1.0, "mrope_section": [1]}}, "does not have these"),
        ("llama", {"rope_parameters": {"rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "whole heads"),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, r"quantization_config \(fp8\)"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True is not trained: with attention_bias=False"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' is not trained"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1 is not trained"),
        ("llama", {"logit_scale": 0.5}, "logit_scale=0.5 means nothing to this family"),
        ("llama", {"model_type": "gemma9"}, "model_type='gemma9' is no family that is known here"),
        ("llama", {"hidden_size": ...}, "says no hidden_size"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 4}, "layers of sliding_attention need one"),
        ("qwen2", {"layer_types": ["linear_attention"] * 4}, "layers are of full_attention"),
        ("qwen3_moe", {"mlp_only_layers": [2]}, r"mlp_only_layers=\[2\] is not trained"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not trained"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not trained"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits=True is not trained"),
        *((family, {"hidden_size": of}, "hidden_size=.* whole number") for family, of in WRONG),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads=0 must be a whole number of at least 1"),
        ("llama", {"rope_parameters": "x"}, "cannot read .*rope_parameters='x': take the file"),
        ("llama", {"rope_parameters": {"rope_theta": "x"}}, "cannot read .*to float: 'x'"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "cannot read .*mlp_only_layers=1"),
        ("qwen3", {"layer_types": -1}, "cannot read .*layer_types=-1"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8", "weight_block_size": ["a", 0]}}, "fp8"),
    ],
)
def test_what_config_json_may_not_say(models, tmp_path, family, values, words):
    folder = copied(models(family)[0], tmp_path)
    changed(folder, **values)
    with pytest.raises(ConfigError, match=words):
        open_folder(str(folder))


@pytest.mark.parametrize(
    ("model_type", "values", "words"),
    [
        ("deepseek_v3", {}, "'deepseek_v3' is not trained: kv_lora_rank=512 means latent attention"),
        ("gemma4_text", {}, "'gemma4_text' is not trained: hidden_size_per_layer_input=256 means embeddings"),
        ("gemma4", {}, "'gemma4' is not trained: hidden_size_per_layer_input=256 means"),
        (
            "gemma4_text",
            {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 4},
            "'gemma4_text' is not trained: num_kv_shared_layers=4 means layers that share keys",
        ),
    ],
)
def test_what_no_layer_computes_is_refused_by_the_key_that_says_it(tmp_path, model_type, values, words):
    transformers.AutoConfig.for_model(model_type, **values).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=words):
        open_folder(str(tmp_path))


def rename(folder: Path, before: bytes, after: bytes) -> None:
    for path in folder.glob("*.safetensors"):
        path.write_bytes(path.read_bytes().replace(before, after))


def headed(described: dict) -> Callable[[Path], None]:
    """Give the first file of weights another header."""

    def change(folder: Path) -> None:
        header = json.dumps(described).encode()
        path = min(folder.glob("*.safetensors"))
        path.write_bytes(len(header).to_bytes(8, "little") + header)

    return change


def overlapping(folder: Path) -> None:
    headed({of: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for of in "ba"})(folder)
    path = min(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes() + b"1234")


def instead_of_a_file(folder: Path) -> None:
    path = min(folder.glob("*.safetensors"))
    path.unlink()
    path.mkdir()


def cut_short(folder: Path) -> None:
    path = min(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-10])


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda f: (f / "config.json").unlink(), r"there is no config.json"),
        (
            lambda f: min(f.glob("*.safetensors")).unlink(),
            r"it lacks model-00001-of-.*Fetch the missing files",
        ),
        (lambda f: [p.unlink() for p in f.glob("*.safetensors*")], r"it lacks model.safetensors"),
        (cut_short, r"model-00001-of-.* is cut short"),
        (lambda f: min(f.glob("*.safetensors")).write_bytes(b"no"), r"no whole file of safetensors"),
        (headed({"w": {"dtype": "F32"}}), r"header of model-00001-of-.* cannot be read"),
        (headed({"w": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}), r"is cut short"),
        (lambda f: rename(f, b"s.0.mlp.up_proj", b"s.0.mlp.xx_proj"), r"it holds model.layers.0.mlp.xx_proj"),
        (lambda f: changed(f, num_hidden_layers=5), r"it lacks model.layers.4.*which config.json means"),
        (
            lambda f: changed(f, intermediate_size=97),
            r"has shape \(96, 64\), and config.json means \(97, 64\)",
        ),
        (lambda f: rename(f, b'"F32"', b'"I32"'), r"is of I32: numbers are read as F32, BF16, F16"),
        (
            lambda f: changed(f, tie_word_embeddings=True),
            r"it holds lm_head.weight, which config.json does not",
        ),
        (overlapping, r"model-00001-of-.* has [ab] elsewhere than behind"),
        (lambda f: (f / INDEX).write_text('{"weight_map": {"w": 3}}'), "says nothing of where weights are"),
        (lambda f: (f / INDEX).write_text("[" * 100_000), r"index.json cannot be read"),
        (lambda f: (f / "config.json").write_text('{"a":' * 100_000), r"config.json cannot be read"),
        (instead_of_a_file, r"it lacks model-00001-of-.*Fetch the missing files"),
    ],
)
def test_a_folder_that_is_not_whole_is_refused(models, tmp_path, harm, words):
    folder = copied(models("llama")[0], tmp_path)
    harm(folder)
    with pytest.raises(ConfigError, match=words):
        open_folder(str(folder)).check()


def test_tensors_are_told_in_the_order_in_which_they_lie(models, tmp_path):
    """Exports write them one after the other, behind the same header, whose order may be another."""
    folder = copied(models("qwen3")[0], tmp_path)
    path = max(folder.glob("*.safetensors"), key=lambda of: of.stat().st_size)
    raw = path.read_bytes()
    size = 8 + int.from_bytes(raw[:8], "little")
    header = json.dumps(dict(reversed(json.loads(raw[8:size]).items()))).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[size:])
    source = open_folder(str(folder))
    source.check()
    for file, tensors in plain_tensors(source).items():
        starts = [of.start for _, of in tensors]
        assert starts == sorted(starts), file
        assert len(starts) > 1 or file != path.name


def test_a_plan_says_which_files_a_run_would_miss(models, tmp_path, capsys):
    folder = shutil.copytree(models("qwen3")[0], tmp_path / "model")
    line = ["~experiment", "system=multiplexed", f"start.weights={folder}", "data.step_samples=2"]
    line += ["data.microbatch_tokens=64", "train.steps=1", "optim.lr=1e-3", "launch.ranks=1"]
    assert main(["plan", "--trace", "32", *line]) == 0
    assert "would be refused" not in capsys.readouterr().err
    next(folder.glob("*.safetensors")).unlink()
    assert main(["plan", "--trace", "32", *line]) == 0
    assert f"note: a run would be refused: start.weights={folder}: " in capsys.readouterr().err


def test_what_does_not_go_together_is_refused(models):
    folder, _ = models("llama")
    config = Config()
    config.start.weights = str(folder)
    config.model.llm = llm_of(dict(open_folder(str(folder)).keys))
    assert check_start(SimpleNamespace(config=config, encoders={})) == ("llm",)
    config.model.llm = replace(config.model.llm, vocab_multiple=16, rotary_base=1.0)
    with pytest.raises(ConfigError, match=r"model.llm.rotary_base=1.0 contradicts"):
        check_start(SimpleNamespace(config=config, encoders={}))
    config.start.optimizer = True
    with pytest.raises(ConfigError, match=r"leave one out"):
        check_start(SimpleNamespace(config=config, encoders={}))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda f: min(f.glob("*.safetensors")).unlink(), "it lacks model-00001-of"),
        (lambda f: rename(f, b"s.0.mlp.up_proj", b"s.0.mlp.xx_proj"), "choose a folder without, or a family"),
        (lambda f: changed(f, intermediate_size=97), "take the config.json that the weights came with"),
        (
            lambda f: changed(f, rope_parameters={"rope_type": "longrope", "rope_theta": 1.0}),
            "'longrope' is not trained: frequencies are scaled by default",
        ),
    ],
)
def test_a_run_is_refused_before_ranks_start(models, tmp_path, capsys, harm, words):
    folder = copied(models("llama")[0], tmp_path)
    harm(folder)
    with DatasetWriter(tmp_path / "texts", ByteTokenizer()) as writer:
        writer.add(Sample("one", "a text"))
    keys = [f"start.weights={folder}", f"+data.sources.texts.path={tmp_path / 'texts'}", *data_keys()[:2]]
    run = tmp_path / "run"
    more = ["data.step_samples=1", "train.steps=1", "tracking=jsonl", f"run.dir={run}"]
    assert main(["train", "~experiment", "system=multiplexed", *keys, *more]) == 2
    assert words in capsys.readouterr().err
    assert not run.exists()


def test_a_tokenizer_that_is_larger_than_the_embedding_is_refused_before_ranks_start(tmp_path, capsys):
    make("llama", tmp_path / "model", vocab_size=259)
    with DatasetWriter(tmp_path / "texts", ByteTokenizer()) as writer:
        writer.add(Sample("one", "a text"))
    run, texts = tmp_path / "run", tmp_path / "texts"
    keys = [f"start.weights={tmp_path / 'model'}", f"+data.sources.texts.path={texts}", *data_keys()[:2]]
    more = ["data.step_samples=1", "train.steps=1", "tracking=jsonl", f"run.dir={run}"]
    assert main(["train", "~experiment", *keys, *more]) == 2
    assert "model.llm.vocab=259 is too small for the tokenizer's 260 ids" in capsys.readouterr().err
    assert not run.exists()


def test_names_of_the_folder_are_those_of_its_index(models):
    folder, _ = models("qwen3")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert index.keys() == open_folder(str(folder)).names.keys()

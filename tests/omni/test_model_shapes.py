"""The shapes of published models: their parameters against published counts, and plans of some."""

import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import hydra_conf
from omni.__main__ import main
from omni.keys import check_keys
from omni.llm_config import LLMConfig
from omni.models.blocks import EncoderPart
from omni.models.llm import llm_work
from omni.models.registry import make_encoder
from omni.planning.work import num_parameters
from parallel.layout import Layout
from parallel.work import Part, even_load

FOLDER = Path(hydra_conf.__file__).parent / "model"
B, M = 10**9, 10**6
# Published parameters, and the unit that they are rounded to.
LLMS = {
    "llama3_1b": (1.23 * B, B // 100),
    "llama3_3b": (3.21 * B, B // 100),
    "llama3_8b": (8.03 * B, B // 100),
    "llama3_70b": (70_553_706_496, 1),
    "llama3_405b": (405 * B, B),
    "qwen2_5_7b": (7.61 * B, B // 100),
    # The model card says 32.5 B; the sizes that it gives make 32.76 B, as the released tensors do.
    "qwen2_5_32b": (32_763_876_352, 1),
    "qwen2_5_72b": (72.7 * B, B // 10),
    "qwen3_8b": (8.2 * B, B // 10),
    "qwen3_32b": (32.8 * B, B // 10),
    "qwen3_30b_a3b": (30.5 * B, B // 10),
    "qwen3_235b_a22b": (235 * B, B),
    "gpt_175b": (175 * B, B),
    "gpt_530b": (530 * B, B),
    "deepseek_v3": (671 * B, B),
    "gpt_oss_120b": (116.83 * B, B // 100),
    "mixtral_8x7b": (46.7 * B, B // 10),
}
# Megatron-LM's weak scaling: layers, hidden, heads and ffn of gpt.yaml by the parameters in its table.
GPTS = {
    1.7: (24, 2048, 16, 8192),
    7.1: (30, 4096, 32, 16384),
    16: (32, 6144, 48, 24576),
    32: (48, 7168, 56, 28672),
    70: (84, 8192, 64, 32768),
    119: (92, 10240, 80, 40960),
    177: (96, 12288, 96, 49152),
    314: (96, 16384, 128, 65536),
    462: (112, 18432, 144, 73728),
}
# Published parameters of encoders, in millions, their unit, and those that ours lacks, with the reason.
ENCODERS = {
    "vit_l14": (303.97, 0.01, 0.0, ""),
    "vit_so400m": (427.68, 0.01, 15.2, "a pooling head of attention and an MLP"),
    "vit_h14": (632.08, 0.01, 0.0, ""),
    "internvit_300m": (304, 1, 0.0, ""),
    "internvit_6b": (5540, 1, 0.0, ""),
    "eva_clip_8b": (7500, 100, 0.0, ""),
    "vit_22b": (21743, 1, 0.0, ""),
    "whisper_large_v3": (640, 10, 1.9, "1,500 learned positions"),
    "vit_1b": (1000, 1000, 0.0, "no shape is published"),
    "vit_2b4": (2400, 100, 0.0, "no shape is published"),
    "vit_10b": (10000, 1000, 0.0, "no shape is published"),
}
# What counts are of: Llama 3.2 1B has the tokenizer's ids here, DeepSeek-V3 counts without its further layer.
KEYS: dict[str, dict[str, int]] = {"llama3_1b": {"vocab": 128256}, "deepseek_v3": {"mtp": 0}}
OF_WHOLE_MODELS = {"qwen2_vl_vit", "qwen2_5_vl_vit"}  # published with their projector, or in a model


def llm_of(name: str, **more: Any) -> LLMConfig:
    """The LLM of a file, with other values by key."""
    values = OmegaConf.merge(
        OmegaConf.structured(LLMConfig), OmegaConf.load(FOLDER / f"llm/{name}.yaml"), more
    )
    llm: Any = OmegaConf.to_object(values)
    check_keys("model.llm", llm)
    return llm


def parameters(llm: LLMConfig) -> int:
    return num_parameters(llm, {}, 260)["llm"]


def encoder_part(name: str) -> EncoderPart:
    """An encoder by its file, in front of an LLM of 3,584."""
    options: Any = OmegaConf.to_container(OmegaConf.load(FOLDER / f"encoder/{name}.yaml"))
    part: Any = make_encoder("image", options).work(3584, 1)
    return part


def size(part: Part) -> int:
    return sum(weight.elements for weight in part.weights())


def assert_published(found: float, published: float, unit: float) -> None:
    """Within 0.5 %, or what rounding leaves open."""
    assert abs(found - published) <= max(0.005 * published, unit / 2)


def test_every_file_is_compared() -> None:
    files = {path.stem for path in (FOLDER / "llm").glob("*.yaml")} - {"tiny", "gpt"}
    assert set(LLMS) == files
    files = {path.stem for path in (FOLDER / "encoder").glob("*.yaml")} - {"vit_tiny", "audio_tiny"}
    assert set(ENCODERS) | OF_WHOLE_MODELS == files


@pytest.mark.parametrize("name", LLMS)
def test_an_llm_has_the_parameters_that_are_published(name: str) -> None:
    assert_published(parameters(llm_of(name, **KEYS.get(name, {}))), *LLMS[name])


def test_megatrons_gpts_are_keys_of_one_file() -> None:
    page = (FOLDER / "llm/gpt.yaml").read_text()
    for billions, (layers, hidden, heads, ffn) in GPTS.items():
        sizes = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads, "ffn": ffn}
        # Some are rounded up and some down.
        found = parameters(llm_of("gpt", **sizes)) / B
        assert found == pytest.approx(billions, abs=0.1 if billions < 10 else 1)
        row = f"{billions} B {layers} {hidden} {heads} {ffn}"
        assert any(line.strip("# ").split() == row.split() for line in page.splitlines()), row


@pytest.mark.parametrize("name", ENCODERS)
def test_an_encoder_has_the_parameters_that_are_published(name: str) -> None:
    published, unit, lacks, _ = ENCODERS[name]
    part = encoder_part(name)
    projector = sum(weight.elements for weight in part.tail[-1].weights())
    assert_published((size(part) - projector) / M + lacks, published, unit)


def test_qwens_encoders_have_their_parameters_with_their_projectors() -> None:
    assert_published(size(encoder_part("qwen2_vl_vit")) / M, 675, 1)
    whole = parameters(llm_of("qwen2_5_7b")) + size(encoder_part("qwen2_5_vl_vit"))
    assert_published(whole, 8.29 * B, B // 100)


def test_deepseek_v3_has_its_further_layer() -> None:
    # 685 B are published with it, and with a copy of embedding and output: 129,280 ids of 7,168.
    found = parameters(llm_of("deepseek_v3")) + 2 * 129_280 * 7168
    assert_published(found, 685 * B, B)


@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("mixtral_8x7b", 12.9),
        ("qwen3_30b_a3b", 3.3),
        ("qwen3_235b_a22b", 22),
        ("deepseek_v3", 37),
    ],
)
def test_a_token_multiplies_with_the_parameters_that_are_published(name: str, published: float) -> None:
    # The embedding counts among them, though nothing is multiplied with it. Some are rounded down.
    llm = llm_of(name, **KEYS.get(name, {}))
    assert llm.vocab is not None
    (part,) = llm_work(llm, 260, Layout(), 2)
    tokens = 720_720
    used = part.forward(even_load(tokens, targets=tokens, routed=(tokens,))).flops / (2 * tokens)
    assert (used + llm.vocab * llm.hidden) / B == pytest.approx(published, rel=0.02)


# FLOP/s and tokens/s of a GPU, as Megatron-Bridge publishes them (docs/performance-summary.md, its archive),
# for containers 25.11, 26.06, 25.11, 26.08 and 26.08.
@pytest.mark.parametrize(
    ("name", "length", "teraflops", "tokens_per_s"),
    [
        ("llama3_8b", 8192, 1933, 37_556),
        ("llama3_405b", 8192, 2403, 952),
        ("deepseek_v3", 4096, 961, 3848),
        ("gpt_oss_120b", 4096, 1077, 33_024),
        ("qwen3_30b_a3b", 4096, 1029, 44_544),
    ],
)
def test_a_token_takes_the_flops_that_published_runs_count(
    name: str, length: int, teraflops: int, tokens_per_s: int
) -> None:
    (part,) = llm_work(llm_of(name, **KEYS.get(name, {})), 260, Layout(), 2)
    load = even_load(length, length**2, targets=length, routed=(length,) * part.ep)
    assert 3 * part.forward(load).flops / length == pytest.approx(1e12 * teraflops / tokens_per_s, rel=0.005)


PLANNED = {
    "deepseek_v3": ["layout.llm.tp=2", "layout.llm.pp=4", "layout.llm.ep=16", "train.precision=fp8"],
    "gpt_oss_120b": ["layout.llm.pp=2", "layout.llm.ep=8", "train.precision=mxfp8"],
    "gpt_175b": ["layout.llm.tp=8", "layout.llm.pp=8"],
}


@pytest.mark.parametrize("name", PLANNED)
def test_plans_take_what_cannot_be_trained_yet(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [
        "~experiment",
        "system=multiplexed",
        "model=qwen2_5_vl_7b",
        f"model/llm={name}",
        "cluster=b200",
        "cluster.memory_bytes=null",
        "launch.ranks=64",
        "data.microbatch_tokens=8192",
        "data.step_samples=64",
        "data.on_long=truncate",
        "train.steps=1",
        "optim.lr=1e-4",
        *PLANNED[name],
    ]
    assert main(["plan", "--json", "--trace", "longtail", *overrides]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 0.001 < found["simulated_mfu"] < 0.6
    assert found["precision"] == (["bf16", *[of[16:] for of in PLANNED[name] if "precision" in of]])[-1]

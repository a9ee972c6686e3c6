import io
import re
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from ranks import RankPool
from small import overrides, write_mixed

from dataloader.format import Item, SampleError
from omni.compose import compose_config
from omni.config import ConfigError
from omni.keys import check_keys
from omni.llm_config import LLMConfig
from omni.models.blocks import EncoderPart
from omni.models.encoders.vit import ViTConfig, ViTEncoder
from omni.models.initialise import initialise
from omni.models.llm import check_llm_layout, padded_vocabulary
from omni.models.regions import Numbering
from omni.models.registry import make_encoder, naming, registered
from omni.planning.prepare import prepare_run
from omni.rank.anchors import EncoderAnchor
from omni.rank.inputs import EncoderBatchInputs
from parallel.layout import Layout
from parallel.packed import PackedTokens, Sharding
from parallel.work import Grad, Weight, even_load


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.sampled_from([1, 3]), st.integers(4, 400))
def test_preprocessing_gives_the_counted_tokens(
    height: int, width: int, channels: int, max_tokens: int
) -> None:
    encoder = ViTEncoder(ViTConfig(patch=4, merge=2, channels=channels, max_tokens=max_tokens))
    tokens, rows = encoder.count((height, width))
    arrays = encoder.preprocess(np.zeros((height, width, 3), np.uint8))
    values = encoder.transfer(arrays.values, torch.device("cpu"))
    assert values.shape == (tokens, 16 * channels)
    assert arrays.positions.shape == (tokens, 2)
    assert tokens == 4 * rows
    assert tokens <= max(max_tokens, 4)


def test_patches_of_a_window_are_neighbours_and_hold_their_pixels() -> None:
    encoder = ViTEncoder(ViTConfig(patch=2, merge=2, channels=1, mean=0.0, std=1.0))
    image = np.arange(8 * 12, dtype=np.uint8).reshape(8, 12, 1)
    arrays = encoder.preprocess(image)
    assert [tuple(p) for p in arrays.positions[:8]] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3), (1, 2), (1, 3),
    ]  # fmt: skip
    ready = encoder.transfer(arrays.values, torch.device("cpu"))
    for values, (row, column) in zip(ready, arrays.positions, strict=True):
        patch = image[2 * row : 2 * row + 2, 2 * column : 2 * column + 2, 0]
        np.testing.assert_allclose(values * 255, patch.ravel(), rtol=1e-5)


def test_aspect_is_kept() -> None:
    encoder = ViTEncoder(ViTConfig(patch=14, merge=2, max_tokens=1024))
    assert encoder.grid((28, 280)) == (2, 20)
    rows, columns = encoder.grid((3000, 1000))
    assert 2.5 < rows / columns < 3.5
    with pytest.raises(SampleError, match="max_side"):
        ViTEncoder(ViTConfig(patch=2, max_side=8)).grid((4, 100))


def test_decoding_keeps_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    decoded = ViTEncoder(ViTConfig()).decode(Item("image", "png", (5, 7), out.getvalue()))
    np.testing.assert_array_equal(decoded[..., 0], pixels)


def test_the_registry_finds_encoders_and_explains_mistakes() -> None:
    assert "vit" in registered()
    assert isinstance(make_encoder("image", {"name": "vit", "layers": 3}), ViTEncoder)
    target = "omni.models.encoders.vit.ViTEncoder"
    assert isinstance(make_encoder("image", {"_target_": target}), ViTEncoder)
    for options, words in (
        ({"name": "nope"}, "model.encoders.image.name=nope"),
        ({}, "give either name"),
        ({"_target_": "omni.nope.Encoder"}, "cannot be imported"),
        ({"name": "vit", "colour": 1}, "colour"),
        ({"name": "vit", "layers": "two"}, "layers"),
        ({"name": "vit", "heads": 3}, "heads=3"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_encoder("image", options)


def test_encoders_are_described_without_megatron() -> None:
    """Its import takes seconds, and a package's module imports the door at its top."""
    made = "[make_encoder('x', {'name': name}) for name in registered() if name in ('audio', 'vit')]"
    code = (
        "import sys; import omni.encoders; from omni.models.registry import make_encoder, registered; "
        f"{made}; sys.exit(any(m.partition('.')[0] == 'megatron' for m in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Unnamed:
    """An encoder whose messages do not call its keys as the contract says."""

    @dataclass
    class Config:
        bands: int = 1

    def __init__(self, config: Config) -> None:
        raise ConfigError(f"bands={config.bands} are too few")


def test_a_mistake_is_said_to_be_in_an_encoder_by_its_name_in_the_model() -> None:
    with pytest.raises(ConfigError, match=r"^model\.encoders\.picture\.heads=3: hidden=64"):
        make_encoder("picture", {"name": "vit", "heads": 3})
    with pytest.raises(ConfigError, match=r"^model\.encoders\.radar: bands=2 are too few"):
        make_encoder("radar", {"_target_": f"{__name__}.Unnamed", "bands": 2})
    with pytest.raises(ConfigError, match=r"^layout\.encoders\.radar\.tp=2: no"), naming("radar"):
        raise ConfigError("layout.encoders.radar.tp=2: no")


def test_sizes_that_do_not_fit_are_refused() -> None:
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 96}
    check_keys("model.llm", LLMConfig(**sizes))
    for change, words in (
        ({"heads": 5}, "heads=5"),
        ({"kv_heads": 3}, "kv_heads=3"),
        ({"norm": "batch"}, "norm=batch"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_keys("model.llm", LLMConfig(**{**sizes, **change}))
    assert padded_vocabulary(LLMConfig(**sizes), 260) == 264
    assert padded_vocabulary(LLMConfig(**sizes, vocab=300), 260) == 304


def test_what_tensor_parallelism_cannot_divide_is_refused_by_both_keys() -> None:
    sizes = {"layers": 2, "hidden": 96, "heads": 6, "kv_heads": 6, "ffn": 96, "vocab_multiple": 24}
    check_llm_layout(LLMConfig(**sizes), Layout(tp=6), 260)
    for change, words in (
        ({"heads": 4, "kv_heads": 2}, "layout.llm.tp=6 does not divide model.llm.heads=4"),
        ({"kv_heads": 3}, "layout.llm.tp=6 does not divide model.llm.kv_heads=3"),
        ({"ffn": 64}, "layout.llm.tp=6 does not divide model.llm.ffn=64"),
        ({"vocab_multiple": 16}, "vocabulary of 272 .260 padded to model.llm.vocab_multiple=16"),
        ({"vocab_multiple": 1, "vocab": 301}, "vocabulary of 301 .301 padded to"),
        ({"vocab": 259}, r"model.llm.vocab=259 is too small for the tokenizer's 260 ids: set at least 260"),
    ):
        with pytest.raises(ConfigError, match=words):
            check_llm_layout(LLMConfig(**{**sizes, **change}), Layout(tp=6), 260)
    encoder = ViTEncoder(ViTConfig(hidden=48, heads=4, ffn=64))
    encoder.check_tp("layout.encoders.image.tp", 4)
    with pytest.raises(ConfigError, match=r"layout.encoders.image.tp=3 does not divide encoder.heads=4"):
        encoder.check_tp("layout.encoders.image.tp", 3)


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_that_share_layers_share_their_work(tp: int) -> None:
    encoder = ViTEncoder(ViTConfig())
    whole, shared = encoder.work(128, 4), encoder.work(128, 4, tp)
    tokens, square, nothing = even_load(256), even_load(0, 256**2), even_load(0)
    assert shared.forward(square).flops * tp == whole.forward(square).flops
    assert shared.forward(nothing).bytes * tp == whole.forward(nothing).bytes
    # The ends, patches and projector, are not divided.
    assert whole.forward(tokens).flops / tp < shared.forward(tokens).flops < whole.forward(tokens).flops
    # Two halves of each layer, one direction; the other one sums as many, and gathers gradients of rows.
    (sums,) = shared.forward(tokens).collectives
    assert (sums.kind, sums.calls) == ("all_reduce", 2 * encoder.config.layers)
    assert {c.kind: c.calls for c in shared.backward(tokens, Grad.BOTH).collectives} == {
        "all_gather": 1,
        "all_reduce": 2 * encoder.config.layers,
    }


class Emitting(torch.nn.Module):
    """Puts out so many rows, whatever it is given."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, *inputs: object) -> torch.Tensor:
        return torch.arange(self.rows).float().unsqueeze(1)


def test_rows_that_were_not_planned_are_refused_but_for_those_of_an_empty_tail() -> None:
    alone = cast("dist.ProcessGroup", SimpleNamespace(size=lambda: 1))
    values, packed = torch.zeros(0), cast("PackedTokens", None)

    def encode(rows: int, planned: int) -> list[float]:
        inputs = EncoderBatchInputs(values, values, packed, (planned,), ("photos, sample 7, item 0",))
        return EncoderAnchor("photos", Emitting(rows), alone, num_points=2).encode(inputs).flatten().tolist()

    assert encode(4, 4) == [0, 1, 2, 3]
    assert encode(2, 0) == []
    # One row too many would shift those of all items after it.
    for rows in (3, 5, 6):
        words = rf"photos, sample 7, .*: the encoder photos \(Emitting\) put out {rows} rows, and .* 4 at 2"
        with pytest.raises(ValueError, match=words):
            encode(rows, 4)


def test_what_an_encoder_raises_names_it_and_what_it_was_given() -> None:
    class Short(torch.nn.Module):
        """Loses a token on the way to its rows."""

        def forward(self, values: torch.Tensor, *rest: object) -> torch.Tensor:
            return values[:-1].view(4, 8)

    alone, values = cast("dist.ProcessGroup", SimpleNamespace(size=lambda: 1)), torch.zeros(8, 4)
    inputs = EncoderBatchInputs(
        values, values, cast("PackedTokens", None), (4,), ("photos, sample 7, item 0",)
    )
    with pytest.raises(RuntimeError, match="invalid for input of size 28") as caught:
        EncoderAnchor("photos", Short(), alone, num_points=1).encode(inputs)
    assert caught.value.__notes__ == [
        "the encoder photos (Short) raised this when it was given 8 tokens, which are to become 4 rows: "
        "photos, sample 7, item 0"
    ]


def test_weights_depend_on_seed_and_name_only() -> None:
    def weights(first_layer: int, layers: int, seed: int) -> dict[str, torch.Tensor]:
        module = torch.nn.ModuleDict(
            {"layers": torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(layers))}
        )
        numbering = Numbering(first_layer=first_layer)
        initialise(module, seed=seed, component="llm", num_layers=4, numbering=numbering)
        return dict(module.named_parameters())

    whole, second = weights(0, 4, 1), weights(2, 2, 1)
    assert torch.equal(whole["layers.3.weight"], second["layers.1.weight"])
    assert not torch.equal(whole["layers.0.weight"], whole["layers.1.weight"])
    assert not torch.equal(whole["layers.0.weight"], weights(0, 4, 2)["layers.0.weight"])
    assert (whole["layers.0.bias"] == 0).all()


def _rows(rank: int, line: list[str]) -> list[torch.Tensor]:
    """Encode three images alone and packed together, in both orders."""
    from omni.rank.build import build_rank

    spec = prepare_run(compose_config(line), 1)
    built = build_rank(spec, rank, torch.device("cpu"), lambda op: None)
    encoder = spec.encoders["image"]
    module = built.components["image"].modules[0]
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (8, width, 1), dtype=np.uint8) for width in (8, 24, 16)]
    ready = [encoder.preprocess(image) for image in images]

    def encode(which: list[int]) -> torch.Tensor:
        values = encoder.transfer(np.concatenate([ready[i].values for i in which]), torch.device("cpu"))
        positions = torch.cat([torch.from_numpy(ready[i].positions) for i in which])
        lengths = [len(ready[i].values) for i in which]
        packed = encoder.pack(Sharding.whole(lengths), positions, torch.float32, torch.device("cpu"))
        with torch.no_grad():
            return module(values, positions, packed)

    return [encode([0, 1, 2]), torch.cat([encode([i]) for i in range(3)]), encode([2, 0, 1])]


LAYER = (
    "self_attention.linear_proj.weight",
    "self_attention.linear_proj.bias",
    "self_attention.linear_qkv.weight",
    "self_attention.linear_qkv.bias",
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc1.bias",
    "mlp.linear_fc2.weight",
    "mlp.linear_fc2.bias",
)


def _names(rank: int, line: list[str]) -> list[str]:
    from omni.rank.build import build_rank

    built = build_rank(prepare_run(compose_config(line), 1), rank, torch.device("cpu"), lambda op: None)
    return [name for name, _ in built.components["image"].modules[0].named_parameters()]


def test_weights_go_by_the_names_that_checkpoints_have(ranks: RankPool, tmp_path: Path) -> None:
    """Names and their order: initial weights, checkpoints and the order of reductions follow from them."""
    write_mixed(tmp_path / "data")
    line = overrides(tmp_path / "data", tmp_path / "run", "+model.encoders.image.taps=[1]")

    def layer(block: str) -> list[str]:
        names = (f"{block}.layers.0.{name}" for name in ("input_layernorm.weight", *LAYER))
        return list(names)

    def linear(name: str) -> list[str]:
        return [f"{name}.weight", f"{name}.bias"]

    assert ranks.run(1, _names, line)[0] == [
        *linear("patch_linear"),
        "row_embedding.weight",
        "column_embedding.weight",
        *layer("block"),
        *layer("tapped.0"),
        "final_norm.weight",
        *linear("projector_in"),
        *linear("projector_out"),
        "tap_projectors.0.norm.weight",
        *linear("tap_projectors.0.linear_in"),
        *linear("tap_projectors.0.linear_out"),
    ]


def test_images_in_a_pack_do_not_see_each_other(ranks: RankPool, tmp_path: Path) -> None:
    write_mixed(tmp_path / "data")
    together, alone, shuffled = ranks.run(1, _rows, overrides(tmp_path / "data", tmp_path / "run"))[0]
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(shuffled[:8], together[16:], rtol=1e-4, atol=1e-5)
    assert together.std() > 1e-3


class Pointless:
    """An encoder of which nobody knows where its rows enter."""

    Config = ViTConfig

    def __init__(self, config: ViTConfig) -> None:
        self.config = config


def test_an_encoder_without_attach_points_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"model.encoders.radar: Pointless .* attach = \("):
        make_encoder("radar", {"_target_": f"{__name__}.Pointless"})


def _built_with_a_weight_left_out(rank: int, line: list[str]) -> str:
    from omni.rank.build import build_rank

    spec = prepare_run(compose_config(line), 1)
    image = spec.work["image"]
    assert isinstance(image, EncoderPart)
    spec = replace(spec, work={**spec.work, "image": replace(image, tail=image.tail[1:])})
    try:
        build_rank(spec, rank, torch.device("cpu"), lambda op: None)
    except ConfigError as error:
        return str(error)
    return "built"


def test_an_encoder_whose_statement_leaves_weights_out_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    write_mixed(tmp_path / "data")
    line = overrides(tmp_path / "data", tmp_path / "run")
    message = ranks.run(1, _built_with_a_weight_left_out, line)[0]
    words = (
        r"model\.encoders\.image: work\(\) states ([\d,]+) elements .* module \w+ has ([\d,]+)\. .* is number"
    )
    found = re.match(words, message)
    assert found, message
    stated, built = (int(number.replace(",", "")) for number in found.groups())
    assert built - stated == 32, "the weights of the last norm"


def test_a_weight_that_is_stated_and_not_built_is_named() -> None:
    from omni.rank.build import check_weights

    module = torch.nn.Linear(4, 2)
    check_weights("mine", module, (Weight(8), Weight(2)))
    with pytest.raises(ConfigError, match=r"number 1, bias: 3 stated, 2 built"):
        check_weights("mine", module, (Weight(8), Weight(3)))
    with pytest.raises(ConfigError, match=r"number 2, none that the module has: 5 stated, 0 built"):
        check_weights("mine", module, (Weight(8), Weight(2), Weight(5)))
    with pytest.raises(ConfigError, match=r"number 1, bias: nothing stated, 2 built"):
        check_weights("mine", module, (Weight(8),))


def test_a_weight_that_is_frozen_and_stated_as_learning_is_named() -> None:
    from omni.rank.build import check_weights

    module = torch.nn.Linear(4, 2)
    module.bias.requires_grad_(False)
    check_weights("mine", module, (Weight(8), Weight(2, frozen=True)))
    with pytest.raises(ConfigError, match=r"encoders.mine: .*0 elements .* as frozen, .* 2 do not.*: bias\."):
        check_weights("mine", module, (Weight(8), Weight(2)))
    module.bias.requires_grad_()
    with pytest.raises(ConfigError, match=r"states 2 elements .* 0 do not learn \(requires_grad\): none"):
        check_weights("mine", module, (Weight(8), Weight(2, frozen=True)))

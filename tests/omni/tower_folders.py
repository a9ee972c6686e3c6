"""Tiny random towers of transformers with their processors, in folders: the referee of wrapped towers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni.models.encoders.qwen_vit import QwenViT
from omni.models.registry import make_encoder
from parallel.packed import Sharding

transformers = pytest.importorskip("transformers", reason="transformers, the referee, is not installed")

_QWEN = {"depth": 4, "hidden_size": 48, "num_heads": 4, "patch_size": 4, "spatial_merge_size": 2}
_VIT = {"num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 64}


def _packed_pixels() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    limits = {"shortest_edge": 64, "longest_edge": 4096}
    return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=limits)


def _qwen2_vl(width: int) -> tuple[Any, Any, Any]:
    from transformers.models.qwen2_vl import modeling_qwen2_vl as theirs

    own = {"depth": 3, "embed_dim": 48, "num_heads": 4, "patch_size": 4, "hidden_size": width}
    config = transformers.Qwen2VLConfig(vision_config={**own, "spatial_merge_size": 2}).vision_config
    return theirs.Qwen2VisionTransformerPretrainedModel, config, _packed_pixels()


def _qwen2_5_vl(width: int) -> tuple[Any, Any, Any]:
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as theirs

    own = {"intermediate_size": 64, "out_hidden_size": width, "window_size": 16}
    config = transformers.Qwen2_5_VLConfig(vision_config={**_QWEN, **own, "fullatt_block_indexes": [1, 3]})
    return theirs.Qwen2_5_VisionTransformerPretrainedModel, config.vision_config, _packed_pixels()


def _qwen3_vl(width: int) -> tuple[Any, Any, Any]:
    from transformers.models.qwen3_vl import modeling_qwen3_vl as theirs

    own = {"intermediate_size": 64, "out_hidden_size": width, "num_position_embeddings": 36}
    config = transformers.Qwen3VLConfig(vision_config={**_QWEN, **own, "deepstack_visual_indexes": [1, 2]})
    return theirs.Qwen3VLVisionModel, config.vision_config, _packed_pixels()


def _qwen3_5(width: int) -> tuple[Any, Any, Any]:
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    own = {"intermediate_size": 64, "out_hidden_size": width, "num_position_embeddings": 49}
    config = transformers.Qwen3_5Config(vision_config={**_QWEN, **own})
    return theirs.Qwen3_5VisionModel, config.vision_config, _packed_pixels()


def _siglip2(width: int) -> tuple[Any, Any, Any]:
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    config = transformers.Siglip2VisionConfig(**_VIT, patch_size=4, num_patches=36)
    return transformers.Siglip2VisionModel, config, Siglip2ImageProcessorPil(patch_size=4, max_num_patches=40)


def _siglip(width: int) -> tuple[Any, Any, Any]:
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    config = transformers.SiglipVisionConfig(**_VIT, image_size=16, patch_size=4)
    return transformers.SiglipVisionModel, config, SiglipImageProcessorPil(size={"height": 16, "width": 16})


def _clip(width: int) -> tuple[Any, Any, Any]:
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    config = transformers.CLIPVisionConfig(**_VIT, image_size=16, patch_size=4)
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    return transformers.CLIPVisionModel, config, CLIPImageProcessorPil(**sizes)


def _internvit(width: int) -> tuple[Any, Any, Any]:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
    from transformers.models.internvl import modeling_internvl as theirs

    config = transformers.InternVLVisionConfig(
        **_VIT, image_size=[16, 16], patch_size=[4, 4], use_qk_norm=True, norm_type="rms_norm"
    )
    processor = GotOcr2ImageProcessorPil(
        size={"height": 16, "width": 16}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    return theirs.InternVLVisionModel, config, processor


def _whisper(width: int) -> tuple[Any, Any, Any]:
    from transformers.models.whisper import modeling_whisper as theirs

    config = transformers.WhisperConfig(
        **{"d_model": 48, "encoder_layers": 3, "encoder_attention_heads": 4, "encoder_ffn_dim": 64},
        **{"num_mel_bins": 16, "max_source_positions": 50, "decoder_layers": 1, "decoder_attention_heads": 4},
        **{"decoder_ffn_dim": 64, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        decoder_start_token_id=1,
    )
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    return theirs.WhisperEncoder, config, extractor


TOWERS = {
    "Qwen2.5-VL": (_qwen2_5_vl, "grid_tower"),
    "Qwen3-VL": (_qwen3_vl, "grid_tower"),
    "SigLIP2": (_siglip2, "grid_tower"),
    "Qwen2-VL": (_qwen2_vl, "grid_tower"),
    "SigLIP": (_siglip, "batch_tower"),
    "CLIP": (_clip, "batch_tower"),
    "InternViT": (_internvit, "batch_tower"),
    "Whisper": (_whisper, "batch_tower"),
}
OURS = {
    "Qwen3-VL ours": (_qwen3_vl, "qwen_vit"),
    "Qwen2.5-VL ours": (_qwen2_5_vl, "qwen_vit"),
    "Qwen3.5 ours": (_qwen3_5, "qwen_vit"),
}
"""Towers in our own layers."""
ALL = TOWERS | OURS


def make_tower(name: str, folder: Path, width: int = 64) -> torch.nn.Module:
    """Draw a tower, save it with its processor, and return it as transformers runs it."""
    kind, config, processor = ALL[name][0](width)
    torch.manual_seed(0)
    model: torch.nn.Module = kind._from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases, too, or one that is left out stays unseen
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return model


SIZES = [(40, 60), (32, 32), (7, 100), (61, 23)]


def items(encoder: Any, seed: int = 0) -> list[np.ndarray]:
    """Decoded items of several sizes."""
    draw = np.random.default_rng(seed)
    if encoder.modality == "audio":
        return [draw.normal(0, 0.1, size).astype(np.float32) for size in (16000, 300, 9001)]
    return [draw.integers(0, 256, (*size, 3), dtype=np.uint8) for size in SIZES]


def size_of(encoder: Any, item: np.ndarray) -> tuple[int, int]:
    """The size of a decoded item, as metadata have it."""
    return (len(item), 16000) if encoder.modality == "audio" else (item.shape[0], item.shape[1])


def theirs(model: Any, processor: Any, item: np.ndarray) -> torch.Tensor:
    """What transformers makes of one item: tokens [T, E], or rows of all attach points [P · R, E]."""
    if item.ndim == 1:
        made = processor(item, sampling_rate=16000, return_tensors="pt")
        return model(made["input_features"]).last_hidden_state[0]
    made = processor(images=[item], return_tensors="pt", input_data_format="channels_last")
    if "image_grid_thw" in made:
        out = model(made["pixel_values"], grid_thw=made["image_grid_thw"])
        return torch.cat([out.pooler_output, *(getattr(out, "deepstack_features", None) or ())])
    if "spatial_shapes" in made:
        return model(**made).last_hidden_state[0, : int(made["spatial_shapes"][0].prod())]
    return model(made["pixel_values"]).last_hidden_state[:, -16:].flatten(0, 1)


def built(encoder: Any, model: torch.nn.Module, width: int = 64) -> Any:
    """The module of an encoder, with the weights of a tower."""
    module = encoder.build(width, torch.float32, torch.device("cpu"), None)
    missing, _ = module.tower.load_state_dict(model.state_dict(), strict=False)
    assert not missing, missing
    return module


def ours(encoder: Any, module: Any, pack: list[np.ndarray]) -> torch.Tensor:
    """What a module, of a wrapped tower what that makes, makes of packed items, attach point after attach
    point.
    """
    made = [encoder.preprocess(item) for item in pack]
    grids = [encoder.row_grid(size_of(encoder, item)) for item in pack]
    sharding = Sharding.whole([len(own.values) for own in made], grids=grids)
    where = torch.from_numpy(np.concatenate([own.positions for own in made]))
    packed = encoder.pack(sharding, where, torch.float32, torch.device("cpu"))
    values = torch.from_numpy(np.concatenate([own.values for own in made]))
    return (
        module(values, where, packed) if isinstance(encoder, QwenViT) else module.tokens(values, packed.given)
    )


def expected(encoder: Any, model: Any, pack: list[np.ndarray]) -> torch.Tensor:
    """What transformers makes of items one by one, in the order of `ours`."""
    points = len(encoder.attach)
    each = [theirs(model, encoder.processor, item).chunk(points) for item in pack]
    return torch.cat([one[point] for point in range(points) for one in each])


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest number."""
    return float((found - wanted).abs().max() / wanted.abs().max())


@dataclass
class Errors:
    """Of a tower: rows of a pack against transformers' and against the items alone, gradients, counts that
    are not what the processor makes, and weights that the statement does not have.
    """

    rows: float
    alone: float
    gradients: float
    worst: str
    counts: int
    weights: int


def compared(name: str, folder: Path, width: int = 64) -> Errors:
    """Compare a wrapped tower that is written to `folder` with transformers."""
    model = make_tower(name, folder, width)
    encoder: Any = make_encoder("own", {"name": ALL[name][1], "folder": str(folder)})
    module = built(encoder, model, width)
    return errors(encoder, model, module, lambda: dict(_gradients(module.tower)))


def compared_ours(rank: int, name: str, folder: Path, keys: list[str]) -> Errors:
    """Compare a tower in our own layers with transformers, on a rank of a run with these keys."""
    from omni.compose import compose_config
    from omni.models.regions import Region
    from omni.planning.prepare import prepare_run
    from omni.rank.build import build_rank
    from omni.rank.folder_weights import FolderReader, wanted_by

    model = make_tower(name, folder)
    spec = prepare_run(compose_config(keys), 1)
    encoder: Any = spec.encoders["image"]
    built = build_rank(spec, rank, torch.device("cpu"), lambda op: None)  # its hooks add up gradients
    module = built.components["image"].modules[0]
    weights, named = encoder.published(), dict(module.named_parameters())
    weights.check()
    wanted = []
    for own, parameter in named.items():
        region = Region(tuple(parameter.shape), 0, ((0, len(parameter)),))
        wanted += wanted_by(weights, own, region, 0, parameter.data.view(-1))
    FolderReader(weights).fill(wanted)

    def gradients() -> dict[str, torch.Tensor]:
        """By their names."""
        found = {}
        for own, parameter in named.items():
            rule = weights.rules[own]
            for number, theirs in enumerate(rule.theirs):
                found[theirs] = Region(rule.shape, 0, rule.runs[number]).cut(parameter.main_grad)
        return found

    return errors(encoder, model, module, gradients)


def _gradients(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, own.grad) for name, own in model.named_parameters() if own.grad is not None)


def errors(
    encoder: Any, model: torch.nn.Module, module: Any, gradients: Callable[[], dict[str, torch.Tensor]]
) -> Errors:
    """Compare the module of an encoder with transformers' `model`; `gradients` of ours go by its names."""
    pack = items(encoder)
    found, wanted = ours(encoder, module, pack), expected(encoder, model, pack)
    alone = [ours(encoder, module, [item]).chunk(len(encoder.attach)) for item in pack]
    apart = torch.cat([one[point] for point in range(len(encoder.attach)) for one in alone])
    weights = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    (found * weights).sum().backward()
    (wanted * weights).sum().backward()
    mine, by_name = gradients(), dict(_gradients(model))
    norm = torch.stack([grad.norm() for grad in by_name.values()]).norm()
    still = getattr(encoder, "still", ())
    off_by = {
        own: float((mine[own] - grad if own in mine else grad).norm())
        / float(norm if own in still else grad.norm().clamp(min=1e-6 * norm))
        for own, grad in by_name.items()
    }
    worst = max(off_by, key=lambda own: off_by[own])
    counts = [
        encoder.count(size_of(encoder, item))[0] - len(encoder.preprocess(item).values) for item in pack
    ]
    stated = sum(weight.elements for weight in encoder.work(64, 4).weights())
    return Errors(
        off(found.detach(), wanted.detach()),
        off(apart.detach(), found.detach()),
        off_by[worst],
        worst,
        sum(map(bool, counts)),
        stated - sum(own.numel() for own in module.parameters()),
    )

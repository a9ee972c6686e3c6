"""The LLM as plans see it: its sizes, what a pass through each part takes, and where rows may enter."""

import re
from collections.abc import Sequence
from typing import Any

from omni.config import ConfigError, LLMConfig, require
from omni.models.layer_sizes import (
    check_divisible,
    check_moe,
    check_transformer,
    layer_work,
    moe_layer_work,
)
from ops.linear import linear_flops
from parallel.costs import PartWork
from parallel.layout import Layout, stage_layers
from pipeline.plan import EMBEDDING, Point

NAME = "llm"
_REFERENCE_TOKENS = 4096
_ATTACH = re.compile(r"llm\.layers\.(\d+)")


def check_llm(config: LLMConfig) -> None:
    """Raise ConfigError for sizes that do not fit together."""
    check_transformer("model.llm", config, rotary_axes=1)
    require("model.llm", config, "kv_heads", "vocab_multiple", "loss_chunk", "rotary_base")
    require("model.llm", config, "norm_eps", least=1e-20)
    if config.heads % config.kv_heads:
        raise ConfigError(f"model.llm.kv_heads={config.kv_heads} must divide heads={config.heads}")


def padded_vocabulary(vocab_size: int, multiple: int) -> int:
    """Round the tokenizer's vocabulary up; the extra ids are never targets."""
    return -(-vocab_size // multiple) * multiple


def attach_layer(name: str) -> int:
    """Return the layer before which the rows of attach point "llm.layers.N" enter.

    Raises:
        ConfigError: if there is no such point.
    """
    match = _ATTACH.fullmatch(name)
    if match is None:
        raise ConfigError(f"attach point {name}: there are {EMBEDDING.name} and llm.layers.N")
    return int(match[1])


def attach_points(names: Sequence[str], parts: Sequence[int]) -> dict[str, Point]:
    """Place attach points in a model whose parts have so many layers each.

    Raises:
        ConfigError: if there is no such point.
    """
    layers = sorted({attach_layer(name) for name in names if name != EMBEDDING.name})
    if layers and layers[-1] >= sum(parts):
        raise ConfigError(f"attach point llm.layers.{layers[-1]}: the LLM has {sum(parts)} layers")
    points = {EMBEDDING.name: EMBEDDING}
    filled = [1] + [0] * (len(parts) - 1)
    for layer in layers:
        part = next(p for p in range(len(parts)) if layer < sum(parts[: p + 1]))
        name = f"llm.layers.{layer}"
        points[name] = Point(name, part, filled[part])
        filled[part] += 1
    return points


def check_llm_layout(config: LLMConfig, layout: Layout, vocab_size: int) -> None:
    """Refuse a layout that the LLM's sizes do not allow.

    Raises:
        ConfigError, LayoutError: naming the key, the value and the remedy.
    """
    check_divisible("model.llm", config, "layout.llm.tp", layout.tp, "heads", "kv_heads", "ffn")
    vocabulary = padded_vocabulary(vocab_size, config.vocab_multiple)
    if vocabulary % layout.tp:
        raise ConfigError(
            f"layout.llm.tp={layout.tp} does not divide the vocabulary of {vocabulary} "
            f"({vocab_size} padded to model.llm.vocab_multiple={config.vocab_multiple}): "
            f"set model.llm.vocab_multiple to a multiple of {layout.tp}"
        )
    llm_parts(config, vocab_size, layout)
    if config.mixture is not None:
        check_moe("model.llm.moe", config.mixture, layers=config.layers, tp=layout.tp, ep=layout.ep)
    elif layout.ep > 1:
        raise ConfigError(
            f"layout.llm.ep={layout.ep}, but the model has no experts: set model.llm.moe, or ep=1"
        )


def output_flops(config: LLMConfig, vocab_size: int) -> int:
    """Forward FLOPs of the output layer, for each target token."""
    return linear_flops(1, config.hidden, padded_vocabulary(vocab_size, config.vocab_multiple))


def llm_parts(config: LLMConfig, vocab_size: int, layout: Layout) -> tuple[int, ...]:
    """Divide the layers over the parts of a layout by cost: layers with experts and dense ones differ, and
    the last part also computes the output. Costs are FLOPs of a token in a sequence of `_REFERENCE_TOKENS`.

    Raises:
        LayoutError: if a part would have no layer.
    """
    works = _layer_works(config, Layout(), element=1)
    costs = [work.flops_per_token + work.flops_per_square * _REFERENCE_TOKENS for work in works]
    return stage_layers(costs, output_flops(config, vocab_size), layout.pp, layout.parts)


def llm_work(config: LLMConfig, vocab_size: int, layout: Layout, element: int) -> tuple[PartWork, ...]:
    """Work of a rank in each part. The output layer counts for every token, as if all were targets."""
    layers = iter(_layer_works(config, layout, element))
    output = output_flops(config, vocab_size) // layout.tp
    works = []
    for part, size in enumerate(llm_parts(config, vocab_size, layout)):
        own = [next(layers) for _ in range(size)]
        works.append(
            PartWork(
                flops_per_token=sum(w.flops_per_token for w in own)
                + (output if part == layout.num_parts - 1 else 0),
                flops_per_square=sum(w.flops_per_square for w in own),
                bytes_per_token=sum(w.bytes_per_token for w in own),
                weight_bytes=sum(w.weight_bytes for w in own),
                recomputed=config.recompute == "full",
                exchanges=size,
            )
        )
    return tuple(works)


def _layer_works(config: LLMConfig, layout: Layout, element: int) -> list[PartWork]:
    """Work of a rank in every layer."""
    sizes: dict[str, Any] = {
        "hidden": config.hidden,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.hidden // config.heads,
        "gated": True,
        "causal": True,
        "element": element,
        "tp": layout.tp,
    }
    works = [layer_work(**sizes, ffn=config.ffn)] * config.layers
    if config.mixture is not None:
        experts = moe_layer_work(**sizes, moe=config.mixture, ep=layout.ep)
        works[config.mixture.dense_layers :] = [experts] * (config.layers - config.mixture.dense_layers)
    return works

"""The LLM as plans see it: its sizes, its virtual stages and what work they state, where rows may enter."""

import re
from collections.abc import Sequence
from operator import attrgetter

from omni.config import ConfigError
from omni.llm_config import LLMConfig
from omni.models.adapters import check_adapters
from omni.models.layer_sizes import check_divisible, check_experts, llm_layers
from omni.models.llm_statement import VirtualStage, llm_virtual_stage, single_layers
from omni.models.stack import Stack
from ops.linear import linear_flops
from parallel.layout import Layout, Staged
from parallel.stages import stage_layers
from parallel.work import even_load
from pipeline.domain_plan import EMBEDDING, Point

NAME = "llm"
_ATTACH = re.compile(r"llm\.layers\.(\d+)")


def padded_vocabulary(config: LLMConfig, vocab_size: int) -> int:
    """Rows of the LLM's vocabulary with a tokenizer of `vocab_size` ids: rounded up. Rows beyond `vocab` pad
    it and take no part; where that is null, they are ids that are never targets.
    """
    return -(-(config.vocab or vocab_size) // config.vocab_multiple) * config.vocab_multiple


def attach_layer(name: str) -> int:
    """Return the layer before which the rows of attach point "llm.layers.N" enter.

    Raises:
        ConfigError: if there is no such point.
    """
    match = _ATTACH.fullmatch(name)
    if match is None:
        raise ConfigError(f"attach point {name}: there are {EMBEDDING.name} and llm.layers.N")
    return int(match[1])


def attach_points(names: Sequence[str], layers_of: Sequence[int]) -> dict[str, Point]:
    """Place attach points in a model whose virtual stages have so many layers each (`layers_of`).

    Raises:
        ConfigError: if there is no such point.
    """
    layers = sorted({attach_layer(name) for name in names if name != EMBEDDING.name})
    if layers and layers[-1] >= sum(layers_of):
        raise ConfigError(f"attach point llm.layers.{layers[-1]}: the LLM has {sum(layers_of)} layers")
    points = {EMBEDDING.name: EMBEDDING}
    filled = [1] + [0] * (len(layers_of) - 1)
    for layer in layers:
        number = next(v for v in range(len(layers_of)) if layer < sum(layers_of[: v + 1]))
        name = f"llm.layers.{layer}"
        points[name] = Point(name, number, filled[number])
        filled[number] += 1
    return points


def check_llm_layout(config: LLMConfig, layout: Layout, vocab_size: int) -> None:
    """Refuse a layout that the LLM's sizes do not allow.

    Raises:
        ConfigError, LayoutError: naming the key, the value and the remedy.
    """
    if config.vocab is not None and config.vocab < vocab_size:
        raise ConfigError(
            f"model.llm.vocab={config.vocab} is too small for the tokenizer's {vocab_size} ids: set at least "
            f"{vocab_size}, or null to have as many"
        )
    check_divisible("model.llm", config, "layout.llm.tp", layout.tp, "heads", "kv_heads", "ffn")
    check_divisible("model.llm.delta", config.delta, "layout.llm.tp", layout.tp, "key_heads")
    vocabulary = padded_vocabulary(config, vocab_size)
    if vocabulary % layout.tp:
        raise ConfigError(
            f"layout.llm.tp={layout.tp} does not divide the vocabulary of {vocabulary} "
            f"({config.vocab or vocab_size} padded to model.llm.vocab_multiple={config.vocab_multiple}): "
            f"set model.llm.vocab_multiple to a multiple of {layout.tp}"
        )
    least = min(virtual_stage_layers(config, vocab_size, layout))
    if config.offload >= least:
        raise ConfigError(
            f"model.llm.offload={config.offload}: inputs of layers behind a virtual stage's first go to the "
            f"host, and layout.llm.pp={layout.pp} vpp={layout.vpp} leave a virtual stage of {least} layers: "
            f"set at most {least - 1}"
        )
    if config.recompute_long and layout.zero > 1:
        raise ConfigError(
            f"model.llm.recompute_long=true with layout.llm.zero={layout.zero}: layers with partitioned "
            "matrices are computed anew in all passes or in none: set zero=1, or recompute_long=false, with "
            "recompute=full if passes of long samples do not fit"
        )
    if config.mixture is not None:
        check_experts("model.llm.moe", config.mixture, tp=layout.tp, ep=layout.ep)
    elif layout.ep > 1:
        raise ConfigError(
            f"layout.llm.ep={layout.ep}, but the model has no experts: set model.llm.moe, or ep=1"
        )


def check_llm_adapters(config: LLMConfig) -> None:
    """Refuse adapters that the LLM's layers do not take.

    Raises:
        ConfigError: naming the key, the value and the remedy.
    """
    if not config.lora.rank:
        return
    for key, has in (
        ("moe.experts", config.mixture is not None),
        ("delta.key_heads", "delta" in config.attention),
        ("mla.kv_rank", config.latent is not None),
        ("mtp", config.mtp > 0),
    ):
        if has:
            raise ConfigError(
                f"model.llm.lora.rank={config.lora.rank} with model.llm.{key}={attrgetter(key)(config)}: "
                f"such layers take no adapters yet; leave lora out, or set {key}=0"
            )
    check_adapters("model.llm", config.lora, Stack.of(llm_layers(config), 1).linears())


def staged(config: LLMConfig) -> Staged:
    """Return what of the LLM decides which groups its ranks need."""
    return Staged(NAME, config.tied or config.mtp > 0, config.mixture is not None)


def virtual_stage_layers(config: LLMConfig, vocab_size: int, layout: Layout) -> tuple[int, ...]:
    """Divide the layers over the virtual stages of a layout by cost: layers with experts and dense ones
    differ, and the last virtual stage also computes the output. Costs are FLOPs of a token of a sequence of
    `layout.context`.

    Raises:
        LayoutError: if a virtual stage would have no layer.
    """
    output = linear_flops(1, config.hidden, padded_vocabulary(config, vocab_size))
    token = even_load(1, layout.context)
    costs = [layer.forward(token).flops for layer in single_layers(config)]
    further = costs[-1] + linear_flops(1, 2 * config.hidden, config.hidden) + output
    return stage_layers(tuple(costs), output + config.mtp * further, layout.pp, layout.vpp)


def llm_work(
    config: LLMConfig, vocab_size: int, layout: Layout, element: int, pool: int = 1
) -> tuple[VirtualStage, ...]:
    """State the work of a rank in each virtual stage, where a stage has a `pool` of so many cp ranks."""
    vocabulary = padded_vocabulary(config, vocab_size)
    layers = virtual_stage_layers(config, vocab_size, layout)
    return tuple(
        llm_virtual_stage(config, vocabulary, layers, number, layout, element, pool)
        for number in range(len(layers))
    )

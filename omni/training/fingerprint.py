"""What must not change when a run continues: its data, its model and how it learns."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from dataloader.index import Index
from dataloader.manifest import UNHASHED_VERSION, hash_of
from dataloader.storage import Storage
from dataloader.tags import PREFIX
from infra.checkpoint import CheckpointError, folder_of
from omni.config import Config
from omni.llm_config import LLMConfig
from omni.llm_sections import DeltaConfig, LoraConfig, MLAConfig, MoEConfig, RotaryConfig
from omni.optim_config import OF_STAGE
from omni.planning.optim_schedule import stages_of
from omni.planning.run_spec import RunSpec

# Keys that decide only memory and time, when to give up, where other keys come from, or how moments are
# rounded from here on.
_FREE = re.compile(
    r"model\.llm\.(recompute(_long)?|keep_attention|offload|loss_chunk)|model\.encoders\.[^.]+\.(recompute|offload|keep_attention)"
    r"|optim\.(max_skipped|moments_dtype)"
    r"|data\.microbatch_tokens|model\.from_folder"
)
# Keys that came after the first checkpoints: at these values, the model is what it was without them.
_LATER = {
    "model.llm.gated": True,
    "model.llm.qk_norm": False,
    "model.llm.attention": ["full"],
    **{f"model.llm.rotary.{key}": value for key, value in vars(RotaryConfig()).items()},
    "model.llm.mtp": 0,
    **{
        f"model.llm.{key}": vars(LLMConfig(1, 1, 1, 1, 1))[key]
        for key in (
            *("attention_scale", "sinks", "qk_norm_over", "norms", "norm_zero_centered", "activation"),
            *("activation_clamp", "gate_offset", "embedding_scale", "output_bias", "ffn_bias"),
        )
    },
    **{
        f"model.llm.moe.{key}": vars(MoEConfig())[key]
        for key in ("normalise", "scale", "groups", "group_topk", "shared_gate")
    },
    "model.llm.output_gate": False,
    **{f"model.llm.delta.{key}": value for key, value in vars(DeltaConfig()).items()},
    **{f"model.llm.mla.{key}": 0 for key in vars(MLAConfig())},
    **{f"model.llm.lora.{key}": value for key, value in vars(LoraConfig()).items()},
}
# Keys of a component's optimizer that came later, too: null is that of `optim`.
_OF_COMPONENT = re.compile(rf"(.+\.)?optim\.components\.[^.]+\.({'|'.join(OF_STAGE)})")
_PHASE = re.compile(r"data\.mixture\.(\d+)\.")
_WEIGHT = re.compile(r"data\.(?:sources\.(.+)\.weight|mixture\.\d+\.weights\.(.+))")
_SOURCE = re.compile(r"data\.sources\.(.+)\.[a-z_]+")
_DATA = re.compile(r"data\.sources\..+\.(content|hash|num_samples|rows_per_group)")
_HASH = re.compile(r"data\.sources\..+\.hash")
_UNKNOWN = re.compile(r"data\.sources\..+\.(hash|augment)")  # what a checkpoint may not know


def fingerprint(spec: RunSpec) -> dict[str, Any]:
    """Return the parts of a run that decide its samples and its losses, as flat plain values.

    Layout, policies, cadence, tracking, the number of steps and what `_FREE` names are left out: they may
    change on resume.
    """
    config = asdict(spec.config)
    parts = {key: config[key] for key in ("model", "optim")}
    parts["stages"] = _stages(spec)
    parts["train"] = {key: config["train"][key] for key in ("seed", "precision")}
    data = config["data"]
    parts["data"] = {
        "sample_tokens": spec.planner.world.budget.longest,
        "sources": {
            name: {
                "weight": source["weight"],
                "num_samples": len(spec.indexes[name]),
                "rows_per_group": spec.indexes[name].manifest.rows_per_group,
                "content": _content(spec.indexes[name]),
                "hash": spec.indexes[name].manifest.hash,
                "augment": repr(source["augment"] or {}),
            }
            for name, source in data["sources"].items()
        },
        "mixture": _mixture(data),
        "tokenizer": spec.tokenizer.name,
        **({"tokenizer_digest": spec.tokenizer.digest} if spec.tokenizer.digest else {}),
        **{
            key: data[key]
            for key in (
                "step_tokens",
                "step_samples",
                "on_long",
                "window_groups",
            )
        },
    }
    return {
        key: value
        for key, value in sorted(flattened(parts, ""))
        if not _FREE.fullmatch(key)
        and not (key in _LATER and value == _LATER[key])
        and not (value is None and _OF_COMPONENT.fullmatch(key))
    }


def same_mixture(manifest: Mapping[str, Any], config: Config) -> bool:
    """Whether the run of a checkpoint, of which `manifest` is given, had all phases of a configuration."""
    saved = {key: value for key, value in manifest["fingerprint"].items() if _PHASE.match(key)}
    return saved == dict(flattened(_mixture(asdict(config.data)), "data.mixture"))


def _mixture(data: Any) -> dict[str, Any]:
    """What decides samples in the phases of a mixture, by their first steps: of plain values of `data`."""
    return {
        str(phase["first"]): {
            **{key: phase[key] for key in ("first", "step_tokens", "step_samples")},
            "weights": phase["weights"],
            **{
                key: {
                    # One that is missing is named where it is read.
                    source: ", ".join(
                        each if each.startswith(PREFIX) else hash_of(Path(each))
                        for each in lists
                        if each.startswith(PREFIX) or Path(each).is_file()
                    )
                    for source, lists in phase[key].items()
                }
                for key in ("remove", "keep")
            },
        }
        for phase in data["mixture"].values()
    }


def _stages(spec: RunSpec) -> dict[str, Any]:
    """Where each stage begins and how it learns. The length of the last may change, as `train.steps` may."""
    config = spec.config
    return {
        stage.name: {
            "first": stage.first,
            "optim": {key: vars(stage.optim)[key] for key in OF_STAGE}
            | {"components": {name: vars(of) for name, of in stage.optim.components.items()}},
        }
        for stage in stages_of(config.optim, config.stages, config.train.steps)
        if stage.name
    }


def _content(index: Index) -> str:
    """A name for the sizes of what a dataset holds: of every shard, and all totals. It is the same with and
    without hashes, so a dataset may be given hashes while a run trains on it.
    """
    manifest = replace(index.manifest, format_version=UNHASHED_VERSION)
    return hashlib.blake2b(repr(manifest).encode(), digest_size=8).hexdigest()


def flattened(value: Any, prefix: str) -> list[tuple[str, Any]]:
    """Return nested plain values as (key, value), keys joined by dots."""
    if isinstance(value, dict):
        return [
            pair for key, inner in value.items() for pair in flattened(inner, f"{prefix}.{key}".lstrip("."))
        ]
    return [(prefix, value)]


def check_fingerprint(manifest: Mapping[str, Any], current: Mapping[str, Any], storage: Storage) -> None:
    """Refuse to continue a checkpoint, of which `manifest` is given, under another configuration.

    Raises:
        CheckpointError: naming the first differences.
    """
    saved = _until(manifest["step"], manifest["fingerprint"])
    current = _until(manifest["step"], current)
    different = [
        key
        for key in sorted(set(saved) | set(current))
        if saved.get(key) != current.get(key) and not (_UNKNOWN.fullmatch(key) and saved.get(key) is None)
    ]
    if different:
        told = [f"{key}={current.get(key)!r} (checkpoint: {saved.get(key)!r})" for key in different[:5]]
        what = "on other data" if all(map(_DATA.fullmatch, different)) else "under another configuration"
        unknown = [key for key in different if _HASH.fullmatch(key) and current.get(key) is None]
        raise CheckpointError(
            f"{storage}/{folder_of(manifest['step'])} was written {what}: {'; '.join(told)}. "
            + ("A dataset that says no hashes gets them by omni data hash. " if unknown else "")
            + "Restore these values to continue the run, or train in a new run folder: omni resume RUN --fork"
            " FOLDER begins one with these weights."
        )


def _until(step: int, parts: Mapping[str, Any]) -> dict[str, Any]:
    """What decided the steps up to one: no phase of the mixture that begins later, and no source that none of
    the others draws from.
    """
    kept = {
        key: value
        for key, value in parts.items()
        if not ((of := _PHASE.match(key)) and int(of.group(1)) > step)
    }
    weights = [of for key, weight in kept.items() if weight and (of := _WEIGHT.fullmatch(key))]
    drawn = {of.group(1) or of.group(2) for of in weights}
    return {
        key: value
        for key, value in kept.items()
        if not ((of := _SOURCE.fullmatch(key)) and of.group(1) not in drawn)
    }


def other_decoders(manifest: Mapping[str, Any], current: Mapping[str, str]) -> list[str]:
    """Return in words which decoders are not those that the run had when a checkpoint was written; none if it
    is of a version that did not note them.
    """
    saved = manifest.get("decoders", current)
    return [
        f"{name} is {current.get(name)}, was {saved.get(name)}"
        for name in sorted(set(saved) | set(current))
        if saved.get(name) != current.get(name)
    ]

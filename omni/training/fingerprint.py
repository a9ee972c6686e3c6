"""What must not change when a run continues: its data, its model and how it learns."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from dataloader.index import Index
from infra.checkpoint import CheckpointError, folder_of
from infra.storage import Storage
from omni.planning.run_spec import RunSpec

# Keys of the model and the optimizer that decide only memory and time, or when to give up.
_FREE = re.compile(
    r"model\.llm\.(recompute|loss_chunk)|model\.encoders\.[^.]+\.recompute|optim\.max_skipped"
    r"|data\.microbatch_tokens"
)


def fingerprint(spec: RunSpec) -> dict[str, Any]:
    """Return the parts of a run that decide its samples and its losses, as flat plain values.

    Layout, policies, cadence, tracking, the number of steps and what `_FREE` names are left out: they may
    change on resume.
    """
    config: Any = OmegaConf.to_container(OmegaConf.structured(spec.config))
    parts = {key: config[key] for key in ("model", "optim")}
    parts["train"] = {key: config["train"][key] for key in ("seed", "precision")}
    data = config["data"]
    parts["data"] = {
        "sample_tokens": spec.planner.budget.longest,
        "sources": {
            name: {
                "weight": source["weight"],
                "num_samples": len(spec.indexes[name]),
                "rows_per_group": spec.indexes[name].manifest.rows_per_group,
                "content": _content(spec.indexes[name]),
            }
            for name, source in data["sources"].items()
        },
        **{
            key: data[key]
            for key in (
                "tokenizer",
                "step_tokens",
                "step_samples",
                "on_long",
                "window_groups",
            )
        },
    }
    return {key: value for key, value in sorted(flattened(parts, "")) if not _FREE.fullmatch(key)}


def _content(index: Index) -> str:
    """A name for what a dataset holds: its manifest lists every shard with its size, and all totals."""
    return hashlib.blake2b(repr(index.manifest).encode(), digest_size=8).hexdigest()


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
    saved = manifest["fingerprint"]
    differences = [
        f"{key}={current.get(key)!r} (checkpoint: {saved.get(key)!r})"
        for key in sorted(set(saved) | set(current))
        if saved.get(key) != current.get(key)
    ]
    if differences:
        raise CheckpointError(
            f"{storage}/{folder_of(manifest['step'])} was written under another configuration: "
            f"{'; '.join(differences[:5])}. Restore these values to continue the run, or train in a new run "
            f"folder."
        )

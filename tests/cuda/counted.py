"""What benchmarks/gpu_counts.py counts, for the process on fake CUDA."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).parents[2] / "benchmarks/gpu_counts.py"


def benchmark() -> Any:
    """The benchmark as a module: it is in no package."""
    spec = importlib.util.spec_from_file_location("gpu_counts", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look for it there
    spec.loader.exec_module(module)
    return module


def dense_figures() -> dict[str, float]:
    figures: dict[str, float] = benchmark().dense()
    return figures


def normed_figures() -> dict[str, float]:
    figures: dict[str, float] = benchmark().normed()
    return figures


# One after the other: each call into the process has a limit of its own.
PARTS = {
    "shared": lambda module: module.shared(module.dense()),
    "experts": lambda module: module.experts(16),
    "eight": lambda module: module.eight(),
}


def other_figures(part: str) -> dict[str, float]:
    figures: dict[str, float] = PARTS[part](benchmark())
    return figures

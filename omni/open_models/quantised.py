"""Folders whose matrices are quantised, as their files hold them: numbers of few bits, and scales of blocks.

They are read into full numbers, bit for bit those that transformers makes of them, and exported as bf16. No
torch here: `decode` has the arithmetic.

    fp8       "x.weight" in E4M3, and "x.weight_scale_inv" for each block of rows × columns (DeepSeek-V3)
    mxfp4     "x_blocks", two E2M1 numbers a byte, and "x_scales", a power of two for 32 numbers (OCP MX)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omni.config import ConfigError
from omni.open_models.rules import Rule

FP8, MXFP4 = "fp8", "mxfp4"
NUMBERS = 32  # of a block of MXFP4


@dataclass(frozen=True)
class Quantised:
    """Which `kind` a folder is of, and how many rows and columns a scale is for."""

    kind: str
    block: tuple[int, int] = (1, NUMBERS)

    def names(self, name: str) -> tuple[str, str]:
        """The tensors in place of one of the rules': its numbers and its scales."""
        return (f"{name}_blocks", f"{name}_scales") if self.kind == MXFP4 else (name, f"{name}_scale_inv")

    def shapes(self, rule: Rule, number: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Shapes of both, None for what this kind cannot hold: vectors, and other than experts in MXFP4."""
        if self.kind == MXFP4:
            if rule.slab is None or not isinstance(rule.columns, int) or rule.columns % NUMBERS:
                return None
            blocks = (rule.slab.count, rule.shape[0], rule.columns // NUMBERS)
            return (*blocks, NUMBERS // 2), blocks
        shape = rule.shapes[number]
        if len(shape) != 2 or rule.slab is not None:
            return None
        rows, columns = (-(-size // of) for size, of in zip(shape, self.block, strict=True))
        return shape, (rows, columns)


def quantised_of(said: Any, path: str) -> Quantised | None:
    """Return what `quantization_config` of a `config.json` says, None without.

    Raises:
        ConfigError: for any other kind, by name.
    """
    if said is None:
        return None
    told: Mapping[str, Any] = said if isinstance(said, Mapping) else {}
    kind, form = told.get("quant_method", said), told.get("fmt", "e4m3")
    if kind == MXFP4:
        return Quantised(MXFP4)
    match told.get("weight_block_size"):
        case [int(rows), int(columns)] if (kind, form) == (FP8, "e4m3") and min(rows, columns) > 0:
            return Quantised(FP8, (rows, columns))
    raise ConfigError(
        f"{path} says quantization_config ({kind}): of quantised weights those in mxfp4 are read, and those "
        f"in fp8 (e4m3) with a weight_block_size; take the folder in bf16"
    )

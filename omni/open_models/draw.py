"""A published model that nobody has trained: the folder that a `config.json` means, with random weights.

What trains from it takes the way of any published model, and comes out as transformers loads it.
"""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from omni.open_models.folder import CONFIG, SINGLE, header_of, open_folder


def draw_folder(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    """Write `config.json` and `model.safetensors` (fp32) to a folder: matrices normal with the standard
    deviation `initializer_range`, biases zero, other vectors one.

    Raises:
        ConfigError: if no family trains what the configuration means.
    """
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    opened = open_folder(str(folder))
    shapes = {name: rules[0][0].shapes[rules[0][1]] for name, rules in opened.names.items()}
    rng = np.random.Generator(np.random.Philox(seed))
    with (folder / SINGLE).open("wb") as file:
        file.write(header_of([(name, "F32", shape) for name, shape in shapes.items()]))
        for name, shape in shapes.items():
            if len(shape) > 1:
                values = rng.normal(0.0, config["initializer_range"], prod(shape))
            else:
                values = np.full(prod(shape), float(not name.endswith("bias")))
            file.write(values.astype("<f4").tobytes())

"""Processors of transformers, as a folder of a tower says them: pixels and sound as the tower was made for.

How many patches an item becomes follows from its size alone, by the functions that the processor itself
calls. Images go the way of PIL: the other one asks for torchvision.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from dataloader.format import SampleError
from omni.keys import ConfigError

# Functions from the height and width of a picture to those that it is resized to.
_RESIZES = ("smart_resize", "get_image_size_for_max_num_patches")


def open_processor(folder: str, audio: bool, model: Any = None) -> Any:
    """Open the processor of a folder, of recordings or of images; with the configuration of a whole `model`
    as that has it work, such as in tiles.

    Raises:
        ConfigError: if there is none, or it needs what is not installed.
    """
    import transformers

    kind = transformers.AutoFeatureExtractor if audio else transformers.AutoImageProcessor
    more = {} if audio else {"backend": "pil", **_of_model(model)}
    try:
        found = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **more)
    except Exception as error:  # what a file of others holds may raise anything
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"encoder.folder={folder}: transformers opens no processor of "
            f"{'recordings' if audio else 'images'} there ({type(error).__name__}: {first}). Fetch its "
            f"preprocessor_config.json, too"
        ) from error
    return found


def _of_model(model: Any) -> dict[str, Any]:
    """What the processor of a whole model hands that of its images."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    kind = None if model is None else PROCESSOR_MAPPING.get(type(model), None)
    return dict(getattr(kind, "images_kwargs", None) or {})


def processed(processor: Any, array: np.ndarray) -> dict[str, np.ndarray]:
    """An image uint8 [H, W, 1 or 3] → what the processor makes of it, by name.

    Raises:
        SampleError: for an image that it refuses.
    """
    image = array if array.shape[2] == 3 else np.repeat(array[:, :, :1], 3, 2)
    try:
        out = processor(images=[image], return_tensors="np", input_data_format="channels_last")
    except ValueError as error:
        raise SampleError(f"{type(processor).__name__} refuses the image: {error}") from error
    return {name: np.asarray(value) for name, value in out.items()}


def resized_by(
    processor: Any, count: Callable[[int, int], object] | None
) -> Callable[[int, int], tuple[int, int]]:
    """Return the function from a picture's height and width to those that the processor resizes it to, with
    the limits that the processor hands it: they are noted as `count` calls it, or else as a small picture is
    processed.

    Raises:
        ConfigError: for a processor whose file has no such function.
    """
    module: Any = sys.modules[type(processor).__module__]
    name = next((name for name in _RESIZES if name in vars(module)), None)
    if name is None:
        raise ConfigError(
            f"encoder.folder: {type(processor).__name__} has none of {', '.join(_RESIZES)}, by which grids "
            f"of pictures are known from their sizes. Write an encoder of your own (docs/encoders.md)"
        )
    original = vars(module)[name]
    seen: list[dict[str, Any]] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append({**inspect.signature(original).bind(*args, **kwargs).arguments})
        return original(*args, **kwargs)

    setattr(module, name, noted)
    try:
        if count is not None:
            count(64, 64)
        else:
            processed(processor, np.zeros((64, 64, 3), np.uint8))
    finally:
        setattr(module, name, original)
    named = inspect.signature(original).parameters
    sides = [next(name for name in named if name.endswith(side)) for side in ("height", "width")]
    limits = {key: value for key, value in seen[0].items() if key not in sides}

    def resized(height: int, width: int) -> tuple[int, int]:
        try:
            found = original(**dict(zip(sides, (height, width), strict=True)), **limits)
        except ValueError as error:
            raise SampleError(f"an image of {height}x{width} pixels: {error}") from error
        return int(found[0]), int(found[1])

    return resized

"""Pictures that look otherwise in each epoch: cropped, mirrored, recoloured.

    augment: {crop: 0.4, flip: 0.5, brightness: 0.2}

    epoch 0 of a picture of 480 x 640: a crop of 391 x 520, made 480 x 640 again, mirrored, 12 % brighter
    epoch 1 of it:                     a crop of 466 x 608, made 480 x 640 again, 3 % darker

A change follows from what is asked for and one integer, which `key_of` makes of seed, source, sample, item
and epoch: so it is the same in any world, with any number of threads, and after any resume. A picture keeps
its size: what planning has counted from sizes stays true.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance

from dataloader.stream import splitmix64

Pixels = npt.NDArray[np.uint8]
Change = Callable[[Pixels], Pixels]


@dataclass(frozen=True)
class Augment:
    """How much pictures may change; by default not at all.

    `crop` is the least share of the area that is kept, and `ratio` the most by which the crop's ratio of
    width to height is another than the picture's, as a factor. `flip` is the probability of the mirror image.
    Brightness, contrast and saturation are multiplied by a factor from 1 - x to 1 + x; hues move by up to x
    of the circle. As torchvision's RandomResizedCrop, RandomHorizontalFlip and ColorJitter in this order,
    but that a crop that does not fit is cut rather than drawn again, and the picture's own ratio counts.
    """

    crop: float = 1.0
    ratio: float = 1.0
    flip: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0

    def change(self, key: int) -> Change:
        """What is done to the picture of a key."""
        return partial(changed, augment=self, key=key)


def key_of(seed: int, source: str, sample: int, item: int, epoch: int) -> int:
    """The key of an item of a sample, in an epoch of its source."""
    said = repr((seed, source, sample, item, epoch)).encode()
    return int.from_bytes(blake2b(said, digest_size=8).digest(), "little")


def changed(pixels: Pixels, augment: Augment, key: int) -> Pixels:
    """A picture uint8 [H, W, 1 or 3] as a key changes it: of the same shape. Raises ValueError for others."""
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] not in (1, 3):
        raise ValueError(
            f"augment takes pictures uint8 [H, W, 1 or 3], and the encoder decodes to {pixels.dtype} "
            f"{list(pixels.shape)}: leave augment out"
        )
    numbers = splitmix64(np.uint64(key) ^ splitmix64(np.arange(9, dtype=np.uint64)))
    drawn = ((numbers >> np.uint64(11)) * 2.0**-53).tolist()  # from 0 to 1, of 53 bits each
    height, width, channels = pixels.shape
    image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    if augment.crop < 1 or augment.ratio > 1:
        box = _box(height, width, augment, *drawn[:4])
        image = image.resize((width, height), Image.Resampling.BILINEAR, box)
    if drawn[4] < augment.flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    image = _recoloured(image, augment, drawn[5:])
    return np.asarray(image).reshape(pixels.shape)


def _box(
    height: int, width: int, augment: Augment, share: float, ratio: float, down: float, right: float
) -> tuple[int, int, int, int]:
    """The rectangle (left, upper, right, lower) that is kept, by numbers from 0 to 1."""
    area = augment.crop + (1 - augment.crop) * share
    wider = augment.ratio ** (2 * ratio - 1)
    rows = max(1, min(height, round(height * math.sqrt(area / wider))))
    columns = max(1, min(width, round(width * math.sqrt(area * wider))))
    top, left = int(down * (height - rows + 1)), int(right * (width - columns + 1))
    return left, top, left + columns, top + rows


def _recoloured(image: Image.Image, augment: Augment, drawn: list[float]) -> Image.Image:
    """Another brightness, contrast, saturation and hue, the last two of colours alone."""
    kinds = (
        (augment.brightness, ImageEnhance.Brightness),
        (augment.contrast, ImageEnhance.Contrast),
        (augment.saturation, ImageEnhance.Color),
    )
    for (most, kind), number in zip(kinds, drawn, strict=False):
        if most:
            image = kind(image).enhance(max(0.0, 1 + most * (2 * number - 1)))
    if augment.hue and image.mode == "RGB":
        turned = np.array(image.convert("HSV"))
        turned[:, :, 0] += np.uint8(round(256 * augment.hue * (2 * drawn[3] - 1)) % 256)
        image = Image.fromarray(turned, "HSV").convert("RGB")
    return image

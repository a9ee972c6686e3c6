"""Documents of texts and images in turn, as OBELICS has them: a row of Parquet has two lists of one length.

    texts:  ["A dog. ", null, " It barks."]
    images: [null, "dogs/1.jpg", null]

At each place one of them is null. Images are bytes, structs of these, or paths of files; where a set has URLs
alone, images are downloaded first.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dataloader.format import PLACEHOLDER, DataError
from dataloader.recipes.parquet import Parquet
from dataloader.recipes.parquet_types import is_item, is_list, is_text
from dataloader.sources.recipe import Text


@dataclass(frozen=True)
class Interleaved(Parquet):
    """The recipe `interleaved`. `texts` and `images` are columns of lists; paths of images are below
    `folder`, itself below the source's root. `id` and `tags` are as of `parquet`.
    """

    folder: str

    def __init__(
        self, texts: str = "texts", images: str = "images", folder: str = "", id: str = "", tags: str = ""
    ) -> None:
        super().__init__(text=texts, image=images, id=id, tags=tags)
        object.__setattr__(self, "folder", folder)
        if not images:
            raise ValueError("images must name the column with the images")

    @property
    def _columns_of_items(self) -> list[str]:
        return [self.text_of, self.image]

    def text(self, raw: bytes, num_items: int) -> Text:
        """All texts, with a placeholder where an image stands."""
        return Text("".join(PLACEHOLDER if text is None else text for text in json.loads(raw)))

    def _takes_text(self, kind: pa.DataType) -> bool:
        return is_list(kind, is_text)

    def _takes_items(self, kind: pa.DataType) -> bool:
        return is_list(kind, lambda of: is_item(of) or is_text(of))

    def _raw(self, values: dict[str, Any]) -> bytes:
        return json.dumps(values[self.text_of], ensure_ascii=False).encode()

    def _all(self, values: dict[str, Any]) -> Iterator[tuple[str, bytes | str]]:
        texts, images = values[self.text_of], values[self.image] or ()
        if len(texts) != len(images):
            raise DataError(f"its lists have {len(texts)} texts and {len(images)} images, not as many")
        for place, (text, image) in enumerate(zip(texts, images, strict=True)):
            data = image.get("bytes") or image.get("path") if isinstance(image, dict) else image
            if (text is None) == (data is None):
                raise DataError(f"both or neither of its text and image {place} are null")
            if data is not None:
                yield "image", data

"""Which types columns of texts and items have in the Parquet files of others."""

from collections.abc import Callable

import pyarrow as pa
from pyarrow import types


def is_text(kind: pa.DataType) -> bool:
    """A text."""
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_item(kind: pa.DataType) -> bool:
    """Bytes of an image or a recording, or a struct that has them."""
    if types.is_struct(kind):
        return any(of.name == "bytes" and is_item(of.type) for of in kind)
    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def is_list(kind: pa.DataType, of: Callable[[pa.DataType], bool]) -> bool:
    """A list of what is `of` a type."""
    listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return listed and of(kind.value_type)

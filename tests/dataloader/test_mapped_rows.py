"""Rows of mapped Arrow files, against pyarrow's own."""

import time
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloader.format import DataError
from dataloader.mapped import MappedRows, getter

RANGE = pa.struct([("at", pa.int64()), ("crc", pa.uint32())])
ITEM = pa.struct([("name", pa.string()), ("size", pa.list_(pa.int32())), ("place", RANGE)])
SCHEMA = pa.schema([("id", pa.string()), ("n", pa.int16()), ("text", RANGE), ("items", pa.list_(ITEM))])


def value(kind: pa.DataType) -> st.SearchStrategy:
    """A value of a type, or none."""
    if pa.types.is_struct(kind):
        of = st.fixed_dictionaries({field.name: value(field.type) for field in kind})
    elif pa.types.is_list(kind):
        of = st.lists(value(kind.value_type), max_size=3)
    elif pa.types.is_string(kind):
        of = st.text(max_size=5)
    else:
        bits = kind.bit_width
        low, high = (
            (-(1 << bits - 1), (1 << bits - 1) - 1)
            if pa.types.is_signed_integer(kind)
            else (0, (1 << bits) - 1)
        )
        of = st.integers(low, high)
    return st.none() | of


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_value_is_the_one_that_pyarrow_gives(data):
    kind = data.draw(
        st.sampled_from([*(field.type for field in SCHEMA), ITEM, pa.list_(pa.list_(pa.uint32()))])
    )
    array = pa.array(data.draw(st.lists(value(kind), max_size=6)), kind)
    get = getter(array)
    assert [get(row) for row in range(len(array))] == array.to_pylist()


def write(file: Path, rows: list[dict], batch: int) -> None:
    with pa.ipc.new_file(str(file), SCHEMA) as writer:
        for at in range(0, len(rows), batch):
            writer.write_batch(pa.RecordBatch.from_pylist(rows[at : at + batch], SCHEMA))


def test_rows_of_any_batch_come_back_and_a_changed_file_is_refused(tmp_path):
    rows = [
        {
            "id": f"é{n}",
            "n": n - 5,
            "text": {"at": n << 40, "crc": n},
            "items": [{"name": "x" * k, "size": [k, n], "place": {"at": -1, "crc": 0}} for k in range(n % 3)],
        }
        for n in range(11)
    ]
    write(tmp_path / "rows", rows, 4)
    mapped = MappedRows(tmp_path / "rows", SCHEMA, 11, "remedy")
    assert [mapped.row(n) for n in (10, 0, 4, 3, 7)] == [rows[n] for n in (10, 0, 4, 3, 7)]
    with pytest.raises(DataError, match="has 11 rows of 12; remedy"):
        MappedRows(tmp_path / "rows", SCHEMA, 12, "remedy")
    with open(tmp_path / "rows", "ab") as file:
        file.write(b"x")
    time.sleep(0.01)  # it is looked at again after a millisecond
    with pytest.raises(DataError, match="was changed while it is in use"):
        mapped.row(0)

"""The .wandb reader against a writer of the same format, at every distance from the end of a block."""

import random
import struct
import zlib

import pytest

from infra.wandb_offline import BLOCK, _records


def encoded(records):
    """A .wandb file: chunks that never cross a block, with heads that never do either."""
    data = bytearray(struct.pack("<4sHB", b":W&B", 0xBEE1, 0))
    for record in records:
        rest, first = record, True
        while True:
            left = BLOCK - len(data) % BLOCK
            if left < 7:
                data += bytes(left)
                left = BLOCK
            body, rest = rest[: left - 7], rest[left - 7 :]
            kind = (1 if first else 4) if not rest else (2 if first else 3)
            data += struct.pack("<IHB", zlib.crc32(bytes([kind]) + body), len(body), kind) + body
            first = False
            if not rest:
                break
    return bytes(data)


@pytest.mark.parametrize("left", range(10))
def test_a_record_that_ends_just_before_a_block_does(tmp_path, left):
    random.seed(left)
    sizes = [BLOCK - 7 - 7 - left, 5, 0, 3 * BLOCK, BLOCK, 1]
    records = [random.randbytes(size) for size in sizes]
    path = tmp_path / "run.wandb"
    path.write_bytes(encoded(records))
    assert list(_records(path)) == records
    whole = path.read_bytes()
    for cut in (1, 8, BLOCK):  # a crash cuts the tail: what is whole before it is read
        path.write_bytes(whole[:-cut])
        found = list(_records(path))
        assert found == records[: len(found)]
        assert len(found) < len(records)

"""Ids that are listed become rows of a dataset, also of one with many files."""

import numpy as np
import pytest

from dataloader.format import DataError, Sample
from dataloader.manifest import read_manifest
from dataloader.removed import among, read_keys, rows_of
from dataloader.tokenizer import ByteTokenizer
from dataloader.writer import DatasetWriter


def test_ids_are_found_in_every_shard(tmp_path):
    with DatasetWriter(tmp_path / "d", ByteTokenizer(), rows_per_group=2, groups_per_shard=2) as writer:
        for i in range(11):
            writer.add(Sample(f"n{i}", "a text"))
    manifest = read_manifest(tmp_path / "d")
    assert len(manifest.shards) == 3
    assert rows_of(tmp_path / "d", manifest, ["n10", "n0", "n5", "n4", "n0"]).tolist() == [0, 4, 5, 10]
    with pytest.raises(DataError, match=r"2 of 3 ids are those of no sample of .* such as 'x', 'n11'"):
        rows_of(tmp_path / "d", manifest, ["x", "n1", "n11"])


def test_a_list_has_an_id_a_line(tmp_path):
    file = tmp_path / "ids.txt"
    file.write_text("a b\n\nc\n")
    assert read_keys(file) == ["a b", "c"]


def test_rows_are_told_from_others():
    ids = np.array([5, 0, 9, 3, 10])
    assert among(ids, np.array([0, 3, 9])).tolist() == [False, True, True, True, False]
    assert not among(ids, np.array([], np.int64)).any()

"""Histograms: every value in one bucket, and pictures that can be read."""

import xml.etree.ElementTree as ET

from pipeline.histograms import buckets, svg


def test_buckets_double_and_hold_every_value_once():
    assert buckets([0, 1, 3, 8, 15]) == [(0, 1, 0), (1, 1, 1), (2, 1, 3), (4, 0, 0), (8, 2, 23)]
    assert buckets([900, 1100]) == [(512, 1, 900), (1024, 1, 1100)]
    assert buckets([]) == []


def test_a_picture_has_two_bars_for_each_bucket_as_tall_as_its_shares():
    root = ET.fromstring(svg([("lengths <of samples>", [1, 1, 1, 5]), ("nothing", [])]))
    titled = [
        rect for rect in root.findall(".//{*}rect") if (rect.findtext("{*}title") or "").startswith("from")
    ]
    heights = [float(rect.attrib["height"]) / 120 for rect in titled]
    assert heights == [0.75, 0.375, 0, 0, 0.25, 0.625]
    assert "lengths <of samples>" in "".join(root.itertext())

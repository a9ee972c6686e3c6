"""Changes of pictures: by their key alone, of the shape that they had, and as they say."""

import numpy as np
import pytest

from dataloader.augment import Augment, key_of

RNG = np.random.default_rng(0)
PICTURE = RNG.integers(0, 256, (48, 64, 3), dtype=np.uint8)
ALL = Augment(crop=0.3, ratio=1.3, flip=0.5, brightness=0.3, contrast=0.3, saturation=0.3, hue=0.1)


def test_a_key_decides_and_nothing_else():
    keys = [key_of(0, "s", sample, 0, epoch) for sample in range(4) for epoch in range(3)]
    assert len(set(keys)) == len(keys)
    assert key_of(0, "s", 1, 0, 2) == key_of(0, "s", 1, 0, 2) == 12906204629854978323
    assert len({key_of(*parts) for parts in ((0, "s", 1, 0, 0), (1, "s", 1, 0, 0), (0, "t", 1, 0, 0))}) == 3
    before = PICTURE.copy()
    seen = [ALL.change(key)(PICTURE) for key in keys]
    np.testing.assert_array_equal(PICTURE, before)
    for key, picture in zip(keys, seen, strict=True):
        assert (picture.shape, picture.dtype) == (PICTURE.shape, np.uint8)
        np.testing.assert_array_equal(picture, ALL.change(key)(PICTURE))
    assert len({picture.tobytes() for picture in seen}) == len(keys)


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 300, 3), (7, 5, 1), (200, 3, 1)])
def test_any_picture_keeps_its_shape(shape):
    picture = RNG.integers(0, 256, shape, dtype=np.uint8)
    for key in range(20):
        changed = ALL.change(key)(picture)
        assert (changed.shape, changed.dtype) == (shape, np.uint8)


def test_flips_are_as_often_as_asked_for():
    flips = [(Augment(flip=0.25).change(key)(PICTURE) == PICTURE[:, ::-1]).all() for key in range(400)]
    assert 70 < sum(flips) < 130
    np.testing.assert_array_equal(Augment(flip=1.0).change(3)(PICTURE), PICTURE[:, ::-1])
    np.testing.assert_array_equal(Augment(flip=0.0).change(3)(PICTURE), PICTURE)


def test_crops_keep_their_share_and_reach_every_edge():
    rows, columns = np.mgrid[0:64, 0:64].astype(np.uint8)
    shown = np.stack([rows, columns, rows], 2)
    lows, highs, shares = [], [], []
    for key in range(300):
        seen = Augment(crop=0.25, ratio=4 / 3).change(key)(shown).astype(int)
        height, width = (np.ptp(seen[:, :, axis]) + 1 for axis in (0, 1))
        lows.append(seen.min())
        highs.append(seen.max())
        shares.append(height * width / 64**2)
        assert 0.65 < height / width < 1.5
    assert min(lows) == 0
    assert max(highs) == 63
    assert 0.2 < min(shares) < 0.3
    assert max(shares) > 0.9


def test_colours_change_as_far_as_asked_for():
    grey = np.full((4, 4, 3), 100, np.uint8)
    means = [Augment(brightness=0.5).change(key)(grey).mean() for key in range(200)]
    assert 50 <= min(means) < 60
    assert 140 < max(means) <= 150
    for picture in (Augment(saturation=0.9, hue=0.5).change(key)(grey) for key in range(20)):
        np.testing.assert_array_equal(picture, grey)  # grey has neither
    red = np.zeros((4, 4, 3), np.uint8) + np.array([200, 0, 0], np.uint8)
    turned = [Augment(hue=0.5).change(key)(red)[0, 0] for key in range(50)]
    assert {int(pixel.argmax()) for pixel in turned} == {0, 1, 2}
    assert {int(pixel.max()) for pixel in turned} == {200}
    flat = [Augment(contrast=0.5).change(key)(PICTURE).std() for key in range(50)]
    assert min(flat) < 0.7 * PICTURE.std()


@pytest.mark.parametrize("array", [PICTURE.astype(np.float32), PICTURE[:, :, 0], PICTURE[:, :, :2]])
def test_what_is_no_picture_is_refused(array):
    with pytest.raises(ValueError, match=r"takes pictures uint8 \[H, W, 1 or 3\]"):
        ALL.change(0)(array)

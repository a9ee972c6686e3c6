import threading
import time

import numpy as np
import pytest
from dataset_samples import image_item, item_counts, make_sample, write_dataset

from dataloader.decode import decode_image
from dataloader.format import PLACEHOLDER, DataError, Item, Sample, SampleError
from dataloader.index import Index
from dataloader.loader import Failure, Fetch, Loader
from dataloader.reader import Reader
from dataloader.tokenizer import ByteTokenizer
from dataloader.tokens import tokenize
from dataloader.writer import DatasetWriter

BYTES = ByteTokenizer()


def fetch_of(path, ids):
    index = Index.open(path)
    metas = [index.meta(i, "s", item_counts) for i in ids]
    items = tuple(("s", meta.id, k) for meta in metas for k in range(len(meta.items)))
    return Fetch(tuple(("s", meta) for meta in metas), items)


@pytest.fixture
def opened():
    loaders = []

    def make(path, decoders=None, **kwargs):
        loader = Loader({"s": Reader(path)}, BYTES, decoders or {"image": decode_image}, **kwargs)
        loaders.append(loader)
        return loader

    yield make
    for loader in loaders:
        loader.close()
        assert not any(thread.is_alive() for thread in loader._threads)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_fetches_come_back_in_their_own_order(tmp_path, opened, num_threads):
    path = write_dataset(tmp_path / "set")
    loader = opened(path, num_threads=num_threads)
    wanted = [[(7 * k + step) % 50 for k in range(40)] for step in range(5)]
    for key, ids in enumerate(wanted):
        loader.submit(key, fetch_of(path, ids))
    for key in (0, 1, 4, 2, 3):  # also out of order and beyond the depth
        fetched = loader.get(key, 20)
        fetch = fetch_of(path, wanted[key])
        samples = [make_sample(i) for i in wanted[key]]
        for (_, meta), sample, arrays in zip(fetch.texts, samples, fetched.texts, strict=True):
            for got, expected in zip(arrays, tokenize(sample, meta, BYTES), strict=True):
                np.testing.assert_array_equal(got, expected)
        for (_, i, k), pixels in zip(fetch.items, fetched.items, strict=True):
            assert pixels is not None
            np.testing.assert_array_equal(pixels, decode_image(make_sample(i).items[k]))
        assert fetched.failures == ()


def test_an_empty_fetch_is_ready_at_once(tmp_path, opened):
    loader = opened(write_dataset(tmp_path / "set"))
    loader.submit(0, Fetch((), ()))
    fetched = loader.get(0, 1)
    assert (fetched.texts, fetched.items, fetched.failures) == ([], [], ())


def test_items_that_fail_to_decode_are_reported_and_the_rest_is_delivered(tmp_path, opened):
    path = tmp_path / "set"
    good = image_item(8, 8, "JPEG")
    torn = Item("image", "jpeg", (8, 8), good.data[:100])
    with DatasetWriter(path, BYTES) as writer:
        writer.add(Sample("a", PLACEHOLDER * 3, (good, torn, good)))
        writer.add(Sample("b", PLACEHOLDER, (Item("image", "jpeg", (8, 9), good.data),)))
    loader = opened(path)
    loader.submit(0, fetch_of(path, [1, 0]))
    fetched = loader.get(0, 20)
    assert [item is None for item in fetched.items] == [True, False, True, False]
    assert [(f.source, f.sample, f.item) for f in fetched.failures] == [("s", 1, 0), ("s", 0, 1)]
    assert isinstance(fetched.failures[0], Failure)
    assert "(8, 8)" in fetched.failures[0].reason
    assert len(fetched.texts) == 2


def test_a_missing_shard_raises_in_get_and_other_fetches_survive(tmp_path, opened):
    path = write_dataset(tmp_path / "set")
    broken, fine = fetch_of(path, range(12, 16)), fetch_of(path, range(4))
    (path / "shard-00001.parquet").unlink()
    loader = opened(path)
    loader.submit(0, broken)
    loader.submit(1, fine)
    with pytest.raises(DataError, match=r"shard-00001.parquet"):
        loader.get(0, 20)
    assert len(loader.get(1, 20).texts) == 4
    with pytest.raises(ValueError, match="fetch 0 was never submitted, or was collected"):
        loader.get(0, 1)


def test_errors_of_a_decoder_surface(tmp_path, opened):
    path = write_dataset(tmp_path / "set")

    def bug(item):
        raise ZeroDivisionError("a bug in the decoder")

    loader = opened(path, {"image": bug})
    loader.submit(0, fetch_of(path, [1]))
    with pytest.raises(ZeroDivisionError, match="a bug") as caught:
        loader.get(0, 20)
    assert caught.value.__notes__ == ["The item is that of source 's', sample 1 ('id-1'), item 0."]
    loader = opened(path, {"audio": bug})
    loader.submit(0, fetch_of(path, [1]))
    with pytest.raises(DataError, match="no encoder for modality 'image'"):
        loader.get(0, 20)
    loader = opened(path)
    loader.submit(0, Fetch((), (("s", 0, 0),)))
    with pytest.raises(DataError, match="has 0 items, not item 0"):
        loader.get(0, 20)


def test_a_slow_read_times_out_with_its_name_and_can_be_asked_for_again(tmp_path, opened):
    path = write_dataset(tmp_path / "set")
    go = threading.Event()

    def slow(item):
        assert go.wait(20)
        return decode_image(item)

    loader = opened(path, {"image": slow})
    loader.submit(5, fetch_of(path, [1]))
    begin = time.monotonic()
    with pytest.raises(
        TimeoutError, match=r"fetch 5 is not ready after 0.2 s: .*1 items from source 's', sample 1"
    ):
        loader.get(5, 0.2)
    assert time.monotonic() - begin < 5
    go.set()
    fetched = loader.get(5, 20)
    assert len(fetched.items) == 1


def test_at_most_depth_fetches_run_ahead(tmp_path, opened):
    path = write_dataset(tmp_path / "set")
    seen = []

    def watched(item):
        seen.append(item.size)
        return decode_image(item)

    loader = opened(path, {"image": watched}, depth=2)
    for key in range(5):
        loader.submit(key, fetch_of(path, [1]))
    deadline = time.monotonic() + 30
    while len(seen) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(seen) == 2
    loader.get(0, 20)
    while len(seen) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(seen) == 3


def test_closing_ends_a_waiting_get(tmp_path, opened):
    path = write_dataset(tmp_path / "set")
    go = threading.Event()

    def stuck(item):
        go.wait(20)
        raise SampleError("late")

    loader = opened(path, {"image": stuck})
    loader.submit(0, fetch_of(path, [1]))
    raised = []

    def wait():
        try:
            loader.get(0, 20)
        except RuntimeError as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.05)
    loader.close(timeout_s=0.1)
    waiter.join(5)
    assert raised
    go.set()
    with pytest.raises(RuntimeError, match="closed"):
        loader.submit(1, Fetch((), ()))


def test_wrong_use_is_refused(tmp_path, opened):
    path = write_dataset(tmp_path / "set")
    loader = opened(path)
    with pytest.raises(ValueError, match=r"unknown sources \['t'\]: known are \['s'\]"):
        loader.submit(0, Fetch((), (("t", 0, 0),)))
    loader.submit(0, Fetch((), ()))
    with pytest.raises(ValueError, match="fetch 0 was submitted"):
        loader.submit(0, Fetch((), ()))
    with pytest.raises(ValueError, match="num_threads 0"):
        Loader({}, BYTES, {}, num_threads=0)

import threading
import time
import weakref
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from dataset_samples import image_item, item_counts, make_sample, write_dataset

from dataloader.decode import decode_image
from dataloader.format import PLACEHOLDER, DataError, Item, Sample, SampleError
from dataloader.index import Index
from dataloader.loader import Failure, Fetch, Loader, _works, default_threads
from dataloader.reader import Reader
from dataloader.shared_files import SharedFiles
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


@pytest.mark.parametrize("stated", [(12_000, 12_000), (64, 64)])
def test_a_header_that_states_gigabytes_is_bad_data_by_name(tmp_path, opened, stated):
    data = bytearray(image_item(8, 8, "JPEG").data)
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = (12_000).to_bytes(2, "big") * 2
    with DatasetWriter(tmp_path / "set", BYTES) as writer:
        writer.add(Sample("huge", PLACEHOLDER, (Item("image", "jpeg", stated, bytes(data)),)))
    loader = opened(tmp_path / "set")
    loader.submit(0, fetch_of(tmp_path / "set", [0]))
    (failure,) = loader.get(0, 20).failures
    assert (failure.source, failure.sample, failure.item, failure.name) == ("s", 0, 0, "huge")
    assert "12000" in failure.reason


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


def test_items_are_changed_as_the_fetch_says(tmp_path, opened):
    path = write_dataset(tmp_path / "set")
    plain = fetch_of(path, [2, 1, 5])
    mirror = lambda pixels: pixels[:, ::-1]  # noqa: E731
    changes = tuple(mirror if at % 2 else None for at in range(len(plain.items)))

    def prepare(item, change=None):
        return decode_image(item) if change is None else change(decode_image(item))

    loader = opened(path, {"image": prepare})
    loader.submit(0, plain)
    loader.submit(1, replace(plain, changes=changes))
    as_it_is, changed = loader.get(0, 20).items, loader.get(1, 20).items
    assert len(changed) == 5
    for one, other, change in zip(as_it_is, changed, changes, strict=True):
        np.testing.assert_array_equal(one if change is None else mirror(one), other)


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
    with pytest.raises(DataError, match=r"lacks one of the items \[0\]"):
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


@pytest.mark.parametrize("bytes_of_large", [1, 10_000])
def test_parts_cost_about_the_same_and_what_is_large_is_a_part_of_its_own(bytes_of_large):
    """None costs more than a sixteenth of all for four threads, but for a single large item."""
    items = tuple(("s", (7 * i) % 100, 0) for i in range(100))
    costs = tuple(bytes_of_large if sample == 42 else 1 + sample % 5 for _, sample, _ in items)
    parts = [work.places for work in _works(Fetch((), items, costs), {}, num_threads=4)]
    assert sorted(place for part in parts for place in part) == list(range(100))
    for part in parts:
        assert [items[place] for place in part] == sorted(items[place] for place in part)
        assert len(part) == 1 or sum(costs[place] for place in part) <= -(-sum(costs) // 16)
        assert len(part) <= 64
    if bytes_of_large > 1:
        assert [items[place][1] for place in parts[0]] == [42]
        assert len(parts) <= 10
    assert len(_works(Fetch((), items[:16]), {}, num_threads=4)) == 16
    assert default_threads(cores=192, ranks=8) == 16
    assert default_threads(cores=2, ranks=4) == 1
    assert default_threads(cores=16, ranks=4) == 4


def test_sixteen_images_keep_four_threads_at_work(tmp_path, opened):
    path = tmp_path / "set"
    with DatasetWriter(path, BYTES) as writer:
        for i in range(16):
            writer.add(Sample(f"{i}", PLACEHOLDER, (image_item(8, 8),)))
    together = threading.Barrier(4, timeout=20)

    def meeting(item):
        together.wait()  # until four threads are here
        return decode_image(item)

    loader = opened(path, {"image": meeting}, num_threads=4)
    loader.submit(0, fetch_of(path, range(16)))
    assert len(loader.get(0, 20).items) == 16


def on_threads(work, numbers):
    threads = [threading.Thread(target=work, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_threads_read_side_by_side(tmp_path):
    path = write_dataset(tmp_path / "set")
    together = threading.Barrier(4, timeout=20)

    def opened(name):
        together.wait()  # until four threads are about to read
        return pa.OSFile(name)

    reader = Reader(path, SharedFiles(open_file=opened))
    found = {}

    def work(i):
        found[i] = reader.read(i, text=True, items=False).id

    on_threads(work, (0, 4, 8, 12))  # of four row groups in two shards
    assert found == {i: f"id-{i}" for i in (0, 4, 8, 12)}


def test_files_stay_open_for_all_threads_a_few_at_most_and_are_opened_anew_after_an_error(tmp_path):
    opened, closed = [], []

    def open_file(name):
        file = pa.OSFile(name)
        opened.append(name)
        weakref.finalize(file, closed.append, name)
        return file

    names = [str(tmp_path / str(number)) for number in range(100)]
    for number in range(100):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 10)
    files = SharedFiles(open_file=open_file)

    def read(name):
        return files.read(name, lambda file: file.read_at(1, 5))

    assert read(names[0]) == b"\0"
    on_threads(lambda _: [read(names[0]) for _ in range(50)], range(4))
    assert opened == names[:1]
    assert [read(name)[0] for name in names] == list(range(100))
    assert opened == names
    assert closed == names[:36]

    def fail(file):
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        files.read(names[99], fail)
    read(names[98])
    read(names[99])
    assert opened[100:] == names[99:]
    files.close()
    assert sorted(closed) == sorted(opened)


def test_what_threads_ask_for_at_once_is_read_once(tmp_path):
    path = write_dataset(tmp_path / "set")
    files, asked = SharedFiles(), threading.Barrier(3, timeout=20)
    read, found = [], []

    def make():
        read.append(1)
        time.sleep(0.2)
        return "it", 2

    def work(number):
        asked.wait()
        found.append(files.cached("key", make))

    on_threads(work, range(3))
    assert (read, found) == ([1], ["it"] * 3)

    def fail():
        raise DataError("damaged")

    for _ in range(2):  # an error is not kept
        with pytest.raises(DataError, match="damaged"):
            files.cached("other", fail)
    reader = Reader(path, files, ranged=False)
    reader.read(0, text=True, items=False)
    once = files.bytes_read
    on_threads(lambda i: reader.read(i, text=True, items=False), range(4))
    assert files.bytes_read == once


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

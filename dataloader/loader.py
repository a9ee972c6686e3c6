"""Fetching in the background: reading, tokenising and preparing what this rank needs, ahead of its step.

An item is prepared by the function of its modality: decoded, and made what its encoder takes in. It is bad
data if that raises a DataError, such as SampleError. Any other exception is a mistake in the function: it
surfaces, with the item's name as a note.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from dataloader.format import DataError, Item, Sample, UnreadableError
from dataloader.tokenizer import Tokenizer
from dataloader.tokens import SampleMeta, TextArrays, blank
from dataloader.tokens_together import tokenize_all

T = TypeVar("T")  # what an item becomes
_MOST_PLACES = 64  # texts or items that a thread takes at a time
_READ_FIRST = 4 << 20  # bytes of items that are read before the first of them is prepared
_PARTS = 4  # of a fetch for each of several threads, so that they end together
_MOST_THREADS = 16


@dataclass(frozen=True)
class Fetch:
    """What a rank needs for a step: texts to tokenise, items by (source, sample id, item index). `costs` says
    what each item takes, in any unit, such as the bytes of its file; items without are alike. `changes` are
    what is done to items that are decoded, None or no changes at all for nothing.
    """

    texts: tuple[tuple[str, SampleMeta], ...]
    items: tuple[tuple[str, int, int], ...]
    costs: tuple[int, ...] = ()
    changes: tuple[Callable[[Any], Any] | None, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.costs) in (0, len(self.items))
        assert len(self.changes) in (0, len(self.items))


class SampleReader(Protocol):
    """What reads the samples of a source. Threads share it."""

    def read(self, i: int, text: bool, items: bool | Sequence[int]) -> Sample:
        """Sample `i` with what is asked for of it. Raises UnreadableError if it alone cannot be read, and
        whatever else if the source cannot.
        """


@dataclass(frozen=True)
class Failure:
    """An item that could not be prepared, or a text that could not be read if `item` is None, and why; `name`
    is the id of its sample.
    """

    source: str
    sample: int
    item: int | None
    reason: str
    name: str


@dataclass(frozen=True)
class Fetched(Generic[T]):
    """The answer to a Fetch, in its order.

    `texts` are (input_ids, labels, loss_mask) as `tokenize` returns them, or `blank`; an item that could not
    be prepared is None. Both are named in `failures`.
    """

    texts: list[TextArrays]
    items: list[T | None]
    failures: tuple[Failure, ...]


class _Work(NamedTuple):
    kind: str  # "texts" or "items"
    places: tuple[int, ...]


class _Job(Generic[T]):
    """A fetch under way; everything but the lists' elements is guarded by the loader's lock."""

    def __init__(self, fetch: Fetch, num_threads: int) -> None:
        self.fetch = fetch
        # Texts of samples whose items are fetched, too, which are read with the first of these.
        self.beside = _beside_items(fetch)
        self.todo = deque(_works(fetch, self.beside, num_threads))
        self.total = len(self.todo)
        self.done = 0
        self.running: dict[int, _Work] = {}  # by thread
        self.started = False
        self.wanted = False
        self.error: BaseException | None = None
        self.texts: list[TextArrays | None] = [None] * len(fetch.texts)
        self.items: list[T | None] = [None] * len(fetch.items)
        self.failures: list[tuple[int, Failure]] = []


def _failures(job: _Job[Any]) -> tuple[Failure, ...]:
    # Texts before items; threads find them in any order.
    return tuple(failure for _, failure in sorted(job.failures, key=lambda pair: (pair[0], pair[1].sample)))


class Loader(Generic[T]):
    """Threads that work off submitted fetches in order, at most `depth` of them ahead of `get`.

    `prepare` has a function for each modality, of an item and, if the fetch has one for it, its change;
    several threads call them at once, and `prepare_s` counts the seconds of a core that they have taken.

    A fetch that `get` waits for is worked on whatever the depth. The threads are daemons: a reader that
    hangs keeps neither `get` (which times out) nor the process from ending.
    """

    def __init__(
        self,
        readers: Mapping[str, SampleReader],
        tokenizer: Tokenizer,
        prepare: Mapping[str, Callable[..., T]],
        num_threads: int = 1,
        depth: int = 2,
    ) -> None:
        if num_threads < 1 or depth < 1:
            raise ValueError(f"num_threads {num_threads} and depth {depth} must be at least 1")
        self._readers = readers
        self._tokenizer = tokenizer
        self._prepare = prepare
        self.prepare_s = 0.0
        self._depth = depth
        self._jobs: dict[int, _Job[T]] = {}  # submitted and not collected, in order
        self._closed = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=f"loader-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: int, fetch: Fetch) -> None:
        """Queue a fetch; returns at once. `key` is free to choose and must not be in use."""
        sources = {source for source, _ in fetch.texts} | {source for source, _, _ in fetch.items}
        unknown = sorted(sources - set(self._readers))
        if unknown:
            raise ValueError(
                f"fetch {key} asks for unknown sources {unknown}: known are {sorted(self._readers)}"
            )
        with self._changed:
            self._check_open()
            if key in self._jobs:
                raise ValueError(f"fetch {key} was submitted and not collected yet: use another key")
            self._jobs[key] = _Job(fetch, len(self._threads))
            self._changed.notify_all()

    def get(self, key: int, timeout_s: float) -> Fetched[T]:
        """Wait for a submitted fetch and hand it out, once.

        Raises TimeoutError saying what it waits for (the fetch stays and may be asked for again), or the
        error that reading it raised.
        """
        with self._changed:
            self._check_open()
            if key not in self._jobs:
                raise ValueError(
                    f"fetch {key} was never submitted, or was collected: waiting are {list(self._jobs)}"
                )
            job = self._jobs[key]
            job.wanted = True
            self._changed.notify_all()
            ready = self._changed.wait_for(
                lambda: self._closed or job.error is not None or job.done == job.total, timeout_s
            )
            self._check_open()
            if not ready:
                parts = "; ".join(_describe(job.fetch, work) for work in job.running.values())
                raise TimeoutError(
                    f"fetch {key} is not ready after {timeout_s} s: {job.done} of {job.total} parts are "
                    f"done, waiting for: {parts or 'a free thread'}"
                )
            del self._jobs[key]
            self._changed.notify_all()  # one fetch fewer ahead
        if job.error is not None:
            raise job.error
        texts = [arrays for arrays in job.texts if arrays is not None]
        assert len(texts) == len(job.texts)
        return Fetched(texts, job.items, _failures(job))

    def failures(self, key: int) -> tuple[Failure, ...] | None:
        """Return what could not be prepared of a fetch that waits to be collected, None if it is not done, or
        not here; waits for nothing.
        """
        with self._changed:
            job = self._jobs.get(key)
            done = job is not None and job.done == job.total and job.error is None
            return _failures(job) if job is not None and done else None

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the threads, waiting at most `timeout_s` for those in the middle of a read."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the loader is closed")

    def _run(self, number: int) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next() is not None)
                if self._closed:
                    return
                job = self._next()
                assert job is not None
                work = job.todo.popleft()
                job.started = True
                job.running[number] = work
            error: BaseException | None = None
            try:
                (self._load_texts if work.kind == "texts" else self._load_items)(job, work.places)
            except BaseException as caught:  # surfaces in get(): a thread must never die with a fetch
                error = caught
            with self._changed:
                del job.running[number]
                job.done += 1
                if error is not None and job.error is None:
                    job.error = error
                    job.todo.clear()
                if job.error is not None or job.done == job.total:  # else nobody can go on for it
                    self._changed.notify_all()

    def _next(self) -> _Job[T] | None:
        """The fetch to work on: one that is waited for, else the first within the depth."""
        jobs = [job for job in self._jobs.values() if job.todo]
        ahead = sum(job.started for job in self._jobs.values())
        wanted = [job for job in jobs if job.wanted]
        allowed = [job for job in jobs if job.started or ahead < self._depth]
        return next(iter(wanted + allowed), None)

    def _load_texts(self, job: _Job[T], places: Sequence[int]) -> None:
        self._tokenize(job, self._read_texts(job, places))

    def _read_texts(self, job: _Job[T], places: Sequence[int]) -> list[tuple[int, Sample]]:
        """Read the texts of places; those that cannot be read are lost."""
        found = []
        for place in places:
            source, meta = job.fetch.texts[place]
            try:
                found.append((place, self._readers[source].read(meta.id, text=True, items=False)))
            except UnreadableError as error:
                job.texts[place] = blank(meta)
                self._lose(job, -1, Failure(source, meta.id, None, str(error), error.name))
        return found

    def _tokenize(self, job: _Job[T], texts: Sequence[tuple[int, Sample]]) -> None:
        """Tokenise samples, each of which stands at a place."""
        metas = [job.fetch.texts[place][1] for place, _ in texts]
        arrays = tokenize_all([sample for _, sample in texts], metas, self._tokenizer)
        for (place, _), found in zip(texts, arrays, strict=True):
            job.texts[place] = found

    def _load_items(self, job: _Job[T], places: Sequence[int]) -> None:
        # Reading is Python and decoding is not: in turn, each finds the processor's caches full of the other.
        texts: list[tuple[int, Sample]] = []
        read: list[tuple[int, str, Item]] = []
        size = 0
        for place, name, item in self._read_items(job, places, texts):
            read.append((place, name, item))
            size += len(item.data)
            if size >= _READ_FIRST:
                self._prepare_items(job, read)
                read, size = [], 0
        self._tokenize(job, texts)
        self._prepare_items(job, read)

    def _prepare_items(self, job: _Job[T], read: Sequence[tuple[int, str, Item]]) -> None:
        start = time.thread_time()
        for place, name, item in read:
            self._load_item(job, place, name, item)
        seconds = time.thread_time() - start
        with self._changed:
            self.prepare_s += seconds

    def _read_items(
        self, job: _Job[T], places: Sequence[int], found: list[tuple[int, Sample]]
    ) -> Iterator[tuple[int, str, Item]]:
        """Yield the items of places, with the names of their samples, and add the texts that are read with
        them to those `found`. What cannot be read is lost.
        """
        for (source, sample_id), of in groupby(places, key=lambda place: job.fetch.items[place][:2]):
            group = list(of)
            indexes = [job.fetch.items[place][2] for place in group]
            reader, texts = self._readers[source], job.beside.pop((source, sample_id), ())
            try:
                sample = reader.read(sample_id, text=bool(texts), items=indexes)
                found += ((place, sample) for place in texts)
            except UnreadableError:  # or each by itself: one may be there without the other
                found += self._read_texts(job, texts)
                try:
                    sample = reader.read(sample_id, text=False, items=indexes)
                except UnreadableError as error:
                    for place, index in zip(group, indexes, strict=True):
                        self._lose(job, place, Failure(source, sample_id, index, str(error), error.name))
                    continue
            if len(sample.items) != len(indexes):
                raise DataError(
                    f"sample {sample.id!r} ({sample_id} of source {source!r}) lacks one of the items "
                    f"{indexes}: index and shards disagree; check with omni data verify"
                )
            for place, item in zip(group, sample.items, strict=True):
                yield place, sample.id, item

    def _load_item(self, job: _Job[T], place: int, name: str, item: Item) -> None:
        """Prepare the item of a place, of a sample that is called `name`."""
        source, sample_id, index = job.fetch.items[place]
        if item.modality not in self._prepare:
            raise DataError(
                f"sample {name!r} of source {source!r}: no encoder for modality {item.modality!r}, "
                f"there are {sorted(self._prepare)}: add its encoder or leave out the source"
            )
        try:
            change = job.fetch.changes[place] if job.fetch.changes else None
            prepare = self._prepare[item.modality]
            job.items[place] = prepare(item) if change is None else prepare(item, change)
        except DataError as error:
            self._lose(job, place, Failure(source, sample_id, index, str(error), name))
        except Exception as error:
            error.add_note(
                f"The item is that of source {source!r}, sample {sample_id} ({name!r}), item {index}."
            )
            raise

    def _lose(self, job: _Job[T], place: int, failure: Failure) -> None:
        with self._changed:
            job.failures.append((place, failure))


def default_threads(cores: int, ranks: int) -> int:
    """Threads of a rank's loader where `ranks` share `cores`: an even share, from 1 to 16."""
    return min(max(1, cores // ranks), _MOST_THREADS)


def _works(
    fetch: Fetch, beside_items: Mapping[tuple[str, int], Sequence[int]], num_threads: int
) -> list[_Work]:
    """A fetch in parts for threads, of neighbours in the order of sample ids, which are read together.

    Parts cost about the same, `_PARTS` or more for each thread; what costs more than that is a part of its
    own, and the first to be done. A text goes with the items of its sample, if it is `beside_items`.
    """
    beside = {place for places in beside_items.values() for place in places}
    alone = [place for place in range(len(fetch.texts)) if place not in beside]
    texts = sorted(alone, key=lambda i: (fetch.texts[i][0], fetch.texts[i][1].id))
    items = sorted(range(len(fetch.items)), key=lambda i: fetch.items[i])
    text_costs = [meta.text_tokens for _, meta in fetch.texts]
    return [
        *_parts("texts", texts, text_costs, num_threads),
        *_parts("items", items, fetch.costs or [1] * len(items), num_threads),
    ]


def _beside_items(fetch: Fetch) -> dict[tuple[str, int], list[int]]:
    """Places of the texts of samples of which items are fetched, too, by source and sample id."""
    having = {(source, sample) for source, sample, _ in fetch.items}
    found: dict[tuple[str, int], list[int]] = {}
    for place, (source, meta) in enumerate(fetch.texts):
        if (source, meta.id) in having:
            found.setdefault((source, meta.id), []).append(place)
    return found


def _parts(kind: str, order: Sequence[int], costs: Sequence[int], num_threads: int) -> list[_Work]:
    parts_of_all = _PARTS * num_threads if num_threads > 1 else 1
    limit = max(1, -(-sum(costs) // parts_of_all))
    parts: list[list[int]] = []
    cost = 0
    for place in order:
        if not parts or cost + costs[place] > limit or len(parts[-1]) == _MOST_PLACES:
            parts.append([])
            cost = 0
        parts[-1].append(place)
        cost += costs[place]
    parts.sort(key=lambda part: costs[part[0]] <= limit)
    return [_Work(kind, tuple(part)) for part in parts]


def _describe(fetch: Fetch, work: _Work) -> str:
    first: Any = (fetch.texts if work.kind == "texts" else fetch.items)[work.places[0]]
    sample = first[1].id if work.kind == "texts" else first[1]
    return f"{len(work.places)} {work.kind} from source {first[0]!r}, sample {sample} on"

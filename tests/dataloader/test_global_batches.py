from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloader.format import DataError
from dataloader.global_batch import Budget, GlobalBatch, take_global_batch
from dataloader.manifest import Frame
from dataloader.samples import in_order
from dataloader.stream import SourceSpec, Stream
from dataloader.tokens import ItemMeta, SampleMeta, fit, length

REFUSED = ItemMeta("image", 0, 0, 1, (9,), "too wide")


def meta_of(source: str, sample: int, long: int) -> SampleMeta:
    """A text of 1 to 20 tokens; for `long` in a hundred samples, of 100 or with an item that is refused."""
    kind = (sample * 7919 + len(source) * 104729) % 100
    if kind < long:
        return SampleMeta(sample, source, 100 if kind % 2 else 5, (REFUSED,) * (kind % 3 == 0), 0)
    return SampleMeta(sample, source, 1 + kind % 20, (), 0)


class World:
    """A stream of samples, with a count of the samples whose lengths were asked for."""

    def __init__(self, sources: dict[str, SourceSpec], long: int) -> None:
        self.stream = Stream(sources, 5, 3)
        self.drawn: list[tuple[str, int]] = []
        self.long = long
        self.asked = 0

    def at(self, position: int) -> tuple[str, int]:
        while position >= len(self.drawn):
            sources, ids = (column.tolist() for column in self.stream.take(len(self.drawn), 1_000))
            self.drawn += zip((self.stream.names[source] for source in sources), ids, strict=True)
        return self.drawn[position]

    def metas(self, source: str, sample: int) -> SampleMeta:
        return meta_of(source, sample, self.long)

    def lengths(self, source: str, ids: np.ndarray, budget: int, policy: str) -> np.ndarray:
        self.asked += len(ids)
        kept = (fit(self.metas(source, i), budget, policy.replace("error", "drop")) for i in ids.tolist())
        return np.array([length(meta) if meta else 0 for meta in kept], dtype=np.int64)

    def take(self, cursor: int, budget: Budget) -> GlobalBatch:
        return take_global_batch(self.stream, self.lengths, self.metas, cursor, budget)

    def plain_take(self, cursor: int, budget: Budget) -> tuple[list, list, int]:
        """The definition, sample by sample: (name, id, length) of those taken, those skipped, next cursor."""
        taken, skipped, tokens = [], [], 0
        begin = cursor
        while taken or cursor < begin + self.stream.cycle:
            name, sample = self.at(cursor)
            meta = fit(self.metas(name, sample), budget.microbatch_tokens, budget.on_long)
            if meta is None:
                skipped.append((name, sample))
            else:
                if budget.step_samples is not None:
                    full = len(taken) >= budget.step_samples
                else:
                    full = tokens + length(meta) > budget.step_tokens
                if taken and full:
                    break
                taken.append((name, sample, length(meta)))
                tokens += length(meta)
            cursor += 1
        if not taken:
            raise DataError("fits no sample")
        return taken, skipped, cursor


def rows(world: World, batch: GlobalBatch) -> list[tuple[str, int, int]]:
    columns = (batch.sources, batch.ids, batch.lengths)
    assert {column.dtype for column in columns} == {np.dtype(np.int64)}
    zipped = zip(*(column.tolist() for column in columns), strict=True)
    return [(world.stream.names[source], i, tokens) for source, i, tokens in zipped]


specs = st.builds(SourceSpec, st.integers(1, 60), st.integers(1, 9), st.integers(1, 4))
worlds = st.builds(
    World,
    st.dictionaries(st.sampled_from(["a", "bb", "ccc"]), specs, min_size=1),
    st.sampled_from([0, 5, 50, 97]),
)
budgets = st.builds(
    Budget,
    st.integers(1, 40),
    st.integers(1, 3_000),
    st.none(),
    st.sampled_from(["drop", "truncate", "error"]),
) | st.builds(
    Budget, st.integers(1, 40), st.none(), st.integers(1, 400), st.sampled_from(["drop", "truncate", "error"])
)


@settings(deadline=None, max_examples=300)
@given(worlds, budgets, st.integers(0, 500))
def test_a_step_takes_what_is_defined(world, budget, cursor):
    expected = found = ""
    for _ in range(3):
        try:
            taken, skipped, after = world.plain_take(cursor, budget)
        except DataError as error:
            with pytest.raises(DataError) as caught:
                world.take(cursor, budget)
            expected, found = str(error), str(caught.value)
            break
        batch = world.take(cursor, budget)
        assert rows(world, batch) == taken
        assert list(batch.skipped) == skipped
        assert batch.next_cursor == after == cursor + len(taken) + len(skipped)
        cursor = after
    assert expected in found  # the same sample and why, where one is refused


def test_a_step_larger_than_the_data_takes_all_samples_it_was_asked_for():
    """A stream has no end: a set of few samples comes again and again within a step."""
    world = World({"a": SourceSpec(30, 4, 1), "bb": SourceSpec(50, 4, 2)}, 20)
    batch = world.take(7, Budget(30, None, 2_048, "drop"))
    assert len(batch.ids) == 2_048 > 2 * world.stream.cycle
    assert batch.skipped
    batch = world.take(7, Budget(30, 10_000, None, "drop"))
    assert 10_000 - 21 <= batch.lengths.sum() <= 10_000


def test_samples_that_are_refused_beyond_the_step_are_no_error():
    """The next step may read them, or the run may end before."""
    world = World({"a": SourceSpec(10_000, 4, 1)}, 1)
    budget = Budget(30, None, 1, "drop")
    cursors = [0]
    while not (batch := world.take(cursors[-1], budget)).skipped:
        cursors.append(batch.next_cursor)
    refused = cursors[-1] + 1  # after the only sample of this step
    strict = replace(budget, on_long="error", step_samples=5)
    assert len(world.take(refused - 6, strict).ids) == 5
    # The sample after those taken is looked at to know that the step is full: its error is this step's.
    with pytest.raises(DataError, match=f"sample {world.at(refused)[1]} of source 'a'"):
        world.take(refused - 5, strict)


@pytest.mark.parametrize("budget", [Budget(30, None, 20_000, "drop"), Budget(30, 200_000, None, "drop")])
def test_little_more_is_read_than_taken(budget):
    world = World({"a": SourceSpec(10**9, 32, 1), "bb": SourceSpec(10**6, 32, 2)}, 5)
    batch = world.take(0, budget)
    assert batch.next_cursor > 17_000
    assert world.asked < 1.15 * batch.next_cursor


def test_no_sample_that_fits_is_an_error_with_the_number_and_the_remedy():
    world = World({"a": SourceSpec(30, 4, 1), "bb": SourceSpec(50, 4, 2)}, 100)
    words = (
        rf"microbatch_tokens=4 fits no sample: {world.stream.cycle} in a row were dropped.*on_long=truncate"
    )
    with pytest.raises(DataError, match=words):
        world.take(11, Budget(4, 100, None, "drop"))
    assert world.asked == world.stream.cycle


def test_no_chat_whose_first_turn_fits_is_an_error_that_does_not_name_what_is_set():
    frame = Frame(bos=False, end_of_item=False, eos=False, turns=True)
    trace = [SampleMeta(n, "trace", 30, (), 0, frame=frame, turns=(12, 29)) for n in range(4)]
    samples = in_order(trace)
    with pytest.raises(DataError, match="microbatch_tokens=11 fits no sample: 4 in a row") as error:
        take_global_batch(
            samples.stream, samples.lengths, samples.metas, 0, Budget(11, 100, None, "truncate")
        )
    assert "on_long=truncate" not in str(error.value)
    batch = take_global_batch(
        samples.stream, samples.lengths, samples.metas, 0, Budget(12, 24, None, "truncate")
    )
    assert (batch.ids.tolist(), batch.lengths.tolist()) == ([0, 1], [12, 12])


@pytest.mark.parametrize("policy", ["drop", "truncate", "error"])
def test_lengths_of_a_trace_are_those_of_its_samples_as_they_are_kept(policy):
    trace = [meta_of("trace", sample, 30) for sample in range(60)]
    samples, ids = in_order(trace), np.array([41, 7, 7, 0, 59, *range(60)])
    for budget in (3, 19, 20, 100):
        kept = [fit(trace[i], budget, "drop" if policy == "error" else policy) for i in ids]
        expected = [0 if meta is None else length(meta) for meta in kept]
        assert samples.lengths("trace", ids, budget, policy).tolist() == expected


def test_items_of_a_trace_are_those_of_its_samples_in_any_order():
    rng = np.random.default_rng(0)
    trace = [
        SampleMeta(
            n,
            "trace",
            4,
            tuple(
                ItemMeta("image" if rng.random() < 0.5 else "audio", int(rng.integers(1, 99)), 1, 3, ())
                for _ in range(int(rng.integers(0, 4)))
            ),
            9,
        )
        for n in range(40)
    ]
    ids = np.array([39, 7, 7, 0, *rng.permutation(40)])
    found = in_order(trace).items("trace", ids)
    for modality in ("image", "audio"):
        expected = [
            (place, item.tokens)
            for place, n in enumerate(ids.tolist())
            for item in trace[n].items
            if item.modality == modality
        ]
        assert list(zip(*(column.tolist() for column in found[modality]), strict=True)) == expected

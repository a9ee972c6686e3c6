"""Records of steps: they read back as written, and put the clocks of ranks on one."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from infra.run_folder import RunFolder
from infra.timelines import (
    DomainRecord,
    RankRecord,
    TimelineError,
    forget_after,
    on_one_clock,
    read_step,
    recorded_steps,
    write_domain,
    write_rank,
)
from pipeline.drawing import Bar, Track

SPANS = (
    Bar("wait", "wait(recv_forward 0)", 0, 0, 40, "recv_forward"),
    Bar("forward", "forward(0, virtual stage 1)", 0, 40, 100),
    Bar("host", "end", None, 100, 130),
)
SIMULATED = (Track("rank 4", (Bar("forward", "forward(0)", 0, 0, 7),)), Track("rank 6", ()))


def record(began_ns: int, *stays: tuple[int, int]) -> RankRecord:
    return RankRecord(stays, began_ns, SPANS)


def write_step(folder: RunFolder, step: int, ranks: tuple[int, ...] = (4, 6)) -> None:
    write_domain(folder, step, 2, DomainRecord((4, 6), SIMULATED))
    for rank in ranks:
        write_rank(folder, step, rank, record(1_000 * rank, (1_000 * rank - 20, 1_000 * rank - 10)))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run")


def test_a_step_reads_back_as_it_was_written_the_last_one_unless_one_is_named(folder: RunFolder):
    for step in (9, 10, 100):
        write_step(folder, step)
    assert recorded_steps(folder) == [9, 10, 100]
    for asked, step in ((None, 100), (9, 9)):
        found, recorded = read_step(folder, asked, 2)
        assert found == step
        assert recorded.simulated == SIMULATED
        assert recorded.measured == (Track("rank 4", SPANS), Track("rank 6", SPANS))
        assert recorded.error_ns == 10


def test_what_is_not_recorded_is_refused_with_what_is(folder: RunFolder):
    with pytest.raises(TimelineError, match=r"holds no timelines: train with train\.timeline_every=N"):
        read_step(folder, None, 0)
    write_step(folder, 10)
    write_step(folder, 20, ranks=(4,))
    with pytest.raises(TimelineError, match="step 11 is not recorded: choose one of 10, 20"):
        read_step(folder, 11, 2)
    with pytest.raises(TimelineError, match="domain 0 of step 10 is not recorded: there are 2"):
        read_step(folder, 10, 0)
    with pytest.raises(TimelineError, match=r"step 20 is not whole: .*step_20 lacks rank 6; .*another step"):
        read_step(folder, 20, 2)


@pytest.mark.parametrize("name", ["domain_2.json", "rank_6.json"])
@pytest.mark.parametrize("content", [b"", b'{"ranks": [4, 6], "simu', b"\xff", b"[1]", b"{}"])
def test_a_record_that_is_not_what_was_written_is_named(folder: RunFolder, name: str, content: bytes):
    write_step(folder, 10)
    path = folder.timelines / "step_10" / name
    path.write_bytes(content)
    with pytest.raises(TimelineError, match=rf"^{path} is damaged \(.*choose another step"):
        read_step(folder, 10, 2)


def test_a_run_that_continues_forgets_the_steps_that_it_repeats(folder: RunFolder):
    for step in (9, 10, 100):
        write_step(folder, step)
    forget_after(folder, 10)
    assert recorded_steps(folder) == [9, 10]


@pytest.mark.parametrize("seed", range(50))
def test_two_ranks_are_no_further_apart_than_said(seed: int):
    """Ranks with clocks of their own, of which nothing is known, pass barriers at odd times."""
    random = Random(seed)
    num, offsets = 4, [random.randint(-(10**12), 10**12) for _ in range(4)]
    stays: list[list[tuple[int, int]]] = [[] for _ in range(num)]
    now = 0
    for _ in range(5):
        enters = [now + random.randint(0, 300) for _ in range(num)]
        leaves = [max(enters) + random.randint(1, 200) for _ in range(num)]
        for rank in range(num):
            stays[rank].append((enters[rank] + offsets[rank], leaves[rank] + offsets[rank]))
        now = max(leaves)
    begins = [now + random.randint(0, 100) for _ in range(num)]
    records = [
        record(begin + offset, *own) for begin, offset, own in zip(begins, offsets, stays, strict=True)
    ]
    rows, error_ns = on_one_clock([str(rank) for rank in range(num)], records)
    assert error_ns == min(max(e[1] - e[0] for e in at) for at in zip(*stays, strict=True))
    starts = [row.spans[0].start_ns for row in rows]
    assert min(starts) == 0
    for a in range(num):
        assert [
            replace(s, start_ns=s.start_ns - starts[a], end_ns=s.end_ns - starts[a]) for s in rows[a].spans
        ]
        for b in range(num):
            assert abs((starts[a] - starts[b]) - (begins[a] - begins[b])) <= error_ns

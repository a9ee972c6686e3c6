"""Pictures of timelines hold what the timelines do, each span where and as long as it is."""

import json
from collections import Counter
from random import Random
from xml.etree import ElementTree

import pytest
from domain_plans import SCHEDULES, Shape, Work, make_plan
from wide_plans import random_wide_plan

from pipeline.drawing import WAITING, Track, idle_ns, rows_of, spans_of, spent_ns, svg, trace_events
from pipeline.laps import CAUSES, DATA, END, HOST, PEERS, Lap, cause_of, idle_of
from pipeline.ops import COMPUTE, Kind, Op
from pipeline.simulator import Timeline, run

WORK = [Work("image", m, (m % 2,), (3,)) for m in range(4)]
SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(schedule: str, shape: Shape | None = None) -> Timeline:
    domain = make_plan(shape or Shape(2), 4, WORK, schedule).domain
    return run(domain, lambda rank, op: 10**6 if op.kind in COMPUTE else 0, lambda op: 10**5)


def drawn(timeline: Timeline) -> list[Track]:
    return rows_of(timeline, [f"rank {team}" for team in timeline.domain.teams])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_spans_of_a_row_follow_each_other_and_hold_every_compute_op_once(schedule):
    timeline = timeline_of(schedule)
    for row, ops in zip(drawn(timeline), timeline.domain.ops, strict=True):
        at = 0
        for span in row.spans:
            assert at == span.start_ns < span.end_ns
            at = span.end_ns
        computed = Counter(span.text for span in row.spans if span.kind != WAITING)
        assert computed == Counter(str(op) for op in ops if op.kind in COMPUTE)


@pytest.mark.parametrize("seed", range(40))
def test_work_and_idle_time_by_cause_add_up_to_the_step_of_every_row(seed):
    random = Random(seed)
    domain = random_wide_plan(random).domain
    times: dict[Op, int] = {}
    timeline = run(
        domain, lambda rank, op: times.setdefault(op, random.randint(0, 50)), lambda op: random.randint(0, 9)
    )
    rows = drawn(timeline)
    worked = sum(s.end_ns - s.start_ns for row in rows for s in row.spans if s.kind != WAITING)
    assert worked + sum(idle_ns(rows).values()) == len(rows) * timeline.makespan_ns


def test_what_a_rank_waits_for_is_told():
    # The second stage waits for the first forward, the first one for the last backward.
    domain = make_plan(Shape(2), 1, [], "encode_first").domain
    timeline = run(domain, lambda rank, op: 10 if op.kind in COMPUTE else 0, lambda op: 1)
    first, second = drawn(timeline)
    assert [(s.kind, s.cause, s.start_ns, s.end_ns) for s in first.spans] == [
        ("forward", "", 0, 10),
        ("wait", "recv_backward", 10, 32),
        ("backward", "", 32, 42),
    ]
    assert [s.cause or s.kind for s in second.spans] == [
        "recv_forward",
        "forward",
        "backward",
        "send_backward",
        "reduce",
    ]


def test_ranks_whose_layers_communicate_wait_for_their_peers():
    domain = make_plan(
        Shape(1, pool=2, collective_group=2), 1, [Work("image", 0, (0,), (3,))], "encode_first"
    ).domain
    timeline = run(domain, lambda rank, op: 10 if op.kind in COMPUTE else 0, lambda op: 0)
    waits = [(s.cause, s.end_ns - s.start_ns) for s in drawn(timeline)[1].spans if s.kind == WAITING]
    # For the forward, while the other rank encodes, and for the reduction, while that one goes back.
    assert waits == [("peers", 10), ("reduce", 10)]


@pytest.mark.parametrize("seed", range(20))
def test_measured_laps_are_drawn_whole_with_idle_time_before_work(seed):
    random = Random(seed)
    domain = random_wide_plan(random).domain
    for domain_rank in range(len(domain.ops) * domain.team):
        laps, at = [], 0
        for what in (DATA, HOST, *domain.ops_of(domain_rank), END):
            end = at + random.randint(0, 50)
            laps.append(Lap(what, at, end, random.randint(0, end - at)))
            at = end
        spans = spans_of(laps, domain, domain_rank)
        now = 0
        for span in spans:
            assert now == span.start_ns < span.end_ns
            now = span.end_ns
        assert now == at
        seen = list(dict.fromkeys(span.text for span in spans))
        assert seen == list(dict.fromkeys(str(lap.what) for lap in laps if lap.end_ns > lap.start_ns))
        idle = {cause: ns for cause, ns in idle_ns([Track("", spans)]).items() if ns}
        assert idle == {cause: ns for cause, ns in idle_of(laps, domain, domain_rank).items() if ns}
        assert sum(spent_ns([Track("", spans)]).values()) == at


def test_what_a_measured_rank_stands_still_for_is_told():
    domain = make_plan(
        Shape(1, pool=2, collective_group=2), 1, [Work("image", 0, (0,), (3,))], "encode_first"
    ).domain
    causes = {
        DATA: DATA,
        END: END,
        Op(Kind.WAIT, 0, Kind.SHIP): "ship",
        Op(Kind.SHIP, 0): HOST,
        Op(Kind.FORWARD, 0): PEERS,  # whose layers communicate
        Op(Kind.ENCODE, 0): HOST,  # alone
        Op(Kind.REDUCE, 0): "reduce",
    }
    assert {what: cause_of(what, domain, 0) for what in causes} == causes
    assert set(causes.values()) < set(CAUSES)


def test_an_svg_has_a_rectangle_for_each_span_on_one_scale():
    short, long = drawn(timeline_of("encode_first")), drawn(timeline_of("encode_first", Shape(4)))
    root = ElementTree.fromstring(svg([("short & sweet", short), ("long", long)]))
    titled = [rect for rect in root.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    spans = [span for rows in (short, long) for row in rows for span in row.spans]
    assert len(titled) == len(spans)
    end = max(span.end_ns for span in spans)
    for rect, span in zip(titled, spans, strict=True):
        assert float(rect.get("width", 0)) == pytest.approx(
            (span.end_ns - span.start_ns) * 1200 / end, abs=0.01
        )
        title = rect.find(f"{SVG}title")
        assert title is not None
        assert span.text in (title.text or "")
    texts = {text.text for text in root.iter(f"{SVG}text")}
    assert {"short & sweet", "long", "rank 3", "forward", "encode backward"} <= texts


def test_trace_events_hold_the_same_spans():
    rows = drawn(timeline_of("one_f_one_b"))
    found = json.loads(trace_events([("1F1B", rows)]))["traceEvents"]
    spans = [event for event in found if event["ph"] == "X"]
    assert [event["ts"] * 1000 for event in spans] == [s.start_ns for row in rows for s in row.spans]
    assert sum(event["dur"] for event in spans) == pytest.approx(
        sum(s.end_ns - s.start_ns for row in rows for s in row.spans) / 1e3
    )
    assert {event["args"]["name"] for event in found if event["name"] == "thread_name"} == {
        "rank 0",
        "rank 1",
    }


def test_a_step_without_work_is_drawn_empty():
    domain = make_plan(Shape(2), 0, [], "encode_first").domain
    rows = drawn(run(domain, lambda rank, op: 0, lambda op: 0))
    assert all(not row.spans for row in rows)
    assert ElementTree.fromstring(svg([("empty", rows)])).tag == f"{SVG}svg"
    assert all(Kind.REDUCE in (op.kind, op.on) for ops in domain.ops for op in ops)

"""Timelines as pictures: SVG for people, trace events for viewers such as Perfetto.

A row is a rank or a team of ranks, a span what it does from one time to another: an op, or waiting, by what
is waited for. Whether times were simulated or measured, the titles say.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

from parallel.work import Grad
from pipeline.domain_plan import DomainPlan
from pipeline.laps import DATA, END, HOST, PEERS, PLAN, SAVE, WEIGHTS, Lap, cause_of
from pipeline.ops import COMPUTE, ISSUED, Kind, Op
from pipeline.simulator import Timeline

WAITING = "wait"
COMMUNICATION = "issuing and taking in"
COLOURS = {
    "encode": "#f2b134",
    "encode backward": "#c77d0a",
    "forward": "#6aa5e8",
    "backward": "#2f6fb2",
    "backward, inputs": "#2f6fb2",
    "backward, weights": "#57b09b",
    "reduce": "#9a7fc9",
    COMMUNICATION: "#5c6b73",
    HOST: "#8d8d8d",
}
_IDLE = {
    "ship": "#f6e3bd",
    "return": "#ead2b0",
    "recv_forward": "#dbe7f5",
    "recv_backward": "#c9d6e6",
    "send_forward": "#e4e4e4",
    "send_backward": "#e4e4e4",
    PEERS: "#e6dff1",
    "reduce": "#d9d0ea",
    DATA: "#f3d3d3",
    PLAN: "#f0c9dd",
    SAVE: "#d5e8d4",
    HOST: "#dcdcdc",
    WEIGHTS: "#d7ecdf",
    END: "#efefef",
}
_SHOWN = {**COLOURS, **{f"waits for {cause}": colour for cause, colour in _IDLE.items()}}
_WIDTH, _HEIGHT, _GAP, _LEFT, _LINE = 1200, 18, 3, 110, 16  # pixels
_DIGIT = 7  # pixels
_TICKS = 12  # at most


@dataclass(frozen=True)
class Bar:
    """What a row does from `start_ns` to `end_ns`: `kind` is one of COLOURS, or "wait" with what is waited
    for in `cause`; `text` names the op whole, `number` is its encoder batch or microbatch, None beside ops.
    """

    kind: str
    text: str
    number: int | None
    start_ns: int
    end_ns: int
    cause: str = ""


@dataclass(frozen=True)
class Track:
    """A rank or a team of them and its spans, in order of time."""

    name: str
    spans: tuple[Bar, ...]


def team_names(ranks: Sequence[int], team: int) -> list[str]:
    """Name the teams of a domain of these global ranks, such as "ranks 8-15"."""
    firsts = range(0, len(ranks), team)
    return [f"ranks {ranks[at]}-{ranks[at + team - 1]}" if team > 1 else f"rank {ranks[at]}" for at in firsts]


def rows_of(timeline: Timeline, names: Sequence[str]) -> list[Track]:
    """Return the rows of a simulated timeline, by the names of its teams, without spans of no length."""
    return [Track(name, tuple(_spans(timeline, team))) for team, name in enumerate(names)]


def _spans(timeline: Timeline, team: int) -> Iterator[Bar]:
    events = zip(timeline.events[team], timeline.transfers[team], strict=True)
    for at, (event, transfer) in enumerate(events):
        op, start = event.op, event.start_ns
        if at in timeline.weights_ns[team]:
            arrived = start + timeline.weights_ns[team][at]
            yield from _span(WAITING, op, start, arrived, WEIGHTS)
            start = arrived
        if op.kind in ISSUED:
            continue
        if op.kind is Kind.WAIT:
            assert op.on is not None
            assert transfer is not None
            # Reducing is work of this rank's too, what it waits for before is not.
            begun = min(event.end_ns, max(start, transfer.start)) if op.on is Kind.REDUCE else event.end_ns
            yield from _span(WAITING, op, start, begun, str(op.on))
            yield from _span(str(op.on), op, begun, event.end_ns)
            continue
        begun = start if transfer is None else max(start, transfer.start)
        yield from _span(WAITING, op, start, begun, PEERS)
        yield from _span(_kind(op), op, begun, event.end_ns)


def _span(kind: str, what: Op | str, start: int, end: int, cause: str = "") -> Iterator[Bar]:
    if end > start:
        yield Bar(kind, str(what), what.index if isinstance(what, Op) else None, start, end, cause)


def spans_of(laps: Sequence[Lap], domain: DomainPlan, domain_rank: int) -> tuple[Bar, ...]:
    """Return what a domain rank did in a measured step. How long it stood still in a lap is known,
    but not when: waiting is drawn before the work of the lap.
    """
    spans: list[Bar] = []
    for lap in laps:
        working = lap.start_ns + lap.idle_ns
        spans += _span(WAITING, lap.what, lap.start_ns, working, cause_of(lap.what, domain, domain_rank))
        spans += _span(_measured_kind(lap.what), lap.what, working, lap.end_ns)
    return tuple(spans)


def _measured_kind(what: Op | str) -> str:
    if isinstance(what, str):
        return HOST
    return COMMUNICATION if what.kind is Kind.WAIT or what.kind in ISSUED else _kind(what)


def _kind(op: Op) -> str:
    assert op.kind in COMPUTE, f"{op} takes no time"
    halves = {Grad.INPUT: ", inputs", Grad.WEIGHT: ", weights"}
    return str(op.kind).replace("_", " ") + (halves.get(op.grad, "") if op.kind is Kind.BACKWARD else "")


def idle_ns(rows: Sequence[Track]) -> dict[str, int]:
    """Return what rows wait, summed, by cause: one of `laps.CAUSES`, or a save between steps. Of these a
    simulated row has only the "end" of the step that others still work towards, and those of its ops.
    """
    end = max((row.spans[-1].end_ns for row in rows if row.spans), default=0)
    found: dict[str, int] = {}
    for row in rows:
        for span in row.spans:
            if span.kind == WAITING:
                found[span.cause] = found.get(span.cause, 0) + span.end_ns - span.start_ns
        found[END] = found.get(END, 0) + end - (row.spans[-1].end_ns if row.spans else 0)
    return found


def spent_ns(rows: Sequence[Track]) -> dict[str, int]:
    """Return what rows spend their time with, summed, by what it is called in pictures."""
    found = {f"waits for {cause}": ns for cause, ns in idle_ns(rows).items()}
    for row in rows:
        for span in row.spans:
            if span.kind != WAITING:
                found[span.kind] = found.get(span.kind, 0) + span.end_ns - span.start_ns
    return {key: found[key] for key in _SHOWN if found.get(key)}


def svg(pictures: Sequence[tuple[str, Sequence[Track]]]) -> str:
    """Draw titled timelines one above the other, on one scale of time."""
    end = max((s.end_ns for _, rows in pictures for row in rows for s in row.spans), default=0) or 1
    body: list[str] = []
    top = _LINE
    for title, rows in pictures:
        body.append(_text(0, top, title, "bold"))
        top += _LINE // 2
        for row in rows:
            body += _row(row, top, end)
            top += _HEIGHT + _GAP
        body += _axis(top, end)
        top += 2 * _LINE
    used = {_key(s) for _, rows in pictures for row in rows for s in row.spans}
    width = _LEFT + _WIDTH + _LINE
    legend, bottom = _legend(top, width, [key for key in _SHOWN if key in used])
    body += legend
    height = bottom + _LINE
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


def _row(row: Track, top: int, end: int) -> Iterator[str]:
    yield _text(0, top + _HEIGHT - 5, row.name)
    for span in row.spans:
        x = _LEFT + span.start_ns * _WIDTH / end
        width = (span.end_ns - span.start_ns) * _WIDTH / end
        what = f"{_key(span)}: {span.text}" if span.kind == WAITING else span.text
        yield (
            f'<rect x="{x:.2f}" y="{top}" width="{width:.2f}" height="{_HEIGHT}" fill="{_SHOWN[_key(span)]}">'
            f"<title>{escape(what)}, {(span.end_ns - span.start_ns) / 1e6:.3f} ms</title></rect>"
        )
        number = "" if span.number is None or span.kind == WAITING else str(span.number)
        if number and width >= _DIGIT * (1 + len(number)):
            yield _text(x + 2, top + _HEIGHT - 5, number)


def _axis(top: int, end: int) -> Iterator[str]:
    step = _round_step(end)
    for at in range(0, end + 1, step):
        yield _text(_LEFT + at * _WIDTH / end, top + _LINE - 4, f"{at / 1e6:g}" + (" ms" if at == 0 else ""))


def _round_step(end: int) -> int:
    """One, two or five times a power of ten, at most `_TICKS` of which lie within `end`."""
    power = 1
    while power * 10 * _TICKS <= end:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor * _TICKS >= end)


def _legend(top: int, width: int, keys: Sequence[str]) -> tuple[list[str], int]:
    """What colours mean, in lines of the picture's width, the last of which is returned, too."""
    body, x = [], 0
    for key in keys:
        wide = 24 + 6 * len(key)
        if x + wide > width:
            x, top = 0, top + _LINE
        body.append(f'<rect x="{x}" y="{top - 10}" width="10" height="10" fill="{_SHOWN[key]}"/>')
        body.append(_text(x + 14, top, key))
        x += wide
    return body, top


def _text(x: float, y: float, text: str, weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-weight="{weight}">{escape(text)}</text>'


def _key(span: Bar) -> str:
    return f"waits for {span.cause}" if span.kind == WAITING else span.kind


def trace_events(pictures: Sequence[tuple[str, Sequence[Track]]]) -> str:
    """Return timelines as JSON in the trace event format: a process for each, a thread for each row."""
    events: list[dict[str, object]] = []
    for number, (title, rows) in enumerate(pictures):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": title}})
        for thread, row in enumerate(rows):
            where = {"pid": number, "tid": thread}
            events.append({"ph": "M", "name": "thread_name", **where, "args": {"name": row.name}})
            events += [
                {
                    "ph": "X",
                    "name": span.text if span.kind != WAITING else _key(span),
                    "cat": span.kind,
                    **where,
                    "ts": span.start_ns / 1e3,
                    "dur": (span.end_ns - span.start_ns) / 1e3,
                    "args": {"op": span.text},
                }
                for span in row.spans
            ]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})

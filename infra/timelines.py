"""Recorded steps in the run folder: what each rank of a domain did, and what was simulated for it.

`timelines/step_<step>/` holds `rank_<rank>.json` of every rank, each by its own clock, and for every domain
`domain_<domain>.json`, which its first rank writes: the domain's ranks and the simulated timeline.

Clocks of different machines differ. Before a recorded step all ranks pass some barriers and note when they
entered and left each. Whatever their clocks say, every rank has left a barrier after the last one entered it:
that moment lies between each rank's own entering and leaving, and two ranks that take the middle of theirs
for it differ by at most the longest stay.
"""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from infra.run_folder import RunFolder, write_text
from pipeline.drawing import Bar, Track, svg

T = TypeVar("T")
Stay = tuple[int, int]
"""When a rank entered a barrier and when it left, in nanoseconds of its clock."""


class TimelineError(ValueError):
    """There is no such recorded step; the message says how to get one."""


@dataclass(frozen=True)
class RankRecord:
    """A rank's recorded step: its stays at the barriers before and when it began, by its own clock, and its
    spans from then on.
    """

    stays: tuple[Stay, ...]
    began_ns: int
    spans: tuple[Bar, ...]


@dataclass(frozen=True)
class DomainRecord:
    """The global ranks of a domain by position, and the rows of the simulated timeline of its plan."""

    ranks: tuple[int, ...]
    simulated: tuple[Track, ...]


@dataclass(frozen=True)
class Recorded:
    """A recorded step of a domain, with the ranks on one clock that starts with the first of them.

    Clocks of two ranks differ by at most `error_ns`.
    """

    measured: tuple[Track, ...]
    simulated: tuple[Track, ...]
    error_ns: int


def write_rank(folder: RunFolder, step: int, rank: int, record: RankRecord) -> None:
    """Write what a rank did."""
    content = {
        "stays": record.stays,
        "began_ns": record.began_ns,
        "spans": [astuple(span) for span in record.spans],
    }
    _write(_step_folder(folder, step) / f"rank_{rank}.json", content)


def write_domain(folder: RunFolder, step: int, domain: int, record: DomainRecord) -> None:
    """Write which ranks a domain has and what was simulated for them."""
    rows = [{"name": row.name, "spans": [astuple(span) for span in row.spans]} for row in record.simulated]
    _write(_step_folder(folder, step) / f"domain_{domain}.json", {"ranks": record.ranks, "simulated": rows})


def read_step(folder: RunFolder, step: int | None, domain: int) -> tuple[int, Recorded]:
    """Return a recorded step of a domain with its number: the last one of the run if `step` is None.

    Raises:
        TimelineError: if it is not there, or not whole.
    """
    steps = recorded_steps(folder)
    if not steps:
        raise TimelineError(
            f"{folder.path} holds no timelines: train with train.timeline_every=N, and every N-th step is "
            "recorded"
        )
    step = steps[-1] if step is None else step
    if step not in steps:
        raise TimelineError(f"step {step} is not recorded: choose one of {', '.join(map(str, steps))}")
    path = _step_folder(folder, step)
    domains = _numbers(path, r"domain_(\d+)\.json")
    if domain not in domains:
        known = ", ".join(map(str, domains)) or "none"
        raise TimelineError(f"domain {domain} of step {step} is not recorded: there are {known}")
    ranks, simulated = _read(path / f"domain_{domain}.json", _domain_record)
    missing = sorted(set(ranks) - set(_numbers(path, r"rank_(\d+)\.json")))
    if missing:
        raise TimelineError(
            f"step {step} is not whole: {path} lacks rank {', '.join(map(str, missing))}; the run is still "
            "at it, was ended there, or found no room on its disk: choose another step"
        )
    names = [f"rank {rank}" for rank in ranks]
    records = [_read(path / f"rank_{rank}.json", _rank_record) for rank in ranks]
    measured, error_ns = on_one_clock(names, records)
    return step, Recorded(measured, simulated, error_ns)


def pictures(where: str, recorded: Recorded) -> list[tuple[str, tuple[Track, ...]]]:
    """Return what is drawn of a recorded step, by title: what was measured, above what was simulated."""
    apart = f"{recorded.error_ns / 1e6:.3f} ms"
    return [
        (f"{where} (measured; clocks of ranks within {apart})", recorded.measured),
        (f"{where} (simulated)", recorded.simulated),
    ]


def drawn(folder: RunFolder, step: int, domain: int = 0) -> str:
    """Draw a recorded step of a domain, as SVG. Raises TimelineError as `read_step` does."""
    return svg(pictures(f"step {step}, domain {domain}", read_step(folder, step, domain)[1]))


def recorded_steps(folder: RunFolder) -> list[int]:
    """Return the steps of which there are records, in order."""
    return _numbers(folder.timelines, r"step_(\d+)")


def forget_after(folder: RunFolder, step: int) -> None:
    """Remove the records of later steps: a run that continues after `step` makes them anew."""
    for later in recorded_steps(folder):
        if later > step:
            shutil.rmtree(_step_folder(folder, later))


def on_one_clock(names: Sequence[str], records: Sequence[RankRecord]) -> tuple[tuple[Track, ...], int]:
    """Return the rows of ranks on one clock, from 0 on, and by how much two of them may be apart.

    Of the barriers, the one at which the longest stay was shortest tells best.
    """
    stays = [record.stays for record in records]
    longest = [max(leave - enter for enter, leave in at) for at in zip(*stays, strict=True)]
    best = longest.index(min(longest))
    middles = [(own[best][0] + own[best][1]) // 2 for own in stays]
    begun = [record.began_ns - middle for record, middle in zip(records, middles, strict=True)]
    rows = tuple(
        Track(name, tuple(_moved(span, began - min(begun)) for span in record.spans))
        for name, record, began in zip(names, records, begun, strict=True)
    )
    return rows, longest[best]


def _moved(span: Bar, by: int) -> Bar:
    return replace(span, start_ns=span.start_ns + by, end_ns=span.end_ns + by)


def _step_folder(folder: RunFolder, step: int) -> Path:
    return folder.timelines / f"step_{step}"


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content) + "\n")


def _read(path: Path, of: Callable[[Any], T]) -> T:
    """What a file of records holds. Raises TimelineError if it is not what was written."""
    try:
        return of(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, LookupError, TypeError) as error:
        raise TimelineError(f"{path} is damaged ({error}): choose another step") from error


def _domain_record(content: Any) -> tuple[list[int], tuple[Track, ...]]:
    simulated = tuple(Track(row["name"], _spans(row["spans"])) for row in content["simulated"])
    return content["ranks"], simulated


def _rank_record(content: Any) -> RankRecord:
    stays = tuple((enter, leave) for enter, leave in content["stays"])
    return RankRecord(stays, content["began_ns"], _spans(content["spans"]))


def _spans(rows: Sequence[Sequence[object]]) -> tuple[Bar, ...]:
    return tuple(Bar(*row) for row in rows)  # type: ignore[arg-type]


def _numbers(path: Path, pattern: str) -> list[int]:
    """The numbers in the names of files in a folder that match a pattern, in order."""
    found = (re.fullmatch(pattern, file.name) for file in path.iterdir()) if path.is_dir() else ()
    return sorted(int(match[1]) for match in found if match)

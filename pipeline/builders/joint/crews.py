"""Who moves together when encoder work is placed between the passes of the LLM.

A unit is neighbouring teams that a tp group connects: it encodes as one. A crew is units that run passes of
the LLM together, because their layers communicate. An encoder batch that lies on several units is a barrier
to them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.domain_plan import DomainPlan
from pipeline.policies import TpGroup


@dataclass(frozen=True)
class Crews:
    """The teams of each unit, the units of each crew, and for each team its unit, for each unit its crew."""

    units: tuple[range, ...]
    crews: tuple[range, ...]
    unit_of: tuple[int, ...]
    crew_of: tuple[int, ...]


def crews_of(domain: DomainPlan, tp_groups: Mapping[str, Sequence[TpGroup]]) -> Crews:
    """Find the units and crews of a domain whose encoders have `tp_groups`."""
    team, teams = domain.team, len(domain.teams)
    encode = [
        range(tp_group[0] // team, tp_group[-1] // team + 1) for of in tp_groups.values() for tp_group in of
    ]
    units = _joined(teams, encode)
    if any(_stage(domain, unit[0]) != _stage(domain, unit[-1]) for unit in units):
        units = _joined(teams, ())  # a tp group across stages: its encoder batches are barriers
    pass_together = [
        range(first // team, (first + domain.collective_group - 1) // team + 1)
        for first in range(0, domain.llm_size, domain.collective_group)
    ]
    crews = _joined(teams, [*units, *pass_together])
    unit_of = [number for number, unit in enumerate(units) for _ in unit]
    crew_of = [number for number, crew in enumerate(crews) for _ in crew]
    return Crews(
        units=tuple(units),
        crews=tuple(range(unit_of[crew[0]], unit_of[crew[-1]] + 1) for crew in crews),
        unit_of=tuple(unit_of),
        crew_of=tuple(crew_of[unit[0]] for unit in units),
    )


def _stage(domain: DomainPlan, team: int) -> int | None:
    return domain.stage(team * domain.team)


def _joined(count: int, spans: Iterable[range]) -> list[range]:
    """Join numbers below `count` that any span holds both of; all spans are of neighbours."""
    tied = [False] * count  # to the number before
    for span in spans:
        for number in span[1:]:
            tied[number] = True
    starts = [number for number in range(count) if not tied[number]]
    return [range(start, stop) for start, stop in zip(starts, [*starts[1:], count], strict=True)]

"""Op lists as the rules look at them."""

from collections.abc import Callable
from operator import attrgetter

from parallel.work import Grad
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Kind, Op

Fields = tuple[Kind, int, Kind | None, int, Grad]
"""The fields of an op: rules look up many, and a tuple is cheaper to make and to find than an Op."""
Lists = list[tuple[Fields, ...]]
"""The ops of each team, in order."""
ENCODES = (Kind.ENCODE, Kind.ENCODE_BACKWARD)

_fields_of: Callable[[Op], Fields] = attrgetter("kind", "index", "on", "virtual_stage", "grad")


def lists_of(domain: DomainPlan) -> Lists:
    """Return the op lists of a domain, by team."""
    return [tuple(map(_fields_of, ops)) for ops in domain.ops]


def fields(
    kind: Kind, index: int, virtual_stage: int = 0, on: Kind | None = None, grad: Grad = Grad.BOTH
) -> Fields:
    """Return the fields of an op."""
    return kind, index, on, virtual_stage, grad


def who(domain: DomainPlan, team: int) -> str:
    """Return the ranks of a team in words."""
    first = team * domain.team
    return (
        f"domain rank {first}"
        if domain.team == 1
        else f"the team of domain ranks {first} to {first + domain.team - 1}"
    )


def encoder_batches_by_team(domain: DomainPlan) -> list[list[int]]:
    """Return the encoder batches that each team encodes, by number."""
    found: list[list[int]] = [[] for _ in domain.teams]
    for c, batch in enumerate(domain.encoder_batches):
        for rank in range(batch.ranks[0], batch.ranks[-1] + 1, domain.team):
            found[rank // domain.team].append(c)
    return found

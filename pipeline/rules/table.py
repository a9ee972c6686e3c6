"""R5, first half: a plan says one thing of where virtual stages and encoder batches live, and its ops are of
what it has.

Where it does not, no other rule can be checked.
"""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from parallel.work import Grad
from pipeline.domain_plan import DomainPlan
from pipeline.ops import BACKWARDS, ISSUED, Kind, Op
from pipeline.plan import StepPlan
from pipeline.routes import outputs_of
from pipeline.rules.lists import Lists, who


def unclear_table(domain: DomainPlan) -> Iterator[str]:
    """Virtual stages that are held unevenly, teams that are not whole: nothing else can be checked."""
    size = domain.stage_size // domain.team
    holds = domain.holds[: domain.llm_size // domain.team]
    stages = [set(holds[first : first + size]) for first in range(0, len(holds), size or 1)]
    holders = Counter(number for held in domain.holds for number in held)
    homes = [rank for home in domain.homes for rank in home]
    if any(rank % domain.team for rank in (domain.stage_size, *homes)):
        yield (
            f"R5: stages of {domain.stage_size} domain ranks and the homes {domain.homes} are not all whole "
            f"teams of {domain.team}"
        )
    elif sorted(holders) != list(range(domain.num_virtual_stages)) or set(holders.values()) != {size}:
        counts = dict(sorted(holders.items()))
        yield f"R5: the virtual stages of the LLM are on {counts} teams, not all on {size}"
    elif any(after and not before for before, after in pairwise(domain.holds)):
        yield "R5: domain ranks beside the LLM stand before some of the LLM's"
    elif any(len(held) > 1 for held in stages):
        yield f"R5: teams of one stage hold different virtual stages: {domain.holds}"
    elif len(domain.ops) != len(domain.holds):
        yield f"R5: there are {len(domain.ops)} op lists for {len(domain.holds)} teams"


def unclear_encoder_batches(domain: DomainPlan) -> Iterator[str]:
    """Encoder batches that say different things of their work: nothing else can be checked."""
    for c, batch in enumerate(domain.encoder_batches):
        named = f"R5: encoder batch {c}"
        items = [domain.items[i] for i in batch.items if 0 <= i < len(domain.items)]
        groups, ranks = batch.layout.num_cp_ranks, batch.ranks
        if len(items) < len(batch.items) or {i.component for i in items} != {batch.component}:
            yield f"{named} holds items of another component, or of none"
        elif batch.microbatches != tuple(sorted({i.microbatch for i in items})):
            yield f"{named} is of microbatches {batch.microbatches}, which are not those of its items"
        elif batch.layout.lengths != tuple(item.tokens for item in items):
            yield f"{named} divides {batch.layout.lengths} tokens, which are not those of its items"
        elif not ranks or ranks != tuple(range(ranks[0], ranks[0] + len(ranks))):
            yield f"{named} is on domain ranks {ranks}, which are not neighbours"
        elif ranks[0] % domain.team or (len(ranks) % groups == 0 and batch.tp % domain.team):
            yield (
                f"{named} is on {groups} tp groups of domain ranks {ranks}, which are not whole teams of "
                f"{domain.team}"
            )
        elif ranks[-1] >= domain.num_ranks:
            yield f"{named} is on domain ranks {ranks} of {domain.num_ranks}"
        elif len(ranks) % groups or batch.outputs != outputs_of(
            batch.items, domain.items, batch.layout, batch.tp, len(domain.fed_by(batch.component))
        ):
            yield f"{named} puts out {batch.rows} rows, not those of its items on {groups} tp groups"


def unknown_ops(plan: StepPlan, lists: Lists) -> Iterator[str]:
    """Ops of encoder batches, components, virtual stages or microbatches that the plan does not have."""
    domain, components = plan.domain, len(plan.components)
    allowed = {held: _allowed(domain, held) for held in set(domain.holds)}
    for team, ops in enumerate(lists):
        own = domain.holds[team]
        limits = allowed[own]
        for op in ops:
            kind, index, on, virtual_stage, grad = op
            if kind is Kind.WAIT:
                known = on in ISSUED and grad is Grad.BOTH
            else:
                known = on is None and (grad is Grad.BOTH or kind in BACKWARDS)
            what = on or kind
            if what is Kind.REDUCE:
                held = own if index == domain.llm else (0,)
                known = known and 0 <= index < components and virtual_stage in held
            elif known:
                count, held = limits[what]
                known = 0 <= index < count and virtual_stage in held
            if not known:
                yield f"R5: {who(domain, team)} runs {Op(*op)}, which is not in the plan"


def _allowed(domain: DomainPlan, own: tuple[int, ...]) -> dict[Kind, tuple[int, tuple[int, ...]]]:
    """How many indices there are for a kind of op, and for which virtual stages, on who holds `own`."""
    microbatches, encoder_batches = len(domain.microbatches), len(domain.encoder_batches)
    last = domain.num_virtual_stages - 1
    above = tuple(number for number in own if number < last and number + 1 not in own)
    below = tuple(number for number in own if number and number - 1 not in own)
    return {
        Kind.ENCODE: (encoder_batches, (0,)),
        Kind.ENCODE_BACKWARD: (encoder_batches, (0,)),
        Kind.FORWARD: (microbatches, own),
        Kind.BACKWARD: (microbatches, own),
        Kind.SHIP: (microbatches, (0,)),
        Kind.RETURN: (microbatches, (0,)),
        Kind.SEND_FORWARD: (microbatches, above),
        Kind.RECV_BACKWARD: (microbatches, above),
        Kind.SEND_BACKWARD: (microbatches, below),
        Kind.RECV_FORWARD: (microbatches, below),
    }

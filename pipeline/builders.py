"""Schedules: from a domain's work to an order of compute for each of its teams.

A builder orders compute; `pipeline/expand.py` then inserts every communication and every wait by fixed rules,
so that a new schedule is only a new order of compute. Builders are pure and every rank runs them alike. They
are given the costs of ops, so that a schedule may be placed by them.

Sources: 1F1B after PipeDream-Flush (Narayanan et al., 2021, section 2); encode-first is the schedule in which
all ranks encode before the pipeline starts (LongCat-Flash-Omni report, section 5, among others).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from parallel.policy import Policy
from pipeline.costs import Costs
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Kind, Op

Order = list[list[Op]]
Builder = Callable[[DomainPlan, Costs], Order]
"""From a domain without ops and the costs of its ops to the compute ops of each team, in order."""


def one_f_one_b(stages: int, microbatches: int, stage: int) -> list[Op]:
    """Order of forward and backward passes of one stage: at most `stages - stage` microbatches in flight."""
    warmup = min(stages - stage - 1, microbatches)
    ops = [Op(Kind.FORWARD, m, part=stage) for m in range(warmup)]
    for m in range(microbatches - warmup):
        ops += [Op(Kind.FORWARD, warmup + m, part=stage), Op(Kind.BACKWARD, m, part=stage)]
    return ops + [Op(Kind.BACKWARD, m, part=stage) for m in range(microbatches - warmup, microbatches)]


def _stage(domain: DomainPlan, team: int) -> int | None:
    """The only part of a team's, which is its stage, None beside the LLM."""
    parts = domain.holds[team]
    assert len(parts) <= 1, f"team {team} holds parts {parts}, and this schedule orders one of them"
    return parts[0] if parts else None


def build_one_f_one_b(domain: DomainPlan, costs: Costs) -> Order:
    """1F1B with encoder work where the first stage needs it: just in time, at most a few microbatches ahead.

    Stage s runs s forwards behind the first stage, so it encodes microbatch m + s before its own forward of
    m, and finds the gradients of m - s ready after its own backward of m. Encoding its own microbatch would
    be too late: the first stage would wait for rows that a later stage encodes only after that stage itself
    waited for the first one. Ranks of several stages that encode together go back together, when the latest
    of these stages would: each at its own time would wait for the others in a circle.
    """
    order = []
    last = len(domain.microbatches) - 1

    def behind(chunk: int, backward: int) -> int:
        """The microbatch whose encoders go back after the backward pass of another."""
        latest = _stage(domain, domain.chunks[chunk].ranks[-1] // domain.team)
        assert latest is not None, "a chunk is on ranks of the LLM, or beside it"
        return backward - latest

    for team, mine in enumerate(chunks_by_team(domain)):
        stage = _stage(domain, team)
        if stage is None:
            order.append(_all(mine))
            continue
        ops: list[Op] = []
        for op in one_f_one_b(domain.num_parts, last + 1, stage):
            if op.kind is Kind.FORWARD:
                ahead = op.index + stage
                ops += [Op(Kind.ENCODE, c) for c, m, _ in mine if m == ahead or (op.index == 0 and m < ahead)]
            ops.append(op)
            if op.kind is Kind.BACKWARD:
                ops += [
                    Op(Kind.ENCODE_BACKWARD, c)
                    for c, _, m in mine
                    if m == behind(c, op.index) or (op.index == last and m > behind(c, last))
                ]
        order.append(ops)
    return order


def build_encode_first(domain: DomainPlan, costs: Costs) -> Order:
    """All encoder forwards, then 1F1B, then all encoder backwards."""
    order = []
    for team, mine in enumerate(chunks_by_team(domain)):
        stage = _stage(domain, team)
        passes = [] if stage is None else one_f_one_b(domain.num_parts, len(domain.microbatches), stage)
        order.append(_all(mine, passes))
    return order


def build_forward_only(domain: DomainPlan) -> Order:
    """Evaluation: each microbatch's encoder work, then its forward through all parts; nothing goes back."""
    order = []
    for team, mine in enumerate(chunks_by_team(domain)):
        ops = []
        for m in range(len(domain.microbatches)):
            ops += [Op(Kind.ENCODE, c) for c, first, _ in mine if first == m]
            ops += [Op(Kind.FORWARD, m, part=part) for part in domain.holds[team]]
        order.append(ops)
    return order


def chunks_by_team(domain: DomainPlan) -> Iterator[list[tuple[int, int, int]]]:
    """Yield for each team its chunks as (number, first microbatch, last one), earlier microbatches first: an
    order that ranks which encode together share, wherever they stand.
    """
    mine: list[list[tuple[int, int, int]]] = [[] for _ in domain.teams]
    for number, chunk in sorted(enumerate(domain.chunks), key=lambda entry: entry[1].microbatches):
        entry = (number, chunk.microbatches[0], chunk.microbatches[-1])
        for rank in range(chunk.ranks[0], chunk.ranks[-1] + 1, domain.team):
            mine[rank // domain.team].append(entry)
    yield from mine


def _all(mine: list[tuple[int, int, int]], between: list[Op] | None = None) -> list[Op]:
    backward = [Op(Kind.ENCODE_BACKWARD, c) for c, *_ in mine]
    return [Op(Kind.ENCODE, c) for c, *_ in mine] + (between or []) + backward


def stages_that_follow(num_parts: int, part: int) -> int:
    """Microbatches that 1F1B has in flight at most on a part."""
    return num_parts - part


@dataclass(frozen=True)
class SchedulePolicy(Policy):
    """In which order the teams of a domain run its chunks and microbatches in training.

    `decide` takes a DomainPlan without ops and the costs of its ops, and returns for each team its compute
    ops in order; communication and waits are inserted afterwards, by rules that are the same for all
    schedules, and the verifier refuses what could hang. A backward may be split in two ops. REDUCE ops of the
    domain's `reductions` may be among them, all of a reduction or none; those left out come at the end.
    `in_flight` says from the number of parts and the number of one how many microbatches' activations that
    part holds at most: with their sizes, the bound that the plan carries. `parts` is how many parts of the
    LLM on a rank it can order at most, None for any number.
    """

    group: ClassVar[str] = "omni.schedule"

    in_flight: Callable[[int, int], int] = stages_that_follow
    parts: int | None = 1

    def __call__(self, domain: DomainPlan, costs: Costs) -> Order:
        """Order the compute of every team.

        Raises:
            PolicyError: if there is not one list for each team.
        """
        order = self.decide(domain, costs)
        self.require(len(order) == len(domain.teams), "one list of ops for each team of the domain")
        return order


ONE_F_ONE_B = SchedulePolicy("one_f_one_b", build_one_f_one_b)
ENCODE_FIRST = SchedulePolicy("encode_first", build_encode_first)


def without_frozen(order: Order, domain: DomainPlan, frozen: frozenset[str]) -> Order:
    """Drop what is not run for components frozen this step: the backward of encoders, and the gradients of
    the LLM's weights, through which the others' gradients still pass.
    """
    idle = {number for number, chunk in enumerate(domain.chunks) if chunk.component in frozen}
    llm_learns = any(number == domain.llm for number, _ in domain.reductions)

    def runs(op: Op) -> bool:
        if op.kind is Kind.BACKWARD:
            return llm_learns or op.makes_input
        return op.kind is not Kind.ENCODE_BACKWARD or op.index not in idle

    return [[op for op in ops if runs(op)] for ops in order]

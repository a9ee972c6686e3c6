"""1F1B: one forward, one backward in turn (PipeDream-Flush; Narayanan et al., 2021, section 2), with encoder
work just in time.
"""

from pipeline.builders.schedule import Facts, Order, SchedulePolicy, chunks_by_team
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Kind, Op


def one_f_one_b_passes(stages: int, parts: int, microbatches: int, stage: int) -> list[Op]:
    """Order the passes of one stage, of one part: at most `stages - stage` microbatches in flight."""
    assert parts == 1, f"{parts} parts on a rank, and this schedule orders one"
    warmup = min(stages - stage - 1, microbatches)
    ops = [Op(Kind.FORWARD, m, part=stage) for m in range(warmup)]
    for m in range(microbatches - warmup):
        ops += [Op(Kind.FORWARD, warmup + m, part=stage), Op(Kind.BACKWARD, m, part=stage)]
    return ops + [Op(Kind.BACKWARD, m, part=stage) for m in range(microbatches - warmup, microbatches)]


def build_one_f_one_b(domain: DomainPlan, facts: Facts) -> Order:
    """1F1B with encoder work where the first stage needs it: just in time, at most a few microbatches ahead.

    Stage s runs s forwards behind the first stage, so it encodes microbatch m + s before its own forward of
    m, and finds the gradients of m - s ready after its own backward of m. Encoding its own microbatch would
    be too late: the first stage would wait for rows that a later stage encodes only after that stage itself
    waited for the first one. Ranks of several stages that encode together go back together, when the latest
    of these stages would: each at its own time would wait for the others in a circle.
    """
    order = []
    last, stages = len(domain.microbatches) - 1, domain.num_stages

    def behind(chunk: int, backward: int) -> int:
        """The microbatch whose encoders go back after the backward pass of another."""
        latest = domain.stage(domain.chunks[chunk].ranks[-1])
        assert latest is not None, "a chunk is on ranks of the LLM, or beside it"
        return backward - latest

    for team, mine in enumerate(chunks_by_team(domain)):
        stage = domain.stage(team * domain.team)
        if stage is None:
            beside = (Kind.ENCODE, Kind.ENCODE_BACKWARD)
            order.append([Op(kind, c) for kind in beside for c, *_ in mine])
            continue
        ops: list[Op] = []
        for op in one_f_one_b_passes(stages, domain.num_parts // stages, last + 1, stage):
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


ONE_F_ONE_B = SchedulePolicy("one_f_one_b", build_one_f_one_b)

"""GPipe: all microbatches forward, then all back, the last one first (Huang et al., 2019, section 2.3).

Its bubble is that of 1F1B, and it holds the activations of all microbatches: the baseline for memory.
"""

from omni.policies import DomainPlan, Facts, Kind, Op, SchedulePolicy


def build_gpipe(domain: DomainPlan, facts: Facts) -> list[list[Op]]:
    """All encoder forwards, GPipe, all encoder backwards. Of several virtual stages on a rank, all
    microbatches pass one after the other.
    """
    order = []
    by_microbatch = sorted(enumerate(domain.encoder_batches), key=lambda entry: entry[1].microbatches)
    for team, held in enumerate(domain.holds):
        encoder_batches = [number for number, batch in by_microbatch if team * domain.team in batch.ranks]
        passes = [(m, number) for number in held for m in range(len(domain.microbatches))]
        order.append(
            [Op(Kind.ENCODE, batch) for batch in encoder_batches]
            + [Op(Kind.FORWARD, m, virtual_stage=number) for m, number in passes]
            + [Op(Kind.BACKWARD, m, virtual_stage=number) for m, number in reversed(passes)]
            + [Op(Kind.ENCODE_BACKWARD, batch) for batch in encoder_batches]
        )
    return order


def every_microbatch(domain: DomainPlan, virtual_stage: int) -> int:
    """All microbatches of a step."""
    return len(domain.microbatches)


GPIPE = SchedulePolicy("gpipe", build_gpipe, in_flight=every_microbatch, vpp=None)

"""`pipeline.encoder_bytes`: what a user lets encoders hold, and the refusal of a step that needs more."""

from collections.abc import Sequence

from omni.config import ConfigError
from pipeline.plan import StepPlan
from pipeline.rules.memory import Kept, peaks


def check_encoder_bytes(plan: StepPlan, kept: Kept, most: int, ranks: Sequence[int]) -> None:
    """Refuse a plan in which some of its domain's `ranks` holds more than `most` bytes of the activations of
    an encoder.

    Raises:
        ConfigError: naming the key, the rank that holds most, and what would do for this step.
    """
    of_encoders = [peak for peak in peaks(plan, kept) if peak.part in plan.components]
    fullest = max(of_encoders, key=lambda peak: peak.bytes, default=None)
    if fullest is None or fullest.bytes <= most:
        return
    raise ConfigError(
        f"pipeline.encoder_bytes={most}: rank {ranks[fullest.team * plan.domain.team]} would hold "
        f"{fullest.bytes} bytes of activations of {fullest.part} at {fullest.at} of step {plan.step}, under "
        f"pipeline.policy={plan.domain.schedule}. Set {fullest.bytes} or more, or null for no bound; less "
        f"do a schedule that puts encoder work off (pipeline=joint), smaller data.microbatch_tokens, and "
        f"model.encoders.{fullest.part}.recompute=full"
    )

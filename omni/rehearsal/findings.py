"""What costs a GPU and not a CPU, where it was found, and what of it is known and allowed.

A host that waits for the device stops queueing launches, and all that the device does while the host catches
up is nothing. float64 runs at half the speed of float32 at best, on many GPUs at a sixty-fourth. What nothing
orders (`order.py`) goes wrong there now and then, and nobody sees where.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from omni.rehearsal.launches import BEHIND

WAITS, DOUBLE, ORDER = "the host waits", "float64", "nothing orders"


class DynamicShapeError(RuntimeError):
    """The shape of an op's result depends on numbers on the device; the message says where."""


@dataclass(frozen=True, order=True)
class Finding:
    """`what` happened on a `thread` during a `phase` of the step, at a `line` of a `function`.

    `kind` is WAITS, DOUBLE or ORDER. The function is the innermost one that is not torch's, by its full name;
    where it is megatron's, `caller` is the innermost one of ours, with its line.
    """

    phase: str
    thread: str
    kind: str
    what: str
    function: str
    line: int
    caller: str = ""

    def __str__(self) -> str:
        via = f", from {self.caller}" if self.caller else ""
        return f"{self.phase} ({self.thread}): {self.kind}, {self.what}, at {self.function}:{self.line}{via}"


@dataclass(frozen=True)
class Allowed:
    """Findings of one kind that are known: those whose phase and function begin with these, and why."""

    kind: str
    phase: str
    function: str
    reason: str

    def covers(self, finding: Finding) -> bool:
        """Whether this entry answers for a finding."""
        return (
            finding.kind == self.kind
            and finding.phase.startswith(self.phase)
            and finding.function.startswith(self.function)
        )


# The list only shrinks: a test fails if nothing is found that an entry is there for.
ALLOWED = (
    Allowed(WAITS, "build", "", "start-up: weights are drawn on the host"),
    Allowed(WAITS, BEHIND, "ops.device.to_host", "where the host learns of a step, with the next one queued"),
    Allowed(WAITS, "checkpoint", "infra.shard_file", "the thread that writes a file waits for the copies"),
    Allowed(WAITS, "restore", "", "start-up: the host reads files"),
    Allowed(
        WAITS,
        "",
        "ops.device.to_host",
        "how many rows ranks send to each other's experts: once a layer and pass, with ep",
    ),
    Allowed(DOUBLE, "", "omni.models.llm_stage.LLMStage.loss", "one number a target token: sums stay exact"),
    Allowed(DOUBLE, "forward", "pipeline.engine._RunningStep.forward", "adds such sums over microbatches"),
    Allowed(
        DOUBLE, "", "omni.rank.optimizer.JointOptimizer.squares", "a number a component: norms stay exact"
    ),
    Allowed(DOUBLE, "totals", "", "a few numbers that all ranks add up"),
    Allowed(DOUBLE, "update", "omni.rank.", "the same: what gradients are divided and clipped by"),
)


def unexpected(findings: Mapping[Finding, int]) -> list[Finding]:
    """Return, in order, the findings that no entry of the list allows."""
    return sorted(finding for finding in findings if not any(entry.covers(finding) for entry in ALLOWED))

"""What a rank is watched with in a rehearsal: where it stands decides what the figures count for."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch._subclasses.fake_tensor import FakeTensorMode

from omni.rehearsal.meter import Meter
from omni.rehearsal.recorder import Recorder
from pipeline.ops import Kind, Op

# What is made during an op counts as; everything else is a buffer.
_KINDS = {
    Kind.ENCODE: "activations",
    Kind.FORWARD: "activations",
    Kind.ENCODE_BACKWARD: "workspace",
    Kind.BACKWARD: "workspace",
    Kind.REDUCE: "workspace",
}


@dataclass(frozen=True)
class Instruments:
    """The fake world, a meter in it, and on device "cuda" a recorder too."""

    mode: FakeTensorMode
    meter: Meter
    recorder: Recorder | None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Watch what the thread does inside the block: modes are a thread's own."""
        with self.mode, self.meter, self.recorder or contextlib.nullcontext():
            yield

    def start(self, labels: Mapping[str, str]) -> None:
        """Forget the steps so far; `labels` names groups by torch's names."""
        self.meter.start(labels)
        if self.recorder is not None:
            self.recorder.start()

    def note(self, where: Op | str) -> None:
        """Hear where the rank stands: at an op, or in words such as "step 3: totals", after all ops."""
        if isinstance(where, Op):
            self.at(where, _KINDS.get(where.on or where.kind, "buffers"))
        else:
            self.at(where.rpartition(": ")[2], "workspace")

    def at(self, where: Op | str, kind: str = "buffers") -> None:
        """Say what goes on from here, and as what counts what it makes."""
        self.meter.where, self.meter.kind = where, kind
        if self.recorder is not None:
            self.recorder.at(where)

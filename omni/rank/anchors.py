"""An encoder as the engine sees it: a module attached to the LLM by name."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from omni.models.followed import Followed
from omni.models.weight_gradients import Deferral, PendingProducts, put_off_in
from omni.rank.inputs import EncoderBatchInputs
from parallel.tp_rows import own_rows
from pipeline.behind import Listener


@dataclass(frozen=True)
class EncoderAnchor:
    """Encodes with `module`, the encoder `name`, shared by the ranks of `tp`, for `num_points` attach
    points.
    """

    name: str
    module: torch.nn.Module
    tp: dist.ProcessGroup
    num_points: int
    deferral: Deferral = field(default_factory=Deferral)
    followed: Followed = field(default_factory=Followed)

    def __post_init__(self) -> None:
        put_off_in(self.module, self.deferral)

    def encode(self, inputs: EncoderBatchInputs) -> torch.Tensor:
        """Packed items → this rank's share of their rows [r, D], point after point.

        Raises:
            ValueError: if the module puts out more or fewer rows than its `count` tells.
            Exception: what the module raises, with a note that names the encoder and what it was given.
        """
        planned = sum(inputs.row_counts)
        more = f" and {len(inputs.samples) - 3} more" if len(inputs.samples) > 3 else ""
        samples = f"{'; '.join(inputs.samples[:3])}{more}"
        called = f"the encoder {self.name} ({type(self.module).__name__})"
        try:
            rows: torch.Tensor = self.module(inputs.values, inputs.positions, inputs.packed)
        except Exception as error:
            error.add_note(
                f"{called} raised this when it was given {len(inputs.values)} tokens, which are to become "
                f"{planned} rows: {samples}"
            )
            raise
        if planned == 0:
            rows = rows[:0]  # an empty tail stood in for items: what it put out goes nowhere
        if len(rows) != planned:
            raise ValueError(
                f"{samples}: {called} put out {len(rows)} rows, and by count() there are {planned} at "
                f"{self.num_points} attach points: make count() and forward() agree"
            )
        return own_rows(rows, inputs.row_counts, self.tp)

    def follow(
        self,
        layers: Sequence[torch.nn.Module],
        came: Callable[[int, int], object],
    ) -> None:
        """Have passes followed through the layers, those of part 0: see `Followed`."""
        self.followed.follow({0: layers}, self.deferral, came)

    def following(self, listener: Listener) -> AbstractContextManager[None]:
        """Have a listener hear of the pass through the encoder that runs inside the block."""
        return self.followed.following(0, listener)

    def weights_later(self) -> AbstractContextManager[PendingProducts]:
        """Put weight gradients of the linears off that can wait: those that megatron divides over ranks."""
        return self.deferral.weights_later()


@contextmanager
def evaluating(anchors: Mapping[str, EncoderAnchor]) -> Iterator[None]:
    """Have the encoders compute inside the block as torch's modules do that are evaluated: without dropout.
    Modules that their author evaluates always stay so.
    """
    training = [own for anchor in anchors.values() for own in anchor.module.modules() if own.training]
    for own in training:
        own.training = False
    try:
        yield
    finally:
        for own in training:
            own.training = True

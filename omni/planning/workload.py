"""What a run's ranks are to do, before there are samples: who holds which parts, and what those take."""

from collections.abc import Mapping
from dataclasses import dataclass

from omni.models.registry import Encoder
from parallel.cluster import Cluster
from parallel.layout import Arrangement
from parallel.work import Part


@dataclass(frozen=True)
class Workload:
    """The virtual stages of the LLM and the encoders, by name, with their statements of `work`, on the ranks
    of an `arrangement` of a cluster. A row of the LLM takes `row_bytes`, a number `element` bytes, and one of
    a gradient `sent` bytes on its way to another replica. `learns_from` is the first step in which a
    component learns: from then on it has moments, also while it is frozen, of `of_moments` bytes a number.
    """

    arrangement: Arrangement
    encoders: Mapping[str, Encoder]
    work: Mapping[str, Part]
    cluster: Cluster
    row_bytes: int
    element: int
    sent: int
    learns_from: Mapping[str, int]
    of_moments: int

"""Forward passes over samples that someone chose: what evaluation and generation have in common.

They go the way training goes, planner → verifier → engine, and keep nothing for a backward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from dataloader.format import DataError
from dataloader.loader import Fetched, SampleReader, TextArrays
from dataloader.tokens import SampleMeta, length
from omni.models.llm_stage import MicrobatchInputs
from omni.models.registry import ItemArrays, prepare_item
from omni.planning.run_spec import RunSpec
from omni.rank.build import Rank
from omni.rank.step import execute
from parallel.memory import Continued
from pipeline.domain_plan import Microbatch
from pipeline.plan import StepPlan

T = TypeVar("T")


@dataclass(frozen=True)
class ForwardPasses:
    """Runs forward-only plans on a rank; items are read from `readers`, by source."""

    spec: RunSpec
    rank: Rank
    readers: Mapping[str, SampleReader]

    def run(
        self,
        plan: StepPlan,
        metas: Sequence[SampleMeta],
        texts: Mapping[int, TextArrays],
        predict: bool,
        continued: Continued | None = None,
    ) -> list[tuple[Microbatch, MicrobatchInputs, torch.Tensor]]:
        """Run a verified plan of samples with `metas`, of whose `texts` this rank's are looked at; where the
        last virtual stage is, return every microbatch, its inputs and outputs.
        """
        domain, assembler = plan.domain, self.rank.assembler
        items: list[ItemArrays | None] = [self._item(*of) for of in assembler.fetch_of(domain, metas).items]
        fetched = Fetched([texts[i] for i in assembler.texts(domain)], items, ())
        inputs = assembler.assemble(domain, fetched, predict, continued)
        result = execute(self.rank, plan, inputs)
        return [
            (domain.microbatches[m], inputs.microbatches[m], outputs)
            for m, outputs in sorted(result.outputs.items())
        ]

    def _item(self, source: str, sample: int, index: int) -> ItemArrays:
        try:
            item = self.readers[source].read(sample, text=False, items=(index,)).items[0]
            encoder = next(e for e in self.spec.encoders.values() if e.modality == item.modality)
            return prepare_item(encoder, item)
        except DataError as error:
            raise DataError(f"held-out source {source}, sample {sample}, item {index}: {error}") from error


def grouped(metas: Sequence[SampleMeta], tokens: int, more: int = 0) -> list[list[int]]:
    """Cut samples, by number, into runs of about `tokens` tokens each, `more` added to each; none empty."""
    groups: list[list[int]] = []
    used = 0
    for number, meta in enumerate(metas):
        size = length(meta) + more
        if not groups or used + size > tokens:
            groups.append([])
            used = 0
        groups[-1].append(number)
        used += size
    return groups


def of_domain(plan: StepPlan, values: Sequence[T]) -> list[T]:
    """Those of a plan's domain, in its order, of the values of all samples that were planned."""
    replicas = plan.group.replicas[plan.number - plan.group.first]
    return [values[n] for n in sorted(n for replica in replicas for n in replica)]

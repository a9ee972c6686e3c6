"""What samples cost a run: the columns that policies of balance decide over. Pure, like all planning."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from dataloader.balance import SampleCosts
from dataloader.tokens import SampleMeta, length
from omni.planning.sharing import Sharing
from ops.ints import Ints
from parallel.costs import CostTable
from parallel.laws import FS_PER_NS
from parallel.layout import Arrangement
from parallel.policies.pool import most_ranks
from parallel.work import virtual_stage_name

_SAFE_NS = 2**62 // FS_PER_NS  # an hour: what is counted in femtoseconds on the way stays in int64


@dataclass(frozen=True)
class Costing:
    """Costs samples by a cost table; `encoders` maps a modality to the component that takes it, and `sharing`
    says how each component shares sequences.
    """

    table: CostTable
    arrangement: Arrangement
    llm: str
    encoders: Mapping[str, str]
    sharing: Mapping[str, Sharing]

    def costs(self, metas: Sequence[SampleMeta]) -> SampleCosts:
        """Return the costs of samples."""
        names = tuple(dict.fromkeys((self.llm, *self.encoders.values())))
        columns = {modality: names.index(name) for modality, name in self.encoders.items()}
        stages, cp, replicas = self._stages, self.arrangement.llm.cp, self.arrangement.replicas
        num_tp_groups = {name: len(self.arrangement.tp_groups(name)) for name in names[1:]}

        @cache
        def of_llm(tokens: int) -> tuple[int, int, int]:
            llm_ns = max(sum(self._ns(part, tokens) for part in parts) for parts in stages)
            kept = max(sum(self._kept(part, tokens) for part in parts) for parts in stages)
            return llm_ns // cp, llm_ns // self._ways(self.llm, tokens), kept

        @cache
        def of_item(name: str, tokens: int) -> tuple[int, int, int]:
            item_ns = self._ns(name, tokens)
            spread_ns = item_ns * replicas // num_tp_groups[name]
            return spread_ns, item_ns // self._ways(name, tokens), self._kept(name, tokens)

        rows: list[list[int]] = []
        least: list[list[int]] = []
        kept_bytes: list[int] = []
        for meta in metas:
            ns, unsplit_ns = [0] * len(names), [0] * len(names)
            ns[0], unsplit_ns[0], kept = of_llm(length(meta))
            for item in meta.items:
                column = columns[item.modality]
                item_ns, whole_ns, item_kept = of_item(names[column], item.tokens)
                ns[column] += item_ns
                unsplit_ns[column] = max(unsplit_ns[column], whole_ns)
                kept += item_kept
            rows.append(ns)
            least.append(unsplit_ns)
            kept_bytes.append(kept)
        return SampleCosts(
            names,
            np.array(rows, np.int64).reshape(-1, len(names)),
            np.array(least, np.int64).reshape(-1, len(names)),
            np.array([length(meta) for meta in metas], np.int64),
            np.array([meta.bytes for meta in metas], np.int64),
            np.array(kept_bytes, np.int64),
        )

    def phases(self, lengths: Sequence[int], items: Iterable[tuple[str, Ints, Ints]]) -> Ints:
        """Return what each of n samples takes a replica of the LLM and of all encoders: nanoseconds [n, 2].

        The samples have `lengths` tokens; `items` are a modality, the number of the sample that each item
        belongs to, [k], and their encoder tokens [k]. Made for all samples of a step: items that truncation
        leaves out count as well.
        """
        out = np.zeros((len(lengths), 2), np.int64)
        tokens = np.array(lengths, np.int64)
        none = np.zeros_like(tokens)
        stages = [sum((self._each_ns(part, tokens) for part in parts), none) for parts in self._stages]
        out[:, 0] = np.maximum.reduce(stages) // self.arrangement.llm.cp
        replicas = self.arrangement.replicas
        for modality, sample, item_tokens in items:
            name = self.encoders[modality]
            shared = self._each_ns(name, item_tokens) * replicas // len(self.arrangement.tp_groups(name))
            np.add.at(out[:, 1], sample, shared)
        return out

    @property
    def alone(self) -> tuple[bool, ...]:
        """Whether a replica does the work of its samples by itself, for the LLM and each encoder."""
        own = self.sharing[self.llm]
        llm = self.arrangement.replicas == 1 or own.policy.within_replica
        return (llm, *(self.arrangement.replicas == 1 for _ in dict.fromkeys(self.encoders.values())))

    @property
    def _stages(self) -> list[list[str]]:
        by_stage = self.arrangement.virtual_stages_by_stage
        return [[virtual_stage_name(self.llm, number) for number in held] for held in by_stage]

    def _ns(self, part: str, tokens: Any) -> Any:
        """Nanoseconds of a sequence of so many tokens, or of each of an array of them."""
        return self.table.parts[part].marginal_ns(tokens, tokens * tokens)

    def _each_ns(self, part: str, tokens: Ints) -> Ints:
        """Nanoseconds of sequences of so many tokens, int64 [n] both."""
        most = self._ns(part, int(tokens.max(initial=0)))
        if most < _SAFE_NS:
            spent: Ints = self._ns(part, tokens)
            return spent
        return np.array([self._ns(part, n) for n in tokens.tolist()], np.int64)

    def _kept(self, part: str, tokens: int) -> int:
        return self.table.parts[part].kept_bytes(tokens)

    def _ways(self, name: str, tokens: int) -> int:
        """Over how many cp ranks a sequence of a component may be cut."""
        own = self.sharing[name]
        return most_ranks(tokens, own.pool) if own.policy.cuts and not own.whole else 1

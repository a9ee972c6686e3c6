"""Held-out loss, and free generation compared with what should have come.

Both go the way training goes: planner → plan → verifier → engine, forward only. Generation is greedy and
feeds back its own output, token by token, so it measures what a user of the model would see.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
import torch
import torch.distributed as dist

from dataloader.format import PLACEHOLDER, DataError
from dataloader.loader import Fetched, TextArrays
from dataloader.reader import Reader
from dataloader.tokens import SampleMeta, fit, length, tokenize
from omni.models.llm_stage import MicrobatchInputs
from omni.models.registry import ItemArrays, prepare_item
from omni.planning.run_spec import RunSpec
from omni.rank.build import Rank
from omni.rank.step import execute, waiting_at
from parallel.control import Control
from pipeline.domain_plan import Microbatch
from pipeline.plan import StepPlan


@dataclass(frozen=True)
class Transcription:
    """One freely generated text beside the one it should be."""

    sample: str
    items: int
    expected: str
    generated: str

    @property
    def exact(self) -> bool:
        """Whether they are the same."""
        return self.expected == self.generated


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the current weights on held-out data. Every rank of the run calls its methods together."""

    spec: RunSpec
    rank: Rank
    readers: Mapping[str, Reader]
    control: Control

    def loss(self, step: int, source: str, num_samples: int) -> float:
        """Mean loss of a target token over `num_samples` held-out samples, spread evenly over the dataset."""
        metas = self._metas(source, num_samples)
        sums = torch.zeros(2, dtype=torch.float64, device=self.rank.device)
        for group in _grouped(metas, self._tokens_at_once()):
            domains = self.spec.arrangement.num_domains
            plan = self.spec.planner.evaluation(step, group, domains, self.rank.domain)
            domain, own = plan.domain, _own(plan, group)
            texts = {i: self._text(source, own[i]) for i in self.rank.assembler.texts(domain)}
            for _, inputs, losses in self._run(plan, own, texts, predict=False):
                if domain.reports(self.rank.position):
                    assert inputs.weights is not None
                    weights = inputs.weights.double()
                    sums += torch.stack([(losses.double() * weights).sum(), weights.sum()])
        dist.all_reduce(sums, group=self.rank.groups.world)
        total, targets = sums.tolist()
        return total / targets if targets else float("nan")

    def transcribe(
        self,
        step: int,
        source: str,
        num_samples: int,
        most_tokens: int,
        stop: Callable[[int, int], bool] = lambda done, of: False,
    ) -> list[Transcription]:
        """Generate the text after each sample's last item, greedily and of at most `most_tokens` tokens, and
        return those that came to their end, on every rank.

        Domains work on samples of their own; the ranks of one agree on every token. After each token all
        ranks ask `stop`, told how many samples of how many are done: if one says so, all leave off together.

        Raises:
            StallError: if a peer does not answer in time.
        """
        arrangement, world = self.spec.arrangement, self.rank.groups.world
        domain, domains = self.rank.domain, arrangement.num_domains
        metas = self._metas(source, num_samples)
        groups = _grouped(metas[domain::domains], self._tokens_at_once() // domains)
        mine: list[Transcription] = []
        rounds = self._generate(step, source, groups, most_tokens, mine)
        counts = self.rank.engine.position == 0  # for its domain
        done, going, stopped = 0, True, False
        while going and not stopped:
            asked = stop(done, len(metas))
            busy = next(rounds, None) is not None
            told = torch.tensor([len(mine) * counts, busy, asked], device=self.rank.device)
            with waiting_at(self.rank, f"generating from {source}, {done} of {len(metas)} done", world):
                dist.all_reduce(told, group=world)
                done, going, stopped = told.tolist()
        stop(done, len(metas))
        found = self.control.share("texts", {str(domain): [astuple(of) for of in mine]} if counts else {})
        return [Transcription(*of) for number in range(domains) for of in found[str(number)]]

    def _generate(
        self,
        step: int,
        source: str,
        groups: Sequence[Sequence[SampleMeta]],
        most_tokens: int,
        done: list[Transcription],
    ) -> Iterator[int]:
        """Generate for one group after the other; yield after each token of all its samples that still grow,
        with their number, and add to `done` those that have come to their end.
        """
        eos = self.spec.tokenizer.eos
        for metas in groups:
            prompts = [replace(m, text_tokens=m.items[-1].at if m.items else 0) for m in metas]
            ids = [self._text(source, m)[0][: length(p)] for m, p in zip(metas, prompts, strict=True)]
            new: list[list[int]] = [[] for _ in metas]
            growing = list(range(len(metas)))
            while growing:
                current = [_grown(prompts[i], new[i]) for i in growing]
                texts = [np.concatenate([ids[i], np.array(new[i], dtype=np.int64)]) for i in growing]
                for i, token in zip(growing, self._next_tokens(step, current, texts), strict=True):
                    new[i].append(token)
                ended = [
                    i
                    for i in growing
                    if new[i][-1] == eos or len(new[i]) >= most_tokens or not self._fits(prompts[i], new[i])
                ]
                done += [self._transcription(source, metas[i], new[i]) for i in ended]
                growing = [i for i in growing if i not in ended]
                yield len(growing)

    def _transcription(self, source: str, meta: SampleMeta, tokens: Sequence[int]) -> Transcription:
        sample = self.readers[source].read(meta.id, text=True, items=False)
        return Transcription(
            sample=sample.id,
            items=len(sample.items),
            expected=sample.text.rpartition(PLACEHOLDER)[2],
            generated=self.spec.tokenizer.decode(tokens),
        )

    def _fits(self, prompt: SampleMeta, new: Sequence[int]) -> bool:
        return length(_grown(prompt, new)) <= self.spec.planner.world.budget.longest

    def _next_tokens(self, step: int, metas: Sequence[SampleMeta], texts: Sequence[np.ndarray]) -> list[int]:
        """The likeliest next token of each sequence, on all ranks of the domain."""
        if not metas:
            return []
        plan = self.spec.planner.evaluation(step, metas, 1)
        domain = plan.domain
        arrays = {i: (ids, ids, ids) for i, ids in enumerate(texts)}  # labels and mask are not looked at
        tokens = torch.full((len(metas),), -1, dtype=torch.int64)
        for batch, _, predicted in self._run(plan, metas, arrays, predict=True):
            pieces = self.rank.assembler.pieces(domain, batch)
            last = [p.sample for p in pieces if p.stop == batch.layout.lengths[p.sequence]]
            tokens[last] = predicted.cpu()
        # Of the groups over the domain's ranks any will do: nothing else is under way.
        tokens = tokens.to(self.rank.device)
        dist.all_reduce(tokens, op=dist.ReduceOp.MAX, group=self.rank.groups.ship)
        return [int(token) for token in tokens.tolist()]

    def _run(
        self,
        plan: StepPlan,
        metas: Sequence[SampleMeta],
        texts: Mapping[int, TextArrays],
        predict: bool,
    ) -> list[tuple[Microbatch, MicrobatchInputs, torch.Tensor]]:
        """Run a forward-only plan of samples with `metas`; where the last part is, return every microbatch,
        its inputs and outputs.
        """
        self.spec.planner.verify(plan)
        domain = plan.domain
        assembler = self.rank.assembler
        fetch = assembler.fetch_of(domain, metas)
        items: list[ItemArrays | None] = [self._item(*item) for item in fetch.items]
        fetched = Fetched([texts[i] for i in assembler.texts(domain)], items, ())
        inputs = assembler.assemble(domain, fetched, predict)
        result = execute(self.rank, plan, inputs)
        return [
            (domain.microbatches[m], inputs.microbatches[m], outputs)
            for m, outputs in sorted(result.outputs.items())
        ]

    def _metas(self, source: str, num_samples: int) -> list[SampleMeta]:
        total = len(self.spec.heldout[source])
        num_samples = min(num_samples, total)
        metas = [self.spec.heldout_meta(source, i * total // num_samples) for i in range(num_samples)]
        longest = self.spec.planner.world.budget.longest
        return [meta for meta in metas if fit(meta, longest, "drop") is not None]

    def _tokens_at_once(self) -> int:
        """Tokens of one evaluation plan: a few microbatches for each replica."""
        return 4 * self.spec.layout.dp * self.spec.config.data.microbatch_tokens

    def _text(self, source: str, meta: SampleMeta) -> TextArrays:
        sample = self.readers[source].read(meta.id, text=True, items=False)
        return tokenize(sample, meta, self.spec.tokenizer)

    def _item(self, source: str, sample: int, index: int) -> ItemArrays:
        item = self.readers[source].read(sample, text=False, items=True).items[index]
        encoder = next(e for e in self.spec.encoders.values() if e.modality == item.modality)
        try:
            return prepare_item(encoder, item)
        except DataError as error:
            raise DataError(f"held-out source {source}, sample {sample}, item {index}: {error}") from error


def _own(plan: StepPlan, metas: Sequence[SampleMeta]) -> list[SampleMeta]:
    """The samples of a plan's domain, of all that were planned, in its order."""
    replicas = plan.group.replicas[plan.number - plan.group.first]
    return [metas[n] for n in sorted(n for replica in replicas for n in replica)]


def _grown(prompt: SampleMeta, new: Sequence[int]) -> SampleMeta:
    return replace(prompt, text_tokens=prompt.text_tokens + len(new))


def _grouped(metas: Sequence[SampleMeta], tokens: int) -> list[list[SampleMeta]]:
    """Cut a list into runs of about `tokens` tokens each, none empty."""
    groups: list[list[SampleMeta]] = []
    used = 0
    for meta in metas:
        if not groups or used + length(meta) > tokens:
            groups.append([])
            used = 0
        groups[-1].append(meta)
        used += length(meta)
    return groups

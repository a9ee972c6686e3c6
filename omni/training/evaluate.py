"""Held-out loss, and free generation compared with what should have come.

Generation is greedy and feeds back its own output, token by token, so it measures what a user of the model
would see.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from dataloader.format import PLACEHOLDER
from dataloader.loader import TextArrays
from dataloader.reader import Reader
from dataloader.tokens import SampleMeta, fit, length, tokenize
from omni.planning.run_spec import RunSpec
from omni.rank.build import Rank
from omni.training.forward import ForwardPasses, grouped, of_domain
from omni.training.generate import FreeGeneration, Prompt, Stop
from parallel.control import Control


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

    @property
    def passes(self) -> ForwardPasses:
        """Passes over held-out samples."""
        return ForwardPasses(self.spec, self.rank, self.readers)

    def loss(self, step: int, source: str, num_samples: int) -> float:
        """Mean loss of a target token over `num_samples` held-out samples, spread evenly over the dataset."""
        metas = self.samples(source, num_samples)
        sums = torch.zeros(2, dtype=torch.float64, device=self.rank.device)
        for numbers in grouped(metas, self._tokens_at_once()):
            group = [metas[i] for i in numbers]
            domains = self.spec.arrangement.num_domains
            plan = self.spec.planner.evaluation(step, group, domains, self.rank.domain)
            self.spec.planner.verify(plan)
            domain, own = plan.domain, of_domain(plan, group)
            texts = {i: self._text(source, own[i]) for i in self.rank.assembler.texts(domain)}
            for _, inputs, losses in self.passes.run(plan, own, texts, predict=False):
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
        stop: Stop = lambda done, of: False,
        cached: bool = True,
    ) -> list[Transcription]:
        """Generate the text after each sample's last item, greedily and of at most `most_tokens` tokens, and
        return those that came to their end, on every rank. `stop` and errors are those of `FreeGeneration`.
        """
        metas = self.samples(source, num_samples)
        prompts = [self._prompt(source, meta) for meta in metas]
        generator = FreeGeneration(self.passes, self.control)
        ends = frozenset({self.spec.tokenizer.eos})
        found = generator.generate(step, prompts, most_tokens, ends, stop, cached)
        return [self._transcription(source, metas[number], found[number]) for number in sorted(found)]

    def _prompt(self, source: str, meta: SampleMeta) -> Prompt:
        given = replace(meta, text_tokens=meta.items[-1].at if meta.items else 0)
        return Prompt(given, self._text(source, meta)[0][: length(given)])

    def _transcription(self, source: str, meta: SampleMeta, tokens: Sequence[int]) -> Transcription:
        sample = self.readers[source].read(meta.id, text=True, items=False)
        return Transcription(
            sample=sample.id,
            items=len(sample.items),
            expected=sample.text.rpartition(PLACEHOLDER)[2],
            generated=self.spec.tokenizer.decode(tokens),
        )

    def samples(self, source: str, num_samples: int) -> list[SampleMeta]:
        """What is taken of `num_samples` samples, spread evenly over a source: those that the run takes."""
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

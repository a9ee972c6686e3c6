"""Held-out loss, and free generation compared with what should have come.

Generation is greedy and feeds back its own output, token by token, so it measures what a user of the model
would see.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from dataloader.format import PLACEHOLDER, Sample
from dataloader.loader import SampleReader, TextArrays
from dataloader.tokenizer import Tokenizer
from dataloader.tokens import SampleMeta, fit, length, text_tokens, tokenize
from omni.planning.run_spec import RunSpec
from omni.rank.build import Rank
from omni.rank.step import waiting_at
from omni.training.forward import ForwardPasses, grouped, of_domain
from omni.training.generate import FreeGeneration, Limit, Prompt, Stop
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
class Answer:
    """What a model is to write after `begin` text tokens of a sample, and the token that ends it."""

    begin: int
    text: str
    closing: int


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the current weights on held-out data. Every rank of the run calls its methods together."""

    spec: RunSpec
    rank: Rank
    readers: Mapping[str, SampleReader]
    control: Control

    @property
    def passes(self) -> ForwardPasses:
        """Passes over held-out samples."""
        return ForwardPasses(self.spec, self.rank, self.readers)

    def loss(
        self, step: int, source: str, num_samples: int, stop: Callable[[], bool] = lambda: False
    ) -> float | None:
        """Mean loss of a target token over `num_samples` held-out samples, spread evenly over the dataset.
        Before each few passes all ranks ask `stop`: if one says so, all leave off together, with None.

        Raises:
            StallError: if a peer does not answer in time.
        """
        metas = taken_of(self.spec, source, num_samples)
        sums = torch.zeros(2, dtype=torch.float64, device=self.rank.device)
        for done, numbers in enumerate(grouped(metas, self._tokens_at_once())):
            if self._left_off(f"step {step}: held-out loss of {source}, after {done} plans", stop()):
                return None
            group = [metas[i] for i in numbers]
            domains = self.spec.arrangement.num_domains
            plan = self.spec.planner.evaluation(step, group, domains, self.rank.domain)
            self.spec.planner.verify(plan)
            domain, own = plan.domain, of_domain(plan, group)
            texts = {i: self._text(source, own[i]) for i in self.rank.assembler.texts(domain)}
            for _, inputs, losses in self.passes.run(plan, own, texts, predict=False):
                if domain.reports(self.rank.domain_rank):
                    assert inputs.weights is not None
                    weights = inputs.weights.double()
                    sums += torch.stack([(losses.double() * weights).sum(), weights.sum()])
        dist.all_reduce(sums, group=self.rank.groups.world)
        total, targets = sums.tolist()
        return total / targets if targets else float("nan")

    def losses(self, step: int, stop: Callable[[], bool]) -> dict[str, float]:
        """Losses of held-out sources, by the names of their metrics: of all, or of those before `stop`."""
        found = {}
        for name, own in self.spec.config.data.heldout.items():
            loss = self.loss(step, name, own.samples, stop)
            if loss is None:
                break
            found[f"loss/eval/{name}"] = loss
        return found

    def _left_off(self, where: str, asked: bool) -> bool:
        """Whether any rank asks to leave off."""
        world = self.rank.groups.world
        told = torch.tensor([asked], dtype=torch.int32, device=self.rank.device)
        with waiting_at(self.rank, where, world):
            dist.all_reduce(told, group=world)
            return bool(told.item())

    def transcribe_all(
        self, step: int, limit: Limit, note: Callable[[str], None]
    ) -> dict[str, list[Transcription]]:
        """Transcribe the held-out sources that ask for it within a limit; `note` hears why some are not."""
        found = {}
        for name, own in self.spec.config.data.heldout.items():
            if own.generate:
                stop = partial(limit.stop, name)
                found[name] = self.transcribe(step, name, own.generate, own.generate_tokens, stop)
                if (why := limit.left_off(name)) is not None:
                    note(why)
        return found

    def transcribe(
        self,
        step: int,
        source: str,
        num_samples: int,
        most_tokens: int,
        stop: Stop = lambda done, of: False,
        cached: bool = True,
    ) -> list[Transcription]:
        """Generate the text after each sample's last item, or the last answer of each chat, greedily and of
        at most `most_tokens` tokens, and return those that came to their end, on every rank. `stop` and
        errors are those of `FreeGeneration`.
        """
        metas = taken_of(self.spec, source, num_samples)
        samples = [self.readers[source].read(meta.id, text=True, items=False) for meta in metas]
        tokenizer = self.spec.tokenizer
        answers = [answer_of(sample, meta, tokenizer) for sample, meta in zip(samples, metas, strict=True)]
        prompts = [
            self._prompt(sample, meta, answer.begin)
            for sample, meta, answer in zip(samples, metas, answers, strict=True)
        ]
        generator = FreeGeneration(self.passes, self.control)
        ends = frozenset(answer.closing for answer in answers) | {tokenizer.eos}
        found = generator.generate(step, prompts, most_tokens, ends, stop, cached)
        return [
            Transcription(samples[n].id, len(metas[n].items), answers[n].text, tokenizer.decode(tokens))
            for n, tokens in sorted(found.items())
        ]

    def _prompt(self, sample: Sample, meta: SampleMeta, begin: int) -> Prompt:
        items = tuple(item for item in meta.items if item.at <= begin)
        given = replace(meta, text_tokens=begin, items=items)
        return Prompt(given, tokenize(sample, meta, self.spec.tokenizer)[0][: length(given)])

    def _tokens_at_once(self) -> int:
        """Tokens of one evaluation plan: a few microbatches for each replica."""
        return 4 * self.spec.layout.dp * self.spec.config.data.pass_tokens

    def _text(self, source: str, meta: SampleMeta) -> TextArrays:
        sample = self.readers[source].read(meta.id, text=True, items=False)
        return tokenize(sample, meta, self.spec.tokenizer)


def taken_of(spec: RunSpec, source: str, num_samples: int) -> list[SampleMeta]:
    """What the run takes of `num_samples` samples that are spread evenly over a held-out source."""
    total = len(spec.heldout[source])
    num_samples = min(num_samples, total)
    metas = [spec.heldout_meta(source, i * total // num_samples) for i in range(num_samples)]
    return [meta for meta in metas if fit(meta, spec.planner.world.budget.longest, "drop") is not None]


def left_out_of(spec: RunSpec) -> Iterator[str]:
    """Say how many samples of held-out sources are not taken, and why: more may be asked for than there are,
    and some may not fit.
    """
    for name, own in spec.config.data.heldout.items():
        total = len(spec.heldout[name])
        for key, count in (("samples", own.samples), ("generate", own.generate)):
            if count > total:
                yield f"data.heldout.{name}.{key}={count}: there are {total}, which are all taken"
        asked = min(own.samples, total)
        if left := asked - len(taken_of(spec, name, own.samples)):
            yield (
                f"{left} of {asked} samples of held-out {name} are left out: they have more than "
                f"{spec.planner.world.budget.longest} tokens (data.sample_tokens, data.microbatch_tokens), "
                f"or an item that its encoder refuses"
            )


def answer_of(sample: Sample, meta: SampleMeta, tokenizer: Tokenizer) -> Answer:
    """What a model is to write of a sample: all after its last item, or the last answer of a chat."""
    if not meta.frame.turns:
        begin = meta.items[-1].at if meta.items else 0
        return Answer(begin, sample.text.rpartition(PLACEHOLDER)[2], tokenizer.eos)
    text = text_tokens(sample, tokenizer)
    before = text.turns[-2] if len(text.turns) > 1 else 0
    begin = max(1, before + int(text.targets[before:].argmax()))  # a model goes on from a token at least
    ids = text.ids[begin : text.turns[-1]].tolist()
    closed = bool(ids) and ids[-1] in tokenizer.special.values()
    return Answer(begin, tokenizer.decode(ids), ids[-1] if closed else tokenizer.eos)

"""Free generation, greedy: the likeliest next token of each sequence, and again with that token at its end.

The first pass is over all of what is given, and encodes its items; layers keep what they need of it, on the
ranks that it ran on (`parallel.memory`). Each further pass is over one token a sequence, planned as any pass
is; a plan serves until a sequence ends. Domains generate for samples of their own; the ranks of one agree on
every token. Where `cached` is false, each pass is over all tokens anew.

Invariant: tokens are those of passes over all tokens, whatever the layout, but for ties within rounding.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist

from dataloader.tokens import SampleMeta, length
from infra.shutdown import StopFlag
from omni.models.grid_positions import next_positions
from omni.planning.planner import Planner
from omni.rank.step import waiting_at
from omni.training.forward import ForwardPasses, grouped
from parallel.control import Control
from parallel.memory import Continued, Memory
from pipeline.plan import StepPlan


@dataclass(frozen=True)
class Prompt:
    """What a text is to begin with: a sample's metadata as far as it is given, and its input ids [T]."""

    meta: SampleMeta
    ids: np.ndarray


@dataclass
class Growing:
    """A prompt, by number among those of the call, that grows by `new` tokens, the first of them at position
    `next`.
    """

    number: int
    prompt: Prompt
    new: list[int] = field(default_factory=list)
    next: int = 0

    @property
    def meta(self) -> SampleMeta:
        """Metadata with the new tokens."""
        before = self.prompt.meta
        return replace(before, text_tokens=before.text_tokens + len(self.new))

    @property
    def tokens(self) -> int:
        """All its tokens."""
        return length(self.prompt.meta) + len(self.new)


Stop = Callable[[int, int], bool]


class Limit:
    """Lets generation leave off `seconds` after this was made, or when a signal asks to stop. Meanwhile
    `show` is told whose texts are generated, and how many of how many are done.
    """

    def __init__(self, seconds: float, signal: StopFlag, show: Callable[[str, int, int], None]) -> None:
        self.seconds = seconds
        self.signal = signal
        self.show = show
        self.until = time.monotonic() + seconds
        self.counts = 0, 0

    def stop(self, name: str, done: int, of: int) -> bool:
        """Whether to leave off now."""
        self.counts = done, of
        self.show(name, done, of)
        return self.signal.requested or time.monotonic() > self.until

    def left_off(self, name: str) -> str | None:
        """Say where and why generation left off; None if all came to its end."""
        done, of = self.counts
        if done == of:
            return None
        why = self.signal.signal_name or f"train.generate_s={self.seconds:g}, or a signal to another rank"
        return f"generation left off at {done} of {of} of {name}: {why}"


@dataclass(frozen=True)
class FreeGeneration:
    """Generates with the current weights. Every rank of the run calls it together."""

    passes: ForwardPasses
    control: Control

    def generate(
        self,
        step: int,
        prompts: Sequence[Prompt],
        most_tokens: int,
        ends: frozenset[int],
        stop: Stop = lambda done, of: False,
        cached: bool = True,
    ) -> dict[int, tuple[int, ...]]:
        """Generate at most `most_tokens` tokens after each prompt, up to one of `ends` or the longest sample
        that the run takes. Return, on every rank, those that came to their end, by number.

        After each token all ranks ask `stop`, told how many of how many are done: if one says so, all leave
        off together.

        Raises:
            StallError: if a peer does not answer in time.
        """
        rank, spec = self.passes.rank, self.passes.spec
        number, domains = rank.domain, spec.arrangement.num_domains
        budget = spec.planner.world.budget
        at_once = 4 * spec.layout.dp * budget.microbatch_tokens // domains
        own = [Growing(n, prompt) for n, prompt in enumerate(prompts)][number::domains]
        groups = [[own[i] for i in group] for group in grouped([s.meta for s in own], at_once, most_tokens)]
        found: dict[int, tuple[int, ...]] = {}
        run = _Run(self.passes, spec.planner.generation(), step, cached)

        def ended(sequence: Growing) -> bool:
            new = sequence.new
            return new[-1] in ends or len(new) >= most_tokens or sequence.tokens > budget.longest

        rounds = run.rounds(groups, ended, found)
        counts = rank.engine.domain_rank == 0  # for its domain
        done, going, stopped = 0, True, False
        while going and not stopped:
            asked = stop(done, len(prompts))
            busy = next(rounds, None) is not None
            told = torch.tensor([len(found) * counts, busy, asked], device=rank.device)
            where = f"generating, {done} of {len(prompts)} done"
            with waiting_at(rank, where, rank.groups.world):
                dist.all_reduce(told, group=rank.groups.world)
                done, going, stopped = told.tolist()
        stop(done, len(prompts))
        texts = {str(n): list(tokens) for n, tokens in found.items()} if counts else {}
        return {int(n): tuple(of) for n, of in self.control.share("texts", texts).items()}


@dataclass(frozen=True)
class _Run:
    """The passes of one domain."""

    passes: ForwardPasses
    planner: Planner
    step: int
    cached: bool

    def rounds(
        self,
        groups: Sequence[Sequence[Growing]],
        ended: Callable[[Growing], bool],
        found: dict[int, tuple[int, ...]],
    ) -> Iterator[int]:
        """Generate for one group after the other; yield after each token of all its sequences that still
        grow, with their number, and add to `found` those that have come to their end.
        """
        for group in groups:
            memory = Memory()
            growing = list(group)
            plan = first = self._over_all(growing)
            in_grids = bool(self.passes.spec.config.model.llm.rotary.sections)
            for sequence, position in zip(growing, next_positions(first.domain, in_grids), strict=True):
                sequence.next = position
            seen, at = [0] * len(growing), [0] * len(growing)
            while growing:
                names = tuple(sequence.number for sequence in growing)
                continued = Continued(memory, names, tuple(seen), tuple(at))
                for sequence, token in zip(
                    growing, self._next(plan, growing, seen, continued if self.cached else None), strict=True
                ):
                    sequence.new.append(token)
                done = [sequence for sequence in growing if ended(sequence)]
                found |= {sequence.number: tuple(sequence.new) for sequence in done}
                memory.forget(sequence.number for sequence in done)
                left = [sequence for sequence in growing if sequence not in done]
                if not self.cached and left:
                    plan = self._over_all(left)
                elif left and (done or plan is first):
                    # Neighbours of one length are attended in one call.
                    left.sort(key=lambda sequence: (sequence.tokens, sequence.number))
                    plan = self.planner.next_tokens(first, [group.index(sequence) for sequence in left])
                    self.planner.verify(plan)
                growing = left
                seen = [sequence.tokens - 1 if self.cached else 0 for sequence in growing]
                at = [sequence.next + len(sequence.new) - 1 for sequence in growing]
                yield len(growing)

    def _over_all(self, sequences: Sequence[Growing]) -> StepPlan:
        plan = self.planner.evaluation(self.step, [sequence.meta for sequence in sequences], 1)
        self.planner.verify(plan)
        return plan

    def _next(
        self,
        plan: StepPlan,
        sequences: Sequence[Growing],
        seen: Sequence[int],
        continued: Continued | None,
    ) -> list[int]:
        """The likeliest next token of each sequence, of which a pass takes what it has not seen, on all ranks
        of the domain.
        """
        rank = self.passes.rank
        texts: Mapping[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {
            i: (ids, ids, ids)  # labels and mask are not looked at
            for i, (sequence, start) in enumerate(zip(sequences, seen, strict=True))
            for ids in [np.concatenate([sequence.prompt.ids, np.array(sequence.new, np.int64)])[start:]]
        }
        tokens = torch.full((len(sequences),), -1, dtype=torch.int64)
        metas = [sequence.meta for sequence in sequences]
        for batch, _, predicted in self.passes.run(plan, metas, texts, True, continued):
            pieces = rank.assembler.pieces(plan.domain, batch)
            last = [p.sample for p in pieces if p.stop == batch.layout.lengths[p.sequence]]
            tokens[last] = predicted.cpu()
        # Of the groups over the domain's ranks any will do: nothing else is under way.
        tokens = tokens.to(rank.device)
        dist.all_reduce(tokens, op=dist.ReduceOp.MAX, group=rank.groups.ship)
        return [int(token) for token in tokens.tolist()]

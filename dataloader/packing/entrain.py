"""Level work of encoders and level work of the LLM at once: items are encoded with one pack, and their sample
may be trained with a later one.

After Entrain (Jang and Chowdhury, 2026, arXiv 2605.27918: its hierarchical assignment to microbatches):

1. Strata: samples are dealt to packs by the work of their items, as many at a time as there are packs.
2. Pairwise deferral: since a sample can be put off and not brought forward, a pack with much work of the LLM
   stands before one with little, and gives samples to it.

Entrain deals once and defers once, to packs of any length. Here packs go on exchanging samples in both steps
while that levels them, a bounded number of times, and no pack exceeds the budget. Rows of samples that are
put off wait in memory: at no time are these samples of more tokens than one pack may have.
"""

from collections.abc import Sequence

from dataloader.balance import SampleCosts
from dataloader.packing.first_fit import pack
from dataloader.packing.policy import PackingPolicy, Packs

_ROUNDS = 8  # of exchanges between packs
_PARTNERS = 4  # that a pack tries to exchange with, of the lightest

Moves = tuple[tuple[int, int], ...]
"""Samples that change their pack, with the pack that they change to: one, or two that change places."""


def pack_entrain(samples: SampleCosts, budget: int) -> Packs:
    """Packs of about equal work of the LLM, of samples that are encoded with the same pack or an earlier one.

    There are as many as first-fit-decreasing makes, and a sixteenth more as often as deferral does not bring
    all of them within the budget. Samples beyond the budget come first, each in a pack of its own.
    O(rounds · n² / packs) for each number tried.
    """
    long, short = _by_length(samples, budget)
    own = samples.take(short)
    count = len(pack(own.tokens.tolist(), budget))
    while not (deferral := Deferral(own, _strata(own, count), count, budget)).relieve():
        count = min(len(short), count + 1 + count // 16)
    deferral.level()
    members = [tuple(sorted(short[i] for i in of)) for of in deferral.members]
    return (*((i,) for i in long), *members)


def encode_entrain(samples: SampleCosts, packs: Packs, budget: int) -> list[int]:
    """The pack of each sample's stratum: where `pack_entrain` began, with as many packs."""
    long, short = _by_length(samples, budget)
    strata = _strata(samples.take(short), len(packs) - len(long))
    chosen = dict(zip(short, (len(long) + number for number in strata), strict=True))
    chosen |= {sample: number for number, sample in enumerate(long)}
    return [chosen[sample] for sample in range(len(samples))]


def _by_length(samples: SampleCosts, budget: int) -> tuple[list[int], list[int]]:
    """Samples beyond the budget, and the others."""
    tokens = samples.tokens.tolist()
    numbers = range(len(tokens))
    return [i for i in numbers if tokens[i] > budget], [i for i in numbers if tokens[i] <= budget]


def _strata(samples: SampleCosts, count: int) -> list[int]:
    """Deal samples to `count` packs, so that the work of encoders is level: the costliest `count` of them one
    to each pack, the next ones the costliest to the pack with the least so far, and so on; then pairs of
    packs exchange samples.
    """
    encoders, llm = samples.ns[:, 1:].sum(1).tolist(), samples.ns[:, 0].tolist()
    order = sorted(range(len(encoders)), key=lambda i: -encoders[i])
    loads = [0] * count
    packs = [0] * len(order)
    for first in range(0, len(order), max(1, count)):
        lightest = sorted(range(count), key=loads.__getitem__)
        for sample, number in zip(order[first : first + count], lightest, strict=False):
            packs[sample] = number
            loads[number] += encoders[sample]
    dealt = Assignment(packs, encoders, count)
    dealt.level()
    work = [sum(llm[i] for i in members) for members in dealt.members]
    place = {number: at for at, number in enumerate(_in_pairs(work))}
    return [place[number] for number in dealt.packs]


def _in_pairs(work: Sequence[int]) -> list[int]:
    """Packs in the order in which samples are put off: the heaviest and the lightest, then the next of both;
    pairs with more work together come first.
    """
    order = sorted(range(len(work)), key=lambda number: -work[number])
    half = len(order) // 2
    pairs: list[tuple[int, ...]] = [(order[at], order[-1 - at]) for at in range(half)]
    pairs += [(order[half],)] if len(order) % 2 else []
    pairs.sort(key=lambda pair: -sum(work[number] for number in pair) * 2 // len(pair))
    return [number for pair in pairs for number in pair]


class Assignment:
    """Samples of given weights in packs, of which pairs exchange samples until they are level."""

    def __init__(self, packs: Sequence[int], weights: Sequence[int], count: int) -> None:
        self.packs, self.weights = list(packs), weights
        self.members: list[list[int]] = [[] for _ in range(count)]
        self.loads = [0] * count
        for sample, number in enumerate(packs):
            self.members[number].append(sample)
            self.loads[number] += weights[sample]

    def allows(self, moves: Moves) -> bool:
        """Whether samples may change their packs so."""
        return True

    def move(self, moves: Moves) -> None:
        """Let samples change their packs."""
        for sample, number in moves:
            before = self.packs[sample]
            self.members[before].remove(sample)
            self.members[number].append(sample)
            self.loads[before] -= self.weights[sample]
            self.loads[number] += self.weights[sample]
            self.packs[sample] = number

    def level(self) -> None:
        """Let each pack, from the heaviest on, exchange samples with the lightest one that this brings closer
        to it; do so again while any gains.
        """
        for _ in range(_ROUNDS):
            order = sorted(range(len(self.loads)), key=lambda number: -self.loads[number])
            lightest = order[: -1 - _PARTNERS : -1]
            gained = False
            for heavy in order:
                gained |= any(self._exchange(heavy, light) for light in lightest)
            if not gained:
                break

    def _exchange(self, heavy: int, light: int) -> bool:
        """Move a sample from the heavy pack to the light one, or let two change places; tell if it levels."""
        gap = least = self.loads[heavy] - self.loads[light]
        best: Moves = ()
        alone = len(self.members[heavy]) == 1
        for given in self.members[heavy]:
            for taken in (*self.members[light], None):
                weight = self.weights[given] - (0 if taken is None else self.weights[taken])
                if abs(gap - 2 * weight) >= least or (taken is None and alone):
                    continue
                moves: Moves = ((given, light),) if taken is None else ((given, light), (taken, heavy))
                if self.allows(moves):
                    best, least = moves, abs(gap - 2 * weight)
        self.move(best)
        return bool(best)


class Deferral(Assignment):
    """Samples that are put off from the packs of their `strata`, weighed by the work of the LLM."""

    def __init__(self, samples: SampleCosts, strata: Sequence[int], count: int, budget: int) -> None:
        super().__init__(strata, samples.ns[:, 0].tolist(), count)
        self.strata, self.budget = strata, budget
        self.tokens: list[int] = samples.tokens.tolist()
        self.waiting: list[int] = (samples.tokens * (samples.ns[:, 1:].sum(1) > 0)).tolist()
        self.held = [sum(self.tokens[i] for i in of) for of in self.members]
        self.waits = [0] * count  # tokens of samples that are encoded and not yet trained, after each pack

    def allows(self, moves: Moves) -> bool:
        """Whether no sample is brought forward, the packs have room, and those that wait find memory."""
        if any(number < self.strata[sample] for sample, number in moves):
            return False
        into = sum(self._signed(self.tokens, moves))
        (_, number), *_ = moves
        back = self.packs[moves[0][0]]
        grows, by = (number, into) if into > 0 else (back, -into)
        if self.held[grows] + by > self.budget:
            return False
        first, stop = sorted((back, number))
        longer = sum(self._signed(self.waiting, moves)) * (1 if back < number else -1)
        return longer <= 0 or max(self.waits[first:stop]) + longer <= self.budget

    def _signed(self, of: Sequence[int], moves: Moves) -> list[int]:
        """What the first sample brings to its new pack, and what the second one takes away."""
        return [-of[sample] if at else of[sample] for at, (sample, _) in enumerate(moves)]

    def move(self, moves: Moves) -> None:
        """Let samples change their packs."""
        for sample, number in moves:
            before = self.packs[sample]
            self.held[before] -= self.tokens[sample]
            self.held[number] += self.tokens[sample]
            first, stop = sorted((before, number))
            for at in range(first, stop):
                self.waits[at] += self.waiting[sample] * (1 if before < number else -1)
        super().move(moves)

    def relieve(self) -> bool:
        """Put off samples of packs beyond the budget; tell if all are within it."""
        for number in range(len(self.members)):
            while self.held[number] > self.budget and self._put_off(number):
                pass
        return all(held <= self.budget for held in self.held)

    def _put_off(self, number: int) -> bool:
        """Put off one sample of a pack to the next one that has room: the longest that is not more than
        enough, or else the shortest that is; tell if there is one.
        """
        excess = self.held[number] - self.budget

        def rank(sample: int) -> tuple[bool, int]:
            enough = self.tokens[sample] > excess
            return enough, self.tokens[sample] if enough else -self.tokens[sample]

        for sample in sorted(self.members[number], key=rank):
            for later in range(number + 1, len(self.members)):
                if self.allows(((sample, later),)):
                    self.move(((sample, later),))
                    return True
        return False


ENTRAIN = PackingPolicy("entrain", pack_entrain, encode=encode_entrain)

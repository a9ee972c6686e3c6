"""A lower bound of a step: no plan of these samples, in this layout, takes less simulated time.

Pure arithmetic over a step's samples, what parts cost and who lives where; no plan is made. The bound is the
largest of four, each true of every plan, whatever its policies of balance, packing and schedule:

    work       all work over all ranks; of an encoder that lives on some ranks, over those
    sample     the longest chain: one sample encoded, through all virtual stages and back, each pass divided
               by the ranks that may share it
    whole      samples are dealt to the ranks that may share them, and some of these get at least so much: of
               the k·m + 1 longest over m places, one gets k + 1, so at least the k + 1 shortest of these
               (Martello and Toth, 1990, bounds of identical machines)
    pipeline   fill and drain: a stage runs nothing of the LLM before some sample has come through the stages
               before it, and the last sample still goes back through them; encoder work may fill the gaps.
               This is true of any of the samples by themselves, so the longest are tried by themselves too

Exchanges of shared sequences, shipping rows, issuing communication and queues count as nothing, so a plan may
be above its bound for them. Passes are as large as `data.microbatch_tokens` allows, and the first and the
last of them as small as one sample. Simulated nanoseconds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dataloader.tokens import SampleMeta, length
from omni.planning.domain_planner import DomainPlanner
from omni.planning.sharing import Sharing
from parallel.costs import WorkCost
from parallel.laws import FS_PER_NS
from parallel.work import Grad, virtual_stage_name

NEARLY = 0.99
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Bound:
    """Nanoseconds that a step takes at least, for four reasons; `longest` is the sample with the longest
    chain, by place among those given, or -1.
    """

    work_ns: int
    sample_ns: int
    whole_ns: int
    pipeline_ns: int
    longest: int

    @property
    def ns(self) -> int:
        """The best possible step."""
        return max(self.work_ns, self.sample_ns, self.whole_ns, self.pipeline_ns)

    @property
    def reason(self) -> str:
        """The simplest within a hundredth of the largest: "work", "sample", "whole" or "pipeline"."""
        of = {"work": self.work_ns, "sample": self.sample_ns, "whole": self.whole_ns}
        return next((name for name, ns in of.items() if ns >= NEARLY * self.ns), "pipeline")


def step_bound(
    metas: Sequence[SampleMeta],
    planner: DomainPlanner,
    frozen: Sequence[str] = (),
    *,
    any_domain: bool = False,
) -> Bound:
    """Bound the training step of all samples of the world, as they are trained on.

    Sequences are shared as the planner shares them, in domains of its size; with `any_domain` by as many
    ranks of the world as they have tokens for, as if all of it were one domain that may cut every sequence.
    """
    if not metas:
        return Bound(0, 0, 0, 0, -1)
    return _Bounding(metas, planner, frozenset(frozen), any_domain).bound()


@dataclass(frozen=True)
class _Cost:
    """What passes take: nanoseconds for each token and for each square of a sequence, and for each pass."""

    token: float = 0.0
    square: float = 0.0
    fixed: float = 0.0

    def __add__(self, other: "_Cost") -> "_Cost":
        return _Cost(self.token + other.token, self.square + other.square, self.fixed + other.fixed)

    def each(self, tokens: Floats) -> Floats:
        """Nanoseconds that each of some sequences adds to a pass [n]."""
        return self.token * tokens + self.square * tokens * tokens

    def alone(self, tokens: Floats, ways: Floats) -> Floats:
        """Nanoseconds of a pass of each of some sequences alone, shared by so many ranks each [n]: whole
        ones, as a plan's.
        """
        return np.floor(self.each(tokens) / ways + self.fixed)


def _cost(cost: WorkCost, *grads: Grad | None) -> _Cost:
    """The cost of passes through a part, of forwards (None) and backwards for gradients."""
    talks = {None: cost.forward_talk, Grad.INPUT: cost.input_talk, Grad.WEIGHT: cost.weight_talk}
    total = _Cost()
    for grad in grads:
        law, talk = cost.laws.of(grad), talks[grad]
        token_fs = law.token_fs + talk.token_fs
        fixed_ns = law.fixed_ns + talk.fixed_ns
        total += _Cost(token_fs / FS_PER_NS, law.square_fs / FS_PER_NS, fixed_ns)
    return total


@dataclass(frozen=True)
class _EncoderWork:
    """What encoding takes by sample [n]: nanoseconds of ranks in all, forward and backward, and those of the
    longest item alone on the ranks that may share it. `at_once` says that all rows enter at the first virtual
    stage.
    """

    name: str
    forward_work: Floats
    back_work: Floats
    forward: Floats
    back: Floats
    at_once: bool


@dataclass(frozen=True)
class _Waits:
    """What a stage waits for at least, in nanoseconds, by how many of the longest samples count [n]: `front`
    before the first pass of these, `turn` before their first backward, `tail` after their last forward and
    `drain` after their last backward for inputs.
    """

    front: Floats
    turn: Floats
    tail: Floats
    drain: Floats


class _Bounding:
    def __init__(
        self, metas: Sequence[SampleMeta], planner: DomainPlanner, frozen: frozenset[str], any_domain: bool
    ) -> None:
        self.planner, self.frozen, self.any_domain = planner, frozen, any_domain
        self.world, self.table = planner.arrangement, planner.table
        self.domains = 1 if any_domain else self.world.num_domains
        self.num_cp_ranks = self.world.llm.cp * self.world.llm.dp
        # Samples from the longest on.
        self.order = sorted(range(len(metas)), key=lambda n: -length(metas[n]))
        metas = [metas[n] for n in self.order]
        self.tokens = np.array([length(meta) for meta in metas], np.float64)
        self.sharers = self._sharers(planner.sharing[planner.llm], self.num_cp_ranks)
        self.ways = self._ways(self.tokens, planner.sharing[planner.llm], self.sharers)
        half = [Grad.INPUT] if planner.llm in frozen else [Grad.INPUT, Grad.WEIGHT]
        numbers = range(self.world.llm.num_virtual_stages)
        costs = [self.table.parts[virtual_stage_name(planner.llm, number)] for number in numbers]
        self.forwards, self.inputs = (
            [_cost(of, None) for of in costs],
            [_cost(of, Grad.INPUT) for of in costs],
        )
        self.weights = [_cost(of, Grad.WEIGHT) if len(half) > 1 else _Cost() for of in costs]
        self.reduced_ns = [of.reduced_after_ns for of in costs]
        self.encodings = [
            self._encoding(metas, modality, name) for modality, name in planner.encoders.items()
        ]
        # Of a cp rank, by how many samples count: a pass of a domain holds a full pack of each replica,
        # or one longer sample.
        full = planner.microbatch_tokens * (1 if any_domain else self.world.replicas)
        room = planner.microbatch_tokens * self.world.llm.dp
        self.passes: Floats = np.cumsum(np.minimum(self.tokens, full)) / room

    def bound(self) -> Bound:
        """The largest of all."""
        chains = self._chains()
        longest = int(chains.argmax())
        stages = [self._stage(stage) for stage in range(self.world.llm.pp)]
        return Bound(
            work_ns=int(self._work()),
            sample_ns=int(chains[longest]),
            whole_ns=int(self._whole()),
            pipeline_ns=int(max(self._filled(stages), *map(self._of_stage, range(len(stages)), stages))),
            longest=self.order[longest],
        )

    def _sharers(self, own: Sharing, everyone: int) -> int:
        """CP ranks that may share a sequence of a component, of which there are so many in the world."""
        if self.any_domain:
            return everyone
        return own.pool.num_cp_ranks if own.policy.cuts and not own.whole else 1

    def _ways(self, tokens: Floats, own: Sharing, most: int) -> Floats:
        """Over how many ranks each sequence may be cut [n]."""
        return np.clip(np.ceil(tokens / own.pool.unit), 1, most)

    def _encoding(self, metas: Sequence[SampleMeta], modality: str, name: str) -> _EncoderWork:
        cost, sharing, tp = self.table.parts[name], self.planner.sharing[name], self.world.encoder_tp[name]
        back = _Cost() if name in self.frozen else _cost(cost, Grad.INPUT, Grad.WEIGHT)
        forward = _cost(cost, None)
        pairs = [(n, i.tokens) for n, meta in enumerate(metas) for i in meta.items if i.modality == modality]
        of, tokens = np.array(pairs, np.int64).reshape(-1, 2).T
        sizes = tokens.astype(np.float64)
        num_tp_groups = len(self.world.tp_groups(name))
        ways = self._ways(sizes, sharing, self._sharers(sharing, num_tp_groups * self.world.num_domains))
        columns = np.zeros((4, len(metas)))
        np.add.at(columns[0], of, forward.each(sizes) * tp)
        np.add.at(columns[1], of, back.each(sizes) * tp)
        np.maximum.at(columns[2], of, forward.alone(sizes, ways))
        np.maximum.at(columns[3], of, back.alone(sizes, ways))
        points = dict(self.planner.feeds).get(name, ())
        forward_work, back_work, longest, longest_back = columns
        at_once = all(point.virtual_stage == 0 for point in points)
        return _EncoderWork(name, forward_work, back_work, longest, longest_back, at_once)

    def _chain(self, costs: Sequence[_Cost]) -> Floats:
        """Nanoseconds of passes of each sample alone, one after the other [n]."""
        return sum((cost.alone(self.tokens, self.ways) for cost in costs), np.zeros_like(self.tokens))

    def _hops(self, count: int) -> Floats:
        """Nanoseconds of so many messages of each sample alone from stage to stage [n]."""
        if self.world.llm.pp == 1 or not count:
            return np.zeros_like(self.tokens)
        rows = self.tokens // (self.ways * self.world.llm.tp)
        lengths, place = np.unique(rows, return_inverse=True)
        return count * np.array([float(self.table.message_ns(int(n))) for n in lengths])[place]

    def _encode(self, *, back: bool) -> Floats:
        """Nanoseconds of each sample's longest item, if its rows enter at the first virtual stage [n]."""
        columns = [(one.back if back else one.forward) for one in self.encodings if one.at_once]
        return np.maximum.reduce([np.zeros_like(self.tokens), *columns])

    def _ends(self) -> Floats:
        """What follows a sample's last backward for inputs [n]: that for weights, or of its items."""
        return np.maximum(self._chain(self.weights[:1]), self._encode(back=True))

    def _chains(self) -> Floats:
        hops = self._hops(2 * (len(self.forwards) - 1))
        passes = self._chain(self.forwards) + self._chain(self.inputs)
        names = [one.name for one in self.encodings]
        return self._encode(back=False) + passes + hops + self._ends() + self._reduced([0], names)

    def _stage(self, stage: int) -> _Waits:
        held = self.world.virtual_stages_by_stage[stage]
        first, last, count = held[0], held[-1], len(self.forwards)
        encode, ends = self._encode(back=False), self._ends()
        front = encode + self._chain(self.forwards[:first]) + self._hops(first)
        onward = self._chain(self.inputs[last + 1 :]) + self._hops(count - 1 - last)
        turn = encode + self._chain(self.forwards) + self._hops(count - 1) + onward
        drain = self._chain(self.inputs[:first]) + self._hops(first) + ends
        back = self._chain(self.inputs) + self._hops(count - 1) + ends
        tail = self._chain(self.forwards[last + 1 :]) + self._hops(count - 1 - last) + back
        return _Waits(*(np.minimum.accumulate(of) for of in (front, turn, tail, drain)))

    def _mean(self, cost: _Cost) -> Floats:
        """What passes of the longest samples take a cp rank on average [n]; each that has any runs one."""
        return np.cumsum(cost.each(self.tokens)) / self.num_cp_ranks + cost.fixed * np.maximum(1, self.passes)

    def _most(self, cost: _Cost) -> Floats:
        """What passes of the longest samples take the busiest cp rank at least [n]."""
        alone = least_of_most(cost.each(self.tokens) / self.sharers, self.num_cp_ranks // self.sharers)
        return np.maximum(self._mean(cost), alone + cost.fixed)

    def _costs(self, stage: int) -> tuple[_Cost, _Cost, _Cost]:
        """Forwards, backwards for inputs and for weights of a stage."""
        of = self.world.virtual_stages_by_stage[stage]
        forward, input_, weight = (
            sum((each[number] for number in of), _Cost())
            for each in (self.forwards, self.inputs, self.weights)
        )
        return forward, input_, weight

    def _of_stage(self, stage: int, waits: _Waits) -> float:
        """What a stage's passes take with what it waits for, whatever else its ranks do meanwhile."""
        forward, input_, weight = self._costs(stage)
        ends = (
            waits.front + self._most(forward + input_ + weight),
            waits.turn + self._most(input_ + weight),
        )
        through = (
            waits.front + self._most(forward) + waits.tail,
            waits.front + self._most(forward + input_) + waits.drain,
            waits.turn + self._most(input_) + waits.drain,
        )
        names = [one.name for one in self.encodings]
        of_ends = self._reduced(self.world.virtual_stages_by_stage[stage])
        worst = float(np.maximum.reduce(ends).max()) + of_ends
        return max(worst, float(np.maximum.reduce(through).max()) + self._reduced([0], names))

    def _filled(self, stages: Sequence[_Waits]) -> float:
        """What the ranks of the LLM take on average, if encoder work fills what gaps it can.

        Encodings fill gaps before a stage's last forward, and their backwards those after its first backward.
        """
        inside = self.encodings if not self.world.encoder_ranks else []
        if not all(one.at_once for one in inside):
            return 0.0  # rows that enter later may be encoded later
        ranks, rows = self.world.llm.world, []
        for stage, waits in enumerate(stages):
            forward, input_, weight = (float(self._mean(of)[-1]) for of in self._costs(stage))
            of_all = (of[-1] for of in (waits.front, waits.turn, waits.tail, waits.drain))
            front, turn, tail, drain = map(float, of_all)
            after, drained = max(0.0, tail - input_ - weight), max(0.0, drain - weight)
            rows.append((forward + input_ + weight, front, after, max(0.0, turn - forward), drained))
        passes, front, after, turned, drained = (sum(of) / len(stages) for of in zip(*rows, strict=True))
        encode = sum(float(one.forward_work.sum()) for one in inside) / ranks
        back = sum(float(one.back_work.sum()) for one in inside) / ranks
        around = max(0.0, front - encode) + max(0.0, after - back)
        between = max(0.0, turned - encode) + max(0.0, drained - back)
        reduced = self._reduced(range(len(self.forwards)), [one.name for one in inside])
        return passes + encode + back + max(around, between) + reduced

    def _work(self) -> float:
        """All work over the ranks that may do it: over all, and over the home of encoders."""
        world, every = self.world, range(len(self.forwards))
        work, names = self._encoder_ns().sum(), [one.name for one in self.encodings]
        found = [(self._llm_ns(every) + work) / world.world + self._reduced(every, names)]
        first, stop = world.home
        if stop > first and names:
            stages = range(-(-first // world.stage_size), min(stop, world.llm_size) // world.stage_size)
            held = [number for stage in stages for number in world.virtual_stages_by_stage[stage]]
            ranks = (stop - first) * world.num_domains
            found.append((self._llm_ns(held) + work) / ranks + self._reduced(held, names))
        return float(max(found))

    def _llm_ns(self, numbers: Sequence[int]) -> float:
        """Nanoseconds of ranks in all passes through some virtual stages, by number."""
        directions = (self.forwards, self.inputs, self.weights)
        cost = sum((of[number] for of in directions for number in numbers), _Cost())
        ns = float(cost.each(self.tokens).sum()) + cost.fixed * float(self.passes[-1]) * self.num_cp_ranks
        return ns * self.world.llm.tp

    def _encoder_ns(self) -> Floats:
        """Nanoseconds of ranks in which each sample's items are encoded, with the way back [n]."""
        none = np.zeros_like(self.tokens)
        return sum((one.forward_work + one.back_work for one in self.encodings), none)

    def _whole(self) -> float:
        """What the busiest domain takes at least, as all work of a sample stays in one."""
        every = sum((of for each in (self.forwards, self.inputs, self.weights) for of in each), _Cost())
        jobs = every.each(self.tokens) * self.world.llm.tp + self._encoder_ns()
        return float(least_of_most(jobs * self.domains / self.world.world, self.domains).max())

    def _reduced(self, numbers: Iterable[int], encoders: Sequence[str] = ()) -> float:
        """What is reduced after the last pass through any of these, at least; nothing where one is frozen."""
        if self.frozen:
            return 0.0
        of_encoders = [self.table.parts[name].reduced_after_ns for name in encoders]
        return float(min([*(self.reduced_ns[number] for number in numbers), *of_encoders], default=0))


def least_of_most(jobs: Floats, places: int) -> Floats:
    """Return what the fullest of so many places gets at least of indivisible jobs [n], by how many of the
    first jobs count [n]: their mean, and of k · places + 1 jobs the k + 1 shortest, for any k.
    """
    upto = np.concatenate(([0.0], np.cumsum(jobs)))
    least: Floats = upto[1:] / places
    last = np.arange(0, len(jobs), places)  # k · places
    count = np.arange(len(last)) + 1
    ordered = np.sort(jobs)[::-1]
    upto = np.concatenate(([0.0], np.cumsum(ordered)))
    several = upto[last + 1] - upto[last + 1 - count]
    descends = bool(np.all(jobs[:-1] >= jobs[1:]))
    at = last if descends else np.full_like(last, len(jobs) - 1)
    np.maximum.at(least, at, several)
    return least

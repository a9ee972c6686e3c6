"""What work costs: a numbered table of integer nanoseconds that every planner reads.

No floating point enters a decision. Coefficients are integers in femtoseconds, results integers in
nanoseconds, so all ranks, machines and Python versions agree on them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from parallel.cluster import Cluster, Link, Links
from parallel.laws import FS_PER_NS, Direction, Law, Laws
from parallel.work import FP32, Collective, Grad, Load, Part, Work, even_load, virtual_stage_name

# The number of tokens at which costs by token are taken: large, and divisible by usual sizes of tensor
# parallelism and merge windows, so integer division is exact.
_REFERENCE = 720_720 * 64
_HALVES = (Grad.INPUT, Grad.WEIGHT)


@dataclass(frozen=True)
class Talk:
    """Time of the collectives in a pass: in femtoseconds for a token, and in nanoseconds of latency."""

    token_fs: int = 0
    fixed_ns: int = 0

    def ns(self, tokens: int) -> int:
        """Nanoseconds of the collectives of a pass over `tokens`."""
        return self.fixed_ns + self.token_fs * tokens // FS_PER_NS


@dataclass(frozen=True)
class WorkCost:
    """Time of passes through a part, linear in tokens and in the sum of squared lengths.

    Compute takes what the `learnt` laws say, if there are any, else the `stated` ones, recomputation being
    part of the backward for inputs. Layers exchange shared sequences `exchanges` times in a forward and
    `back_exchanges` times in a backward, each time in and out. What ranks of a layer tell each other
    otherwise takes `forward_talk`, and `input_talk` and `weight_talk` in the two halves of a backward.
    Gathering partitioned matrices and scattering their gradients takes what `moved` says of these three, in
    nanoseconds, behind compute but for a first layer's. Inputs of `copies` layers go to the host in a forward
    and come back in a backward, which takes `copy_fs` for a token of each, behind the compute of as many
    layers, but for `late` of them on the way back. Reducing gradients, once a step, takes `reduce_ns`,
    and gathering updated weights `gather_ns`, in so many `pieces`, each of some layers. Of a pass so many
    layers are `followed`: behind each something else may be sent. A forward keeps `kept_token` bytes for each
    token until its backward, which works with `working_token` bytes beside, and sends `away_token` to the
    host. Passes whose layers are all computed anew cost as `anew` says, None if that is no other.
    """

    stated: Laws
    exchanges: int = 0
    back_exchanges: int = 0
    forward_talk: Talk = Talk()
    input_talk: Talk = Talk()
    weight_talk: Talk = Talk()
    moved: tuple[int, int, int] = (0, 0, 0)
    copies: int = 0
    copy_fs: int = 0
    late: int = 0
    reduce_ns: int = 0
    gather_ns: int = 0
    pieces: int = 1
    followed: int = 1
    kept_token: int = 0
    working_token: int = 0
    away_token: int = 0
    learnt: Laws | None = None
    anew: "WorkCost | None" = None

    def of(self, anew: bool) -> "WorkCost":
        """Return the costs of a pass, by whether all its layers are computed anew."""
        return self.anew if anew and self.anew is not None else self

    @property
    def laws(self) -> Laws:
        """The laws of compute, learnt or stated."""
        return self.learnt or self.stated

    def kept_bytes(self, tokens: int) -> int:
        """Bytes that a forward over `tokens` keeps until its backward: what a bound on memory adds up."""
        return self.kept_token * tokens

    def compute_ns(self, tokens: int, squares: int, direction: Direction = None) -> int:
        """Nanoseconds of a pass over `tokens` in sequences whose squared lengths sum to `squares`, what its
        layers communicate apart.
        """
        return self.laws.ns(tokens, squares, direction)

    def gathered_behind_ns(self, forward_ns: int) -> int:
        """Nanoseconds of gathering weights that a forward hides: all but the first piece's."""
        return min(forward_ns, self.gather_ns) * (self.pieces - 1) // max(1, self.pieces)

    def reduced_behind_ns(self, backward_ns: int) -> int:
        """Nanoseconds of reducing gradients that a backward hides which makes the last of them: a piece is
        reduced when the pass has left the layer in front of it, and two are still left at the end.
        """
        return min(backward_ns, self.reduce_ns) * max(0, self.pieces - 2) // max(1, self.pieces)

    def behind_layers_ns(self, backward_ns: int) -> int:
        """Nanoseconds of a backward that follow its first layer."""
        return backward_ns * (self.followed - 1) // self.followed

    @property
    def reduced_after_ns(self) -> int:
        """Nanoseconds of reducing gradients that follow the last backward whatever that takes."""
        return self.reduce_ns - self.reduced_behind_ns(self.reduce_ns)

    def forward_ns(self, tokens: int, squares: int, exchange_ns: int = 0) -> int:
        """Nanoseconds of a forward pass; what a layer exchanges takes `exchange_ns`."""
        compute_ns = self.compute_ns(tokens, squares)
        return compute_ns + self.talk_ns(tokens, exchange_ns) + self.exposed_ns(tokens, compute_ns)

    def backward_ns(self, tokens: int, squares: int, exchange_ns: int = 0, grad: Grad = Grad.BOTH) -> int:
        """Nanoseconds of the backward pass or a half of it. Gradients are exchanged once, whatever they take
        to compute.
        """
        compute_ns = self.compute_ns(tokens, squares, grad)
        return (
            compute_ns + self.talk_ns(tokens, exchange_ns, grad) + self.exposed_ns(tokens, compute_ns, grad)
        )

    def exposed_ns(self, tokens: int, compute_ns: int, grad: Grad | None = None) -> int:
        """Nanoseconds that a pass over `tokens` which computes for `compute_ns` waits for partitions, those
        of a layer at least and what takes longer than compute, and for copies to the host or from it.
        """
        forward, input_, weight = self.moved
        ns = {None: forward, Grad.INPUT: input_, Grad.WEIGHT: weight}.get(grad, input_ + weight)
        partitions_ns = max(ns // max(1, self.exchanges), ns - compute_ns)
        return partitions_ns + self._copied_ns(tokens, compute_ns, grad)

    def _copied_ns(self, tokens: int, compute_ns: int, grad: Grad | None) -> int:
        """Nanoseconds that a pass waits for copies: each hides behind the compute of one layer."""
        if grad is Grad.WEIGHT or not self.copies:
            return 0
        copy_ns = self.copy_fs * tokens // FS_PER_NS
        late = self.late if grad else 0
        return late * copy_ns + (self.copies - late) * max(0, copy_ns - compute_ns // self.exchanges)

    def marginal_ns(self, tokens: int, squares: int) -> int:
        """Nanoseconds that more tokens add to a pass: what balancing compares."""
        forward = self.laws.forward
        token_fs = forward.token_fs + self.forward_talk.token_fs
        return (token_fs * tokens + forward.square_fs * squares) // FS_PER_NS

    def talk_ns(self, tokens: int, exchange_ns: int = 0, grad: Grad | None = None) -> int:
        """Nanoseconds of a pass, a forward or the backward that makes `grad`, that its layers communicate."""
        if grad is None:
            return self.forward_talk.ns(tokens) + self.exchanges * exchange_ns
        if grad is Grad.WEIGHT:
            return self.weight_talk.ns(tokens)
        later = self.weight_talk.ns(tokens) if grad is Grad.BOTH else 0
        return self.input_talk.ns(tokens) + later + self.back_exchanges * exchange_ns


@dataclass(frozen=True)
class CostTable:
    """Numbered costs of every part: the virtual stages of the LLM as "llm/0", "llm/1", encoders by name.

    The number is part of every plan made with it. `components` are in the order of a plan's, and `between` is
    the link from one virtual stage to the next: that across nodes, unless given. `issue_ns` is what an op
    that issues a communication, or waits for one, costs its rank beside the wait.
    """

    number: int
    parts: Mapping[str, WorkCost]
    links: Links
    row_bytes: int
    components: tuple[str, ...] = ()
    between: Link | None = None
    issue_ns: int = 0

    def llm_virtual_stage(self, component: int, number: int) -> str:
        """Return the name of a virtual stage of the LLM, which is component number `component`."""
        return virtual_stage_name(self.components[component] if self.components else "llm", number)

    @cached_property
    def learnt(self) -> tuple[tuple[str, Laws], ...]:
        """The laws that were learnt, by part: what ranks must agree on beside their configuration."""
        return tuple((name, cost.learnt) for name, cost in self.parts.items() if cost.learnt is not None)

    def with_laws(self, number: int, learnt: Mapping[str, Laws]) -> "CostTable":
        """Return the table of another number whose compute takes what was `learnt`, else what was stated."""
        parts = {name: _with_laws(cost, learnt.get(name)) for name, cost in self.parts.items()}
        return replace(self, number=number, parts=parts)

    def message_ns(self, rows: int) -> int:
        """Nanoseconds to hand `rows` activations of the LLM's width from one virtual stage to the next."""
        return (self.between or self.links.across).message_ns(rows * self.row_bytes)


def _with_laws(cost: WorkCost, learnt: Laws | None) -> WorkCost:
    """Costs whose compute takes what was learnt of passes whose layers are not computed anew: that of others
    takes a forward more.
    """
    if cost.anew is None:
        return replace(cost, learnt=learnt)
    again = None if learnt is None else replace(learnt, input=learnt.input + learnt.forward)
    return replace(cost, learnt=learnt, anew=replace(cost.anew, learnt=again))


@dataclass(frozen=True)
class Axis:
    """The ranks of a group, the link that its rings go over, and that on which each sends to each
    (all-to-all), which is the same unless given.
    """

    ranks: int
    link: Link
    pairs: Link | None = None

    def of(self, kind: str) -> Link:
        """Return the link of a kind of collective."""
        return self.pairs or self.link if kind == "all_to_all" else self.link


Axes = Mapping[str, Axis]
"""The groups of a part by the axis that connects them: "tp", "ep", "dp_cp", "expt_dp", "embd"."""


def collectives_ns(collectives: Iterable[Collective], axes: Axes) -> int:
    """Nanoseconds of collectives: each call takes the latency of its link and the bytes that a rank sends.

    Exchanges of shared sequences are not among them: a plan knows their time.
    """
    return sum(
        one.calls * axes[one.axis].of(one.kind).message_ns(one.bytes)
        for one in collectives
        if one.axis != "pool"
    )


def table_from_work(
    parts: Mapping[str, Part],
    cluster: Cluster,
    row_bytes: int,
    number: int = 0,
    axes: Mapping[str, Axes] | None = None,
    between: Link | None = None,
    components: tuple[str, ...] = (),
    sent: int = FP32,
    overlaps: bool = True,
) -> CostTable:
    """Derive the first table from statements and the cluster's figures; `learning.py` corrects it.

    All tokens count as targets. `row_bytes` is the size of one activation of the LLM's width, `axes` are the
    groups of each part. Of a gradient a number takes `sent` bytes on its way to another replica;
    weights arrive and gradients leave layer by layer if that `overlaps`.
    """
    costs = of_each(parts, axes or {}, lambda name, own: work_cost(parts[name], cluster, own, sent, overlaps))
    return CostTable(number, costs, cluster.links, row_bytes, components, between, cluster.issue_ns)


def of_each(
    parts: Mapping[str, Part], axes: Mapping[str, Axes], read: Callable[[str, Axes], WorkCost]
) -> dict[str, WorkCost]:
    """Return what is read off each part, by its name and groups: once for equal parts, as virtual stages."""
    read_before: list[tuple[Part, Axes, WorkCost]] = []
    found = {}
    for name, part in parts.items():
        own = axes.get(name, {})
        cost = next((cost for other, of, cost in read_before if of is own and other == part), None)
        if cost is None:
            cost = read(name, own)
            read_before.append((part, own, cost))
        found[name] = cost
    return found


def work_cost(part: Part, cluster: Cluster, axes: Axes, sent: int = FP32, overlaps: bool = True) -> WorkCost:
    """Read the cost of a part off its statement, also of passes whose layers are all computed anew."""
    cost, again = (_work_cost(part, cluster, axes, sent, overlaps, anew) for anew in (False, True))
    return cost if again == cost else replace(cost, anew=again)


def _work_cost(part: Part, cluster: Cluster, axes: Axes, sent: int, overlaps: bool, anew: bool) -> WorkCost:
    """The cost of a part, asked for many tokens, for a long sequence, and for none.

    Products, attention and memory traffic take their times one after the other. A roofline (Williams,
    Waterman and Patterson, 2009) takes the longest of them; kernels overlap them in part, and products that
    are small reach less of the peak by as much as they move for each FLOP, which a sum says and a maximum
    does not.
    """
    many, long, none = (
        replace(full_load(part, *of), anew=anew) for of in ((_REFERENCE,), (0, _REFERENCE), (0,))
    )
    forward = [part.forward(load) for load in (many, long, none)]
    input_, weight = ([part.backward(load, half) for load in (many, long, none)] for half in _HALVES)
    # Of the attention in a backward two forwards' FLOPs are its own, and more of them recomputation.
    of_squares, back_squares = forward[1].flops, input_[1].flops + weight[1].flops
    again = max(0, -(-back_squares // of_squares) - 2) if of_squares else 0
    passes = -(-(input_[0].flops + weight[0].flops) // forward[0].flops) if forward[0].flops else 2
    square_fs = _fs(of_squares, cluster.attention)
    back_fs = _fs(back_squares - again * of_squares, cluster.attention_backward) + again * square_fs
    sizes = {name: axis.ranks for name, axis in axes.items()}
    talks = talks_by_axis(part, axes, anew)
    moved = tuple(of.pop("partition", Talk()).fixed_ns for of in talks)
    forward_talk, input_talk, weight_talk = (sum_talks(of.values()) for of in talks)
    once = part.reduction(sizes, sent)
    reduced = [one.calls for one in once if one.kind in ("reduce_scatter", "all_to_all")]
    return WorkCost(
        Laws(
            forward=_law(forward, cluster, square_fs, passes=1),
            input=_law(input_, cluster, back_fs, passes=passes - 1),
            weight=_law(weight, cluster, 0, passes=1),
        ),
        exchanges=part.layers,
        back_exchanges=part.layers * (1 + max(passes - 2, again)),
        forward_talk=forward_talk,
        input_talk=input_talk,
        weight_talk=weight_talk,
        moved=(moved[0], moved[1], moved[2]),
        copies=forward[0].copies,
        copy_fs=_copy_fs(forward[0], cluster),
        late=input_[0].late,
        reduce_ns=collectives_ns([one for one in once if one.kind != "all_gather"], axes),
        pieces=sum(reduced) if part.by_layer and overlaps else 1,
        followed=max(1, part.layers) if part.by_layer and overlaps else 1,
        gather_ns=collectives_ns([one for one in once if one.kind == "all_gather"], axes),
        kept_token=-(-forward[0].kept // _REFERENCE),
        working_token=part.backward(many, Grad.BOTH).workspace // _REFERENCE,
        away_token=forward[0].offloaded // _REFERENCE,
    )


def _law(works: Sequence[Work], cluster: Cluster, square_fs: int, passes: int) -> Law:
    """The law of passes that take such works for many tokens, for a long sequence, and for none."""
    many, _, none = works
    token_fs = (
        _fs(many.flops - many.plain_flops, cluster.products)
        + _fs(many.plain_flops, cluster.plain_products)
        + _fs(many.bytes - none.bytes, cluster.moved_per_s)
    )
    fixed_ns = (
        passes * cluster.op_overhead_ns
        + none.launches * cluster.launch_ns
        + none.dispatches * cluster.dispatch_ns
        + none.bytes * 10**9 // cluster.moved_per_s
    )
    return Law(token_fs, square_fs, fixed_ns)


def _fs(amount: int, per_s: int) -> int:
    """Femtoseconds that a token's share of what `_REFERENCE` tokens take lasts."""
    return amount * 10**15 // (_REFERENCE * per_s)


def _copy_fs(work: Work, cluster: Cluster) -> int:
    """Femtoseconds that a token's share of one copy to the host lasts."""
    if not work.copies:
        return 0
    assert cluster.host_per_s is not None, "nobody has said how fast copies to the host are"
    return _fs(work.offloaded // work.copies, cluster.host_per_s)


def talks_by_axis(
    part: Part, axes: Axes, anew: bool = False
) -> tuple[dict[str, Talk], dict[str, Talk], dict[str, Talk]]:
    """Return what a forward and the two halves of a backward communicate in a part's layers, by axis; of
    passes whose layers are all computed `anew`, if so.
    """
    many, none = (replace(full_load(part, tokens), anew=anew) for tokens in (_REFERENCE, 0))
    of_passes = (
        [part.forward(load), *(part.backward(load, half) for half in _HALVES)] for load in (many, none)
    )
    talks = []
    for of_many, of_none in zip(*of_passes, strict=True):
        names = dict.fromkeys(one.axis for one in (*of_many.collectives, *of_none.collectives))
        talks.append({axis: _talk(axis, of_many, of_none, axes) for axis in names})
    forward, input_, weight = talks
    return forward, input_, weight


def _talk(axis: str, of_many: Work, of_none: Work, axes: Axes) -> Talk:
    many, none = (
        collectives_ns([one for one in work.collectives if one.axis == axis], axes)
        for work in (of_many, of_none)
    )
    return Talk((many - none) * FS_PER_NS // _REFERENCE, none)


def sum_talks(talks: Iterable[Talk]) -> Talk:
    """Return what several communicate one after the other."""
    all_of_them = list(talks)
    return Talk(sum(of.token_fs for of in all_of_them), sum(of.fixed_ns for of in all_of_them))


def full_load(part: Part, tokens: int, squares: int = 0) -> Load:
    """A load that nobody shares: all tokens are targets, and every rank sends as many to experts."""
    return even_load(tokens, squares, targets=tokens, routed=(tokens // part.tp,) * part.ep)

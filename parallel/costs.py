"""What work costs: clusters, and a numbered table of integer nanoseconds that every planner reads.

No floating point enters a decision. Coefficients are integers in femtoseconds, results integers in
nanoseconds, so all ranks, machines and Python versions agree on them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from parallel.laws import FS_PER_NS, Direction, Law, Laws
from parallel.work import Collective, Grad, Load, Part, even_load, part_name

# Tokens at which a statement is asked what a token takes: so many, of all usual sizes multiples, that integer
# divisions by tensor-parallel ranks and merge windows leave nothing.
_REFERENCE = 720_720 * 64


@dataclass(frozen=True)
class Link:
    """What one message costs between two ranks."""

    latency_ns: int
    bytes_per_s: int

    def bytes_ns(self, num_bytes: int) -> int:
        """Nanoseconds that so many bytes take, latency apart."""
        return num_bytes * 10**9 // self.bytes_per_s

    def message_ns(self, num_bytes: int) -> int:
        """Nanoseconds of one message."""
        return self.latency_ns + self.bytes_ns(num_bytes)


@dataclass(frozen=True)
class Links:
    """The links of a rank: `inside` its node and `across` nodes.

    Both kinds work at the same time, and in both directions.
    """

    inside: Link
    across: Link


@dataclass(frozen=True)
class Cluster:
    """What a rank and the links between ranks can do.

    `flops` is the peak of one rank in FLOP/s at the training precision and `efficiency` the share of it that
    layers reach; `memory_bytes_per_s` is what it reads and writes its own memory at; `link_bytes_per_s` and
    `link_latency_ns` describe one message between two nodes, the `node_link` ones one inside a node of
    `ranks_per_node` neighbouring ranks; `op_overhead_ns` is what starting any op costs, and `issue_ns` what a
    rank that computes itself spends on issuing a communication, and again on taking in what came (0 where a
    host does that meanwhile). A rank's device holds `memory_bytes`, None if that is not to be checked.
    """

    name: str
    flops: int
    efficiency: float
    memory_bytes_per_s: int
    link_bytes_per_s: int
    link_latency_ns: int
    ranks_per_node: int
    node_link_bytes_per_s: int
    node_link_latency_ns: int
    op_overhead_ns: int
    memory_bytes: int | None = None
    issue_ns: int = 0

    @property
    def links(self) -> Links:
        """The links inside a node and between nodes."""
        return Links(
            Link(self.node_link_latency_ns, self.node_link_bytes_per_s),
            Link(self.link_latency_ns, self.link_bytes_per_s),
        )


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

    Compute takes what the `learnt` laws say, if there are any, else what was stated: a backward takes
    `backward_factor` forwards, those of recomputation included, and `attention_again` times the attention
    alone, and its gradients of weights that can be put off `weight_fs` for a token, as much as a forward
    unless given. Each of `exchanges` layers exchanges shared sequences, once in and once out. What ranks of a
    layer tell each other otherwise takes `forward_talk`, and `input_talk` and `weight_talk` in the two halves
    of a backward. Reducing gradients and gathering weights, once a step, takes `reduce_ns`. A forward keeps
    `kept_token` bytes for each token until its backward.
    """

    token_fs: int
    square_fs: int
    overhead_ns: int
    backward_factor: int = 2
    exchanges: int = 0
    attention_again: int = 0
    forward_talk: Talk = Talk()
    input_talk: Talk = Talk()
    weight_talk: Talk = Talk()
    reduce_ns: int = 0
    weight_fs: int | None = None
    kept_token: int = 0
    learnt: Laws | None = None

    @cached_property
    def stated(self) -> Laws:
        """The laws of compute that the statement gives."""
        weight_fs = self.token_fs if self.weight_fs is None else self.weight_fs
        return Laws(
            forward=Law(self.token_fs, self.square_fs, self.overhead_ns),
            input=Law(
                max(0, self.backward_factor * self.token_fs - weight_fs),
                (self.backward_factor + self.attention_again) * self.square_fs,
                (self.backward_factor - 1) * self.overhead_ns,
            ),
            weight=Law(weight_fs, 0, self.overhead_ns),
        )

    @property
    def laws(self) -> Laws:
        """The laws of compute, learnt or stated."""
        return self.learnt or self.stated

    def kept_bytes(self, tokens: int) -> int:
        """Bytes that a forward over `tokens` keeps until its backward: what a bound on memory adds up."""
        return self.kept_token * tokens

    def compute_ns(self, tokens: int, squares: int, direction: Direction = None) -> int:
        """Nanoseconds of a pass over `tokens` in sequences whose squared lengths sum to `squares`, what its
        layers communicate apart. Recomputation is part of the backward for inputs.
        """
        if self.learnt is not None:
            return self.learnt.ns(tokens, squares, direction)
        forward = self.stated.forward.ns(tokens, squares)
        if direction is None:
            return forward
        weight = self.stated.weight.ns(tokens, squares)
        if direction is Grad.WEIGHT:
            return weight
        both = self.backward_factor * forward + self.attention_again * self.square_fs * squares // FS_PER_NS
        return both if direction is Grad.BOTH else both - weight

    def forward_ns(self, tokens: int, squares: int, exchange_ns: int = 0) -> int:
        """Nanoseconds of a forward pass; what a layer exchanges takes `exchange_ns`."""
        return self.compute_ns(tokens, squares) + self.talk_ns(tokens, exchange_ns)

    def backward_ns(self, tokens: int, squares: int, exchange_ns: int = 0, grad: Grad = Grad.BOTH) -> int:
        """Nanoseconds of the backward pass or a half of it. Gradients are exchanged once, whatever they take
        to compute.
        """
        return self.compute_ns(tokens, squares, grad) + self.talk_ns(tokens, exchange_ns, grad)

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
        exchanged = (self.backward_factor - 1 + self.attention_again) * self.exchanges * exchange_ns
        later = self.weight_talk.ns(tokens) if grad is Grad.BOTH else 0
        return self.input_talk.ns(tokens) + later + exchanged


@dataclass(frozen=True)
class CostTable:
    """Numbered costs of every part: the parts of the LLM as "llm/0", "llm/1", encoders by name.

    The number is part of every plan made with it. `components` are in the order of a plan's, and `between` is
    the link from one part of the LLM to the next: that across nodes, unless given. `issue_ns` is what an op
    that issues a communication, or waits for one, costs its rank beside the wait.
    """

    number: int
    parts: Mapping[str, WorkCost]
    links: Links
    row_bytes: int
    components: tuple[str, ...] = ()
    between: Link | None = None
    issue_ns: int = 0

    def llm_part(self, component: int, part: int) -> str:
        """Return the name of a part of the LLM, which is component number `component`."""
        return part_name(self.components[component] if self.components else "llm", part)

    @cached_property
    def learnt(self) -> tuple[tuple[str, Laws], ...]:
        """The laws that were learnt, by part: what ranks must agree on beside their configuration."""
        return tuple((name, cost.learnt) for name, cost in self.parts.items() if cost.learnt is not None)

    def with_laws(self, number: int, learnt: Mapping[str, Laws]) -> "CostTable":
        """Return the table of another number whose compute takes what was `learnt`, else what was stated."""
        parts = {name: replace(cost, learnt=learnt.get(name)) for name, cost in self.parts.items()}
        return replace(self, number=number, parts=parts)

    def message_ns(self, rows: int) -> int:
        """Nanoseconds to hand `rows` activations of the LLM's width from one part to the next."""
        return (self.between or self.links.across).message_ns(rows * self.row_bytes)


@dataclass(frozen=True)
class Axis:
    """The ranks of a group, and the link that its slowest member talks over."""

    ranks: int
    link: Link


Axes = Mapping[str, Axis]
"""The groups of a part by the axis that connects them: "tp", "ep", "dp_cp", "expt_dp", "embd"."""


def collectives_ns(collectives: Iterable[Collective], axes: Axes) -> int:
    """Nanoseconds of collectives: each call takes the latency of its link and the bytes that a rank sends.

    Exchanges of shared sequences are not among them: a plan knows their time.
    """
    return sum(
        one.calls * axes[one.axis].link.message_ns(one.bytes) for one in collectives if one.axis != "pool"
    )


def table_from_work(
    parts: Mapping[str, Part],
    cluster: Cluster,
    row_bytes: int,
    number: int = 0,
    axes: Mapping[str, Axes] | None = None,
    between: Link | None = None,
    components: tuple[str, ...] = (),
) -> CostTable:
    """Derive the first table from statements and the cluster's figures; `learning.py` corrects it.

    A roofline (Williams, Waterman and Patterson, 2009): a token takes the longer of its arithmetic and its
    memory traffic. All tokens count as targets. `row_bytes` is the size of one activation of the LLM's width,
    `axes` are the groups of each part.
    """
    costs = {name: work_cost(part, cluster, (axes or {}).get(name, {})) for name, part in parts.items()}
    return CostTable(number, costs, cluster.links, row_bytes, components, between, cluster.issue_ns)


def work_cost(part: Part, cluster: Cluster, axes: Axes) -> WorkCost:
    """Read the cost of a part off its statement, asked for many tokens, for a long sequence, and for none."""
    effective = max(1, int(cluster.flops * cluster.efficiency))
    many, long, none = _load(part, _REFERENCE), _load(part, 0, _REFERENCE), _load(part, 0)
    of_tokens, of_squares, of_nothing = (part.forward(load) for load in (many, long, none))
    token_bytes = of_tokens.bytes - of_nothing.bytes
    back_tokens, back_squares = (part.backward(load, Grad.BOTH).flops for load in (many, long))
    factor = -(-back_tokens // of_tokens.flops) if of_tokens.flops else 2
    again = -(-back_squares // of_squares.flops) - factor if of_squares.flops else 0

    def talk(of_many: Iterable[Collective], of_none: Iterable[Collective]) -> Talk:
        fixed = collectives_ns(of_none, axes)
        return Talk((collectives_ns(of_many, axes) - fixed) * FS_PER_NS // _REFERENCE, fixed)

    halves = (
        talk(part.backward(many, half).collectives, part.backward(none, half).collectives)
        for half in (Grad.INPUT, Grad.WEIGHT)
    )
    sizes = {name: axis.ranks for name, axis in axes.items()}
    token_fs = max(
        of_tokens.flops * 10**15 // (_REFERENCE * effective),
        token_bytes * 10**15 // (_REFERENCE * cluster.memory_bytes_per_s),
    )
    put_off = part.backward(many, Grad.WEIGHT).flops
    return WorkCost(
        token_fs=token_fs,
        square_fs=of_squares.flops * 10**15 // (_REFERENCE * effective),
        overhead_ns=cluster.op_overhead_ns + of_nothing.bytes * 10**9 // cluster.memory_bytes_per_s,
        backward_factor=factor,
        exchanges=part.layers,
        attention_again=max(0, again),
        forward_talk=talk(of_tokens.collectives, of_nothing.collectives),
        input_talk=next(halves),
        weight_talk=next(halves),
        reduce_ns=collectives_ns(part.reduction(sizes), axes),
        weight_fs=token_fs * put_off // of_tokens.flops if of_tokens.flops else 0,
        kept_token=-(-of_tokens.kept // _REFERENCE),
    )


def _load(part: Part, tokens: int, squares: int = 0) -> Load:
    """A load that nobody shares: all tokens are targets, and every rank sends as many to experts."""
    return even_load(tokens, squares, targets=tokens, routed=(tokens // part.tp,) * part.ep)

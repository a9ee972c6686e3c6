"""The vocabulary in which a part says once what its work takes, and from which everything else follows.

A part (a virtual stage of the LLM, an encoder) states, for what an op processes on one rank (`Load`), what a
forward and a backward take (`Work`): FLOPs, bytes of memory traffic, collectives, memory. The cost table,
MFU, the simulator, the model of memory and bytes, the verifier's memory rule and `omni layout show` are read
off it.

All sizes are bytes unless they are called elements. Bytes of collectives are those that one rank sends to
others, over n ranks counted as rings: all-gather and reduce-scatter (n - 1) shards, all-reduce twice that
(Patarasuk and Yuan, 2009, section 3), all-to-all pair by pair.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from ops.delta_shape import DeltaHeads
from parallel.tiles import AttentionShape

FP32 = 4  # bytes
INDEX = 8  # bytes
INT32 = 4  # bytes


def virtual_stage_name(llm: str, number: int) -> str:
    """Return the name of a virtual stage among all parts, such as "llm/0"; encoders are one part each."""
    return f"{llm}/{number}"


class Grad(StrEnum):
    """Which gradients a backward makes: those of its inputs, those of its weights, or both at once.

    Splitting a backward after Zero Bubble Pipeline Parallelism (Qi et al., 2024, section 2): what other
    stages wait for comes first, the rest fills gaps.
    """

    BOTH = "both"
    INPUT = "input"
    WEIGHT = "weight"

    __hash__ = str.__hash__  # an enumeration's own is in Python, and plans are full of them


@dataclass(frozen=True)
class Attended:
    """Attention of one rank over one pack.

    Of `tokens`, `local` are attended where they are. For shared sequences the rank computes tiles of `rows`
    query rows and `context` key rows, each times its heads. `into` and `out` are the
    numbers that it sends to each cp rank of the pool (itself 0) in the exchanges before and after the tiles,
    `out_back` and `into_back` in their transposes; they are empty if nothing is shared. `delta` are the
    same four, in the order of the fields, of layers with a delta net. `own` are the numbers that it keeps in
    the first exchange, None if that was not counted, and `groups` the rows and context of the tiles of each
    kernel call, none if they are one. Shared tokens that lie `apart`, with others between, are first copied.
    `lists` are the int32 that say what exchanges copy where, those of delta nets included. `adding` are those
    made for a moment where gradients of several tiles, or of several cp ranks, are added up on the way back:
    of what others get, of what this rank keeps, and of its keys or its values. `late` of the local tokens are
    attended during the exchange after the tiles, the others during the one before.
    """

    tokens: int
    local: int
    rows: int = 0
    context: int = 0
    into: tuple[int, ...] = ()
    out: tuple[int, ...] = ()
    into_back: tuple[int, ...] = ()
    out_back: tuple[int, ...] = ()
    delta: tuple[tuple[int, ...], ...] = ()
    own: int | None = None
    groups: tuple[tuple[int, int], ...] = ()
    apart: bool = False
    lists: int = 0
    adding: tuple[int, int, int] = (0, 0, 0)
    late: int = 0


@dataclass(frozen=True)
class Load:
    """What one op processes on one rank.

    `squares` is its share of the sum of squared lengths, in `sequences` sequences; `targets` are positions
    that give losses (padded, over its tensor-parallel ranks), `rows` what this rank of an encoder passes on
    and `most_rows` the most of any rank that shares its layers. `routed` are the tokens that each rank of its
    expert group sends to experts, of which this rank is number `router`; empty where there are no experts.
    `frozen` says that no weight learns, so that only what gradients of inputs take is kept; `rowless`, that
    then no rows of encoders are put among embeddings, which are the inputs themselves. Layers with a window
    attend as `windowed` says, None for as all others do. All layers of the LLM are computed `anew` for
    its backward if so, else those that `recompute` names.
    """

    seen: Attended
    squares: int = 0
    sequences: int = 1
    targets: int = 0
    rows: int = 0
    most_rows: int = 0
    routed: tuple[int, ...] = ()
    router: int = 0
    frozen: bool = False
    rowless: bool = False
    windowed: Attended | None = None
    anew: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that attention and feed-forward see on this rank."""
        return self.seen.tokens

    @property
    def list_bytes(self) -> int:
        """Bytes of the lists of what exchanges copy where."""
        return INT32 * (self.seen.lists + (self.windowed.lists if self.windowed else 0))


def even_load(
    tokens: int, squares: int = 0, *, targets: int = 0, rows: int = 0, routed: Sequence[int] = ()
) -> Load:
    """Return a load of `tokens` that nobody shares."""
    seen = Attended(tokens, tokens)
    return Load(seen, squares, targets=targets, rows=rows, most_rows=rows, routed=tuple(routed))


@dataclass(frozen=True)
class Collective:
    """`calls` collectives of one kind over an axis of `parallel.axes`, such as "tp", "pool" or "ep".

    In each call a rank sends `bytes` to others. `to` divides them over the members of the axis where `kind`
    is "all_to_all", evenly where it is empty; elsewhere they go to the next of a ring.
    """

    axis: str
    kind: str
    bytes: int
    calls: int = 1
    to: tuple[int, ...] = ()


def all_gather(axis: str, shard: int, ranks: int, calls: int = 1) -> tuple[Collective, ...]:
    """Gather the shards of `ranks`; nothing where a rank is alone."""
    return _rings(axis, "all_gather", (ranks - 1) * shard, ranks, calls)


def reduce_scatter(axis: str, shard: int, ranks: int, calls: int = 1) -> tuple[Collective, ...]:
    """Sum over `ranks`, of which each gets a shard; nothing where a rank is alone."""
    return _rings(axis, "reduce_scatter", (ranks - 1) * shard, ranks, calls)


def all_reduce(axis: str, size: int, ranks: int, calls: int = 1) -> tuple[Collective, ...]:
    """Sum over `ranks`, of which each gets all; nothing where a rank is alone."""
    return _rings(axis, "all_reduce", 2 * (ranks - 1) * size // ranks, ranks, calls)


def exchange(axis: str, shard: int, ranks: int, calls: int = 1) -> tuple[Collective, ...]:
    """Send each other one of `ranks` a shard; nothing where a rank is alone."""
    return _rings(axis, "all_to_all", (ranks - 1) * shard, ranks, calls)


def _rings(axis: str, kind: str, size: int, ranks: int, calls: int) -> tuple[Collective, ...]:
    return (Collective(axis, kind, size, calls),) if ranks > 1 and calls else ()


def all_to_all(axis: str, to: Sequence[int], calls: int = 1) -> tuple[Collective, ...]:
    """Send `to[i]` to member i of the axis, nothing to oneself; nothing where a rank is alone."""
    return (Collective(axis, "all_to_all", sum(to), calls, tuple(to)),) if len(to) > 1 and calls else ()


@dataclass(frozen=True)
class Work:
    """What a pass takes on one rank: FLOPs (recomputation included), bytes read and written, collectives.

    `plain_flops` are those of `flops` whose products no format of 8 bits or less takes; `frozen_flops` those
    of a forward whose weights never learn although others of the component do. `launches` are layers whose
    kernels are started, `dispatches` those of them that sort tokens by their experts.
    `kept` is what stays in memory for the backward when a forward is done, or for gradients of weights that
    are put off when a backward for inputs is done. `workspace` is the most that a pass needs besides, at a
    moment when all that it finds kept is still there; `last` what the end of a backward needs, when all is
    freed; `passing` what a forward needs that keeps nothing, as no gradient comes back to it. Of what a pass
    keeps, `offloaded` bytes wait on the host: they go there in a forward and come back in a backward, in so
    many `copies` for as many layers, `late` of which hide behind no other layer.
    """

    flops: int = 0
    bytes: int = 0
    collectives: tuple[Collective, ...] = ()
    kept: int = 0
    workspace: int = 0
    last: int = 0
    passing: int = 0
    plain_flops: int = 0
    frozen_flops: int = 0
    launches: int = 0
    dispatches: int = 0
    offloaded: int = 0
    copies: int = 0
    late: int = 0


@dataclass(frozen=True)
class Weight:
    """A parameter on one rank, of so many elements, and how its gradient is reduced.

    Over the replicas of the component; of so many `experts`, over those of the experts. That of a `partial`
    one is first summed over tensor-parallel ranks, which see different tokens. A `tied` one is summed over
    the two ends of the pipeline as well, and has a bucket of its own. A `frozen` one never learns: it has no
    gradient, no bucket and no state of an optimizer. A `matrix` is that of a linear, which ZeRO may
    partition; a `partition` is what a rank then holds of one, and its replicas are other domains.
    """

    elements: int
    experts: int = 0
    partial: bool = False
    tied: bool = False
    frozen: bool = False
    matrix: bool = False
    partition: bool = False


class Block(Protocol):
    """A piece of a part that states its work: parts are made of blocks, one after the other."""

    def weights(self) -> tuple[Weight, ...]:
        """Return the parameters, in the module's order."""
        ...

    def forward(self, load: Load) -> Work:
        """Return what a forward takes."""
        ...

    def backward(self, load: Load, grad: Grad) -> Work:
        """Return what a backward takes. In FLOPs and collectives INPUT and WEIGHT together are BOTH; weights
        whose gradients are not put off belong to INPUT.
        """
        ...


class Part(Block, Protocol):
    """A stage of the LLM or an encoder on one rank: the one statement of its work.

    `shape` and `head_dim` are those of its attention on this rank, in layers without a window; `window`
    tokens are seen in those with one, None if none has, and `delta` are the heads of delta nets, None without
    any. `layers` says how many of its layers exchange shared sequences, `element` the bytes of a number; `tp`
    ranks share its layers, and `ep` its experts, 0 where it has none.
    """

    @property
    def shape(self) -> AttentionShape:
        """Heads of this rank."""
        ...

    @property
    def window(self) -> int | None:
        """Tokens that a token sees in layers with a window, itself among them."""
        ...

    @property
    def delta(self) -> DeltaHeads | None:
        """Heads of delta nets on this rank."""
        ...

    @property
    def head_dim(self) -> int:
        """Numbers of a head."""
        ...

    @property
    def layers(self) -> int:
        """Layers that exchange shared sequences."""
        ...

    @property
    def element(self) -> int:
        """Bytes of a number."""
        ...

    @property
    def tp(self) -> int:
        """Ranks that share its layers."""
        ...

    @property
    def ep(self) -> int:
        """Ranks that share its experts."""
        ...

    @property
    def by_layer(self) -> bool:
        """Whether updated weights arrive, and gradients are reduced, layer by layer behind passes."""
        ...

    def input_bytes(self, load: Load) -> int:
        """Bytes of the input tensors of a pass, which a rank holds throughout a step."""
        ...

    def shared_bytes(self, load: Load) -> int:
        """Bytes of those input tensors that passes of one microbatch through several parts share."""
        ...

    def gathered_bytes(self, load: Load) -> int:
        """Bytes of the tensor that all parts of a rank gather tokens in."""
        ...

    def reduction(self, ranks: Mapping[str, int], sent: int = FP32) -> tuple[Collective, ...]:
        """Return the collectives that a step needs once: those that reduce gradients, of which a number takes
        `sent` bytes on its way to another replica, and all-gathers of updated weights. `ranks` are the sizes
        of axes, 1 if left out.
        """
        ...


@dataclass(frozen=True)
class Chain:
    """Blocks one after the other."""

    blocks: tuple[Block, ...]

    def weights(self) -> tuple[Weight, ...]:
        """Parameters of all blocks."""
        return tuple(weight for block in self.blocks for weight in block.weights())

    def forward(self, load: Load) -> Work:
        """What the blocks keep adds up; each needs its workspace while the later ones have kept nothing."""
        works = [block.forward(load) for block in self.blocks]
        return _summed(works, _fullest([work.kept for work in works], works))

    def backward(self, load: Load, grad: Grad, stays: int = 0) -> Work:
        """Blocks run from the last to the first; what the later ones kept is then freed, but what they put
        off, and what `stays` of the last one's to the end.
        """
        works = [block.backward(load, grad) for block in self.blocks]
        if grad is Grad.WEIGHT:
            kept = [block.backward(load, Grad.INPUT).kept for block in self.blocks]
        else:
            before = [block.forward(load).kept for block in self.blocks]
            kept = [all_of_it - work.kept for all_of_it, work in zip(before, works, strict=True)]
            kept[-1] -= stays
        summed = _summed(works, _fullest(kept, works))
        return replace(summed, last=summed.last + stays) if summed.last else summed


def _fullest(later: Sequence[int], works: Sequence[Work]) -> int:
    """The largest workspace, less what blocks after that one have not kept yet, or no longer."""
    return max((work.workspace - sum(later[i + 1 :]) for i, work in enumerate(works)), default=0)


def _summed(works: Sequence[Work], workspace: int) -> Work:
    return Work(
        flops=sum(work.flops for work in works),
        bytes=sum(work.bytes for work in works),
        collectives=merged(c for work in works for c in work.collectives),
        kept=sum(work.kept for work in works),
        workspace=workspace,
        last=works[0].last + sum(work.kept for work in works) if works and works[0].last else 0,
        passing=max((work.passing for work in works), default=0),
        plain_flops=sum(work.plain_flops for work in works),
        frozen_flops=sum(work.frozen_flops for work in works),
        launches=sum(work.launches for work in works),
        dispatches=sum(work.dispatches for work in works),
        offloaded=sum(work.offloaded for work in works),
        copies=sum(work.copies for work in works),
        late=sum(work.late for work in works),
    )


def merged(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Count equal collectives together."""
    calls: dict[tuple[str, str, int, tuple[int, ...]], int] = {}
    for one in collectives:
        key = one.axis, one.kind, one.bytes, one.to
        calls[key] = calls.get(key, 0) + one.calls
    return tuple(Collective(axis, kind, size, count, to) for (axis, kind, size, to), count in calls.items())

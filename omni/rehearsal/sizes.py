"""What transformer layers weigh and keep for their backward, as integer arithmetic on their sizes.

The counts follow the operations one by one: what a layer keeps is the list of tensors that some backward asks
for. They are checked against rehearsals (benchmarks/memory_model.py), so a change of a layer that changes
what it keeps shows there.

Shapes, all of one rank: T tokens that attention and feed-forward see, t those between them (T / tp where
ranks share them, else T), D width, F feed-forward, N and K heads of queries and of keys, H head size.
"""

from dataclasses import dataclass, replace

from parallel.packed import Sharding
from parallel.tile_plan import plan_tiles
from parallel.tiles import AttentionShape

FP32 = 4  # bytes


@dataclass(frozen=True)
class Stack:
    """`layers` transformer layers as each of `tp` ranks holds them, with `element` bytes a number.

    With `splits_tokens` the ranks divide the tokens between attention and feed-forward as well.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    gated: bool
    causal: bool
    bias: bool
    qkv_bias: bool
    layer_norm: bool
    recompute: str
    tp: int
    splits_tokens: bool
    element: int

    @property
    def head_dim(self) -> int:
        """H."""
        return self.hidden // self.heads

    @property
    def norm_weights(self) -> tuple[int, ...]:
        """Elements of the parameters of one norm."""
        return (self.hidden,) * (2 if self.layer_norm else 1)

    def between(self, tokens: int) -> int:
        """Return t of T."""
        return tokens // self.tp if self.splits_tokens else tokens

    def layer_weights(self) -> tuple[int, ...]:
        """Elements of each parameter of a layer, in the module's order."""
        attended = self.hidden // self.tp
        qkv = attended + 2 * self.kv_heads * self.head_dim // self.tp
        inner = self.ffn // self.tp
        fc1 = inner * (2 if self.gated else 1)
        return (
            *self.norm_weights,
            *linear_weights(attended, self.hidden, self.hidden * self.bias),
            *linear_weights(self.hidden, qkv, qkv * (self.bias or self.qkv_bias)),
            *self.norm_weights,
            *linear_weights(self.hidden, fc1, fc1 * self.bias),
            *linear_weights(inner, self.hidden, self.hidden * self.bias),
        )


def linear_weights(inputs: int, outputs: int, bias: int) -> tuple[int, ...]:
    """Elements of a linear layer's weight and, unless it has none, of its bias."""
    return (inputs * outputs, bias) if bias else (inputs * outputs,)


@dataclass(frozen=True)
class Attended:
    """Attention of one rank over one pack.

    Of `tokens`, `local` are attended where they are, in `runs` of neighbours. For shared sequences the rank
    computes tiles of `rows` query rows and `context` key rows, each times its heads. `into` and `out` are the
    numbers that it sends to each member of the pool in the exchanges before and after the tiles, `out_back`
    and `into_back` in their transposes; they are empty if nothing is shared.
    """

    tokens: int
    local: int
    runs: int
    rows: int = 0
    context: int = 0
    into: tuple[int, ...] = ()
    out: tuple[int, ...] = ()
    into_back: tuple[int, ...] = ()
    out_back: tuple[int, ...] = ()


def attended(sharding: Sharding, stack: Stack) -> Attended:
    """Count what member `sharding.rank` attends to."""
    layout, rank = sharding.layout, sharding.rank
    shape = AttentionShape(stack.heads // stack.tp, stack.kv_heads // stack.tp, stack.causal)
    plan = plan_tiles(layout, sharding.tiles, rank, shape, stack.head_dim)
    tokens = layout.local_tokens(rank) + sharding.tail
    if plan is None:
        return Attended(tokens, tokens, 1)
    local = runs = 0
    before = True  # whether the tokens just before were exchanged
    pieces = [
        (bool(tiles), sum(shard.length for shard in shards if shard.rank == rank))
        for shards, tiles in zip(layout.shards, sharding.tiles, strict=True)
    ]
    for shared, length in [*pieces, (False, sharding.tail)]:
        if length and not shared:
            local, runs = local + length, runs + before
        before = shared if length else before
    rows = sum(span.rows * group.heads for group in plan.groups for span in group.spans)
    context = sum(span.context * group.kv_heads for group in plan.groups for span in group.spans)
    incoming, outgoing = plan.incoming, plan.outgoing
    return Attended(
        tokens,
        local,
        runs,
        rows,
        context,
        *(side.counts for side in (incoming.source, outgoing.source, incoming.target, outgoing.target)),
    )


def kept_by_layer(stack: Stack, seen: Attended) -> int:
    """Bytes that a layer keeps for its backward, its output included and its input not."""
    tokens, between = seen.tokens, stack.between(seen.tokens)
    stream = between * stack.hidden * stack.element  # one tensor between attention and feed-forward
    if stack.recompute == "full":
        return stream
    # Two norms and two sums, and of each norm what it divided by.
    norms = 4 * stream + 2 * between * len(stack.norm_weights) * FP32
    inner = tokens * stack.ffn // stack.tp * stack.element
    # Gated: both halves of the first linear's output, the gate, a copy of the other half, and the product.
    feed_forward = inner * (5 if stack.gated else 2)
    return norms + _kept_by_attention(stack, seen) + feed_forward


def _kept_by_attention(stack: Stack, seen: Attended) -> int:
    heads, kv_heads, size = stack.heads // stack.tp, stack.kv_heads // stack.tp, stack.head_dim
    qkv = seen.tokens * (heads + 2 * kv_heads) * size
    output = seen.tokens * heads * size
    if stack.recompute == "selective":
        # Queries of several groups lie apart from their keys and values, so they are copied together.
        copied = kv_heads > 1 and heads > kv_heads
        return (qkv + output + output * copied) * stack.element
    rotated = seen.tokens * (heads + kv_heads) * size
    if not seen.into:
        return (qkv + rotated + output) * stack.element + seen.tokens * heads * FP32
    tiles = 2 * (seen.rows + seen.context) * size * stack.element + seen.rows * FP32
    if seen.runs == 1:  # a view, which keeps what it is a view of
        tiles += (qkv + rotated) * stack.element
    elif seen.runs:
        tiles += seen.local * (heads + 2 * kv_heads) * size * stack.element
    local = seen.local * heads * (size * stack.element + FP32)
    return tiles + local + output * stack.element


def layer_workspace(stack: Stack, seen: Attended) -> int:
    """Bytes that the backward of a layer needs at most, beside what was kept.

    That is at its start: the gradients of the feed-forward's second linear for all tokens, of its weight and
    of its input; and with full recomputation, what the layer would have kept.
    """
    tokens, inner = seen.tokens, stack.ffn // stack.tp
    start = (tokens * stack.hidden + stack.hidden * inner + tokens * inner) * stack.element
    if stack.recompute != "full":
        return start
    return start + kept_by_layer(replace(stack, recompute="none"), seen)

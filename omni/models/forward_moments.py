"""What a layer's forward makes and lets go of, tensor by tensor: what it keeps, and its fullest moment.

The list follows the modules: megatron-core's layer, attention and feed-forward, and our attention on packed
tokens. A tensor that autograd saves stays; any other goes when nothing in Python refers to it. So one list
says three things: what a pass keeps for its backward, what it holds at most meanwhile, and both again where
weights are frozen (no inputs of linears) or nothing is kept at all (layers that will be computed anew, and
passes that no gradient comes back to).

Shapes as in `stack.py`.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from omni.models.layer import Layer
from parallel.work import FP32, Attended

LINEARS = {"linear_qkv": "norm 1", "linear_proj": "attended", "linear_fc1": "norm 2", "linear_fc2": "product"}
"""What the linears of a layer take in."""
LOADS = 1 << 12  # of layers that are alike, whose forwards are remembered
OF_KERNELS = ("early out", "early sums", "late out", "late sums", "tile out", "tile sums")
"""What kernels of attention put out where sequences are shared."""
KEPT_OF_SHARED = ("local", *OF_KERNELS, "tiles")
"""What attention of shared sequences keeps for its backward."""


@dataclass
class Tape:
    """Bytes of what a pass has made, by name: what is held `now`, and the `most` so far.

    `graph` says whether autograd keeps anything, and `learn` the linears whose inputs it keeps. Tensors that
    are `lasting` stay in any case: without a graph they are made, with one they were there.
    """

    graph: bool
    learn: Collection[str]
    lasting: Collection[str] = ()
    held: dict[str, int] = field(default_factory=dict)
    now: int = 0
    most: int = 0

    def make(self, name: str, size: int) -> None:
        """Make a tensor."""
        size = 0 if self.graph and name in self.lasting else size
        self.held[name] = size
        self.now += size
        self.most = max(self.most, self.now)

    def drop(self, *names: str, saved: bool = False) -> None:
        """Let go of tensors, but not of those that are `saved` if there is a graph."""
        for name in names:
            if not (self.graph and saved) and name not in self.lasting:
                self.now -= self.held.pop(name, 0)

    def of(self, *names: str) -> int:
        """Bytes of tensors that are held."""
        return sum(self.held.get(name, 0) for name in names)

    def enter(self, linear: str) -> None:
        """Be taken in by a linear."""
        taken = LINEARS[linear]
        self.drop(taken, saved=linear in self.learn)


class ForwardBytes(NamedTuple):
    """Bytes that the forward of a layer holds in the end, its output and what it keeps, and at most; and
    whether it holds what it puts out.
    """

    kept: int
    most: int
    keeps_stream: bool


@lru_cache(LOADS)
def layer_forward(
    stack: Layer, seen: Attended, graph: bool, learn: tuple[str, ...], lasting: tuple[str, ...]
) -> ForwardBytes:
    """Run a layer over a tape with these fields. Stages have layers that are alike, and a pass asks again."""
    tape = Tape(graph, learn, lasting)
    attention_half(stack, seen, tape)
    feed_forward_half(stack, seen.tokens, tape)
    return ForwardBytes(tape.now, tape.most, "out" in tape.held)


def attention_half(stack: Layer, seen: Attended, tape: Tape) -> None:
    """Norm and attention; then the sum with what went around it, the "residual", and the norm of that. A half
    without a norm ahead takes in the stream itself.
    """
    if stack.norms == "after":
        tape.make("input", stack.stream(seen.tokens) * (not _keeps_stream(stack, tape)))
    else:
        _norm(stack, seen.tokens, tape, "1")
    if stack.latent is not None:
        between = stack.between(seen.tokens)
        tape.make("attended", stack.latent.kept(seen.tokens, between, stack.tp, stack.element))
        held = {"attended": True}
    elif stack.delta is not None:
        tape.make("attended", stack.delta.kept(seen.tokens, stack.tp, stack.element))
        held = {"attended": True}
    else:
        (_, first), (attended, _) = stack.attention_linears()
        _first_linear(stack, seen.tokens, tape, "linear_qkv", seen.tokens * first // stack.tp)
        output = seen.tokens * attended // stack.tp * stack.element
        held = _core(stack, seen, tape, output)
    _summed(stack, seen.tokens, tape, "linear_proj", "proj")
    for name, saved in held.items():
        tape.drop(name, saved=saved)
    tape.enter("linear_qkv")
    _sums_behind(stack, seen.tokens, tape, "proj")
    tape.make("residual", stack.stream(seen.tokens))
    tape.drop("input")
    if stack.norms == "before":
        _norm(stack, seen.tokens, tape, "2")
    tape.drop("proj", "sums of proj", saved=stack.norms != "before")
    if stack.norms == "around":
        _norm(stack, seen.tokens, tape, "2")


def feed_forward_half(stack: Layer, tokens: int, tape: Tape) -> None:
    """The feed-forward, and the layer's output."""
    feed_forward(stack, tokens, tape)
    tape.enter("linear_fc1")
    _sums_behind(stack, tokens, tape, "fc2")
    tape.make("out", stack.stream(tokens))
    tape.drop("fc2", "sums of fc2", saved=stack.norms != "before")
    tape.drop("residual", saved=stack.norms != "after" or "linear_fc1" in tape.learn)
    _leave(stack, tape)


def expert_half(stack: Layer, tokens: int, tape: Tape) -> None:
    """As `feed_forward_half`, of a shared expert beside others: none where its width is 0."""
    if stack.ffn:
        feed_forward(stack, tokens, tape)
    tape.drop("norm 2", saved=True)
    if stack.norms != "before":
        tape.make("mixed", stack.stream(tokens))
        _sums_behind(stack, tokens, tape, "mixed")
    tape.make("out", stack.stream(tokens))
    tape.drop("fc2")
    tape.drop("mixed", "sums of mixed", "residual", saved=True)
    _leave(stack, tape)


def feed_forward(stack: Layer, tokens: int, tape: Tape) -> None:
    """Two linears and what is between them."""
    numbers = tokens * stack.ffn // stack.tp
    _first_linear(stack, tokens, tape, "linear_fc1", numbers * (2 if stack.gated else 1))
    tape.make("product", numbers * stack.element)
    tape.drop("linear_fc1 out", saved=True)
    _summed(stack, tokens, tape, "linear_fc2", "fc2")
    tape.enter("linear_fc2")


def _norm(stack: Layer, tokens: int, tape: Tape, number: str) -> None:
    sums = stack.between(tokens) * len(stack.one_norm) * FP32
    tape.make(f"sums {number}", sums)
    tape.make(f"norm {number}", stack.stream(tokens))
    tape.drop(f"sums {number}", saved=True)


def _leave(stack: Layer, tape: Tape) -> None:
    """Hand the output on to a layer that may not keep it."""
    if tape.graph and not _keeps_stream(stack, tape):
        tape.drop("out")


def _keeps_stream(stack: Layer, tape: Tape) -> bool:
    """Whether a layer keeps what it takes in, which is all that it does with it but to add to it: a norm
    ahead does, and so does a linear that learns.
    """
    return stack.norms != "after" or not tape.graph or "linear_qkv" in tape.learn


def _sums_behind(stack: Layer, tokens: int, tape: Tape, name: str) -> None:
    """What the norm behind a half keeps of it, beside all that the half put out."""
    if stack.norms != "before":
        tape.make(f"sums of {name}", stack.between(tokens) * len(stack.one_norm) * FP32)


def _first_linear(stack: Layer, tokens: int, tape: Tape, name: str, numbers: int) -> None:
    """A linear that ranks divide by its outputs."""
    adapter = stack.adapters().get(name)
    if adapter is not None:
        tape.make(f"{name} inner", adapter.inner(tokens))
    tape.make(f"{name} out", numbers * stack.element)
    tape.drop(f"{name} inner", saved=name in tape.learn)


def _summed(stack: Layer, tokens: int, tape: Tape, linear: str, name: str) -> None:
    """A linear whose outputs ranks sum: of all tokens, before each has its own."""
    adapter = stack.adapters().get(linear)
    if adapter is not None:
        tape.make(f"{linear} inner", adapter.inner(tokens))
    shard = stack.stream(tokens)
    whole = tokens * stack.hidden * stack.element
    if whole != shard:
        tape.make("whole", whole)
    tape.make(name, shard)
    tape.drop("whole")
    tape.drop(f"{linear} inner", saved=linear in tape.learn)


def _core(stack: Layer, seen: Attended, tape: Tape, output: int) -> dict[str, bool]:
    """Queries and keys as they attend, attention, and what gates let through of it. Returns what the caller
    holds until the linear behind is done, and whether a graph keeps it.
    """
    heads, kv_heads, size = stack.heads // stack.tp, stack.kv_heads // stack.tp, stack.head_dim
    anew = stack.recompute == "selective"
    keeps = tape.graph and not anew  # what attention takes in and puts out, beside what it began with
    if stack.wide_norms:
        _wide_norms(stack, seen.tokens, tape, keeps)
    tape.make("rotated", seen.tokens * (heads + kv_heads) * size * stack.element)
    tape.drop("normed queries", "normed keys")
    if seen.into:
        _shared(stack, seen, tape, keeps)
    if not seen.into or seen.local:
        tape.make("attended", output)
    if seen.into:
        tape.drop("local", "early out", "late out", "tile out", saved=keeps)
        tape.drop("shared", "shared out")
    else:
        tape.make("sums", seen.tokens * heads * FP32)
        tape.drop("sums", saved=keeps)
    if stack.output_gate:
        tape.make("let through", output)
        tape.drop("attended", saved=keeps)
    tape.drop("rotated", saved=keeps and not seen.into)
    learns = "linear_proj" in tape.learn
    out = {"attended": (keeps and not seen.into) or learns}
    return {
        "linear_qkv out": anew or stack.qk_norm or stack.output_gate or not seen.into,
        **({"let through": learns} if stack.output_gate else out),
    }


def _wide_norms(stack: Layer, tokens: int, tape: Tape, keeps: bool) -> None:
    """Norms of all queries together and of all keys: numbers in single precision, and times what they divide
    by; then the result. These factors are kept.
    """
    for name, heads in (("queries", stack.heads), ("keys", stack.kv_heads)):
        numbers = tokens * heads // stack.tp * stack.head_dim
        tape.make(f"factors of {name}", tokens * FP32)
        tape.make("exact", 2 * numbers * FP32)
        tape.make(f"normed {name}", numbers * stack.element)
        tape.drop("exact")
    tape.drop("factors of queries", "factors of keys", saved=keeps)


def core_forward(stack: Layer, seen: Attended, tape: Tape, output: int) -> Tape:
    """Rotation and attention alone, of queries, keys and values that are there."""
    for name, saved in _core(stack, seen, tape, output).items():
        tape.drop(name, saved=saved or name != "linear_qkv out")
    return tape


def _shared(stack: Layer, seen: Attended, tape: Tape, keeps: bool) -> None:
    """Sequences that ranks share: queries, keys and values to where their tiles are, and outputs back. They
    are laid side by side to be packed. What a rank sends to itself lies in the buffer of what it receives.
    Where all tokens are shared, what comes back is what attention puts out.
    """
    heads, kv_heads, size = stack.heads // stack.tp, stack.kv_heads // stack.tp, stack.head_dim
    unit = size * stack.element
    taken = (seen.rows + 2 * seen.context) * unit
    sent, landed = (sum(of) * stack.element for of in (seen.into, seen.into_back))
    own = taken - landed if seen.own is None else seen.own * stack.element
    tape.make("local", seen.local * (heads + 2 * kv_heads) * unit)
    shared = (seen.tokens - seen.local) * (heads + 2 * kv_heads) * unit
    tape.make("shared", shared * seen.apart)
    tape.make("cells", shared)
    tape.make("wire", sent)
    tape.make("landing", own + landed)
    tape.drop("cells")
    _alone("early", seen.local - seen.late, heads, unit, tape, keeps)
    tape.drop("wire")
    tape.make("tiles", taken)
    tape.drop("landing")
    tape.make("tile out", seen.rows * unit)
    tape.make("tile sums", seen.rows * FP32)
    tape.drop("tile sums", "tiles", saved=keeps)
    sent, landed = (sum(of) * stack.element for of in (seen.out, seen.out_back))
    tape.make("cells", seen.rows * unit * (len(seen.groups) > 1))
    tape.make("wire", sent)
    tape.make("landing", seen.rows * unit - sent + landed)
    tape.drop("cells")
    _alone("late", seen.late, heads, unit, tape, keeps)
    tape.drop("wire")
    tape.make("shared out" if seen.local else "attended", (seen.tokens - seen.local) * heads * unit)
    tape.drop("landing")


def _alone(when: str, tokens: int, heads: int, unit: int, tape: Tape, keeps: bool) -> None:
    """What attention puts out for tokens of sequences that nobody shares, in heads of `unit` bytes."""
    tape.make(f"{when} out", tokens * heads * unit)
    tape.make(f"{when} sums", tokens * heads * FP32)
    tape.drop(f"{when} sums", saved=keeps)

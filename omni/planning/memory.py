"""A model of what a rank holds in a step: integers along its op list, no tensors and no ranks.

The idea: weights, gradients and optimizer state follow from sizes alone. Everything else begins with one op
of the list and ends with another, so the list is walked with the bytes of what is alive, and the peak is
the largest sum. Within a backward pass what was kept is freed layer by layer, faster than gradients grow, so
its beginning counts, and for the embedding its end. What an op keeps and needs is its part's statement.

Kinds of memory are `weights`, `gradients` (fp32 sums), `optimizer` (fp32 weights, and moments), `activations`
(made by forward passes, for their backward), `workspace` (made by backward passes and updates) and `buffers`
(inputs, messages, scratch). The model is checked against rehearsals: benchmarks/memory_model.py.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from omni.models.llm import NAME as LLM
from omni.planning.held_state import laid_on, state_of
from omni.planning.rank_work import RankWork
from omni.planning.workload import Workload
from parallel.boundary import Route
from parallel.work import FP32, INDEX, Grad
from pipeline.ops import BACKWARDS, Kind, Op, issued_within
from pipeline.rules.lists import ENCODES

KINDS = ("weights", "gradients", "optimizer", "activations", "workspace", "buffers")

Parts = Counter[tuple[str, str]]
"""Bytes by kind and component; rows on their way between components are of none, ""."""
BETWEEN = ""
SUM = -1
_Key = tuple[str, int, int]
_Size = tuple[tuple[str, str], int]
_Moment = tuple["Held", tuple[_Size, ...], Op | str]
"""What is held, what comes to that for a moment, or goes, and the op that runs."""


class Held(dict[_Key, _Size]):
    """What is alive, by what it is, its number and its part: kind and component, and bytes; `sums` are the
    bytes of all by kind and component, `total` those of all. `part_of` names for each encoder batch whose
    rows have gradients the microbatch whose `joined` gradients these are part of, or that they are a `SUM`
    of their own; `parts` counts them by microbatch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sums: Parts = Counter()
        self.total = 0
        self.part_of: dict[int, int] = {}
        self.parts: Counter[int] = Counter()

    def __setitem__(self, key: _Key, value: _Size) -> None:
        self.drop(key)
        super().__setitem__(key, value)
        self.sums[value[0]] += value[1]
        self.total += value[1]

    def drop(self, key: _Key) -> _Size | None:
        """Let go of something, if it is there, and return it."""
        found = super().pop(key, None)
        if found is not None:
            self.sums[found[0]] -= found[1]
            self.total -= found[1]
        return found


def model_peak(spec: Workload, work: RankWork) -> tuple[Parts, str]:
    """Model the bytes that a rank holds when it holds most, and the op that then runs."""
    most, peak, at = -1, Parts(), ""
    for held, extra, op in _walk(spec, work):
        total = held.total + sum(size for _, size in extra)
        if total > most:
            most, peak, at = total, Counter(held.sums), str(op)
            for what, size in extra:
                peak[what] += size
    return _constant(spec, work) + peak, at


def model_encoding(spec: Workload, work: RankWork) -> dict[Op, int]:
    """Model the most bytes that a rank holds during each pass of an encoder."""
    constant, most = _constant(spec, work).total(), Counter[Op]()
    for held, extra, op in _walk(spec, work):
        if isinstance(op, Op) and op.kind in ENCODES:
            most[op] = max(most[op], constant + held.total + sum(size for _, size in extra))
    return most


def model_host(work: RankWork) -> int:
    """Model the most bytes that passes of a rank keep on its host at once."""
    held = most = 0
    for op in work.domain.ops_of(work.domain_rank):
        if op.kind in (Kind.FORWARD, Kind.ENCODE) and _goes_back(work, op):
            held += work.forward(op).offloaded
            most = max(most, held)
        elif op.kind in BACKWARDS and _goes_back(work, op) and op.grad is not Grad.WEIGHT:
            held -= work.forward(op).offloaded
    return most


def by_kind(parts: Mapping[tuple[str, str], int]) -> dict[str, int]:
    """Add up bytes over components: those of each of `KINDS`."""
    return {kind: sum(size for (of, _), size in parts.items() if of == kind) for kind in KINDS}


def _constant(spec: Workload, work: RankWork) -> Parts:
    """Bytes that are held throughout: state, inputs of the step, and megatron's scratch memory."""
    held: Parts = Counter({("buffers", BETWEEN): place_lists(work)})
    for name, parts in work.components.items():
        for part in parts.values():
            held += state_of(spec, name, part, work.rank, learns=name in work.learnt)
    held["buffers", LLM] += _inputs(work) + _scratch(work)
    for c, load in work.encodings.items():
        name = work.domain.encoder_batches[c].component
        held["buffers", name] += work.encoders[name].input_bytes(load)
    return held


def place_lists(work: RankWork) -> int:
    """Bytes of the lists of the places of all rows that leave and that arrive: here, in the buffer of a
    collective, and where they stop, as they come there and as they go on.
    """
    listed = sum(work.rows_in) + sum(work.rows_out)
    for m, route in enumerate(work.domain.routes):
        if route is None:
            continue
        if route.transport == "reduce_scatter":
            listed += work.rows_out[m]
        elif route.transport == "all_gather":
            listed += work.rows_in[m]
        else:
            listed += 2 * route.stopping[work.domain_rank]
    return INDEX * listed


def _inputs(work: RankWork) -> int:
    """Inputs of all passes of the LLM, of which virtual stages share some."""
    first = min(work.llm, default=0)
    return sum(
        work.llm[p].input_bytes(load) - (work.llm[p].shared_bytes(load) if p != first else 0)
        for (_, p), load in work.passes.items()
    )


def _scratch(work: RankWork) -> int:
    """The one tensor that all virtual stages gather tokens in: the largest, as passes take it over."""
    loads = work.passes.items()
    return max((work.llm[p].gathered_bytes(load) for (_, p), load in loads), default=0)


def _rounding(spec: Workload, work: RankWork, op: Op) -> Iterator[tuple[_Size, ...]]:
    """Yield what rounding a bucket of gradients takes for a moment, or adding up what arrived of it."""
    name = (LLM, *spec.encoders)[op.index]
    for laid, _, replicas in laid_on(spec, name, work.components[name][op.virtual_stage], work.rank):
        if replicas > 1:
            most = max(laid.sizes)
            size = most * spec.sent if op.kind is Kind.REDUCE else most // replicas * FP32
            yield ((("workspace", name), size),)


def _walk(spec: Workload, work: RankWork) -> Iterator[_Moment]:
    """Yield bytes, beside what is constant, at the moments that may be the fullest, with their op."""
    held = Held()
    yield held, (), "start"
    for op in _as_held(work.domain.ops_of(work.domain_rank)):
        if op.kind is Kind.FORWARD:
            _take_rows(work, op, held)
        for extra in _during(work, op, held):
            yield held, extra, op
        if spec.sent < FP32 and Kind.REDUCE in (op.kind, op.on):
            for extra in _rounding(spec, work, op):
                yield held, extra, op
        _after(work, op, held)
        yield held, (), op


def _as_held(ops: Sequence[Op]) -> Iterator[Op]:
    """Ops as they add to what is held: a forward holds most at its end, when all is there that goes within
    it, a backward at its beginning.
    """
    at = 0
    while at < len(ops):
        messages = issued_within(ops, at)
        yield from (*messages, ops[at]) if ops[at].kind is Kind.FORWARD else (ops[at], *messages)
        at += 1 + len(messages)


def _during(work: RankWork, op: Op, held: Held) -> Iterator[tuple[_Size, ...]]:
    """Yield what comes to what is held at the fullest moments of a compute op, or goes."""
    if op.kind in (Kind.FORWARD, Kind.ENCODE):
        component, _, _ = work.of(op)
        forward = work.forward(op)
        most = forward.kept + forward.workspace if _goes_back(work, op) else forward.passing
        yield ((("activations", component), most),)
    elif op.kind in (Kind.SHIP, Kind.RETURN):
        yield ((("buffers", BETWEEN), _shipping(work, op)),)
    elif op.kind is Kind.WAIT and op.on is Kind.RETURN:
        added = sum(_rows(work, c) for c in _learning(work, op.index) if c in held.part_of)
        if _learning(work, op.index):
            yield ((("workspace", BETWEEN), _joined(work, op.index) + added),)
    elif op.kind in BACKWARDS:
        if not _goes_back(work, op):
            return
        component, _, _ = work.of(op)
        grad = work.domain.made_by(op)
        assert grad is not None
        backward = work.backward(op, grad)
        yield ((("workspace", component), backward.workspace),)
        what, size = held.get(_kept(op), (("activations", component), 0))
        enters = op.kind is Kind.BACKWARD and op.virtual_stage == min(work.llm) and _returns(work, op.index)
        rows = work.rows_in[op.index] * work.row_bytes if enters and backward.last else 0
        yield (what, -size), (("workspace", component), backward.last + rows)


def _goes_back(work: RankWork, op: Op) -> bool:
    """Whether a pass keeps what a backward takes: unless nothing that it takes in or goes through learns."""
    if op.kind in (Kind.ENCODE, Kind.ENCODE_BACKWARD):
        return work.domain.encoder_batches[op.index].component in work.trained
    return LLM in work.trained or op.virtual_stage > 0 or _returns(work, op.index)


def _returns(work: RankWork, m: int) -> bool:
    """Whether gradients of a microbatch's rows go back."""
    return m in work.returned


def _kept(op: Op) -> tuple[str, int, int]:
    """What a pass keeps, as it is called among what is held."""
    return "encoded" if op.kind in (Kind.ENCODE, Kind.ENCODE_BACKWARD) else "kept", op.index, op.virtual_stage


def _after(work: RankWork, op: Op, held: Held) -> None:
    """Update what is held when an op is done."""
    m, kind = op.index, op.kind
    row = work.row_bytes
    if kind in (Kind.FORWARD, Kind.ENCODE):
        component, _, load = work.of(op)
        if _goes_back(work, op):
            kept = work.forward(op).kept
        elif kind is Kind.ENCODE:
            kept = load.rows * row
        else:
            kept = _message(work, op) if op.virtual_stage < work.domain.num_virtual_stages - 1 else 0
        held[_kept(op)] = ("activations", component), kept
    elif kind in BACKWARDS:
        _backward(work, op, held)
    elif kind in (Kind.SHIP, Kind.RETURN):
        rows_in, rows_out = work.rows_in[m], work.rows_out[m]
        arriving, leaving = (rows_in, rows_out) if kind is Kind.SHIP else (rows_out, rows_in)
        local = _route(work, op).is_local  # then what arrives is what left
        held[f"{kind} out", m, 0] = ("buffers", BETWEEN), 0 if local else leaving * row
        held[f"{kind} in", m, 0] = ("buffers", BETWEEN), arriving * row
        held[f"{kind} all", m, 0] = ("buffers", BETWEEN), _moved(work, op)[0]
        if kind is Kind.RETURN:  # the gradients leave as they are
            held.drop(("row gradients", m, 0))
            held.drop((f"{Kind.SHIP} in", m, 0))
        else:
            _let_go_of_frozen(work, m, held)
    elif kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD):
        held[str(kind), m, op.virtual_stage] = ("buffers", LLM), _message(work, op)
    elif kind is Kind.WAIT:
        _waited(work, op, held)


def _route(work: RankWork, op: Op) -> Route:
    """The way of rows of a microbatch, or of their gradients."""
    route = work.domain.routes[op.index]
    assert route is not None
    return route if op.kind is Kind.SHIP else route.transpose()


def _shipping(work: RankWork, op: Op) -> int:
    """Bytes that shipping rows or returning gradients needs at most: what arrives, buffers, and of rows what
    encoder batches put out, one after the other, and what leaves. Gradients leave as they are.
    """
    route, m = _route(work, op), op.index
    arriving, made = work.rows_out[m], 0
    if op.kind is Kind.SHIP:
        arriving, made = work.rows_in[m], _joined(work, m) + work.rows_out[m] * work.row_bytes
    if route.is_local:
        return made
    return made + arriving * work.row_bytes + sum(_moved(work, op))


def _joined(work: RankWork, m: int) -> int:
    """Bytes of all rows of the encoder batches that hold items of a microbatch here."""
    return sum(_rows(work, c) for c in work.domain.joined(m, work.domain_rank))


def _moved(work: RankWork, op: Op) -> tuple[int, int]:
    """Bytes of the buffers in which a collective moves the rows of all ranks: until it is waited for, and for
    a moment.
    """
    route = _route(work, op)
    block = 0 if route.is_local else route.block * work.row_bytes
    if route.transport == "reduce_scatter":
        return block, block * route.num_ranks
    if route.transport == "all_gather":
        return block * route.num_ranks, block
    # Rows that stop here, as they came and as they go on.
    return 0, 2 * route.stopping[work.domain_rank] * work.row_bytes


def _message(work: RankWork, op: Op) -> int:
    """Bytes of an activation between virtual stages of the LLM."""
    return work.passes[op.index, op.virtual_stage].tokens // work.llm[op.virtual_stage].tp * work.row_bytes


def _let_go_of_frozen(work: RankWork, m: int, held: Held) -> None:
    """Rows of frozen encoders go when the last microbatch that they are of has been shipped."""
    for c in work.encodings:
        batch = work.domain.encoder_batches[c]
        if m == max(batch.microbatches) and batch.component not in work.trained:
            held.drop(("encoded", c, 0))


def _take_rows(work: RankWork, op: Op, held: Held) -> None:
    """Rows go when the last virtual stage takes them in, unless their gradients go back."""
    last = max(work.domain.virtual_stages_with_rows(work.domain_rank), default=None)
    if op.virtual_stage == last and not _returns(work, op.index):
        held.drop((f"{Kind.SHIP} in", op.index, 0))


def _backward(work: RankWork, op: Op, held: Held) -> None:
    m, p = op.index, op.virtual_stage
    held.drop(_kept(op))
    if op.grad is Grad.INPUT and (op.kind is Kind.ENCODE_BACKWARD or work.domain.llm_learns):
        component, _, _ = work.of(op)
        held[_kept(op)] = ("workspace", component), work.backward(op, op.grad).kept
    if op.grad is Grad.WEIGHT:
        return
    if op.kind is Kind.ENCODE_BACKWARD:
        _let_go_of_gradients(held, m)
        return
    for what in (str(Kind.RECV_FORWARD), str(Kind.RECV_BACKWARD)):
        held.drop((what, m, p))
    held.drop(("gradient", m, p + 1))  # of a virtual stage that this rank holds too
    if p:
        held["gradient", m, p] = ("workspace", LLM), _message(work, op)
    if p == min(work.llm) and _returns(work, m):
        held["row gradients", m, 0] = ("workspace", BETWEEN), work.rows_in[m] * work.row_bytes


def _hand_back(work: RankWork, m: int, held: Held) -> None:
    """Gradients of a microbatch's rows become those of the encoder batches that put them out: parts of one
    tensor, which stays while any of them does, or sums of their own with what came before.
    """
    learning = _learning(work, m)
    if not learning:
        return
    held["joined", m, 0] = ("buffers", BETWEEN), _joined(work, m)
    held.parts[m] = 1  # this microbatch itself
    for c in learning:
        added = c in held.part_of
        _let_go_of_gradients(held, c)
        held.part_of[c] = SUM if added else m
        if added:
            held["returned", c, 0] = ("buffers", BETWEEN), _rows(work, c)
        else:
            held.parts[m] += 1
    _let_go_of_part(held, m)


def _let_go_of_gradients(held: Held, c: int) -> None:
    m = held.part_of.pop(c, None)
    if m == SUM:
        held.drop(("returned", c, 0))
    elif m is not None:
        _let_go_of_part(held, m)


def _let_go_of_part(held: Held, m: int) -> None:
    held.parts[m] -= 1
    if not held.parts[m]:
        held.drop(("joined", m, 0))


def _learning(work: RankWork, m: int) -> list[int]:
    """Encoder batches of this rank that hold items of a microbatch and take gradients."""
    encoder_batches = work.domain.encoder_batches
    return [
        c for c in work.domain.joined(m, work.domain_rank) if encoder_batches[c].component in work.trained
    ]


def _rows(work: RankWork, c: int) -> int:
    """Bytes of the rows of an encoder batch that this rank puts out."""
    return work.domain.encoder_batches[c].rows_of(work.domain_rank) * work.row_bytes


def _waited(work: RankWork, op: Op, held: Held) -> None:
    m = op.index
    if op.on is Kind.SEND_BACKWARD:
        held.drop(("gradient", m, op.virtual_stage))
    elif op.on in (Kind.SHIP, Kind.RETURN):
        held.drop((f"{op.on} out", m, 0))
        held.drop((f"{op.on} all", m, 0))
        if op.on is Kind.RETURN:
            held.drop((f"{op.on} in", m, 0))
            _hand_back(work, m, held)

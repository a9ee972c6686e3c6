"""A model of what a rank holds in a step: integers along its op list, no tensors and no ranks.

The idea: weights, gradients and optimizer state follow from sizes alone. Everything else begins with one op
of the list and ends with another, so the list is walked with the bytes of what is alive, and the peak is
the largest sum. Within a backward pass what was kept is freed layer by layer, faster than gradients grow, so
its beginning counts, and for the embedding its end. What an op keeps and needs is its part's statement.

Kinds are those of `Footprint`. The model is checked against rehearsals: benchmarks/memory_model.py.
"""

from collections import Counter
from collections.abc import Iterator

from omni.models.llm import NAME as LLM
from omni.rehearsal.footprint import KINDS, Footprint
from omni.rehearsal.rank_work import RankWork, rank_work
from omni.rehearsal.traffic import traffic
from omni.training.job import Job
from parallel.axes import group_of
from parallel.buckets import buckets, by_replicas
from parallel.work import FP32, INDEX, Grad
from pipeline.plan import Kind, Op, StepPlan

Held = dict[tuple[str, int], tuple[str, int]]
"""What is alive, by what it is and its number: kind and bytes."""


def model_footprint(job: Job, plan: StepPlan, rank: int) -> Footprint:
    """Model what `rank` holds and sends in `plan`, to be compared with rehearsals. No plan is refused for its
    memory yet.
    """
    work = rank_work(job, plan, rank)
    constant = _constant(job, work)
    peak, at = max(_walk(work), key=lambda state: sum(state[0].values()))
    return Footprint(
        parameters={name: sum(w.elements for w in weights) for name, weights in work.weights().items()},
        peak={kind: constant[kind] + peak[kind] for kind in KINDS},
        at=at,
        traffic=traffic(job, work),
    )


def _constant(job: Job, work: RankWork) -> Counter[str]:
    """Bytes that are held throughout: state, inputs of the step, and megatron's scratch memory."""
    held: Counter[str] = Counter()
    for name, weights in work.weights().items():
        # Main weights for those of half precision, and two moments of what learns.
        copies = (work.element < FP32) + 2 * (name in work.trained)
        for axis, own in by_replicas(weights).items():
            ranks = group_of(job.arrangement, None if name == LLM else name, axis, work.rank)
            laid = buckets(own, len(ranks))
            held["weights"] += laid.total * work.element
            held["gradients"] += laid.total * FP32
            held["optimizer"] += laid.owned(ranks.index(work.rank), len(ranks)) * copies * FP32
    held["buffers"] += INDEX * (sum(work.rows_in) + sum(work.rows_out))
    if work.llm:
        held["buffers"] += sum(work.llm.input_bytes(load) for load in work.passes)
        held["buffers"] += max((work.llm.scratch_bytes(load) for load in work.passes), default=0)
    for c, load in work.encodings.items():
        held["buffers"] += work.encoders[work.domain.chunks[c].component].input_bytes(load)
    return held


def _walk(work: RankWork) -> Iterator[tuple[Counter[str], str]]:
    """Yield bytes by kind, beside what is constant, at the moments that may be the fullest, with their op."""
    held: Held = {}
    yield Counter(), "start"
    for op in work.domain.ops[work.position]:
        for moment in _during(work, op, held):
            yield moment, str(op)
        _after(work, op, held)
        yield _sum(held), str(op)


def _sum(held: Held) -> Counter[str]:
    total: Counter[str] = Counter()
    for kind, size in held.values():
        total[kind] += size
    return total


def _during(work: RankWork, op: Op, held: Held) -> Iterator[Counter[str]]:
    """Yield what is held at the fullest moments of a compute op."""
    m = op.index
    if op.kind is Kind.ENCODE_BACKWARD:
        backward = work.encoders[work.domain.chunks[m].component].backward(work.encodings[m], Grad.BOTH)
        yield _sum(held) + Counter(workspace=backward.workspace)
    elif op.kind is Kind.FORWARD:
        assert work.llm is not None
        forward = work.llm.forward(work.passes[m])
        yield _sum(held) + Counter(activations=forward.kept + forward.workspace)
    elif op.kind is Kind.BACKWARD:
        assert work.llm is not None
        backward = work.llm.backward(work.passes[m], Grad.BOTH)
        yield _sum(held) + Counter(workspace=backward.workspace)
        done = {key: value for key, value in held.items() if key != ("kept", m)}
        yield _sum(done) + Counter(workspace=backward.last)


def _after(work: RankWork, op: Op, held: Held) -> None:
    """Update what is held when an op is done."""
    m, kind = op.index, op.kind
    row = work.row_bytes
    if kind is Kind.ENCODE:
        _encoded(work, m, held)
    elif kind is Kind.ENCODE_BACKWARD:
        held.pop(("encoded", m))
        batch = work.domain.chunks[m].microbatch
        if not any(
            ("encoded", c) in held for c in work.encodings if work.domain.chunks[c].microbatch == batch
        ):
            held.pop(("returned", batch), None)
    elif kind in (Kind.SHIP, Kind.RETURN):
        rows_in, rows_out = work.rows_in[m], work.rows_out[m]
        arriving, leaving = (rows_in, rows_out) if kind is Kind.SHIP else (rows_out, rows_in)
        held[f"{kind} out", m] = "buffers", leaving * row
        held[f"{kind} in", m] = "buffers", arriving * row
        if kind is Kind.RETURN:  # the gradients leave as they are
            held.pop(("row gradients", m), None)
        else:
            _let_go_of_frozen(work, m, held)
    elif kind in (Kind.RECV_FORWARD, Kind.RECV_BACKWARD):
        held[str(kind), m] = "buffers", _message(work, m)
    elif kind is Kind.FORWARD:
        assert work.llm is not None
        held["kept", m] = "activations", work.llm.forward(work.passes[m]).kept
    elif kind is Kind.BACKWARD:
        _backward(work, m, held)
    elif kind is Kind.WAIT:
        _waited(op, held)


def _message(work: RankWork, m: int) -> int:
    """Bytes of an activation between parts of the LLM."""
    assert work.llm is not None
    return work.passes[m].tokens // work.llm.tp * work.row_bytes


def _encoded(work: RankWork, chunk: int, held: Held) -> None:
    component, load = work.domain.chunks[chunk].component, work.encodings[chunk]
    kept = load.rows * work.row_bytes
    if component in work.trained:
        kept = work.encoders[component].forward(load).kept
    held["encoded", chunk] = "activations", kept


def _let_go_of_frozen(work: RankWork, m: int, held: Held) -> None:
    for c in work.encodings:
        chunk = work.domain.chunks[c]
        if chunk.microbatch == m and chunk.component not in work.trained:
            held.pop(("encoded", c), None)


def _backward(work: RankWork, m: int, held: Held) -> None:
    for what in ("kept", str(Kind.RECV_FORWARD), str(Kind.RECV_BACKWARD), f"{Kind.SHIP} in"):
        held.pop((what, m), None)
    if not work.domain.is_first(work.position):
        held["gradient", m] = "workspace", _message(work, m)
    if Op(Kind.RETURN, m) in work.domain.ops[work.position]:
        held["row gradients", m] = "workspace", work.rows_in[m] * work.row_bytes


def _waited(op: Op, held: Held) -> None:
    m = op.index
    if op.on is Kind.SEND_BACKWARD:
        held.pop(("gradient", m), None)
    elif op.on in (Kind.SHIP, Kind.RETURN):
        held.pop((f"{op.on} out", m), None)
        if op.on is Kind.RETURN:
            arrived = held.pop((f"{op.on} in", m), None)
            if arrived:
                held["returned", m] = arrived

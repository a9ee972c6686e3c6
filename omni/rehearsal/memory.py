"""A model of what a rank holds in a step: integers along its op list, no tensors and no ranks.

The idea: weights, gradients and optimizer state follow from sizes alone. Everything else begins with one op
of the list and ends with another, so the list is walked with the bytes of what is alive, and the peak is
the largest sum. Within a backward pass what was kept is freed layer by layer, faster than gradients grow, so
its beginning counts, and for the embedding its end.

Kinds are those of `Footprint`. The model is checked against rehearsals: benchmarks/memory_model.py.
"""

from collections import Counter
from collections.abc import Iterator

from omni.models.llm import NAME as LLM
from omni.rehearsal.footprint import KINDS, Footprint
from omni.rehearsal.parts import INDEX, buckets
from omni.rehearsal.rank_work import RankWork, rank_work
from omni.rehearsal.sizes import FP32
from omni.rehearsal.traffic import traffic
from omni.training.job import Job
from pipeline.plan import Kind, Op, StepPlan

Held = dict[tuple[str, int], tuple[str, int]]
"""What is alive, by what it is and its number: kind and bytes."""


def model_footprint(job: Job, plan: StepPlan, rank: int) -> Footprint:
    """Model what `rank` holds and sends in `plan`, to be compared with rehearsals. No plan is refused for its
    memory yet.

    Raises:
        ConfigError: for models that there is no arithmetic of.
    """
    work = rank_work(job, plan, rank)
    constant = _constant(job, work)
    peak, at = max(_walk(work), key=lambda state: sum(state[0].values()))
    return Footprint(
        parameters={name: sum(weights) for name, weights in _weights(work).items()},
        peak={kind: constant[kind] + peak[kind] for kind in KINDS},
        at=at,
        traffic=traffic(job, work),
    )


def _weights(work: RankWork) -> dict[str, tuple[int, ...]]:
    """Elements of each parameter, by component."""
    weights = {LLM: work.stage.weights()} if work.stage else {}
    return weights | {name: part.weights() for name, part in work.encoders.items()}


def _constant(job: Job, work: RankWork) -> Counter[str]:
    """Bytes that are held throughout: state, inputs of the step, and megatron's scratch memory."""
    held: Counter[str] = Counter()
    for name, weights in _weights(work).items():
        mesh = job.arrangement.mesh if name == LLM else job.arrangement.encoder_meshes[name]
        ranks = sorted(mesh.group(work.rank, *(("cp", "dp") if name == LLM else ("dp",))))
        alone = work.stage.reduced_alone() if name == LLM and work.stage else None
        laid = buckets(weights, alone, len(ranks))
        held["weights"] += laid.total * work.element
        held["gradients"] += laid.total * FP32
        # Main weights for those of half precision, and two moments of what learns.
        copies = (work.element < FP32) + 2 * (name in work.trained)
        held["optimizer"] += laid.owned(ranks.index(work.rank), len(ranks)) * copies * FP32
    for each in work.passes:
        held["buffers"] += INDEX * (each.rows_in + each.rows_out)
    if work.stage:
        stack = work.stage.stack
        held["buffers"] += sum(work.stage.input_bytes(p.seen, p.targets) for p in work.passes)
        if stack.splits_tokens:
            held["buffers"] += max((p.seen.tokens for p in work.passes), default=0) * work.row_bytes
    for encoding in work.encodings.values():
        held["buffers"] += work.encoders[encoding.component].input_bytes(encoding.seen)
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
    m, stage = op.index, work.stage
    if op.kind is Kind.ENCODE_BACKWARD:
        each = work.encodings[m]
        yield _sum(held) + Counter(workspace=work.encoders[each.component].backward_workspace(each.seen))
    elif op.kind in (Kind.FORWARD, Kind.BACKWARD):
        assert stage is not None
        seen, targets = work.passes[m].seen, work.passes[m].targets
        if op.kind is Kind.FORWARD:
            needed = stage.kept(seen, targets) + stage.forward_workspace(seen, targets)
            yield _sum(held) + Counter(activations=needed)
        else:
            yield _sum(held) + Counter(workspace=stage.backward_workspace(seen, targets))
            done = {key: value for key, value in held.items() if key != ("kept", m)}
            yield _sum(done) + Counter(workspace=stage.last_workspace(seen))


def _after(work: RankWork, op: Op, held: Held) -> None:
    """Update what is held when an op is done."""
    m, kind = op.index, op.kind
    row = work.row_bytes
    if kind is Kind.ENCODE:
        _encoded(work, m, held)
    elif kind is Kind.ENCODE_BACKWARD:
        held.pop(("encoded", m))
        batch = work.encodings[m].microbatch
        if not any(
            ("encoded", c) in held for c, other in work.encodings.items() if other.microbatch == batch
        ):
            held.pop(("returned", batch), None)
    elif kind in (Kind.SHIP, Kind.RETURN):
        rows_in, rows_out = work.passes[m].rows_in, work.passes[m].rows_out
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
        assert work.stage is not None
        held["kept", m] = "activations", work.stage.kept(work.passes[m].seen, work.passes[m].targets)
    elif kind is Kind.BACKWARD:
        _backward(work, m, held)
    elif kind is Kind.WAIT:
        _waited(op, held)


def _message(work: RankWork, m: int) -> int:
    """Bytes of an activation between stages."""
    assert work.stage is not None
    return work.stage.stack.between(work.passes[m].seen.tokens) * work.row_bytes


def _encoded(work: RankWork, chunk: int, held: Held) -> None:
    each = work.encodings[chunk]
    kept = each.own_rows * work.row_bytes
    if each.component in work.trained:
        kept = work.encoders[each.component].kept(each.seen, each.own_rows)
    held["encoded", chunk] = "activations", kept


def _let_go_of_frozen(work: RankWork, m: int, held: Held) -> None:
    for c, each in work.encodings.items():
        if each.microbatch == m and each.component not in work.trained:
            held.pop(("encoded", c), None)


def _backward(work: RankWork, m: int, held: Held) -> None:
    assert work.stage is not None
    for what in ("kept", str(Kind.RECV_FORWARD), str(Kind.RECV_BACKWARD), f"{Kind.SHIP} in"):
        held.pop((what, m), None)
    if not work.stage.first:
        held["gradient", m] = "workspace", _message(work, m)
    if Op(Kind.RETURN, m) in work.domain.ops[work.position]:
        held["row gradients", m] = "workspace", work.passes[m].rows_in * work.row_bytes


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

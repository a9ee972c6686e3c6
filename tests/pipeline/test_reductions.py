"""Reductions begin as soon as their gradients are complete, and hide behind what is left to compute."""

from dataclasses import replace

from domain_plans import COMPONENTS, Shape, Work, make_plan

from parallel.work import Grad
from pipeline.builders.one_queue.serial import serialise
from pipeline.domain_plan import DomainPlan
from pipeline.expand import expand
from pipeline.ops import COMPUTE, ISSUED, Kind, Op
from pipeline.reductions import in_front, with_reductions
from pipeline.simulator import run

AUDIO, IMAGE, LLM = (COMPONENTS.index(name) for name in ("audio", "image", "llm"))


def two_stages() -> DomainPlan:
    """Four microbatches, of which each stage encodes two; the LLM's gradients are reduced first."""
    work = [Work("image", m, (m % 2,), (2,)) for m in range(4)]
    domain = make_plan(Shape(2), 4, work, "encode_first", frozen=("audio",)).domain
    domain = replace(domain, reductions=((LLM, 1), (LLM, 0), (IMAGE, 0)))
    order = [[op for op in ops if op.kind in COMPUTE] for ops in domain.ops]
    lists = expand(with_reductions(order, domain, COMPONENTS), domain)
    return replace(domain, ops=tuple(map(tuple, lists)))


def makespan(domain: DomainPlan, reduce_ns: int) -> int:
    """The time of a step of which every pass takes 100 ns, and the LLM's reductions as given."""

    def compute_ns(rank: int, op: Op) -> int:
        return 100 if op.kind in COMPUTE else reduce_ns * (op.index == LLM)

    return run(domain, compute_ns, lambda op: 0).makespan_ns


def test_the_llm_is_reduced_while_encoders_go_back():
    domain = two_stages()
    for team, ops in enumerate(domain.ops):
        kinds, reduction = [op.kind for op in ops], ops.index(Op(Kind.REDUCE, LLM, virtual_stage=team))
        assert max(at for at, kind in enumerate(kinds) if kind is Kind.BACKWARD) < reduction
        assert reduction < kinds.index(Kind.ENCODE_BACKWARD)
        assert [op.on for op in ops[-2:]] == [Kind.REDUCE] * 2
    # Each rank goes back through two encoder batches after its last pass, 200 ns.
    assert makespan(domain, 200) == makespan(domain, 0)
    assert makespan(domain, 300) == makespan(domain, 0) + 100


def test_reductions_of_an_order_that_has_them_stay():
    domain = make_plan(Shape(1), 1, [], "encode_first").domain
    forward, backward = Op(Kind.FORWARD, 0), Op(Kind.BACKWARD, 0)
    first, *others = (Op(Kind.REDUCE, n) for n, _ in domain.reductions)
    (ops,) = with_reductions([[forward, backward]], domain, COMPONENTS)
    assert ops == [forward, backward, first, *others]
    (ops,) = with_reductions([[forward, first, backward]], domain, COMPONENTS)
    assert ops == [forward, first, backward, *others]


def test_a_shared_embedding_waits_for_the_last_virtual_stage():
    domain = make_plan(Shape(1, vpp=2), 1, [], "interleaved").domain
    # So that the last virtual stage's does not keep it back.
    domain = replace(domain, reductions=((LLM, 0), (LLM, 1)))
    order = [Op(Kind.BACKWARD, 0), Op(Kind.BACKWARD, 0, virtual_stage=1)]
    (ops,) = with_reductions([order], domain, COMPONENTS)
    assert ops.index(Op(Kind.REDUCE, LLM)) > ops.index(order[1])
    (ops,) = with_reductions([order[:1]], domain, COMPONENTS)  # of another rank's output it waits for nothing
    assert ops[:2] == [order[0], Op(Kind.REDUCE, LLM)]


def begun_behind(*ops: Op, width: int = 1) -> list[tuple[Op, tuple[tuple[int, int], ...]]]:
    """What begins behind the ops of a rank that goes back through an image, which `width` ranks share."""
    work = [Work("image", 0, tuple(range(width)), (2,) * width)]
    domain = make_plan(Shape(2), 1, work, "encode_first").domain
    domain = replace(domain, ops=(ops, ops))
    return list(in_front(domain, COMPONENTS, 0).items())


ENCODED, WEIGHTS = Op(Kind.ENCODE_BACKWARD, 0), Op(Kind.ENCODE_BACKWARD, 0, grad=Grad.WEIGHT)
INPUTS, LLM_BACK = Op(Kind.ENCODE_BACKWARD, 0, grad=Grad.INPUT), Op(Kind.BACKWARD, 0)
OF_LLM, OF_IMAGE, OF_AUDIO = Op(Kind.REDUCE, LLM), Op(Kind.REDUCE, IMAGE), Op(Kind.REDUCE, AUDIO)


def test_what_is_complete_goes_behind_the_backward_of_an_encoder_that_a_rank_runs_alone():
    both = ((LLM, 0), (IMAGE, 0))
    assert begun_behind(ENCODED, OF_LLM, OF_IMAGE) == [(ENCODED, both)]
    assert begun_behind(WEIGHTS, OF_LLM, OF_IMAGE, OF_AUDIO) == [(WEIGHTS, both)]
    assert begun_behind(INPUTS, OF_LLM, WEIGHTS, OF_IMAGE) == [(INPUTS, both[:1]), (WEIGHTS, both[1:])]
    # Gradients of weights are not made in the half for inputs, nor is what stands behind others.
    assert begun_behind(INPUTS, OF_IMAGE, OF_LLM) == []
    assert begun_behind(ENCODED, OF_IMAGE, OF_LLM) == [(ENCODED, both[1:])]
    # An op between them may be one that peers wait for.
    assert begun_behind(ENCODED, Op(Kind.SHIP, 0), OF_LLM) == []
    # The last virtual stage may make gradients of the first one's embedding.
    assert begun_behind(LLM_BACK, OF_IMAGE, OF_LLM) == []
    assert begun_behind(LLM_BACK, OF_LLM, OF_IMAGE) == [(LLM_BACK, both[:1])]


def test_nothing_but_its_own_goes_behind_what_several_ranks_run_together():
    assert begun_behind(ENCODED, OF_LLM, OF_IMAGE, width=2) == []
    assert begun_behind(ENCODED, OF_IMAGE, OF_LLM, width=2) == [(ENCODED, ((IMAGE, 0),))]


def test_in_one_queue_reductions_are_issued_after_all_else():
    """Peers that still compute would keep the rows of others waiting behind them."""
    domain = two_stages()
    for ops in serialise(domain, lambda rank, op: 100 if op.kind in COMPUTE else 50, lambda op: 10):
        issued = [op.kind for op in ops if op.kind in ISSUED]
        reductions = issued.count(Kind.REDUCE)
        assert reductions
        assert set(issued[-reductions:]) == {Kind.REDUCE}

"""Each builder against what its paper says: bubbles on even stages, activations held, gradients put off."""

from dataclasses import replace

import pytest
from domain_plans import BUILDERS, Shape, Work, make_plan

from parallel.work import Grad
from pipeline.builders.passes import held_at_most
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Kind, Op
from pipeline.simulator import Timeline, run

FORWARD, INPUT, WEIGHT = 420, 540, 300  # nanoseconds of a stage


def domain_of(schedule: str, stages: int, microbatches: int, vpp: int = 1) -> DomainPlan:
    return make_plan(Shape(stages, vpp=vpp), microbatches, [], schedule).domain


def timeline_of(domain: DomainPlan) -> Timeline:
    """A step of even stages whose messages take no time."""
    vpp = domain.num_virtual_stages // domain.num_stages
    backward = {Grad.BOTH: INPUT + WEIGHT, Grad.INPUT: INPUT, Grad.WEIGHT: WEIGHT}

    def compute_ns(rank: int, op: Op) -> int:
        if op.kind is Kind.REDUCE:
            return 0
        whole = FORWARD if op.kind is Kind.FORWARD else backward[op.grad]
        assert whole % vpp == 0
        return whole // vpp

    return run(domain, compute_ns, lambda op: 0)


def makespan(domain: DomainPlan) -> int:
    return timeline_of(domain).makespan_ns


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [15, 19, 24])
@pytest.mark.parametrize(
    "schedule, bubble",
    [
        ("one_f_one_b", FORWARD + INPUT + WEIGHT),
        ("encode_first", FORWARD + INPUT + WEIGHT),
        ("zero_bubble_h1", FORWARD + INPUT - WEIGHT),  # Qi et al., 2024, table 2
        ("zero_bubble_h2", max(FORWARD, FORWARD + INPUT - 2 * WEIGHT)),
    ],
)
def test_bubbles_are_those_of_the_papers(schedule, bubble, stages, microbatches):
    work = microbatches * (FORWARD + INPUT + WEIGHT)
    assert makespan(domain_of(schedule, stages, microbatches)) == work + (stages - 1) * bubble


@pytest.mark.parametrize("stages", [3, 4, 5, 8])
def test_the_bubble_of_zb_h1_5_is_between_those_of_the_paper(stages):
    h1, between, h2 = (makespan(domain_of(f"zero_bubble_h{name}", stages, 24)) for name in ("1", "1_5", "2"))
    assert h1 > between > h2


@pytest.mark.parametrize("stages, microbatches", [(2, 4), (4, 11), (8, 24)])
def test_a_stage_of_zb_h2_idles_between_its_first_and_last_pass_as_the_paper_says(stages, microbatches):
    """The paper's bubble (Qi et al., 2024, table 2) leaves out what a stage begins late and ends early."""
    timeline = timeline_of(domain_of("zero_bubble_h2", stages, microbatches))
    work = microbatches * (FORWARD + INPUT + WEIGHT)
    spans = []
    for events in timeline.events:
        passes = [event for event in events if event.op.kind in (Kind.FORWARD, Kind.BACKWARD)]
        spans.append(passes[-1].end_ns - passes[0].start_ns)
    assert max(spans) == work + (stages - 1) * (FORWARD + INPUT - 2 * WEIGHT)


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("vpp", [1, 2, 5])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_bubble_of_interleaved_virtual_stages_is_divided_by_their_number(stages, vpp, groups):
    microbatches = groups * stages
    whole = FORWARD + INPUT + WEIGHT
    expected = microbatches * whole + (stages - 1) * whole // vpp
    assert makespan(domain_of("interleaved", stages, microbatches, vpp)) == expected


@pytest.mark.parametrize("stages, vpp, microbatches", [(4, 2, 6), (3, 3, 7), (4, 1, 1), (2, 4, 5), (5, 2, 3)])
def test_a_last_group_that_is_not_full_costs_at_most_what_a_full_one_does(stages, vpp, microbatches):
    full = -(-microbatches // stages) * stages
    taken = makespan(domain_of("interleaved", stages, microbatches, vpp))
    assert taken <= makespan(domain_of("interleaved", stages, full, vpp))


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
def test_each_schedule_holds_what_it_says(stages):
    microbatches = 3 * stages + 2
    expected = {
        "one_f_one_b": lambda stage: stages - stage,
        "encode_first": lambda stage: stages - stage,
        "disaggregated": lambda stage: stages - stage,
        "zero_bubble_h1": lambda stage: stages,
        "zero_bubble_h1_5": lambda stage: stages + (stages - 1) // 2,
        "zero_bubble_h2": lambda stage: 2 * stages - 1,
        "interleaved": lambda stage: stages - stage,
    }
    expected |= {  # encoder work apart
        "joint": expected["one_f_one_b"],
        "joint_interleaved": expected["interleaved"],
        "joint_zero_bubble_h1": expected["zero_bubble_h1"],
        "joint_zero_bubble_h1_5": expected["zero_bubble_h1_5"],
        "joint_zero_bubble_h2": expected["zero_bubble_h2"],
    }
    for schedule, policy in BUILDERS.items():
        domain = domain_of(schedule, stages, microbatches)
        for stage, ops in enumerate(domain.ops):
            most = policy.in_flight(domain, stage)
            assert held_at_most(ops)[stage] == most, schedule
            assert schedule not in expected or most == expected[schedule](stage), schedule


def test_interleaved_virtual_stages_hold_at_most_two_groups_each():
    domain = domain_of("interleaved", 4, 16, vpp=3)
    for stage, ops in enumerate(domain.ops):
        most = held_at_most(ops)
        assert set(most) == {stage, stage + 4, stage + 8}
        assert all(
            BUILDERS["interleaved"].in_flight(domain, virtual_stage) == held <= 8
            for virtual_stage, held in most.items()
        )


@pytest.mark.parametrize("schedule, ahead", [("zero_bubble_h1", 1), ("zero_bubble_h2", 2)])
def test_zero_bubble_puts_the_weights_of_a_later_stage_off_longer(schedule, ahead):
    domain = domain_of(schedule, 4, 12)
    for stage, ops in enumerate(domain.ops):
        made = {op.grad: [o for o in ops if o.kind is Kind.BACKWARD and o.grad is op.grad] for op in ops}
        assert [op.index for op in made[Grad.INPUT]] == [op.index for op in made[Grad.WEIGHT]] == [*range(12)]
        at = {(op.grad, op.index): place for place, op in enumerate(ops) if op.kind is Kind.BACKWARD}
        between = [
            sum(at[Grad.INPUT, m] < at[Grad.INPUT, later] < at[Grad.WEIGHT, m] for later in range(12))
            for m in range(12 - stage * ahead)
        ]
        assert between == [stage * ahead] * len(between)


@pytest.mark.parametrize("schedule", ["zero_bubble_h1", "joint_zero_bubble_h2"])
def test_passes_that_are_computed_anew_go_back_whole(schedule):
    def of_some_anew(domain, facts):
        batches = tuple(replace(batch, anew=m in (3, 7)) for m, batch in enumerate(domain.microbatches))
        return BUILDERS[schedule](replace(domain, microbatches=batches), facts)

    plain, domain = domain_of(schedule, 4, 12), make_plan(Shape(4), 12, [], of_some_anew).domain
    for before, ops in zip(plain.ops, domain.ops, strict=True):
        grads = {m: [op.grad for op in ops if op.kind is Kind.BACKWARD and op.index == m] for m in range(12)}
        assert grads == {m: [Grad.BOTH] if m in (3, 7) else [Grad.INPUT, Grad.WEIGHT] for m in range(12)}
        forwards = [[op for op in of if op.kind is Kind.FORWARD] for of in (before, ops)]
        assert forwards[0] == forwards[1]


# Encoders.


def compute_of(ops: tuple[Op, ...]) -> str:
    """The compute of a list in short: e0 and E0 encode and go back, f0 and B0 are passes."""
    short = {Kind.ENCODE: "e", Kind.ENCODE_BACKWARD: "E", Kind.FORWARD: "f", Kind.BACKWARD: "B"}
    return " ".join(f"{short[op.kind]}{op.index}" for op in ops if op.kind in short)


def with_encoders(
    schedule: str, stages: int, microbatches: int, rank: int, beside: int = 0, frozen: tuple[str, ...] = ()
) -> DomainPlan:
    """An encoder batch of each microbatch on `rank`, or in turn on the `beside` ranks from there on."""
    ranks = [rank + m % max(1, beside) for m in range(microbatches)]
    work = [Work("image", m, (ranks[m],), (2,)) for m in range(microbatches)]
    home = (min(ranks), max(ranks) + 1)
    shape = Shape(stages, beside=beside, homes=(home, home))
    return make_plan(shape, microbatches, work, schedule, frozen).domain


def test_on_the_first_stage_1f1b_encodes_right_before_and_goes_back_right_after():
    first, last = with_encoders("one_f_one_b", 2, 4, rank=0).ops
    assert compute_of(first) == "e0 f0 e1 f1 B0 E0 e2 f2 B1 E1 e3 f3 B2 E2 B3 E3"
    assert compute_of(last) == "f0 B0 f1 B1 f2 B2 f3 B3"
    for frozen, expected in (
        (("image",), "e0 f0 e1 f1 B0 e2 f2 B1 e3 f3 B2 B3"),
        (("llm",), "e0 f0 e1 f1 B0 E0 e2 f2 B1 E1 e3 f3 B2 E2 B3 E3"),
    ):
        assert compute_of(with_encoders("one_f_one_b", 2, 4, 0, frozen=frozen).ops[0]) == expected


def test_beside_the_llm_encoders_are_a_few_microbatches_ahead_of_the_first_stage():
    ops = with_encoders("disaggregated", 2, 6, rank=2, beside=1).ops
    assert compute_of(ops[0]) == "f0 f1 B0 f2 B1 f3 B2 f4 B3 f5 B4 B5"
    assert compute_of(ops[2]) == "e0 e1 e2 e3 E0 e4 E1 e5 E2 E3 E4 E5"
    one, two = with_encoders("disaggregated", 2, 6, rank=2, beside=2).ops[2:]
    assert compute_of(one) == "e0 e2 e4 E0 E2 E4"
    assert compute_of(two) == "e1 e3 e5 E1 E3 E5"


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("beside", [1, 2, 3])
def test_what_ranks_beside_the_llm_hold_does_not_grow_with_the_step(stages, beside):
    for microbatches in (4, 12, 24):
        for ops in with_encoders("disaggregated", stages, microbatches, stages, beside).ops[stages:]:
            held = [m for op in ops for m in [(op.kind is Kind.ENCODE) - (op.kind is Kind.ENCODE_BACKWARD)]]
            most = max(sum(held[: at + 1]) for at in range(len(held)))
            assert most <= -(-stages // beside) + 2


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(
    "beside, encode, back", [(1, 400, 800), (1, 10, 1250), (2, 800, 1700), (3, 1260, 2520)]
)
def test_encoders_that_keep_up_cost_their_first_forward_and_their_last_backward(stages, beside, encode, back):
    """Ratios of ranks that make as many rows in the time of a stage as it consumes."""
    microbatches, whole = 16, FORWARD + INPUT + WEIGHT
    assert encode + back <= beside * whole
    domain = with_encoders("disaggregated", stages, microbatches, stages, beside)
    ns = {Kind.ENCODE: encode, Kind.ENCODE_BACKWARD: back, Kind.FORWARD: FORWARD, Kind.REDUCE: 0}
    taken = run(domain, lambda rank, op: ns.get(op.kind, INPUT + WEIGHT), lambda op: 0).makespan_ns
    assert taken == encode + (microbatches + stages - 1) * whole + back

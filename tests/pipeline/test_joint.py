"""Joint schedules: who takes how much encoder work, where it goes, and what bounds it."""

from collections import Counter
from dataclasses import replace

import pytest
from domain_plans import BUILDERS, Shape, Work, make_plan

from parallel.work import Grad
from pipeline.builders import ENCODE_FIRST, JOINT, JOINT_ZERO_BUBBLE_H1, Facts
from pipeline.builders.joint.shares import Room, deal_out, share_out, within
from pipeline.costs import Costs
from pipeline.domain_plan import DomainPlan
from pipeline.ops import COMPUTE, Kind, Op
from pipeline.rules.lists import ENCODES
from pipeline.simulator import run

STAGES, MICROBATCHES, FORWARD = 4, 12, 600


def costs_of(encode_ns: int) -> Costs:
    """Even stages, a backward twice as long as a forward, encoder batches that all take `encode_ns`, free
    messages.
    """

    def compute_ns(rank: int, op: Op) -> int:
        if op.kind is Kind.REDUCE:
            return 0
        if op.kind in (Kind.ENCODE, Kind.ENCODE_BACKWARD):
            return encode_ns if op.kind is Kind.ENCODE else 2 * encode_ns
        return FORWARD * (2 if op.kind is Kind.BACKWARD and op.grad is Grad.BOTH else 1)

    return compute_ns, lambda op: 0


def domain_of(
    schedule, costs: Costs, encoder_batches: int = STAGES, frozen=(), shared: bool = False
) -> DomainPlan:
    """So many encoder batches in each microbatch, a rank each, in turn; and if asked one that all ranks
    share.
    """
    work = [
        Work("image", m, (n % STAGES,), (1,)) for m in range(MICROBATCHES) for n in range(encoder_batches)
    ]
    if shared:
        work += [Work("image", m, tuple(range(STAGES)), (8,), STAGES) for m in range(0, MICROBATCHES, 4)]
    return make_plan(Shape(STAGES), MICROBATCHES, work, schedule, frozen, costs=costs).domain


def makespan(domain: DomainPlan, costs: Costs) -> int:
    return run(domain, *costs).makespan_ns


def held(ops) -> int:
    """The most encoder batches whose activations a rank holds."""
    most = now = 0
    for op in ops:
        now += (op.kind is Kind.ENCODE) - (op.kind is Kind.ENCODE_BACKWARD)
        most = max(most, now)
    return most


def test_enough_encoder_work_leaves_little_idle():
    costs = costs_of(300)
    bound = MICROBATCHES * 3 * (FORWARD + 300)  # all work over all ranks
    assert bound <= makespan(domain_of("joint", costs), costs) <= 1.02 * bound
    assert bound <= makespan(domain_of("joint_zero_bubble_h1", costs), costs) <= bound + 300
    assert makespan(domain_of("encode_first", costs), costs) == bound + (STAGES - 1) * 3 * FORWARD


def test_too_little_encoder_work_fills_a_part_of_the_bubble():
    costs = costs_of(30)
    alone, work = (MICROBATCHES + STAGES - 1) * 3 * FORWARD, MICROBATCHES * 3 * (FORWARD + 30)
    taken = makespan(domain_of("joint", costs), costs)
    assert work < alone < taken <= alone + 7 * 30
    assert taken < makespan(domain_of("encode_first", costs), costs)


def test_backwards_of_encoders_hold_up_no_pass_that_others_wait_for():
    # One encoder batch a microbatch: idle time has room for all of them, but most gaps are shorter than a
    # backward.
    costs = costs_of(200)
    events = run(domain_of("joint", costs, encoder_batches=1), *costs).events
    last = max(event.end_ns for of in events for event in of if event.op.kind is Kind.BACKWARD)
    alone = (MICROBATCHES + STAGES - 1) * 3 * FORWARD
    assert last <= alone + 200, "passes end as they would alone, but for the first encoding"


@pytest.mark.parametrize("encode_ns", [20, 100, 300, 900, 2000])
def test_joint_is_no_slower_than_encoding_first(encode_ns):
    costs = costs_of(encode_ns)
    for joint, around in (("joint", "encode_first"), ("joint_zero_bubble_h1", "zero_bubble_h1")):
        assert makespan(domain_of(joint, costs), costs) <= makespan(domain_of(around, costs), costs)


def test_an_encoder_batch_is_encoded_and_goes_back_where_the_order_puts_it():
    costs = costs_of(300)
    domain = domain_of("joint", costs)
    for team, ops in enumerate(domain.ops):
        mine = [number for number, batch in enumerate(domain.encoder_batches) if batch.ranks == (team,)]
        for kind in (Kind.ENCODE, Kind.ENCODE_BACKWARD):
            assert sorted(op.index for op in ops if op.kind is kind) == mine
    each = Counter(batch.ranks for batch in domain.encoder_batches)
    assert max(each.values()) - min(each.values()) <= 2  # even stages take evenly


@pytest.mark.parametrize("room", [3, 5, 8])
def test_activations_of_encoders_stay_under_their_bound(room):
    costs = costs_of(300)
    free = domain_of("joint", costs)
    assert max(map(held, free.ops)) > room
    base = replace(free, routes=(), ops=(), bounds=(*free.bounds, ("image", room)))
    tp_groups = {"image": [(rank,) for rank in range(STAGES)]}
    for policy in (JOINT, JOINT_ZERO_BUBBLE_H1):
        order = policy(base, Facts(costs, lambda rank, op: 1, tp_groups))
        assert max(map(held, order)) == room


def test_encoder_batches_that_all_ranks_share_come_before_the_pipeline_and_after_it():
    costs = costs_of(300)
    domain = domain_of("joint", costs, shared=True)
    shared = {number for number, batch in enumerate(domain.encoder_batches) if batch.layout.num_cp_ranks > 1}
    assert len(shared) == 3
    for ops in domain.ops:
        compute = [op for op in ops if op.kind in COMPUTE]
        assert {op.index for op in compute[:3]} == shared
        last_pass = max(at for at, op in enumerate(compute) if op.kind is Kind.BACKWARD)
        back = [at for at, op in enumerate(compute) if op.kind is Kind.ENCODE_BACKWARD and op.index in shared]
        assert min(back) > last_pass


def test_what_is_longer_than_any_pass_is_encoded_first_and_goes_back_last():
    usual, message_ns = costs_of(100)
    long = 7

    def compute_ns(rank: int, op: Op) -> int:
        return usual(rank, op) * (20 if op.index == long and op.kind in ENCODES else 1)

    domain = domain_of("joint", (compute_ns, message_ns))
    (team,) = domain.encoder_batches[long].ranks
    compute = [op for op in domain.ops[team] if op.kind in COMPUTE]
    assert compute[0] == Op(Kind.ENCODE, long)
    last_pass = max(at for at, op in enumerate(compute) if op.kind is Kind.BACKWARD)
    assert compute.index(Op(Kind.ENCODE_BACKWARD, long)) > last_pass


def test_what_is_frozen_takes_no_room_in_the_pipeline():
    """Without backwards of the encoder nothing waits for gradients, and nothing fills the cool-down."""
    costs = costs_of(300)
    domain = domain_of("joint", costs, frozen=("image",))
    assert not any(op.kind in (Kind.ENCODE_BACKWARD, Kind.RETURN) for ops in domain.ops for op in ops)
    work = MICROBATCHES * (3 * FORWARD + 300)
    assert makespan(domain, costs) < makespan(domain_of("encode_first", costs, frozen=("image",)), costs)
    assert makespan(domain, costs) >= work


def test_a_tp_group_that_would_hold_too_much_gives_to_one_that_has_room():
    assert within([0, 0, 0], [6, 5, 3], [0, 0, 0], 2, 10) == [1, 0, 0]
    assert within([0, 0, 0], [6, 5, 3], [0, 1, 2], 2, 6) == [0, 0, 0], "not held at once"
    assert within([0, 0, 1], [6, 5, 7], [0, 0, 0], 2, 10) == [0, 0, 1], "nobody has room"
    assert within([0, 0, 1, 2], [7, 5, 7, 1], [0, 0, 0, 0], 3, 10) == [2, 0, 1, 2]
    dealt = [0, 1] * 20
    assert within(dealt, [3] * 40, [n // 8 for n in range(40)], 2, 12) == dealt


def test_shares_even_out_what_ranks_do():
    """Two ranks work for 10 and 20; 30 more make each of them work for 30."""
    rooms = [Room(work_ns=10, idle_ns=100), Room(work_ns=20, idle_ns=100)]
    assert share_out(rooms, 20, forward_ns=10, backward_ns=20) == [20, 10]


def test_shares_follow_what_ranks_idle_once_gradients_are_back():
    """The pipeline takes 117, of which each of two ranks works 96 and idles 7 or 14 at the end: of 21 for
    backwards, and half as much for forwards, the second takes twice as much as the first.
    """
    rooms = [Room(work_ns=96, idle_ns=7), Room(work_ns=96, idle_ns=14)]
    first, second = share_out(rooms, 117, forward_ns=10, backward_ns=20)
    assert first + second >= 30
    assert second == pytest.approx(2 * first, abs=2)


def test_encoder_batches_are_dealt_evenly_along_the_order():
    dealt = deal_out([10] * 12, [1, 2, 3])
    assert Counter(dealt) == {0: 2, 1: 4, 2: 6}
    assert Counter(dealt[:6]) == {0: 1, 1: 2, 2: 3}


def test_long_encoder_batches_are_dealt_first_and_count():
    """One takes as much as six others: its tp group gets none of these."""
    dealt = deal_out([10, 10, 10, 60, 10, 10, 10], [1, 1])
    tp_group = dealt[3]
    assert [n for n, of in enumerate(dealt) if of == tp_group] == [3]
    assert deal_out([5, 5], [0, 0]) in ([1, 0], [0, 1])  # without shares evenly


def test_tp_groups_exchange_encoder_batches_where_few_are_dealt():
    """In order they come to 8 + 5 + 4 and 7 + 6; 8 and 6 change places."""
    dealt = deal_out([8, 7, 6, 5, 4], [15, 15])
    assert [
        sum(cost for cost, of in zip([8, 7, 6, 5, 4], dealt, strict=True) if of == tp_group)
        for tp_group in (0, 1)
    ] == [15, 15]


def test_every_joint_schedule_is_registered():
    assert {name for name in BUILDERS if name.startswith("joint")} == {
        "joint",
        "joint_interleaved",
        "joint_uniform",
        "joint_zero_bubble_h1",
        "joint_zero_bubble_h1_5",
        "joint_zero_bubble_h2",
    }
    assert ENCODE_FIRST.encoder_batches == 0 < JOINT.encoder_batches

"""Ranks that would wait for each other for ever are found, each rehearsed alone; the engine's never do."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from parity_matrix import Case, named
from parity_runs import configure, write_data
from small import overrides, with_values

from omni.__main__ import main
from omni.commands.plan import plan_of_step
from omni.planning.prepare import prepare_run
from omni.rank.optimizer import ComponentOptimizer
from omni.rehearsal.meetings import PAIRS, RECEIVE, SEND, Call, stuck, unequal
from omni.rehearsal.rehearse import rehearse
from parallel.partitions import PartitionedPart
from pipeline.domain_plan import DomainPlan
from pipeline.ops import Kind, Op

Calls = Mapping[int, Sequence[Call]]


def call(label: str, size: int, *ranks: int, kind: str = "all_reduce") -> Call:
    return Call(label, ranks or (0, 1), kind, (size,), (), f"op {size}")


def send(me: int, to: int, size: int = 8) -> Call:
    return Call("forward", (min(me, to), max(me, to)), SEND, (size,), (), "send")


def receive(me: int, source: int, size: int = 8) -> Call:
    return Call("forward", (min(me, source), max(me, source)), RECEIVE, (), (size,), "receive")


def pairs(*sent: int, expected: tuple[int, ...]) -> Call:
    return Call("ep", (0, 1), PAIRS, sent, expected, "layer")


A, B = call("a", 8), call("b", 4)
GATHER = call("weights", 64, kind="all_gather")
# Of each fault what ranks issue, and what is said; those of other projects as they were reported there.
FAULTS: dict[str, tuple[Calls, str]] = {
    "another size": ({0: [A], 1: [call("a", 4)]}, "group a of ranks 0, 1, call 1"),
    "another kind": ({0: [A], 1: [replace(A, kind="all_gather")]}, "rank 1 issues all_gather of 8 bytes"),
    "one less": (
        {0: [A, A], 1: [A]},
        "call 2: rank 0 issues all_reduce .* rank 1 has issued all that it does",
    ),
    "rows that nobody expects": (
        {0: [pairs(0, 6, expected=(0, 2))], 1: [pairs(2, 0, expected=(4, 0))]},
        "group ep of ranks 0, 1, call 1",
    ),
    "a message shorter than its buffer": ({0: [send(0, 1, 4)], 1: [receive(1, 0, 8)]}, "group forward"),
    "two groups in two orders": ({0: [A, B], 1: [B, A]}, "rank 0 waits for rank 1 in group a: .* at op 8"),
    "three ranks in a circle": (
        {
            0: [call("x", 1, 0, 1), call("z", 1, 0, 2)],
            1: [call("y", 1, 1, 2), call("x", 1, 0, 1)],
            2: [call("z", 1, 0, 2), call("y", 1, 1, 2)],
        },
        "rank 2 waits for rank 0 in group z",
    ),
    # NVIDIA/Megatron-LM issue 5100: every stage sends before it receives.
    "both send first": (
        {0: [send(0, 1), receive(0, 1)], 1: [send(1, 0), receive(1, 0)]},
        "rank 0 waits for rank 1 in group forward: send",
    ),
    # NVIDIA/Megatron-LM issue 4745: a stage without such layers returns before its all-reduce.
    "a stage returns early": (
        {0: [A], 1: [A, call("pp", 4)]},
        "group pp of ranks 0, 1, call 1: rank 0 has issued all that it does, rank 1 issues",
    ),
    # NVIDIA/Megatron-LM issue 1810: dispatch and combine are eligible at once, and ranks begin with either.
    "dispatch and combine": (
        {
            0: [pairs(0, 6, expected=(0, 2)), pairs(0, 2, expected=(0, 6))],
            1: [pairs(6, 0, expected=(2, 0)), pairs(2, 0, expected=(6, 0))],
        },
        "group ep of ranks 0, 1, call 1",
    ),
    # meta-pytorch/torchrec pull request 4149: two groups, each rank in an order of its own.
    "shards and replicas": (
        {
            0: [call("shard", 8, 0, 1, kind="all_gather"), call("replicate", 4, 0, 1)],
            1: [call("replicate", 4, 0, 1), call("shard", 8, 0, 1, kind="all_gather")],
        },
        "rank 1 waits for rank 0 in group replicate",
    ),
    # lm-sys/FastChat issue 114: a rank gathers a layer that another has passed.
    "a forward that differs": ({0: [GATHER, GATHER], 1: [GATHER]}, "group weights of ranks 0, 1, call 2"),
    # haotian-liu/LLaVA issue 759: a rank without images does not gather the encoder's weights.
    "no image": ({0: [GATHER, A], 1: [A]}, "group weights of ranks 0, 1, call 1"),
}


def found(calls: Calls) -> list[str]:
    return [*unequal(calls)] or [*stuck(calls)]


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_said_who_does_not_meet(fault: str) -> None:
    calls, said = FAULTS[fault]
    lines = found(calls)
    assert any(re.search(said, line) for line in lines), lines


@pytest.mark.parametrize(
    "calls",
    [
        {0: [A, B], 1: [A, B]},
        {0: [send(0, 1), receive(0, 1)], 1: [receive(1, 0), send(1, 0)]},
        {0: [pairs(0, 6, expected=(0, 2))], 1: [pairs(2, 0, expected=(6, 0))]},
        {0: [call("world", 8, 0, 1, 2), A], 1: [call("world", 8, 0, 1, 2), A]},  # rank 2 is not given
    ],
)
def test_ranks_that_meet_are_left_in_peace(calls: Calls) -> None:
    assert found(calls) == []


CASES = (
    (1, Case(tp=2, pp=2, encoder_tp=2, schedule="joint", recompute="full")),
    (3, Case(dp=2, pp=2, domain="dp", schedule="joint_zero_bubble_h1", recompute="full")),
    (2, Case(tp=2, dp=2, domain="dp", placement="disaggregated", beside=2, boundary="two_level")),
)
ZERO3 = CASES[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("meetings")
    write_data(path)
    return path


Plant = Callable[[pytest.MonkeyPatch], None]


def issued(zero: int, case: Case, folder: Path, bad: int | None = None, plant: Plant | None = None) -> Calls:
    """What all ranks of the first domain issue in a step; a fault may be planted in one."""
    config = with_values(configure(case, folder), {"layout.llm.zero": zero})
    config.model.llm.layers = max(2, case.pp * case.layout.vpp)
    config.cluster.queues = "one"
    spec = prepare_run(config, case.world)
    plan = plan_of_step(spec, 1, 0)
    calls = {}
    for rank in spec.arrangement.global_ranks(0):
        with pytest.MonkeyPatch.context() as patch:
            if rank == bad and plant is not None:
                plant(patch)
            calls[rank] = rehearse(spec, plan, rank).calls
    return calls


@pytest.mark.parametrize(("zero", "case"), CASES, ids=lambda of: getattr(of, "name", of))
def test_ranks_of_the_engine_meet(folder: Path, zero: int, case: Case) -> None:
    calls = issued(zero, case, folder)
    assert min(map(len, calls.values())) > 5
    assert found(calls) == []


@pytest.mark.slow  # a minute and a half
@pytest.mark.parametrize(
    "name",
    [
        "cp2 dp2 ep2 one_domain experts enc_dynamic llm_dynamic",
        "tp2 pp2 dp2 ep2 enc_tp2 stage0 one_domain experts enc_hybrid_pow2 llm_dynamic one_f_one_b "
        "reduce_scatter frozen_in_turn",
        "cp2 pp2 ep2 stage0 experts enc_long_short llm_dynamic zero_bubble_h1 frozen_image",
        "pp4 dp2 enc_tp2 one_domain enc_dynamic llm_dynamic joint_zero_bubble_h2 recompute reduce_scatter",
        "cp2 pp2 dp2 stage0 one_domain enc_hybrid_pow2 interleaved recompute reduce_scatter",
    ],
)
def test_ranks_of_cases_of_the_matrix_meet(folder: Path, name: str) -> None:
    assert found(issued(1, named(name), folder)) == []


def backwards(patch: pytest.MonkeyPatch) -> None:
    """A rank gathers ahead in the wrong direction."""
    gather = PartitionedPart.gather
    patch.setattr(
        PartitionedPart, "gather", lambda part, weight, *, back: gather(part, weight, back=not back)
    )


def once_more(patch: pytest.MonkeyPatch) -> None:
    """A rank sums a tied embedding's gradient twice."""
    tie = ComponentOptimizer.tie
    patch.setattr(ComponentOptimizer, "tie", lambda own: (tie(own), tie(own)))


def swapped(patch: pytest.MonkeyPatch) -> None:
    """A rank reduces its last two components in another order: each group by itself is in order."""
    ops_of = DomainPlan.ops_of

    def other(domain: DomainPlan, domain_rank: int) -> tuple[Op, ...]:
        ops = list(ops_of(domain, domain_rank))
        *_, one, two = (at for at, op in enumerate(ops) if op.kind is Kind.REDUCE)
        first, second = ops[one], ops.pop(two)
        ops[one : one + 1] = [second, first]
        return tuple(ops)

    patch.setattr(DomainPlan, "ops_of", other)


@pytest.mark.parametrize(
    ("plant", "group"), [(backwards, "llm partition"), (once_more, "llm embd"), (swapped, "dp_cp")]
)
def test_a_rank_that_errs_is_found(folder: Path, plant: Plant, group: str) -> None:
    lines = found(issued(*ZERO3, folder, bad=1, plant=plant))
    assert any(f"group {group}" in line or f" {group}" in line for line in lines), lines


def test_the_command_says_whether_a_domain_meets(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = overrides(folder / "mixed", folder / "run", "launch.ranks=2", "layout.llm.tp=2")
    assert main(["rehearse", "--dry", "--domain", "0", *line]) == 0
    assert "domain 0: 2 ranks issue" in capsys.readouterr().out
    assert main(["rehearse", "--dry", "--domain", "7", *line]) == 2
    assert "--domain 7: there are domains 0 to 0" in capsys.readouterr().err
    assert main(["rehearse", "--dry", "--domain", "0", "--rank", "1", *line]) == 2
    assert "leave --rank and --json out" in capsys.readouterr().err

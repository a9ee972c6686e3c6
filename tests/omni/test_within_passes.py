"""Messages that go within passes go between their layers, on real ranks. Parity says that nothing changes."""

from collections import Counter
from pathlib import Path

import pytest
from parity_runs import measure
from ranks import RankPool
from small import overrides, write_mixed

from omni.compose import compose_config
from omni.config import Config
from omni.planning.prepare import prepare_run
from parallel.work import Grad
from pipeline.behind import Within
from pipeline.ops import PARTS, Kind, Op, parts_done

TP2_PP2 = ["layout.llm.tp=2", "layout.llm.pp=2", "layout.domain=1", "packing.divisor=4", "cluster.queues=one"]
CASES = {
    "1F1B": ["pipeline=encode_first"],
    "zero bubble": ["pipeline=joint_zero_bubble_h2"],
    "anew": ["pipeline=encode_first", "model.llm.recompute=full"],
    "frozen": ["pipeline=encode_first", "+optim.components={llm: {frozen: [[1, 3]]}}"],
}


def counted(rank: int, config: Config, world: int) -> Counter[str]:
    """Count messages by whether they went between layers, or when their pass was done."""
    found, issue, passed = Counter[str](), Within._issue, Within.passed

    def between(self: Within, done: int) -> None:
        before = len(self.messages)
        issue(self, done)
        found["between"] += before - len(self.messages)

    def behind(self: Within) -> None:
        found["behind"] += len(self.messages)
        passed(self)

    Within._issue, Within.passed = between, behind  # type: ignore[method-assign]
    try:
        measure(rank, config, world, single_queue=True)
    finally:
        Within._issue, Within.passed = issue, passed  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("case", CASES)
def test_messages_go_between_layers(ranks: RankPool, tmp_path: Path, case: str) -> None:
    """Of four layers a stage, all but what goes after the last quarter."""
    write_mixed(tmp_path)
    line = overrides(
        tmp_path, tmp_path / "run", "train.steps=1", "model.llm.layers=8", *TP2_PP2, *CASES[case]
    )
    config = compose_config(line)
    domain = prepare_run(config, 4).planner.next_step(1, 0, 0).domain
    planned = Counter[int](
        op.within for ops in domain.ops for op in ops for _ in range(domain.team) if op.within
    )
    assert planned, "nothing goes within a pass"
    late = sum(count for within, count in planned.items() if within > parts_done(3, 4))
    found = sum(ranks.run(4, counted, config, 4), Counter[str]())
    assert found == Counter({"between": planned.total() - late, "behind": late})


@pytest.mark.parametrize("layers", [1, 2, 3, 8, 20])
@pytest.mark.parametrize("op", [Op(Kind.FORWARD, 9), Op(Kind.BACKWARD, 9, grad=Grad.INPUT)], ids=str)
def test_what_goes_within_a_pass_goes_as_soon_as_its_parts_are_done(op: Op, layers: int) -> None:
    messages = [Op(Kind.SEND_FORWARD, m, within=within) for m, within in enumerate((1, 4, 4, 7))]
    issued = list[Op]()
    within = Within(op, messages, issued.append)
    before = [0, *(PARTS * ran // layers for ran in range(layers))]
    for ran in range(layers):
        if op.kind is Kind.FORWARD:
            within.came(ran, layers)
        else:
            within.came(layers - 1 - ran, layers)  # it computes the layer anew
            assert issued == [each for each in messages if each.within <= before[ran]]
            within.left(layers - 1 - ran, layers)
        assert issued == [each for each in messages if each.within <= PARTS * ran // layers]
    within.passed()
    assert issued == messages

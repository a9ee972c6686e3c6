"""Rounds of a step: where they begin, and which are tried for a step that does not fit."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from planners import planner, table
from small import overrides, write_mixed

from dataloader.global_batch import Budget
from dataloader.samples import InOrder
from dataloader.tokens import ItemMeta, SampleMeta
from omni.compose import compose_config
from omni.planning.prepare import prepare_run
from omni.planning.rounds import TRIES, rounds_to_try, starts_of
from omni.training.reporter import Reporter
from parallel.costs import CostTable, full_load
from parallel.work import Grad
from pipeline.domain_plan import DomainPlan

TOKENS = (40, 40, 80, 0, 160, 160)  # of the items of six microbatches


def keeping(each: int) -> CostTable:
    """What costs are where an encoder keeps so many bytes of a token."""
    costs = table(1)
    return replace(costs, parts={**costs.parts, "eye": replace(costs.parts["eye"], kept_token=each)})


def step(each: int) -> DomainPlan:
    """A step of one rank that passes once for each of TOKENS, with one item, or none of no tokens."""

    def meta(source: str, sample: int) -> SampleMeta:
        items = (ItemMeta("image", TOKENS[sample], 1, 0, ()),) if TOKENS[sample] else ()
        return SampleMeta(sample, source, 30, items, 0)

    stream, budget = InOrder(len(TOKENS), ("pairs",)), Budget(40, None, len(TOKENS), "error")
    return planner(metas=meta, stream=stream, budget=budget, table=keeping(each)).next_step(1, 0, 0).domain


@pytest.mark.parametrize(
    "each, rounds, starts",
    [
        (1, 1, [0]),
        (1, 2, [0, 4]),  # 160 and 320 bytes
        (1, 3, [0, 3, 5]),
        (1, 99, [0, 1, 2, 3, 4, 5]),
        (0, 2, [0, 3]),
    ],
)
def test_rounds_keep_about_the_same_bytes_or_have_as_many_microbatches(each, rounds, starts):
    assert starts_of(step(each), rounds, keeping(each)) == starts


@pytest.mark.parametrize(
    "beyond, tried",
    [
        ((1, 1), [(0, 2), (1, 2), (0, 3), (1, 3), (0, 4), (1, 4), (0, 6), (1, 6)]),
        ((300, 350), [(0, 3), (0, 4), (1, 4), (0, 6), (1, 6)]),  # there is room for 180 and 130 of 480
        ((300, 480), [(0, 3), (0, 4), (0, 6)]),  # the second would not fit without its encoder
        ((480, 500), []),
    ],
)
def test_as_many_rounds_are_tried_as_encoders_have_to_have_room(beyond, tried):
    plan = step(1)
    assert list(rounds_to_try([(plan, more) for more in beyond], keeping(1))) == tried
    assert len({rounds for _, rounds in tried}) <= TRIES


@pytest.mark.parametrize(
    "asked, said", [(None, ["step 2 does not fit cluster.memory_bytes at once"]), (3, [])]
)
def test_that_a_later_step_does_not_fit_at_once_is_said_once(asked, said):
    notes: list[str] = []
    reporter: Any = SimpleNamespace(
        spec=SimpleNamespace(
            policies={"pipeline": SimpleNamespace(name="encode_first")},
            config=SimpleNamespace(pipeline=SimpleNamespace(rounds=asked)),
        ),
        progress=SimpleNamespace(note=notes.append),
        schedules=Counter[str](),
    )
    for number, rounds in enumerate((1, 3, 3, 1, 3), start=1):
        domain = replace(step(1), rounds=rounds)
        Reporter._say_schedule(reporter, SimpleNamespace(step=number, domain=domain))
    assert notes == [f"{of}: encode_first in 3 rounds" for of in said]
    assert reporter.schedules == {"encode_first": 2, "encode_first in 3 rounds": 3}


def test_an_encoder_works_with_what_a_whole_backward_does(tmp_path: Path) -> None:
    """Half a backward holds more: all that is made anew for the gradients of weights that are put off."""
    write_mixed(tmp_path / "mixed")
    more = ["++model.encoders.image.recompute=full", "++model.encoders.image.layers=4"]
    spec = prepare_run(compose_config(overrides(tmp_path / "mixed", tmp_path / "run", *more)), 1)
    part, table, tokens = spec.work["image"], spec.table.parts["image"], 1 << 26
    of_backward = {grad: part.backward(full_load(part, tokens), grad).workspace / tokens for grad in Grad}
    assert table.working_token == pytest.approx(of_backward[Grad.BOTH], rel=0.01)
    assert table.working_token < 0.5 * of_backward[Grad.INPUT]

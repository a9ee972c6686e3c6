"""Ranks beside the LLM that nobody gave: allocated when a run is composed, and settled from then on."""

import pytest

from dataloader.tokens import ItemMeta, SampleMeta
from omni.compose import compose_config
from omni.compose_saved import compose_saved
from omni.planning.choice import BESIDE, as_saved, open_keys
from omni.planning.layouts import resolve_layout
from omni.planning.prepare import prepare_run
from omni.training.seats import fitting
from parallel.layout import LayoutError

LINE = [
    "system=disttrain", "layout.llm.pp=2", "data.microbatch_tokens=1024", "data.step_tokens=null",
    "data.step_samples=24", "cluster=h100", "train.precision=bf16",
]  # fmt: skip


def trace_of(patches):
    image = ItemMeta("image", patches, patches // 16, 3, ())
    return [SampleMeta(n, "trace", 200, (image,), 100) for n in range(48)]


FEW, MANY = trace_of(16), trace_of(8192)


def prepared(*more, ranks=17, trace=FEW):
    return prepare_run(compose_config([*LINE, *more]), ranks, trace)


def test_as_many_ranks_encode_as_the_samples_of_the_step_take_and_the_run_says_so():
    few, many = prepared(), prepared(trace=MANY)
    assert few.config.placement.ranks == few.arrangement.encoder_ranks == 1
    assert many.config.placement.ranks == many.arrangement.encoder_ranks > 8
    assert list(many.choice.lines()) == [f"chosen: placement.ranks={many.config.placement.ranks}"]
    assert many.config.choice.keys == [BESIDE]
    assert not open_keys(many.config)
    later = prepare_run(compose_config(LINE), 17, [*FEW, *MANY], begin=(3, 48))
    assert later.config.placement.ranks == many.config.placement.ranks, "a run begins with the samples there"


def test_the_key_overrules_and_a_settled_run_stays_as_it_is():
    own = prepared("placement.ranks=3", trace=MANY)
    assert (own.config.placement.ranks, own.choice) == (3, None)
    settled = prepared(trace=MANY).config
    assert prepare_run(settled, 17, FEW).choice is None
    assert as_saved(compose_config(LINE), settled).placement == settled.placement
    same, _ = compose_saved(settled, ["train.steps=3"])
    assert same.placement == settled.placement


def test_ranks_are_allocated_again_for_others_or_another_layout():
    settled = prepared(trace=MANY).config
    fewer = prepare_run(settled, 8, MANY)
    assert fewer.choice.again == 17
    assert fewer.config.placement.ranks in (2, 4, 6)
    assert fitting(settled, 8) == (settled, 8), "what was allocated for 17 ranks hinders no eight"
    longer, _ = compose_saved(settled, ["layout.llm.pp=4"])
    assert BESIDE in open_keys(longer)
    apart, _ = compose_saved(settled, ["system=encode_first"])
    assert apart.placement.ranks is None


def test_what_else_is_chosen_is_chosen_for_the_ranks_that_are_left():
    spec = prepared("system=omni", "placement=disaggregated", "data.sample_tokens=1024", trace=MANY)
    assert {BESIDE, "layout.domain", "balance.policy"} < set(spec.choice.keys)
    assert spec.config.choice.keys == list(spec.choice.keys)
    assert not open_keys(spec.config)
    assert spec.arrangement.encoder_ranks == spec.choice.keys[BESIDE]


@pytest.mark.parametrize(
    "ranks, more, said",
    [
        (2, [], r"launch.ranks=2: .*launch.ranks=3 would do"),
        (9, ["system=encode_first"], r"does not divide the 9 ranks .*: 8 is the nearest"),
        (1, ["system=megatron"], r"does not divide the 1 ranks .*: 2 is the nearest"),
        (17, ["layout.llm.dp=9"], r"launch.ranks=17: .*launch.ranks=19 would do"),
    ],
)
def test_ranks_that_a_placement_cannot_have_are_refused_with_the_nearest(ranks, more, said):
    config = compose_config([*LINE, *more])
    for find in (
        lambda: prepare_run(config, ranks, FEW),
        lambda: resolve_layout(config.layout, config.placement, ("image",), ranks),
    ):
        with pytest.raises(LayoutError, match=said):
            find()

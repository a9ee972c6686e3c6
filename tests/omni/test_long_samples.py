"""Samples longer than a microbatch: who may have them, how they are spread, and that it changes no step."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planners import BUDGET, planner, plans_of_all_domains

from dataloader.tokens import SampleMeta
from omni.config import ConfigError
from omni.data_config import DataConfig
from omni.planning.pools import check_long_samples
from parallel.layout import Arrangement, Layout, arrange
from parallel.placements import COLOCATED
from parallel.policies.sharing import ALL, DYNAMIC, NONE, UNIFORM
from pipeline.plan import StepPlan

MICROBATCH = 16


def meta_of(source: str, sample: int) -> SampleMeta:
    """A text: most are short, and every fourth has 8 microbatches of tokens or a few less."""
    tokens = 8 * MICROBATCH - sample % 5 if sample % 4 == 0 else 3 + sample % 11
    return SampleMeta(sample, source, tokens - 1, (), 0)


def world_of(cp: int, dp: int, pp: int = 1) -> Arrangement:
    return arrange(Layout(cp=cp, dp=dp, pp=pp), {"eye": 1, "ear": 1}, COLOCATED, 0, replicas=dp)


def steps(world: Arrangement, llm_sp: str, **changes: object) -> list[StepPlan]:
    budget = replace(
        BUDGET, microbatch_tokens=MICROBATCH, step_tokens=None, step_samples=12, sample_tokens=8 * MICROBATCH
    )
    planning = planner(world=world, llm_sp=llm_sp, metas=meta_of, **({"budget": budget} | changes))
    plans = plans_of_all_domains(planning, 1, 0)
    for plan in plans:
        planning.verify(plan)
    return plans


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from([1, 2, 3]),
    st.sampled_from([2, 3, 4]),
    st.sampled_from(["dynamic", "dhp"]),
)
def test_a_cp_rank_holds_its_share_of_a_microbatch_or_of_one_long_sample(cp, dp, llm_sp):
    world = world_of(cp, dp)
    (plan,) = steps(world, llm_sp)
    long = 0
    for batch in plan.domain.microbatches:
        tokens = sum(batch.layout.lengths)
        most = max(map(batch.layout.local_tokens, range(world.pool)))
        if tokens > MICROBATCH * dp:
            assert len(batch.samples) == 1
            assert most == -(-tokens // world.pool)
        else:
            assert most <= -(-MICROBATCH // cp), "as without sharing"
        long += max(batch.layout.lengths) > MICROBATCH
    assert long == sum(length > MICROBATCH for length in plan.taken.lengths) > 1


def test_others_pass_with_a_long_sample_where_the_pool_has_room():
    (plan,) = steps(world_of(cp=2, dp=16), "dynamic")
    with_long = [batch for batch in plan.domain.microbatches if max(batch.layout.lengths) > MICROBATCH]
    assert all(len(batch.samples) > 1 for batch in with_long)


def test_which_samples_a_step_takes_does_not_depend_on_who_shares_them():
    taken = {plan.taken for cp, dp in ((1, 2), (2, 2), (1, 4)) for plan in steps(world_of(cp, dp), "dynamic")}
    one = replace(BUDGET, microbatch_tokens=8 * MICROBATCH, step_tokens=None, step_samples=12)
    taken |= {plan.taken for plan in steps(world_of(1, 1), "uniform", budget=one)}
    assert len(taken) == 1


@pytest.mark.parametrize(
    "policy, pool, words",
    [
        (UNIFORM, 4, ["llm_sp=uniform", "such as dynamic"]),
        (NONE, 4, ["llm_sp=none"]),
        (ALL, 4, ["llm_sp=all"]),
        (DYNAMIC, 1, ["nobody", "layout.domain or layout.llm.cp"]),
    ],
)
def test_a_long_sample_that_nobody_shares_is_refused(policy, pool, words):
    data = DataConfig(microbatch_tokens=16, sample_tokens=17)
    with pytest.raises(ConfigError) as caught:
        check_long_samples(data, policy, world_of(1, pool))
    for word in [
        "data.sample_tokens=17",
        "data.microbatch_tokens=16",
        "raise data.microbatch_tokens",
        *words,
    ]:
        assert word in str(caught.value)
    for longest in (None, 5, 16):
        check_long_samples(replace(data, sample_tokens=longest), policy, world_of(1, pool))


def test_a_pool_takes_samples_of_any_length():
    check_long_samples(DataConfig(microbatch_tokens=16, sample_tokens=10**6), DYNAMIC, world_of(1, 2))

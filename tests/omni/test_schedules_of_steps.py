from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni.config import ConfigError
from omni.keys import check_keys
from omni.optim_config import ComponentOptimConfig, OptimConfig
from omni.planning.optim_schedule import (
    check_optim,
    frozen_components,
    learning_rate,
    learning_rate_notes,
    stage_notes,
    stages_of,
)

COMPONENTS = ("eye", "llm")


def check(config: OptimConfig) -> None:
    """Check a configuration as one of a run of 100 steps is."""
    check_keys("optim", config)
    check_optim(config, COMPONENTS, 100)


def optim(**changes: object) -> OptimConfig:
    return OptimConfig(**{"lr": 1e-3, "min_lr": 1e-5, "warmup_steps": 10, **changes})


def rates(config: OptimConfig, steps: int) -> list[float]:
    return [learning_rate(config, step, steps) for step in range(1, steps + 1)]


def freezing(**spans: list[list[int]]) -> OptimConfig:
    return optim(components={name: ComponentOptimConfig(frozen=span) for name, span in spans.items()})


@st.composite
def settings_and_steps(draw) -> tuple[OptimConfig, int]:
    steps = draw(st.integers(1, 200))
    warmup = draw(st.integers(0, steps - 1))
    decay = draw(st.none() | st.integers(1, steps - warmup))
    schedule = draw(st.sampled_from(("cosine", "wsd")))
    return optim(warmup_steps=warmup, decay_steps=decay, schedule=schedule), steps


@given(settings_and_steps())
def test_the_rate_rises_then_never_rises_again_and_ends_at_its_minimum(drawn):
    config, steps = drawn
    check_optim(config, COMPONENTS, steps)
    all_rates = rates(config, steps)
    warm = config.warmup_steps
    assert all_rates[:warm] == pytest.approx([config.lr * step / warm for step in range(1, warm + 1)])
    after = all_rates[max(0, warm - 1) :]
    assert all(b <= a + 1e-15 for a, b in pairwise(after))
    assert all(config.min_lr * (1 - 1e-9) <= rate <= config.lr * (1 + 1e-9) for rate in all_rates[warm:])
    assert all_rates[-1] == pytest.approx(config.min_lr)


@given(settings_and_steps())
def test_the_rate_never_jumps(drawn):
    config, steps = drawn
    all_rates = [config.lr if config.warmup_steps == 0 else 0.0, *rates(config, steps)]
    decay = steps - config.warmup_steps
    if config.schedule == "wsd" and config.decay_steps is not None:
        decay = config.decay_steps
    # The steepest slopes: linear warm-up, linear decay, and the middle of a cosine (pi / 2 times linear).
    largest = max(1 / max(1, config.warmup_steps), 1.6 / decay) * config.lr
    jumps = [abs(b - a) for a, b in pairwise(all_rates)]
    assert max(jumps) <= largest * (1 + 1e-9)


def test_warm_up_reaches_the_rate_at_its_last_step():
    config = optim(warmup_steps=4, lr=8.0)
    assert [learning_rate(config, step, 100) for step in (1, 2, 3, 4)] == [2.0, 4.0, 6.0, 8.0]
    assert learning_rate(config, 5, 100) < 8.0


def test_cosine_is_half_way_down_in_the_middle():
    config = optim(lr=1.0, min_lr=0.2, warmup_steps=10)
    assert learning_rate(config, 60, 110) == pytest.approx(0.6)
    assert learning_rate(config, 110, 110) == pytest.approx(0.2)


def test_wsd_stays_and_then_falls_linearly():
    config = optim(lr=1.0, min_lr=0.2, schedule="wsd", warmup_steps=10, decay_steps=20)
    assert {learning_rate(config, step, 100) for step in range(10, 81)} == {1.0}
    assert learning_rate(config, 90, 100) == pytest.approx(0.6)
    assert learning_rate(config, 100, 100) == pytest.approx(0.2)


def test_wsd_without_decay_steps_falls_over_all_remaining_steps():
    config = optim(lr=1.0, min_lr=0.0, schedule="wsd", warmup_steps=10)
    assert learning_rate(config, 55, 100) == pytest.approx(0.5)


def test_a_run_may_be_all_warm_up():
    config = optim(lr=1.0, warmup_steps=5)
    check_optim(config, COMPONENTS, 5)
    assert rates(config, 5) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_a_warm_up_longer_than_the_run_shrinks_with_it():
    config = optim(lr=1.0, warmup_steps=100)
    check_optim(config, COMPONENTS, 50)
    assert rates(config, 50) == rates(optim(lr=1.0, warmup_steps=5), 50)
    assert rates(config, 5) == rates(optim(lr=1.0), 5)
    (note,) = learning_rate_notes(config, 50)
    assert "optim.warmup_steps=100 does not fit train.steps=50" in note
    assert "takes 5 steps" in note
    assert learning_rate_notes(config, 100) == []


def test_a_component_says_where_its_own_rate_is_another_than_stated():
    own = ComponentOptimConfig(warmup_steps=100, schedule="cosine")
    config = optim(lr=1.0, schedule="wsd", decay_steps=10, components={"eye": own})
    (note,) = stage_notes(stages_of(config, {}, 50))
    assert "optim.components.eye.warmup_steps=100 does not fit train.steps=50" in note
    (note,) = stage_notes(stages_of(config, {}, 200), done=140, before=300)
    assert "learning rates of optim.components.eye follow it: step 140 had" in note


def test_a_least_rate_above_the_rate_is_refused():
    config = optim(lr=1e-3, min_lr=1e-4, components={"eye": ComponentOptimConfig(lr=1e-5)})
    with pytest.raises(ConfigError, match=r"optim\.components\.eye: min_lr=0\.0001 is above lr=1e-05"):
        check_optim(config, COMPONENTS, 50)
    with pytest.raises(ConfigError, match=r"optim: min_lr=1\.0 is above lr=0\.5"):
        check_optim(optim(lr=0.5, min_lr=1.0), COMPONENTS, 50)


def test_a_continued_run_says_where_its_rate_jumps():
    config = optim(lr=1.0, min_lr=0.0)
    (note,) = learning_rate_notes(config, 70, done=60, before=60)
    assert "train.steps was 60 and is 70" in note
    assert f"step 60 had 0, step 61 takes {learning_rate(config, 61, 70):.3g}" in note
    assert learning_rate_notes(config, 60, done=30, before=60) == []
    assert learning_rate_notes(config, 70, done=0, before=60) == [], "nothing is done yet"
    # Where neither length has begun to decay, nothing changes.
    steady = optim(lr=1.0, schedule="wsd", warmup_steps=5, decay_steps=10)
    assert learning_rate_notes(steady, 70, done=30, before=60) == []


# Freezing.


def test_spans_hold_their_first_step_and_not_their_last():
    config = freezing(eye=[[1, 3], [5, 6]])
    frozen = [frozen_components(config.components, step) for step in range(7)]
    assert frozen == [(), ("eye",), ("eye",), (), (), ("eye",), ()]


def test_frozen_components_come_in_the_order_of_their_names():
    config = freezing(llm=[[1, 2]], eye=[[1, 2]])
    assert frozen_components(config.components, 1) == ("eye", "llm")


# What is refused.


def test_good_settings_pass():
    check_optim(optim(), COMPONENTS, 10)
    check_optim(optim(schedule="wsd", decay_steps=90), COMPONENTS, 100)
    check_optim(freezing(eye=[[0, 50]], llm=[[50, 60]]), COMPONENTS, 100)


@pytest.mark.parametrize(
    "config, what",
    [
        (optim(schedule="linear"), "optim.schedule=linear: choose one of cosine, wsd"),
        (optim(warmup_steps=-1), "optim.warmup_steps=-1"),
        (optim(warmup_steps=101, decay_steps=91), "optim.decay_steps=91 and a warm-up of 10 .*=100"),
        (optim(schedule="wsd", decay_steps=91), "optim.decay_steps=91 .* train.steps=100"),
        (freezing(ear=[[1, 2]]), "optim.components.ear: .* eye, llm"),
        (freezing(eye=[[5, 5]]), "optim.components.eye.frozen"),
        (freezing(eye=[[5, 4]]), "optim.components.eye.frozen"),
        (freezing(eye=[[-1, 4]]), "optim.components.eye.frozen"),
        (freezing(eye=[[1, 2, 3]]), "optim.components.eye.frozen"),
        (freezing(eye=[[0, 9]], llm=[[0, 3]]), "every component is frozen at step 1"),
        (freezing(eye=[[0, 50]], llm=[[20, 30]]), "every component is frozen at step 20"),
        (freezing(eye=[[40, 50]], llm=[[20, 41]]), "every component is frozen at step 40"),
    ],
)
def test_contradictions_are_refused_by_name(config, what):
    with pytest.raises(ConfigError, match=what):
        check(config)


def test_components_that_freeze_together_after_the_end_are_no_error():
    check_optim(freezing(eye=[[200, 300]], llm=[[200, 300]]), COMPONENTS, 100)


@pytest.mark.parametrize("decay_steps", [0, -5])
def test_a_decay_of_no_steps_is_refused(decay_steps):
    with pytest.raises(ConfigError, match=f"optim.decay_steps={decay_steps}"):
        check(optim(schedule="wsd", decay_steps=decay_steps))

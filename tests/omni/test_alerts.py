"""Alerts say what needs a look, once, and nothing else."""

import math
from random import Random

from omni.training.alerts import WINDOW, Alerts
from omni.training.choice_watch import AT_START, COSTS, OVER, ChoiceWatch


def steps(count, **changes):
    """Metrics of steps with noisy losses of two sources; `changes` are {step: metrics} by keyword `at`."""
    random = Random(0)
    for step in range(1, count + 1):
        metrics = {
            "progress/step": step,
            "perf/step_s": 0.5 + random.random(),
            "optim/skipped_steps": 0,
            "optim/grad_norm": 1.0,
            "loss/train/docs": 2.5 - step / count + random.gauss(0, 0.4),
            "loss/train/strips": 0.01 * math.exp(random.gauss(0, 1)),
        }
        yield metrics | changes.get("at", {}).get(step, {})


def said(count, at):
    alerts = Alerts()
    return [(int(m["progress/step"]), a.title) for m in steps(count, at=at) for a in alerts.step(m)]


def test_noise_says_nothing():
    assert said(400, {}) == []


def test_one_far_off_step_is_noise_and_three_are_a_spike():
    high = {"loss/train/docs": 6.0}
    assert said(200, {100: high}) == []
    assert said(200, dict.fromkeys((100, 101, 102), high)) == [(102, "loss spike")]


def test_losses_and_steps_that_are_not_finite():
    bad = {"loss/train/docs": math.nan, "optim/skipped_steps": 1, "optim/grad_norm": math.inf}
    after = {step: {"optim/skipped_steps": 1} for step in range(31, 61)}
    assert said(60, {30: bad, **after}) == [(30, "loss not finite"), (30, "step skipped")]


def test_a_gradient_of_exactly_nothing():
    assert said(60, {30: {"loss/train": 2.0, "optim/grad_norm": 0.0}}) == [(30, "gradient zero")]
    assert said(60, {30: {"loss/train": 0.0, "optim/grad_norm": 0.0}}) == []  # no target token


def test_a_stall_names_what_ranks_waited_for():
    slow = {"perf/step_s": 9.0, "perf/idle_frac/data": 0.8, "perf/idle_frac/host": 0.1}
    alerts = Alerts()
    (alert,) = [a for m in steps(60, at={50: slow}) for a in alerts.step(m)]
    assert alert.title == "stall"
    assert "step 50 took 9.0 s" in alert.text
    assert "data (80%)" in alert.text


def test_an_alert_of_a_kind_is_not_said_again_at_once():
    slow = {step: {"perf/step_s": 60.0} for step in range(40, 40 + 2 * WINDOW, 10)}
    assert said(200, slow) == [(40, "stall"), (40 + WINDOW, "stall")]


def test_planning_that_holds_up_steps_is_named_once_it_does_so_again_and_again():
    alerts = Alerts()
    slow = {"plan/ms": 5000.0, "perf/step_s": 5.1}
    found = [alerts.step({"progress/step": step, **slow}) for step in (1, 2, 3, 4)]
    assert [[alert.title for alert in of] for of in found] == [[], [], ["slow planning"], []]
    assert "its plan took 5.00 s" in found[2][0].text
    quick = {"plan/ms": 5000.0, "perf/step_s": 9.0}
    assert not [a for step in range(100, 110) for a in alerts.step({"progress/step": step, **quick})]


def test_a_choice_that_samples_have_left_behind_is_told_and_a_noisy_one_is_not():
    random = Random(1)

    def told(ratio_after):
        alerts, watch, found = Alerts(choice_costs=0.15), ChoiceWatch([], since=0), []
        for step in range(1, 301):
            over = (1.1 if step <= 100 else 1.1 * ratio_after) * (1 + abs(random.gauss(0, 0.1)))
            metrics = {"progress/step": step, "perf/step_s": 1.0, OVER: over}
            found += [(step, alert.title) for alert in alerts.step(metrics | watch.step(metrics))]
        return found

    assert told(1.0) == []
    first, *later = told(1.3)
    assert first[1] == "choice out of date"
    assert 100 + WINDOW // 2 <= first[0] <= 100 + WINDOW
    assert len(later) == (300 - first[0]) // WINDOW


def test_what_keys_were_chosen_for_is_known_after_a_restart_and_forgotten_where_they_are_chosen_again():
    before = ChoiceWatch([], since=0)
    records = []
    for step in range(1, 41):
        metrics = {"progress/step": step, OVER: 1.0 if step <= 20 else 1.5}
        records.append(metrics | before.step(metrics))
    assert records[18].keys() == records[0].keys()
    assert records[19][AT_START] == 1.0
    goes_on = ChoiceWatch(records, since=0).step({OVER: 1.5})
    assert goes_on[AT_START] == 1.0
    assert goes_on[COSTS] == 0.5
    assert ChoiceWatch(records, since=40).step({OVER: 1.5}) == {}
    assert ChoiceWatch(records, since=0).step({}) == {}
